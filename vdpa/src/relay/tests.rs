//! Tests of relays against a model guest and a model device. The models are honest and complete in
//! any order, or hostile. One test explores all interleavings of one pass.

#[cfg(test)]
mod explore;
mod fuzz;
#[cfg(test)]
mod hostile;
mod model;
mod packed;
#[cfg(test)]
mod traffic;

pub use fuzz::relay_anything;

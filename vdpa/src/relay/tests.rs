//! Tests of relays against a model guest and a model device. The models are honest and complete in
//! any order, or hostile. One test explores all interleavings of one pass.

mod explore;
mod hostile;
mod model;
mod packed;
mod traffic;

//! Tests of relays against a model guest and a model device: honest ones that complete in any
//! order, hostile ones, and all interleavings of one pass.

mod explore;
mod hostile;
mod model;
mod packed;
mod traffic;

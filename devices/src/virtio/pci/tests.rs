//! Tests of the transport from a guest's view, through ECAM and BAR 0 of a whole bus. Behind it is
//! a model backend that panics when it is called out of order.

#[cfg(test)]
mod doorbells;
#[cfg(test)]
mod failover;
mod fuzz;
#[cfg(test)]
mod lifecycle;
#[cfg(test)]
mod queue_reset;
#[cfg(test)]
mod registers;
mod removal;
mod rig;
#[cfg(test)]
mod saved;
#[cfg(test)]
mod swap;
#[cfg(test)]
mod watching;

#[cfg(any(test, feature = "fuzz"))]
pub use fuzz::transport_anything;

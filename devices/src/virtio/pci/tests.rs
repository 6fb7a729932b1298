//! Tests of the transport from a guest's view, through ECAM and BAR 0 of a whole bus. Behind it is
//! a model backend that panics when it is called out of order.

mod doorbells;
mod failover;
mod fuzz;
mod lifecycle;
mod queue_reset;
mod registers;
mod removal;
mod rig;
mod saved;
mod swap;
mod watching;

//! The machine.

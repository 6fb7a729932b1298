//! The machine.

pub mod config;

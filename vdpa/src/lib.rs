//! Everything about vDPA on Linux.

pub mod memory;

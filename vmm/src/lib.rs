//! The machine.

pub mod acpi;
pub mod boot;
mod byte_count;
pub mod config;
pub mod layout;
pub mod memory;

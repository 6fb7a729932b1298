//! The PC devices that a guest kernel expects at fixed ports: serial console, power control,
//! keyboard controller (only its reset), clock. Also the ACPI event registers.
//!
//! They own their registers. They must not know their ports, nor how the machine reacts when the
//! guest requests a power-off.

pub mod clock;
pub mod event;
pub mod output;
pub mod power;
pub mod serial;

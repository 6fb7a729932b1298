//! The few devices of a PC that a guest kernel expects at fixed ports: serial
//! console, power control, keyboard controller (only its reset), clock; and what the outside tells the guest by ACPI.
//!
//! They own their registers. They must not know which ports they sit at, nor
//! what the machine does when the guest asks for power-off.

pub mod clock;
pub mod event;
pub mod output;
pub mod power;
pub mod serial;

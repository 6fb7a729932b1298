//! The few devices of a PC that a guest kernel expects at fixed ports: serial
//! console, power control, power button, keyboard controller (only its reset), clock.
//!
//! They own their registers. They must not know which ports they sit at, nor
//! what the machine does when the guest asks for power-off.

pub mod button;
pub mod clock;
pub mod output;
pub mod power;
pub mod serial;

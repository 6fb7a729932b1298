//! Shared by the tests of relays: two guests without a VM that send each other numbered frames, and
//! the VMM's side of their devices.
//!
//! ```text
//!   guest.rs     thread per guest: rings in guest memory, NAPI
//!   vmm.rs       the test's thread: relays, transitions, doorbells, control queue
//!   netdev.rs    both of these on vdpa::netdev, for devices that are reset at each change
//!   scene.rs     two of those with traffic between them, and what may be lost
//!   frame.rs     what is sent and how it is checked
//!   watchdog.rs  when nothing moved for too long
//! ```
//! Guest and VMM share only what a real guest and VMM share (guest memory, kicks, interrupts), and
//! the counts of [`guest::Flow`].

// Each test target has its own copy of this module and uses a part of it.
#![allow(dead_code, reason = "not every test needs everything")]

pub(crate) mod frame;
pub(crate) mod guest;
pub(crate) mod netdev;
pub(crate) mod scene;
pub(crate) mod vmm;
pub(crate) mod watchdog;

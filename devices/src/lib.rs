//! The devices that the guest sees: buses, PCI, the virtio devices and a few legacy ones.
//!
//! Must not know KVM, HTTP, or files of the host other than a device's own backing.

#![cfg_attr(
    feature = "fuzz",
    allow(
        dead_code,
        clippy::unwrap_used,
        clippy::expect_used,
        reason = "models of the tests"
    )
)]

pub mod bus;
mod error;
pub mod hypervisor;
pub mod legacy;
pub mod pci;
mod saved;
mod translation;
pub mod vfio;
pub mod virtio;

pub use error::{Error, ErrorKind};

#[cfg(test)]
#[path = "../../tests/fuzz/shared/corpus.rs"]
mod corpus;
#[cfg(any(test, feature = "fuzz"))]
#[allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "code of tests, which fuzz targets use"
)]
#[path = "../../tests/fuzz/shared/steps.rs"]
mod steps;
#[cfg(any(test, feature = "fuzz"))]
#[allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "code of tests, which fuzz targets use"
)]
mod testing;

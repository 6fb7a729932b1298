//! vDPA on Linux, for a VMM or for a driver in userspace.
//!
//! ```text
//!   device::Device ---- ioctls ----+
//!     states of one NIC            |      /dev/vhost-vdpa-N
//!   iotlb::Iotlb ---- messages ----+----> (kernel, parent driver)
//!     memory that it accesses      |
//!   ring, control_queue            |
//!     the VMM's own rings  -- kick / call eventfds
//!   doorbell::Doorbell -- a store in the device's own page instead of a kick
//! ```
//! The crate does not depend on KVM, PCI or HTTP. It trusts no data that a device or a guest wrote.
//!
//! The Cargo feature `vduse` adds the module of the same name. With it a process is a vDPA device
//! itself, such as a NIC on a tap. A VMM does not need it.
//!
//! A driver in userspace goes through these steps:
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use vdpa::device::{Device, VringConfig};
//! use vdpa::iotlb::{Access, Mapping};
//! use vdpa::memory::SharedBuffer;
//! use vdpa::ring::{Direction, DriverQueue, Piece, RingFeatures, RingLayout};
//! use vmm_sys_util::eventfd::{EFD_CLOEXEC, EventFd};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let (mut device, mut iotlb) = Device::open("/dev/vhost-vdpa-0")?.own()?;
//!
//! // Memory for one ring and one frame, seen by the device at IOVA 1 MiB.
//! let features = device.info().features & 1 << 32; // VERSION_1
//! let ring = RingFeatures::of(features);
//! let ring_bytes = RingLayout::new(ring.format(), 16)?.size();
//! let memory = Arc::new(SharedBuffer::new(ring_bytes + 4096, 0x10_0000)?);
//! let mapping = Mapping { region: memory.clone(), offset: 0, access: Access::ReadWrite };
//! iotlb.map(0, 0x10_0000, ring_bytes + 4096, mapping)?;
//!
//! device.negotiate(features)?;
//! let mut transmit = DriverQueue::new(memory.clone(), 16, 0, ring)?;
//! let (kick, call) = (EventFd::new(EFD_CLOEXEC)?, EventFd::new(EFD_CLOEXEC)?);
//! let config = VringConfig {
//!     size: 16,
//!     addresses: transmit.addresses(),
//!     base: transmit.initial_base(),
//!     kick: Some(&kick),
//!     call: Some(&call),
//! };
//! device.set_vring(1, &config, &[memory.range()])?;
//! device.enable_vring(1)?;
//! device.start()?;
//!
//! // A frame of 60 bytes behind the 12 bytes of `struct virtio_net_hdr_v1`.
//! let frame = Piece {
//!     iova: memory.iova(ring_bytes, 72)?,
//!     len: 72,
//!     direction: Direction::DeviceReads,
//! };
//! transmit.add(&[frame])?;
//! if transmit.needs_kick()? {
//!     kick.write(1)?;
//! }
//! call.read()?;
//! while let Some(used) = transmit.pop_used()? {
//!     println!("chain {} used, {} bytes written", used.head, used.written);
//! }
//! # drop(device);
//! # Ok(())
//! # }
//! ```

#![cfg_attr(
    feature = "fuzz",
    allow(
        dead_code,
        clippy::unwrap_used,
        clippy::expect_used,
        reason = "models of the tests"
    )
)]

pub mod causes;
pub mod conformance;
pub mod control_queue;
#[cfg(test)]
#[path = "../../tests/fuzz/shared/corpus.rs"]
mod corpus;
pub mod device;
pub mod doorbell;
mod error;
pub mod eventfd;
pub mod features;
pub mod iotlb;
pub mod iova;
pub mod memory;
pub mod netdev;
mod opaque_debug;
mod opaque_error;
pub mod probe;
pub mod relay;
pub mod ring;
#[cfg(any(test, feature = "fuzz"))]
#[allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "code of tests, which fuzz targets use"
)]
#[path = "../../tests/fuzz/shared/steps.rs"]
mod steps;
mod text_form;
pub mod uapi;
#[cfg(any(test, feature = "vduse"))]
pub mod vduse;
pub mod window;

pub use error::{Error, ErrorKind};

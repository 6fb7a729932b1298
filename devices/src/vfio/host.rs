//! The border to the host's VFIO device: what this module needs of it, as a trait.
//!
//! [`open`](super::open) implements it with system calls, the tests with a model.

use std::fmt;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

use super::migration::MigrationHost;
use crate::hypervisor::DevicePages;

/// The index of the region of configuration space; those of BARs are 0 to 5.
pub(super) const CONFIG: u8 = 7;
/// BARs of a function.
pub(super) const BARS: usize = 6;

/// A memory BAR, or no BAR if the size is 0.
#[derive(Debug, Clone, Default)]
pub(super) struct Region {
    /// Length in bytes.
    pub(super) size: u64,
    /// Offset and length of the parts that can be mapped.
    pub(super) areas: Vec<(u64, u64)>,
}

/// The properties of an open device, which stay the same.
#[derive(Debug, Clone)]
pub(super) struct Description {
    /// The driver on the host.
    pub(super) driver: String,
    /// By BAR.
    pub(super) regions: [Region; BARS],
    /// MSI-X vectors that the host can give.
    pub(super) vectors: u32,
    /// Whether vectors can be added while MSI-X is enabled.
    pub(super) resizable: bool,
}

/// An open device of the host.
pub(super) trait Host: MigrationHost + Send + Sync + fmt::Debug {
    /// Reads at `offset` of a region.
    fn read(&self, region: u8, offset: u64, data: &mut [u8]) -> io::Result<()>;

    /// Writes at `offset` of a region.
    fn write(&self, region: u8, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Maps a part of a BAR, page-aligned, into this process.
    fn map(&self, bar: u8, offset: u64, size: u64) -> io::Result<Arc<dyn DevicePages>>;

    /// Connects MSI-X vectors from `first` on to eventfds, and enables MSI-X.
    fn set_vectors(&self, first: u32, eventfds: &[RawFd]) -> io::Result<()>;

    /// Disables MSI-X.
    fn disable_vectors(&self) -> io::Result<()>;

    /// Signals this eventfd when the host wants the device back.
    fn set_request(&self, eventfd: RawFd) -> io::Result<()>;

    /// Signals this eventfd when the device reports an uncorrectable error.
    fn set_error(&self, eventfd: RawFd) -> io::Result<()>;

    /// Resets the function, and nothing else.
    fn reset(&self) -> io::Result<()>;
}

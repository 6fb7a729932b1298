//! The IOTLB: which memory a device sees at which I/O virtual address.
//!
//! [`Iotlb`] owns a mirror of the kernel's table, one [`IovaMap`] per address
//! space, and keeps mapped memory alive. Every change is checked against the
//! mirror before it is written through an [`IotlbSink`]. It must not know what
//! state the device is in, nor what the memory is for.
//!
//! ```text
//!            Iotlb::batch(asid)                 map / unmap
//!   idle  ----------------------->  in batch  --------------+
//!    ^  ^      BATCH_BEGIN           |   |  ^               |
//!    |  |                            |   |  +---------------+
//!    |  +--- Batch::commit ----------+   |
//!    |        BATCH_END                  |  a write failed, or the Batch was
//!    +--- roll back, BATCH_END ----------+  dropped without commit
//! ```
//! A device without IOTLB_BATCH gets the same calls without the two bracket
//! messages. The kernel ignores the result of the mapping at BATCH_END, so a
//! committed batch is not proof that the device can reach the memory.

pub mod map;
pub mod memlock;

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::sync::Arc;

pub use self::map::IovaMap;
pub use self::memlock::Memlock;
use crate::device::handle::Handle;
use crate::iova::{IovaRange, PAGE_SIZE};
use crate::memory::{DmaRegion, GuestMemory, GuestRegion};
use crate::uapi::BackendFeatures;
pub use crate::uapi::message::{Access, IotlbMessage};
use crate::{Error, ErrorKind};

/// Where IOTLB messages go: the device, or a recorder in a test.
pub trait IotlbSink: std::fmt::Debug {
    /// Sends one message.
    ///
    /// # Errors
    /// Whatever the kernel says; mostly EFAULT.
    fn send(&self, message: &IotlbMessage) -> io::Result<()>;

    /// Resets the device if it runs: all of its memory is about to go.
    ///
    /// # Errors
    /// Whatever the kernel says.
    fn stop(&self) -> io::Result<()>;
}

/// A vhost-vdpa device as a sink.
#[derive(Debug, Clone)]
pub struct DeviceSink {
    pub(crate) handle: Handle,
}

impl IotlbSink for DeviceSink {
    fn send(&self, message: &IotlbMessage) -> io::Result<()> {
        // One message, one write: the kernel takes no part of a message.
        let bytes = message.encode();
        let written = (&*self.handle.file).write(&bytes)?;
        if written == bytes.len() {
            Ok(())
        } else {
            Err(io::ErrorKind::WriteZero.into())
        }
    }

    fn stop(&self) -> io::Result<()> {
        match self.handle.status()? {
            0 => Ok(()),
            _ => self.handle.set_status(0),
        }
    }
}

/// A mapping: which part of which memory, and how.
#[derive(Debug, Clone)]
pub struct Mapping {
    /// The memory, kept alive while the device may reach it.
    pub region: Arc<dyn DmaRegion>,
    /// First byte of the region that is mapped; a multiple of 4 KiB.
    pub offset: u64,
    /// What the device may do.
    pub access: Access,
}

/// What the device allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IotlbLimits {
    /// The IOVAs that can be mapped.
    pub range: IovaRange,
    /// Number of address spaces.
    pub address_spaces: u32,
    /// The acknowledged backend features.
    pub features: BackendFeatures,
}

/// The IOTLB of one device. See the module's diagram.
#[derive(Debug)]
pub struct Iotlb<S: IotlbSink = DeviceSink> {
    sink: S,
    limits: IotlbLimits,
    spaces: BTreeMap<u32, IovaMap<Mapping>>,
}

impl<S: IotlbSink> Iotlb<S> {
    /// An IOTLB in which nothing is mapped, as after `open`.
    #[must_use]
    pub fn new(sink: S, limits: IotlbLimits) -> Self {
        Self {
            sink,
            limits,
            spaces: BTreeMap::new(),
        }
    }

    /// What the device allows.
    #[must_use]
    pub fn limits(&self) -> &IotlbLimits {
        &self.limits
    }

    /// What is mapped in an address space; `None` if nothing ever was.
    #[must_use]
    pub fn address_space(&self, asid: u32) -> Option<&IovaMap<Mapping>> {
        self.spaces.get(&asid)
    }

    /// Number of address spaces that can be used: 1 unless IOTLB_ASID was acknowledged.
    #[must_use]
    pub fn usable_address_spaces(&self) -> u32 {
        if self.limits.features.contains(BackendFeatures::IOTLB_ASID) {
            self.limits.address_spaces
        } else {
            1
        }
    }

    /// Bytes mapped in all address spaces.
    #[must_use]
    pub fn mapped_bytes(&self) -> u64 {
        self.spaces
            .values()
            .fold(0, |sum: u64, space| sum.saturating_add(space.bytes()))
    }

    /// Number of mappings in all address spaces.
    #[must_use]
    pub fn mapped_ranges(&self) -> usize {
        self.spaces.values().map(IovaMap::len).sum()
    }

    /// Maps `size` bytes of memory at `iova`.
    ///
    /// # Errors
    /// The range breaks a rule, or the kernel refuses; nothing has changed then.
    pub fn map(&mut self, asid: u32, iova: u64, size: u64, mapping: Mapping) -> Result<(), Error> {
        let wanted = self.check(asid, iova, size, &mapping)?;
        self.send_update(asid, wanted, &mapping, size)?;
        self.insert(asid, iova, size, mapping)
    }

    /// Removes the mapping that begins at `iova`, whole.
    ///
    /// # Errors
    /// As [`Iotlb::map`].
    pub fn unmap(&mut self, asid: u32, iova: u64) -> Result<(), Error> {
        self.take(asid, iova).map(drop)
    }

    /// Begins a batch of changes of one address space.
    ///
    /// # Errors
    /// As [`Iotlb::map`].
    pub fn batch(&mut self, asid: u32) -> Result<Batch<'_, S>, Error> {
        self.check_asid(asid)?;
        self.bracket(IotlbMessage::BatchBegin { asid })?;
        Ok(Batch {
            iotlb: self,
            asid,
            announced: 0,
            done: Vec::new(),
            open: true,
        })
    }

    /// Maps all of guest RAM at IOVA = guest-physical address, readable and
    /// writable, in one batch: all of it or nothing.
    ///
    /// # Errors
    /// As [`Iotlb::map`]. A short limit on locked memory is reported with the need of all regions
    /// together.
    pub fn map_guest_memory(&mut self, asid: u32, memory: &GuestMemory) -> Result<(), Error> {
        let regions = GuestRegion::all(memory);
        let mut batch = self.batch(asid)?;
        batch.announce(regions.iter().map(|region| region.size()).sum());
        for region in regions {
            let (base, size) = (region.base(), region.size());
            let mapping = Mapping {
                region,
                offset: 0,
                access: Access::ReadWrite,
            };
            batch.map(base, size, mapping)?;
        }
        batch.commit()
    }

    /// Whether a reset of the device leaves its mappings in place.
    #[must_use]
    pub fn survives_reset(&self) -> bool {
        self.limits
            .features
            .contains(BackendFeatures::IOTLB_PERSIST)
    }

    /// To be called after each reset of the device. Where the mappings did not
    /// survive it, the device has forgotten them but the vhost layer has not,
    /// so every one is invalidated and made again.
    ///
    /// # Errors
    /// The kernel refuses. What could not be mapped again is gone from the
    /// mirror too, and the caller should give the device up.
    pub fn remap_after_reset(&mut self) -> Result<(), Error> {
        if self.survives_reset() {
            return Ok(());
        }
        let asids: Vec<u32> = self.spaces.keys().copied().collect();
        for asid in asids {
            self.remap(asid)?;
        }
        Ok(())
    }

    fn remap(&mut self, asid: u32) -> Result<(), Error> {
        let entries: Vec<(IovaRange, Mapping)> = self
            .spaces
            .get(&asid)
            .into_iter()
            .flat_map(IovaMap::iter)
            .map(|(range, mapping)| (range, mapping.clone()))
            .collect();
        if entries.is_empty() {
            return Ok(());
        }
        // Not a `Batch`: it would try to restore mappings that the device lost.
        self.bracket(IotlbMessage::BatchBegin { asid })?;
        let mut result = Ok(());
        for (range, _) in &entries {
            result = result.and(self.take(asid, range.first()).map(drop));
        }
        let mut wanted: u64 = entries.iter().filter_map(|(range, _)| range.size()).sum();
        for (range, mapping) in entries {
            if result.is_ok() {
                result = self.send_update(asid, range, &mapping, wanted);
                let size = range.size().unwrap_or(0);
                wanted = wanted.saturating_sub(size);
                if result.is_ok() {
                    result = self.insert(asid, range.first(), size, mapping);
                }
            }
        }
        // The bracket is closed whatever happened: an open one would swallow
        // every later change of another address space.
        result.and(self.bracket(IotlbMessage::BatchEnd { asid }))
    }

    fn check_asid(&self, asid: u32) -> Result<(), Error> {
        let count = self.usable_address_spaces();
        if asid < count {
            return Ok(());
        }
        Err(Error::other(format!(
            "there is no address space {asid}: the device has {count}"
        )))
    }

    fn check(
        &self,
        asid: u32,
        iova: u64,
        size: u64,
        mapping: &Mapping,
    ) -> Result<IovaRange, Error> {
        self.check_asid(asid)?;
        let wanted = match self.spaces.get(&asid) {
            Some(space) => space.check(iova, size),
            None => IovaMap::<()>::new(self.limits.range).check(iova, size),
        }
        .map_err(|source| unchangeable(asid, source))?;
        let region = mapping.region.size();
        let end = mapping.offset.checked_add(size);
        let inside = end.is_some_and(|end| end <= region)
            && mapping.offset.is_multiple_of(PAGE_SIZE)
            && mapping.region.host_address().is_multiple_of(PAGE_SIZE);
        if inside {
            return Ok(wanted);
        }
        Err(Error::other(format!(
            "bytes {:#x}+{size:#x} are not whole pages of a memory region of {region:#x} bytes",
            mapping.offset
        )))
    }

    fn insert(&mut self, asid: u32, iova: u64, size: u64, mapping: Mapping) -> Result<(), Error> {
        let range = self.limits.range;
        self.spaces
            .entry(asid)
            .or_insert_with(|| IovaMap::new(range))
            .insert(iova, size, mapping)
            .map(drop)
            .map_err(|source| unchangeable(asid, source))
    }

    fn take(&mut self, asid: u32, iova: u64) -> Result<(IovaRange, Mapping), Error> {
        let missing = || unchangeable(asid, map::not_mapped(iova));
        let space = self.spaces.get_mut(&asid).ok_or_else(missing)?;
        let (range, _) = space.get(iova).ok_or_else(missing)?;
        let message = IotlbMessage::Invalidate {
            asid,
            iova,
            size: range.size().unwrap_or(u64::MAX),
        };
        self.sink
            .send(&message)
            .map_err(|source| refused(message, source))?;
        // Only now: while the device may reach the memory, the mirror keeps it alive.
        space
            .remove(iova)
            .map_err(|source| unchangeable(asid, source))
    }

    /// `pending`: bytes that are still to be pinned, for the explanation of a failure.
    fn send_update(
        &self,
        asid: u32,
        range: IovaRange,
        mapping: &Mapping,
        pending: u64,
    ) -> Result<(), Error> {
        let message = IotlbMessage::Update {
            asid,
            iova: range.first(),
            size: range.size().unwrap_or(u64::MAX),
            host_address: mapping.region.host_address() + mapping.offset,
            access: mapping.access,
        };
        self.sink.send(&message).map_err(|source| {
            if source.raw_os_error() != Some(libc::EFAULT) {
                return refused(message, source);
            }
            // It stands for many causes; the limit of locked memory is the commonest.
            let memlock = Memlock::now(pending);
            let message = format!("the kernel refused to map {range} for the device; {memlock}");
            Error::new(ErrorKind::Refused, message).because(source)
        })
    }

    fn bracket(&self, message: IotlbMessage) -> Result<(), Error> {
        if !self.limits.features.contains(BackendFeatures::IOTLB_BATCH) {
            return Ok(());
        }
        self.sink
            .send(&message)
            .map_err(|source| refused(message, source))
    }
}

/// The range breaks a rule of the address space; nothing was written.
fn unchangeable(asid: u32, source: Error) -> Error {
    let message = format!("the mappings of address space {asid} cannot be changed");
    Error::other(message).because(source)
}

fn refused(message: IotlbMessage, source: io::Error) -> Error {
    let message = format!("the kernel refused the IOTLB message {message:?}");
    Error::new(ErrorKind::Refused, message).because(source)
}

impl<S: IotlbSink> Drop for Iotlb<S> {
    /// Takes everything away from the device before the memory is released:
    /// a software parent would otherwise go on writing to these addresses. A device that
    /// still runs then, for somebody gave up in the middle, is reset before: to take
    /// memory from under one is a DMA fault, which not every device survives.
    fn drop(&mut self) {
        if let Err(error) = self.sink.stop() {
            tracing::warn!(%error, "the device could not be reset before its memory goes");
        }
        for (&asid, space) in &mut self.spaces {
            let entries: Vec<IovaRange> = space.iter().map(|(range, _)| range).collect();
            for range in entries {
                let message = IotlbMessage::Invalidate {
                    asid,
                    iova: range.first(),
                    size: range.size().unwrap_or(u64::MAX),
                };
                let sent = self.sink.send(&message);
                if let (Err(error), Ok((range, mapping))) = (sent, space.remove(range.first())) {
                    tracing::warn!(%range, %error, "mapping not removed; its memory is kept");
                    // The device may still reach it: never unmap it from this process.
                    std::mem::forget(mapping);
                }
            }
        }
    }
}

/// A change that a batch made, to be undone if it is not committed.
#[derive(Debug)]
enum Done {
    Mapped(IovaRange),
    Unmapped(IovaRange, Mapping),
}

/// Changes of one address space that the device gets together. Dropped
/// without [`Batch::commit`], or after a failed write, they are undone.
#[derive(Debug)]
#[must_use = "a batch that is not committed is rolled back"]
pub struct Batch<'a, S: IotlbSink> {
    iotlb: &'a mut Iotlb<S>,
    asid: u32,
    announced: u64,
    done: Vec<Done>,
    open: bool,
}

impl<S: IotlbSink> Batch<'_, S> {
    /// Says how many bytes this batch is going to map in all, so that a
    /// failure can say how much locked memory is needed.
    pub fn announce(&mut self, bytes: u64) {
        self.announced = bytes;
    }

    /// Maps `size` bytes of memory at `iova`.
    ///
    /// # Errors
    /// As [`Iotlb::map`]. Earlier changes of the batch stay until it is committed or dropped.
    pub fn map(&mut self, iova: u64, size: u64, mapping: Mapping) -> Result<(), Error> {
        let range = self.iotlb.check(self.asid, iova, size, &mapping)?;
        let pending = self.announced.max(size);
        self.iotlb
            .send_update(self.asid, range, &mapping, pending)?;
        self.iotlb.insert(self.asid, iova, size, mapping)?;
        self.announced = self.announced.saturating_sub(size);
        self.done.push(Done::Mapped(range));
        Ok(())
    }

    /// Removes the mapping that begins at `iova`, whole.
    ///
    /// # Errors
    /// As [`Iotlb::map`].
    pub fn unmap(&mut self, iova: u64) -> Result<(), Error> {
        let (range, mapping) = self.iotlb.take(self.asid, iova)?;
        self.done.push(Done::Unmapped(range, mapping));
        Ok(())
    }

    /// Gives the changes to the device.
    ///
    /// # Errors
    /// The kernel refuses; the changes are rolled back then.
    pub fn commit(mut self) -> Result<(), Error> {
        self.iotlb
            .bracket(IotlbMessage::BatchEnd { asid: self.asid })?;
        self.open = false;
        Ok(())
    }

    fn undo(&mut self, done: Done) -> Result<(), Error> {
        match done {
            Done::Mapped(range) => self.iotlb.unmap(self.asid, range.first()),
            Done::Unmapped(range, mapping) => {
                let size = range.size().unwrap_or(u64::MAX);
                self.iotlb.map(self.asid, range.first(), size, mapping)
            }
        }
    }
}

impl<S: IotlbSink> Drop for Batch<'_, S> {
    fn drop(&mut self) {
        if !self.open {
            return;
        }
        while let Some(done) = self.done.pop() {
            if let Err(error) = self.undo(done) {
                // The mirror still says what the kernel has: `unmap` removes an
                // entry only after the kernel did, `map` adds it only then.
                tracing::error!(%error, "an IOTLB change could not be rolled back");
            }
        }
        let end = IotlbMessage::BatchEnd { asid: self.asid };
        if let Err(error) = self.iotlb.bracket(end) {
            tracing::error!(%error, "an IOTLB batch could not be closed");
        }
    }
}

#[cfg(test)]
mod tests;

//! The IOTLB: maps memory at I/O virtual addresses for a device.
//!
//! [`Iotlb`] owns a mirror of the kernel's table, one [`IovaMap`] per address space, and keeps
//! mapped memory alive. Every change is checked against the mirror before it is written through an
//! [`IotlbSink`]. The module depends neither on the state of the device nor on the use of the
//! memory.
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
//! A device without IOTLB_BATCH gets the same calls without the two bracket messages. The kernel
//! ignores the result of the mapping at BATCH_END. So a committed batch is no proof that the device
//! can access the memory.

mod apply;
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

/// The receiver of IOTLB messages: the device, or a recorder in a test.
pub trait IotlbSink: std::fmt::Debug {
    /// Sends one message.
    ///
    /// # Errors
    /// The kernel refuses, usually with EFAULT.
    fn send(&self, message: &IotlbMessage) -> io::Result<()>;

    /// Resets the device if it runs: its mappings are about to be removed.
    ///
    /// # Errors
    /// The kernel refuses.
    fn stop(&self) -> io::Result<()>;
}

/// A vhost-vdpa device as a sink.
#[derive(Debug, Clone)]
pub struct DeviceSink {
    pub(crate) handle: Handle,
}

impl IotlbSink for DeviceSink {
    fn send(&self, message: &IotlbMessage) -> io::Result<()> {
        // One message, one write: the kernel accepts no partial message.
        let bytes = message.encode();
        let written = self.handle.file()?.write(&bytes)?;
        if written == bytes.len() {
            Ok(())
        } else {
            Err(io::ErrorKind::WriteZero.into())
        }
    }

    fn stop(&self) -> io::Result<()> {
        if self.handle.file.is_none() {
            return Ok(());
        }
        match self.handle.status()? {
            0 => Ok(()),
            _ => self.handle.set_status(0),
        }
    }
}

/// A mapping: a part of a memory region, and the device's access to it.
#[derive(Debug, Clone)]
pub struct Mapping {
    /// The memory, kept alive while the device may access it.
    pub region: Arc<dyn DmaRegion>,
    /// First byte of the region that is mapped; a multiple of 4 KiB.
    pub offset: u64,
    /// The device's access.
    pub access: Access,
}

/// The mappings of all address spaces, which keep their memory alive.
pub(crate) type Mappings = BTreeMap<u32, IovaMap<Mapping>>;

/// The limits of a device.
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
    spaces: Mappings,
}

impl<S: IotlbSink> Iotlb<S> {
    /// An empty IOTLB, as after `open`.
    #[must_use]
    pub fn new(sink: S, limits: IotlbLimits) -> Self {
        Self {
            sink,
            limits,
            spaces: BTreeMap::new(),
        }
    }

    /// The limits of the device.
    #[must_use]
    pub fn limits(&self) -> &IotlbLimits {
        &self.limits
    }

    /// The mappings of an address space; `None` if it never had any.
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

    /// Removes the mapping that begins at `iova`, as a whole.
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
        self.batch_of(asid, true)
    }

    /// `bracketed`: whether the device gets the bracket messages.
    fn batch_of(&mut self, asid: u32, bracketed: bool) -> Result<Batch<'_, S>, Error> {
        self.check_asid(asid)?;
        if bracketed {
            self.bracket(IotlbMessage::BatchBegin { asid })?;
        }
        Ok(Batch {
            iotlb: self,
            asid,
            announced: 0,
            done: Vec::new(),
            open: true,
            bracketed,
        })
    }

    /// Maps all of guest RAM at IOVA = guest-physical address, readable and writable, in one batch:
    /// all or nothing.
    ///
    /// # Errors
    /// As [`Iotlb::map`]. If the limit on locked memory is too low, the error names the need of all
    /// regions together.
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

    /// Maps the memory again; to be called after each reset of the device. Without IOTLB_PERSIST
    /// the device has lost its mappings but the vhost layer has not. So each mapping is invalidated
    /// and created again.
    ///
    /// # Errors
    /// The kernel refuses. The mirror drops the mappings that could not be restored, and the caller
    /// should give the device up.
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
        // Close the bracket in every case: an open one would swallow every later change of another
        // address space.
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
        let space = self.spaces.get(&asid).ok_or_else(missing)?;
        let (range, _) = space.get(iova).ok_or_else(missing)?;
        self.take_inside(asid, range)?.pop().ok_or_else(missing)
    }

    /// Removes all mappings inside `range` by one message; returns them by ascending address.
    fn take_inside(
        &mut self,
        asid: u32,
        range: IovaRange,
    ) -> Result<Vec<(IovaRange, Mapping)>, Error> {
        let Some(space) = self.spaces.get_mut(&asid) else {
            return Ok(Vec::new());
        };
        let entries: Vec<IovaRange> = space.overlapping(&range).map(|(entry, _)| entry).collect();
        let (Some(first), Some(last)) = (entries.first(), entries.last()) else {
            return Ok(Vec::new());
        };
        // The kernel removes every mapping that the message touches.
        let Some(inside) =
            IovaRange::new(first.first(), last.last()).filter(|inside| range.contains(inside))
        else {
            let source = Error::other(format!("a mapping is only partly inside {range}"));
            return Err(unchangeable(asid, source));
        };
        let message = IotlbMessage::Invalidate {
            asid,
            iova: inside.first(),
            size: inside.size().unwrap_or(u64::MAX),
        };
        self.sink
            .send(&message)
            .map_err(|source| refused(message, source))?;
        // Only now: the mirror keeps the memory alive while the device may access it.
        let removed = entries.iter().map(|entry| space.remove(entry.first()));
        removed
            .collect::<Result<_, _>>()
            .map_err(|source| unchangeable(asid, source))
    }

    /// `pending`: bytes still to be pinned, for the explanation of a failure.
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
            // EFAULT has many causes; the limit on locked memory is the most common.
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

impl Iotlb {
    /// Takes all mappings without removing them: closing the device does that.
    pub(crate) fn close(&mut self) -> Mappings {
        self.sink.handle.file = None;
        std::mem::take(&mut self.spaces)
    }
}

/// The range breaks a rule of the address space; nothing was written.
fn unchangeable(asid: u32, source: Error) -> Error {
    let message = format!("cannot change the mappings of address space {asid}");
    Error::other(message).because(source)
}

fn refused(message: IotlbMessage, source: io::Error) -> Error {
    let message = format!("the kernel refused the IOTLB message {message:?}");
    Error::new(ErrorKind::Refused, message).because(source)
}

impl<S: IotlbSink> Drop for Iotlb<S> {
    /// Unmaps everything before the memory is released: a software parent would otherwise continue
    /// to write to these addresses. A device that still runs, after an error midway, is reset
    /// first. Unmapping memory under a running device is a DMA fault, which not every device
    /// survives.
    fn drop(&mut self) {
        if let Err(error) = self.sink.stop() {
            tracing::warn!(%error, "cannot reset the device before its memory is unmapped");
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
                    // The device may still access it: never unmap it from this process.
                    std::mem::forget(mapping);
                }
            }
        }
    }
}

/// A change of a batch, to be undone if the batch is not committed.
#[derive(Debug)]
enum Done {
    Mapped(IovaRange),
    Unmapped(IovaRange, Mapping),
}

/// Changes of one address space that the device gets together. Dropping it without
/// [`Batch::commit`], or after a failed write, undoes them.
#[derive(Debug)]
#[must_use = "a batch that is not committed is rolled back"]
pub struct Batch<'a, S: IotlbSink> {
    iotlb: &'a mut Iotlb<S>,
    asid: u32,
    announced: u64,
    done: Vec<Done>,
    open: bool,
    bracketed: bool,
}

impl<S: IotlbSink> Batch<'_, S> {
    /// Sets the total number of bytes that this batch will map, so that an error can name the
    /// locked memory needed.
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

    /// Removes the mapping that begins at `iova`, as a whole.
    ///
    /// # Errors
    /// As [`Iotlb::map`].
    pub fn unmap(&mut self, iova: u64) -> Result<(), Error> {
        let (range, mapping) = self.iotlb.take(self.asid, iova)?;
        self.done.push(Done::Unmapped(range, mapping));
        Ok(())
    }

    /// Removes all mappings inside `range`; none may be partly inside.
    fn unmap_inside(&mut self, range: IovaRange) -> Result<(), Error> {
        let removed = self.iotlb.take_inside(self.asid, range)?;
        let removed = removed.into_iter();
        self.done
            .extend(removed.map(|(range, mapping)| Done::Unmapped(range, mapping)));
        Ok(())
    }

    /// Commits the changes to the device.
    ///
    /// # Errors
    /// The kernel refuses; the changes are rolled back then.
    pub fn commit(mut self) -> Result<(), Error> {
        self.end()
    }

    fn end(&mut self) -> Result<(), Error> {
        if self.bracketed {
            self.iotlb
                .bracket(IotlbMessage::BatchEnd { asid: self.asid })?;
        }
        self.open = false;
        Ok(())
    }

    /// Undoes all changes, as far as the kernel allows.
    fn roll_back(&mut self) -> Result<(), Error> {
        let mut result = Ok(());
        while let Some(done) = self.done.pop() {
            // The mirror still matches the kernel: `unmap` removes an entry, and `map` adds one,
            // only after the kernel did.
            result = result.and(self.undo(done));
        }
        result.and(self.end())
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
        if let Err(error) = self.roll_back() {
            tracing::error!(%error, "cannot roll back an IOTLB batch");
        }
    }
}

#[cfg(test)]
mod tests;

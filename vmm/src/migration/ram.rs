//! Guest RAM on its way from one file to another.
//!
//! [`RamImage`] owns how the file and the mapping of guest RAM are read and written. `send.rs` and
//! `receive.rs` carry the pages of one round over one connection. Nothing here decides when a round
//! begins.
//!
//! Pages are spread over connections by their offset, in stripes of 1 MiB: stripe *n* always uses
//! connection *n* mod (number of connections). So no version of a page overtakes a later one, and
//! no connection waits for another between rounds.
//!
//! Pages are read with `pread` from the file behind the mapping, into one buffer per connection. A
//! running guest changes them meanwhile, so the sender needs a copy. Otherwise neither the CRC nor
//! the test for zeros would match the sent bytes. A `pread` also leaves holes of the file holes,
//! which a read of the mapping would fill with pages. Pages are written through the mapping, since
//! files of huge pages do not support `write`.

mod receive;
mod send;

#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use rustix::fs::SeekFrom;
use vdpa::memory::GuestMemory;
use vm_memory::{Bytes as _, GuestAddress};

pub(super) use receive::{Budget, receive_rounds};
pub(super) use send::{Round, send_round};

use super::dirty::PAGE_SIZE;
use super::error::MigrationError;
use super::protocol::{RUN_PAGES_MAX, RamRange};
use crate::kvm::pre_fault::PreFault;
use crate::memory::{GuestRam, RamSlot};
use crate::snapshot::memory_image::PageSums;

/// Bytes in a stripe.
const STRIPE: u64 = RUN_PAGES_MAX * PAGE_SIZE;
/// One page of zeros for comparison.
static ZEROS: [u8; 4096] = [0; 4096];

/// The connection that carries the pages of the stripe that contains `offset`.
fn carrier(offset: u64, connections: u16) -> u64 {
    (offset / STRIPE) % u64::from(connections.max(1))
}

/// Guest RAM by its file offsets. Clones share the memory and keep it mapped.
#[derive(Debug, Clone)]
pub struct RamImage {
    file: Arc<File>,
    memory: GuestMemory,
    slots: Vec<RamSlot>,
    len: u64,
    pre_fault: Option<Arc<PreFault>>,
    sums: Option<Arc<PageSums>>,
}

impl RamImage {
    /// The RAM of a machine. Its slots are consecutive in the file, from offset 0 on.
    #[must_use]
    pub fn new(ram: &GuestRam) -> Self {
        Self {
            file: Arc::clone(ram.file()),
            memory: ram.memory().clone(),
            slots: ram.slots().to_vec(),
            len: ram.slots().iter().map(|slot| slot.guest.len).sum(),
            pre_fault: None,
            sums: None,
        }
    }

    /// Maps each page for the guest as soon as it is written.
    #[must_use]
    pub fn mapped_by(self, pre_fault: PreFault) -> Self {
        Self {
            pre_fault: Some(Arc::new(pre_fault)),
            ..self
        }
    }

    /// Updates `sums` after each write of a page.
    #[must_use]
    pub fn summed_by(self, sums: Arc<PageSums>) -> Self {
        Self {
            sums: Some(sums),
            ..self
        }
    }

    /// Size of RAM in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The ranges as a HELLO describes them.
    #[must_use]
    pub fn ranges(&self) -> Vec<RamRange> {
        self.slots
            .iter()
            .map(|slot| RamRange {
                guest_address: slot.guest.start,
                len: slot.guest.len,
                file_offset: slot.file_offset,
            })
            .collect()
    }

    /// Reads the bytes at `offset` of the file.
    pub(super) fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), MigrationError> {
        self.file
            .read_exact_at(into, offset)
            .map_err(|source| MigrationError::Memory {
                offset,
                access: "read",
                source,
            })
    }

    /// First offset from `offset` on, at most `end`, where the file may have data; before it there
    /// are only zeros. Rounded down to a page.
    fn data_after(&self, offset: u64, end: u64) -> u64 {
        // This moves the file's position, which has no other user.
        match rustix::fs::seek(&*self.file, SeekFrom::Data(offset)) {
            Ok(data) => (data / PAGE_SIZE * PAGE_SIZE).clamp(offset, end),
            Err(rustix::io::Errno::NXIO) => end,
            // The file system does not report holes.
            Err(_) => offset,
        }
    }

    /// Bytes where the file may have data. The rest are holes, which read as zeros and are not
    /// sent.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        let (mut next, mut sum) = (0, 0_u64);
        loop {
            let data = self.data_after(next, self.len);
            if data >= self.len {
                return sum;
            }
            // This moves the file's position, which has no other user.
            let hole = match rustix::fs::seek(&*self.file, SeekFrom::Hole(data)) {
                Ok(hole) => hole.clamp(data.saturating_add(PAGE_SIZE), self.len),
                Err(_) => self.len,
            };
            sum = sum.saturating_add(hole - data);
            next = hole;
        }
    }

    /// Checks a run that came from the peer.
    fn check(&self, offset: u64, len: u64) -> Result<(), MigrationError> {
        let bad = |problem| MigrationError::Page {
            offset,
            len,
            problem,
        };
        if len == 0 || !offset.is_multiple_of(PAGE_SIZE) || !len.is_multiple_of(PAGE_SIZE) {
            return Err(bad("no whole pages"));
        }
        match offset.checked_add(len) {
            None => Err(bad("past the end of everything")),
            Some(end) if end > self.len => Err(bad("outside guest RAM")),
            Some(end) if offset / STRIPE != (end - 1) / STRIPE => Err(bad("in two stripes")),
            Some(_) => Ok(()),
        }
    }

    /// Writes a run that came from the peer.
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), MigrationError> {
        let len = u64::try_from(data.len()).unwrap_or(u64::MAX);
        self.check(offset, len)?;
        let failed = |source: io::Error| MigrationError::Memory {
            offset,
            access: "written",
            source,
        };
        let pages = offset..offset.saturating_add(len);
        let (mut offset, mut data) = (offset, data);
        while !data.is_empty() {
            // `check` has found the run inside RAM, and the slots leave no gap; a slot may end
            // within the run.
            let slot = self
                .slots
                .iter()
                .find(|slot| {
                    (slot.file_offset..slot.file_offset.saturating_add(slot.guest.len))
                        .contains(&offset)
                })
                .ok_or_else(|| failed(ErrorKind::NotFound.into()))?;
            let within = offset - slot.file_offset;
            let room = usize::try_from(slot.guest.len - within).unwrap_or(usize::MAX);
            let (now, later) = data.split_at(room.min(data.len()));
            let guest_address = slot.guest.start.saturating_add(within);
            let written = u64::try_from(now.len()).unwrap_or(u64::MAX);
            self.memory
                .write_slice(now, GuestAddress(guest_address))
                .map_err(|error| failed(io::Error::other(error)))?;
            if let Some(pre_fault) = &self.pre_fault {
                pre_fault.map(guest_address, written);
            }
            offset = offset.saturating_add(written);
            data = later;
        }
        self.sum(pages)
    }

    /// Reads the written pages back, so that the sums describe the memory and not the received
    /// bytes.
    fn sum(&self, pages: Range<u64>) -> Result<(), MigrationError> {
        let Some(sums) = &self.sums else {
            return Ok(());
        };
        let mut page = [0; 4096];
        let mut offset = pages.start;
        while offset < pages.end {
            self.read(offset, &mut page)?;
            sums.update(offset, &page);
            offset = offset.saturating_add(PAGE_SIZE);
        }
        Ok(())
    }

    /// Zeroes a run that came from the peer. Does not touch pages that are zero already, holes of
    /// the file included: zeros must not cost the destination memory. Punching holes is not
    /// possible either: a device may have pinned the page.
    fn write_zeros(&self, offset: u64, len: u64) -> Result<(), MigrationError> {
        self.check(offset, len)?;
        let end = offset.saturating_add(len);
        let mut page = [0; 4096];
        let mut next = self.data_after(offset, end);
        while next < end {
            self.read(next, &mut page)?;
            if page != ZEROS {
                self.write(next, &ZEROS)?;
            }
            next = self.data_after(next.saturating_add(PAGE_SIZE), end);
        }
        Ok(())
    }
}

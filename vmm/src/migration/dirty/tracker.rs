//! The union of all sources of writes to guest RAM.
//!
//! Owns the order of reading and clearing; the sets themselves are [`DirtyPages`], KVM's side is
//! [`crate::kvm::dirty_log`].

use std::ops::Range;
use std::sync::Arc;

use vdpa::memory::GuestMemory;
use vm_memory::{Address as _, GuestMemoryBackend as _, GuestMemoryRegion as _};

use super::{DirtyPages, PAGE_SIZE};
use crate::Error;
use crate::kvm::memory_slots::MemorySlots;
use crate::memory::RamSlot;

/// Collects the written pages. While it lives, KVM logs writes to guest RAM; dropping it ends that.
#[derive(Debug)]
pub struct DirtyTracker {
    slots: Arc<MemorySlots>,
    memory: GuestMemory,
    ram: Vec<RamSlot>,
}

impl DirtyTracker {
    /// Starts logging. Earlier writes may be missing from the first [`DirtyTracker::take`], and it
    /// may report everything as written: send all of RAM after it.
    ///
    /// # Errors
    /// KVM refused; nothing is logged.
    pub fn start(
        slots: Arc<MemorySlots>,
        memory: &GuestMemory,
        ram: &[RamSlot],
    ) -> Result<Self, Error> {
        slots.start_dirty_log().map_err(no_log)?;
        Ok(Self {
            slots,
            memory: memory.clone(),
            ram: ram.to_vec(),
        })
    }

    /// Adds all pages written since the last call, and those in `always` (offsets in the file), to
    /// `into`.
    ///
    /// # Errors
    /// [`Error`]; every page then counts as written, and all are in `into`.
    pub fn take(&self, into: &mut DirtyPages, always: &[Range<u64>]) -> Result<(), Error> {
        let taken = self.take_kvm(into).and_then(|()| self.take_userspace(into));
        for range in always {
            into.mark(range.clone());
        }
        if taken.is_err() {
            into.mark(0..into.capacity().saturating_mul(PAGE_SIZE));
        }
        taken
    }

    fn take_kvm(&self, into: &mut DirtyPages) -> Result<(), Error> {
        for log in self.slots.take_dirty_log().map_err(no_log)? {
            into.merge(self.first_page(log.guest_address)?, &log.pages);
        }
        Ok(())
    }

    fn take_userspace(&self, into: &mut DirtyPages) -> Result<(), Error> {
        for region in self.memory.iter() {
            let first = self.first_page(region.start_addr().raw_value())?;
            // vm-memory's bitmaps use the processor's pages, 4096 bytes on x86-64. One atomic step
            // reads and clears each word: a concurrent mark stays.
            let bitmap = vm_memory::MmapRegion::bitmap(region).get_and_reset();
            into.merge(first, &bitmap);
        }
        Ok(())
    }

    /// Number of the page at the start of the slot or region at this address.
    fn first_page(&self, guest_address: u64) -> Result<u64, Error> {
        self.ram
            .iter()
            .find(|slot| slot.guest.start == guest_address)
            .map(|slot| slot.file_offset / PAGE_SIZE)
            .ok_or_else(|| {
                Error::host(format!(
                    "writes are logged at {guest_address:#x}, where the machine has no memory"
                ))
            })
    }
}

/// The error for a log that could not be switched or read.
fn no_log(source: Error) -> Error {
    Error::host("cannot use the log of the pages that the guest writes").because(source)
}

impl Drop for DirtyTracker {
    fn drop(&mut self) {
        if let Err(error) = self.slots.stop_dirty_log() {
            tracing::warn!(
                %error,
                "writes to guest memory stay logged, which costs the guest time"
            );
        }
    }
}

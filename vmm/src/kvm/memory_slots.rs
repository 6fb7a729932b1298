//! KVM memory slots: the host memory that the guest sees at each address.
//!
//! [`MemorySlots`] owns the numbering of the slots and keeps their memory alive. It must not know
//! the use of the memory: guest RAM and the pages of devices are slots alike. The one
//! difference is that writes to guest RAM can be logged and those to device pages never are
//! ([`super::dirty_log`] switches it).

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::VmFd;
use parking_lot::Mutex;
use vdpa::memory::GuestMemory;
use vm_memory::{
    Address as _, GuestMemoryBackend as _, GuestMemoryRegion as _, MemoryRegionAddress,
};

use crate::Error;

/// Smallest unit of a slot, in bytes.
const PAGE_SIZE: u64 = 4096;

/// The host memory of a slot, and its guest address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotRange {
    /// First guest-physical address, page-aligned.
    pub guest_address: u64,
    /// Length in bytes, a multiple of the page size.
    pub len: u64,
    /// Host virtual address of the first byte, page-aligned.
    pub host_address: u64,
    /// Guest writes exit as MMIO instead of reaching the memory.
    pub readonly: bool,
}

/// The role of a slot's memory for migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SlotKind {
    /// Guest RAM: writes can be logged.
    Ram,
    /// Anything else, such as a doorbell page or a BAR, which the kernel cannot write-protect:
    /// never logged.
    Other,
}

pub(super) struct Slot {
    pub(super) range: SlotRange,
    pub(super) kind: SlotKind,
    /// Whether the kernel logs writes (`KVM_MEM_LOG_DIRTY_PAGES`).
    pub(super) logging: bool,
    /// Keeps the host mapping alive as long as the guest may use it.
    _owner: Arc<dyn Any + Send + Sync>,
}

/// The memory slots of one VM. Dropping it removes all of them before their memory is released.
pub struct MemorySlots {
    pub(super) vm: Arc<VmFd>,
    limit: usize,
    /// `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2` is enabled: reading the log does not clear it.
    pub(super) manual_protection: AtomicBool,
    pub(super) slots: Mutex<BTreeMap<u32, Slot>>,
}

impl fmt::Debug for MemorySlots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map()
            .entries(
                self.slots
                    .lock()
                    .iter()
                    .map(|(number, slot)| (*number, slot.range)),
            )
            .finish()
    }
}

impl MemorySlots {
    /// Starts without slots.
    #[must_use]
    pub fn new(vm: Arc<VmFd>) -> Self {
        // KVM had 32 slots before it reported a limit.
        let limit = usize::try_from(vm.check_extension_int(kvm_ioctls::Cap::NrMemslots))
            .ok()
            .filter(|&limit| limit > 0)
            .unwrap_or(32);
        Self {
            vm,
            limit,
            manual_protection: AtomicBool::new(false),
            slots: Mutex::default(),
        }
    }

    /// Maps every region of `memory` for the guest at its own address.
    ///
    /// # Errors
    /// Those of [`MemorySlots::add`]; slots added before the failure stay.
    pub fn add_ram(&self, memory: &GuestMemory) -> Result<(), Error> {
        let owner: Arc<dyn Any + Send + Sync> = Arc::new(memory.clone());
        for region in memory.iter() {
            let guest_address = region.start_addr().raw_value();
            let host = region
                .get_host_address(MemoryRegionAddress(0))
                .ok()
                .and_then(|pointer| u64::try_from(pointer.addr()).ok())
                .ok_or_else(|| {
                    Error::host(format!(
                        "guest RAM at {guest_address:#x} has no host mapping"
                    ))
                })?;
            let range = SlotRange {
                guest_address,
                len: region.len(),
                host_address: host,
                readonly: false,
            };
            // SAFETY: needed to hand host memory to the guest. The range is
            // exactly one mapped region of `memory`, and the slot holds a
            // clone of `memory`, which shares and so keeps the mapping.
            unsafe { self.add_kind(range, SlotKind::Ram, Arc::clone(&owner)) }?;
        }
        Ok(())
    }

    /// Adds a slot and returns its number; the lowest free one.
    ///
    /// # Safety
    /// The memory at `range.host_address .. + range.len` must stay mapped for as long as `owner`
    /// lives. Nothing in this process may hold it as a Rust reference: the guest reads and writes
    /// it at any time.
    ///
    /// # Errors
    /// The range is invalid or overlaps another one; no slot is left; the ioctl failed. Nothing has
    /// changed.
    pub unsafe fn add(
        &self,
        range: SlotRange,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<u32, Error> {
        // SAFETY: needed because `add_kind` has the same requirements as this function; so its
        // callers meet them.
        unsafe { self.add_kind(range, SlotKind::Other, owner) }
    }

    /// Like [`MemorySlots::add`], with the kind. RAM added while writes are being logged is logged
    /// from its first moment.
    ///
    /// # Safety
    /// That of [`MemorySlots::add`].
    unsafe fn add_kind(
        &self,
        range: SlotRange,
        kind: SlotKind,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<u32, Error> {
        let mut slots = self.slots.lock();
        let number = free_number(&slots, range, self.limit)?;
        let logging = kind == SlotKind::Ram && slots.values().any(|slot| slot.logging);
        self.set(number, range, range.len, logging)?;
        slots.insert(
            number,
            Slot {
                range,
                kind,
                logging,
                _owner: owner,
            },
        );
        Ok(number)
    }

    /// Removes a slot and drops the owner of its memory.
    ///
    /// # Errors
    /// No such slot, or the ioctl failed.
    pub fn remove(&self, number: u32) -> Result<(), Error> {
        let mut slots = self.slots.lock();
        let range = slots
            .get(&number)
            .ok_or_else(|| Error::host(format!("memory slot {number} does not exist")))?
            .range;
        self.set(number, range, 0, false)?;
        slots.remove(&number);
        Ok(())
    }

    /// Number of slots now; for leak tests and metrics.
    #[must_use]
    pub fn count(&self) -> usize {
        self.slots.lock().len()
    }

    /// `memory_size` 0 removes the slot.
    pub(super) fn set(
        &self,
        slot: u32,
        range: SlotRange,
        memory_size: u64,
        logging: bool,
    ) -> Result<(), Error> {
        let readonly = if range.readonly { KVM_MEM_READONLY } else { 0 };
        let log = if logging { KVM_MEM_LOG_DIRTY_PAGES } else { 0 };
        let region = kvm_userspace_memory_region {
            slot,
            flags: readonly | log,
            guest_phys_addr: range.guest_address,
            memory_size,
            userspace_addr: range.host_address,
        };
        // SAFETY: needed because the ioctl gives the guest access to host memory. Callers of `add`
        // vouch for the range, a removal only removes access, and other flags do not change the
        // range.
        unsafe { self.vm.set_user_memory_region(region) }.map_err(|error| {
            Error::host(format!(
                "KVM_SET_USER_MEMORY_REGION failed for {:#x}+{:#x}",
                range.guest_address, range.len
            ))
            .because(io::Error::from(error))
        })
    }
}

impl Drop for MemorySlots {
    fn drop(&mut self) {
        let numbers: Vec<u32> = self.slots.lock().keys().copied().collect();
        for number in numbers {
            if let Err(error) = self.remove(number) {
                // Keep the memory mapped forever: otherwise the guest would reach the next mapping
                // at that address.
                tracing::error!(number, %error, "cannot remove a memory slot");
                if let Some(slot) = self.slots.lock().remove(&number) {
                    std::mem::forget(slot);
                }
            }
        }
    }
}

/// Checks `range` against the existing slots and returns a free number.
fn free_number(slots: &BTreeMap<u32, Slot>, range: SlotRange, limit: usize) -> Result<u32, Error> {
    let SlotRange {
        guest_address, len, ..
    } = range;
    let slot = format!("memory slot {guest_address:#x}+{len:#x}");
    let bad = || Error::host(format!("{slot} is empty, not page-aligned, or wraps"));
    let aligned = [guest_address, len, range.host_address]
        .iter()
        .all(|value| value % PAGE_SIZE == 0);
    let last = match len
        .checked_sub(1)
        .and_then(|n| guest_address.checked_add(n))
    {
        Some(last) if aligned => last,
        _ => return Err(bad()),
    };
    if range.host_address.checked_add(len).is_none() {
        return Err(bad());
    }
    for taken in slots.values() {
        let other = taken.range.guest_address;
        // No overflow: this function has checked every range in the map.
        if other <= last && guest_address <= other + (taken.range.len - 1) {
            return Err(Error::host(format!(
                "{slot} overlaps the one at {other:#x}"
            )));
        }
    }
    (0..)
        .take(limit)
        .find(|number| !slots.contains_key(number))
        .ok_or_else(|| Error::host(format!("all {limit} memory slots of the VM are in use")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(guest_address: u64, len: u64) -> SlotRange {
        SlotRange {
            guest_address,
            len,
            host_address: 0x7000_0000_0000,
            readonly: false,
        }
    }

    fn slots(ranges: &[(u64, u64)]) -> BTreeMap<u32, Slot> {
        (0..)
            .zip(ranges)
            .map(|(number, &(address, len))| {
                let slot = Slot {
                    range: range(address, len),
                    kind: SlotKind::Other,
                    logging: false,
                    _owner: Arc::new(()),
                };
                (number, slot)
            })
            .collect()
    }

    #[test]
    fn refuses_bad_ranges() {
        let none = BTreeMap::new();
        for bad in [
            range(0, 0),
            range(0x800, 0x1000),
            range(0, 0x1001),
            range(u64::MAX - 0xfff, 0x2000),
            range(0x1000, u64::MAX - 0xfff),
            SlotRange {
                host_address: 1,
                ..range(0, 0x1000)
            },
            SlotRange {
                host_address: u64::MAX - 0xfff,
                ..range(0, 0x1000)
            },
        ] {
            let error = free_number(&none, bad, 32).unwrap_err().to_string();
            assert!(
                error.contains("not page-aligned, or wraps"),
                "{bad:x?}: {error}"
            );
        }
        // The last page of the address space is an ordinary range.
        assert_eq!(
            free_number(&none, range(u64::MAX - 0xfff, 0x1000), 32).unwrap(),
            0
        );
    }

    #[test]
    fn refuses_overlap_and_reuses_numbers() {
        let mut map = slots(&[(0, 0x10_000), (0x20_000, 0x10_000)]);
        for (address, len) in [(0xf000, 0x1000), (0x1f000, 0x2000), (0, 0x100_000)] {
            let error = free_number(&map, range(address, len), 32).unwrap_err();
            assert!(error.to_string().contains("overlaps"), "{error}");
        }
        assert_eq!(free_number(&map, range(0x10_000, 0x10_000), 32).unwrap(), 2);
        let error = free_number(&map, range(0x10_000, 0x1000), 2).unwrap_err();
        assert!(error.to_string().contains("all 2 memory slots"), "{error}");
        map.remove(&0);
        assert_eq!(free_number(&map, range(0, 0x1000), 2).unwrap(), 0);
    }
}

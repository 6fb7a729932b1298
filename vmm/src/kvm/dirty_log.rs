//! KVM's log of the pages of guest RAM that vCPUs have written.
//!
//! Owns how logging is enabled, read and disabled. It must not know who uses the pages, nor that
//! others than vCPUs write to memory (KVM does not see userspace and devices).
//!
//! ```text
//!          start_dirty_log              take_dirty_log (any number of times)
//!   off ───────────────────> logging ──┐
//!    ^                          │  ^   │ read, clear and write-protect again
//!    └──────────────────────────┘  └───┘
//!          stop_dirty_log
//! ```
//!
//! A slot whose flags alone change stays in place (`KVM_MR_FLAGS_ONLY` in `virt/kvm/kvm_main.c`):
//! the guest has its memory throughout.
//!
//! Without `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2` (Linux 5.1, its `INITIALLY_SET` 5.7), the kernel
//! write-protects all RAM in one go at the start, and the guest waits. With it, every page counts
//! as written at first. Clearing a piece protects it, 8 MiB under one hold of the kernel's lock.

use std::io;
use std::sync::atomic::Ordering;

use kvm_bindings::{
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_INITIALLY_SET,
    KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE, kvm_clear_dirty_log, kvm_clear_dirty_log__bindgen_ty_1,
    kvm_enable_cap,
};
use vmm_sys_util::ioctl::ioctl_with_ref;

use super::memory_slots::{MemorySlots, SlotKind, SlotRange};
use crate::Error;

/// The ioctl that `kvm-ioctls` has no method for.
#[allow(
    missing_docs,
    reason = "the macro makes a function that cannot carry any"
)]
mod number {
    use kvm_bindings::{KVMIO, kvm_clear_dirty_log};
    use vmm_sys_util::ioctl_iowr_nr;

    ioctl_iowr_nr!(KVM_CLEAR_DIRTY_LOG, KVMIO, 0xc0, kvm_clear_dirty_log);
}

/// Bytes in a page of the log.
const PAGE_SIZE: u64 = 4096;
/// Words of the log that one ioctl clears: 8 MiB of RAM. The ioctl holds KVM's lock of the page
/// tables, and each fault of the guest waits for it.
const WORDS_AT_ONCE: usize = 32;

/// Pages of one slot that vCPUs have written since the last read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotDirtyLog {
    /// First guest-physical address of the slot.
    pub guest_address: u64,
    /// Length of the slot in bytes.
    pub len: u64,
    /// One bit per page of 4096 bytes, the first page in the lowest bit of the first word. Bits
    /// past the slot's end are clear.
    pub pages: Vec<u64>,
}

impl MemorySlots {
    /// Has the kernel log writes of vCPUs to all of guest RAM, whether they run or not.
    ///
    /// The first [`MemorySlots::take_dirty_log`] may report every page as written. A second call
    /// changes nothing.
    ///
    /// # Errors
    /// The ioctl failed; the kernel then logs nothing.
    pub fn start_dirty_log(&self) -> Result<(), Error> {
        self.ask_for_manual_protection();
        if let Err(error) = self.switch_dirty_log(true) {
            if let Err(second) = self.switch_dirty_log(false) {
                tracing::warn!(error = %second, "writes to part of guest memory stay logged");
            }
            return Err(error);
        }
        Ok(())
    }

    /// Ends logging and discards the log.
    ///
    /// # Errors
    /// The ioctl failed. Slots after the failing one are still logged, which only costs the guest
    /// time.
    pub fn stop_dirty_log(&self) -> Result<(), Error> {
        self.switch_dirty_log(false)
    }

    /// Whether writes of vCPUs to guest RAM are being logged.
    #[must_use]
    pub fn is_logging(&self) -> bool {
        self.slots.lock().values().any(|slot| slot.logging)
    }

    /// Returns the pages that vCPUs have written since the last call, by ascending slot number.
    /// Later writes are logged anew: read the pages after this returns, and none is missed.
    ///
    /// # Errors
    /// Logging is off, or an ioctl fails. The log may then be incomplete: count every page as
    /// written.
    pub fn take_dirty_log(&self) -> Result<Vec<SlotDirtyLog>, Error> {
        let slots = self.slots.lock();
        let mut logs = Vec::new();
        for (&number, slot) in slots.iter().filter(|(_, slot)| slot.logging) {
            logs.push(self.take_of_slot(number, slot.range)?);
        }
        if logs.is_empty() {
            return Err(Error::host("the log of writes to guest memory is off"));
        }
        Ok(logs)
    }

    fn switch_dirty_log(&self, on: bool) -> Result<(), Error> {
        let mut slots = self.slots.lock();
        for (&number, slot) in slots.iter_mut() {
            if slot.kind == SlotKind::Ram && slot.logging != on {
                self.set(number, slot.range, slot.range.len, on)?;
                slot.logging = on;
            }
        }
        Ok(())
    }

    /// Enables the capability as far as the kernel has it. The log works without it too, so a
    /// failure is not an error.
    fn ask_for_manual_protection(&self) {
        let has = self
            .vm
            .check_extension_raw(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2.into());
        let wanted = KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET;
        let flags = u32::try_from(has).unwrap_or(0) & wanted;
        if flags & KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE != 0 && !self.is_logging() {
            let capability = kvm_enable_cap {
                cap: KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
                args: [flags.into(), 0, 0, 0],
                ..Default::default()
            };
            match self.vm.enable_cap(&capability) {
                Ok(()) => self.manual_protection.store(true, Ordering::Relaxed),
                Err(error) => {
                    tracing::debug!(%error, "the kernel protects all of guest memory at once");
                }
            }
        }
    }

    fn take_of_slot(&self, number: u32, range: SlotRange) -> Result<SlotDirtyLog, Error> {
        let failed = |ioctl: &str, source: io::Error| {
            let address = range.guest_address;
            Error::host(format!(
                "{ioctl} failed for the memory slot at {address:#x}"
            ))
            .because(source)
        };
        let get = |source| failed("KVM_GET_DIRTY_LOG", source);
        let len = usize::try_from(range.len).map_err(|error| get(io::Error::other(error)))?;
        let mut pages = self
            .vm
            .get_dirty_log(number, len)
            .map_err(|error| get(error.into()))?;
        if self.manual_protection.load(Ordering::Relaxed) {
            self.clear(number, range, &mut pages)
                .map_err(|source| failed("KVM_CLEAR_DIRTY_LOG", source))?;
        }
        Ok(SlotDirtyLog {
            guest_address: range.guest_address,
            len: range.len,
            pages,
        })
    }

    /// Clears and write-protects the pages that are set in `pages`, which KVM_GET_DIRTY_LOG leaves
    /// to userspace.
    fn clear(&self, slot: u32, range: SlotRange, pages: &mut [u64]) -> io::Result<()> {
        let total = range.len / PAGE_SIZE;
        let mut first_page = 0;
        for words in pages.chunks_mut(WORDS_AT_ONCE) {
            let covered = u64::try_from(words.len())
                .unwrap_or(u64::MAX)
                .saturating_mul(64);
            // The kernel requires a multiple of 64 unless the range ends with the slot.
            let count = covered.min(total.saturating_sub(first_page));
            if words.iter().any(|&word| word != 0) {
                let request = kvm_clear_dirty_log {
                    slot,
                    num_pages: u32::try_from(count).map_err(io::Error::other)?,
                    first_page,
                    __bindgen_anon_1: kvm_clear_dirty_log__bindgen_ty_1 {
                        dirty_bitmap: words.as_mut_ptr().cast(),
                    },
                };
                // SAFETY: needed because no crate wraps this ioctl. The descriptor is a VM's and
                // the structure is the ioctl's. The kernel reads one bit for each of `num_pages`
                // pages from `words`, which has 64 of them per word.
                let result =
                    unsafe { ioctl_with_ref(&*self.vm, number::KVM_CLEAR_DIRTY_LOG(), &request) };
                if result != 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            first_page += covered;
        }
        Ok(())
    }
}

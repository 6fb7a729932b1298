//! Accesses of the guest to a device without an exit to our threads, in two ways. KVM ioeventfds
//! signal an eventfd inside the kernel when the guest writes to an address: a queue kick. Memory
//! slots map the device's own pages, a doorbell or a part of a BAR, so the access does not exit at
//! all.
//!
//! This module owns the lists of addresses that are attached and mapped. It must not know the queue
//! of an address.
//!
//! Such a slot has no flags: it is never logged as dirty, because it is not guest memory. The
//! kernel maps a doorbell for writes only, so a guest's first access to it must be a write. A read
//! makes KVM_RUN return EFAULT (see [`crate::vcpu::FaultHandler`]).
//!
//! The ioeventfds have no data match and length 0. For KVM that is any write of any width and, on
//! Intel hosts, skips the instruction decoder (`KVM_FAST_MMIO_BUS`). Hosts without
//! `KVM_CAP_IOEVENTFD_NO_LENGTH` (before Linux 4.4) are rejected when `/dev/kvm` is opened;
//! vhost-vdpa needs a newer kernel anyway.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use devices::hypervisor::{DeviceMappings, DevicePages};
use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use parking_lot::Mutex;
use vmm_sys_util::eventfd::EventFd;

use super::memory_slots::{MemorySlots, SlotRange};

/// The ioeventfds, and the slots of doorbells and other device pages, of one VM.
#[derive(Debug)]
pub struct KvmDeviceMappings {
    vm: Arc<VmFd>,
    slots: Arc<MemorySlots>,
    /// Descriptor number of the attached eventfd, by address.
    attached: Mutex<BTreeMap<u64, RawFd>>,
    /// Number of the memory slot, by address.
    mapped: Mutex<BTreeMap<u64, u32>>,
    /// How often pages were unmapped so far.
    unmapped: AtomicU64,
}

impl KvmDeviceMappings {
    /// Starts without eventfds or mapped pages. Pages get their slots from `slots`.
    #[must_use]
    pub fn new(vm: Arc<VmFd>, slots: Arc<MemorySlots>) -> Self {
        Self {
            vm,
            slots,
            attached: Mutex::default(),
            mapped: Mutex::default(),
            unmapped: AtomicU64::new(0),
        }
    }

    /// Number of attached eventfds; for leak tests and metrics.
    #[must_use]
    pub fn count(&self) -> usize {
        self.attached.lock().len()
    }

    /// Number of mapped doorbells and parts of BARs; for leak tests and metrics.
    #[must_use]
    pub fn mapped_count(&self) -> usize {
        self.mapped.lock().len()
    }

    /// Number of times device pages were ever unmapped from the guest. A memory fault of the guest
    /// may be outdated if this has changed since the vCPU entered the guest.
    #[must_use]
    pub fn unmapped_count(&self) -> u64 {
        self.unmapped.load(Ordering::Acquire)
    }
}

impl DeviceMappings for KvmDeviceMappings {
    fn attach(&self, address: u64, eventfd: &EventFd) -> io::Result<()> {
        let mut attached = self.attached.lock();
        if attached.contains_key(&address) {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                format!("a doorbell is attached at {address:#x} already"),
            ));
        }
        self.vm
            .register_ioevent(eventfd, &IoEventAddress::Mmio(address), NoDatamatch)?;
        attached.insert(address, eventfd.as_raw_fd());
        Ok(())
    }

    fn detach(&self, address: u64, eventfd: &EventFd) -> io::Result<()> {
        let mut attached = self.attached.lock();
        if attached.get(&address) != Some(&eventfd.as_raw_fd()) {
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                format!("this doorbell is not attached at {address:#x}"),
            ));
        }
        self.vm
            .unregister_ioevent(eventfd, &IoEventAddress::Mmio(address), NoDatamatch)?;
        attached.remove(&address);
        Ok(())
    }

    fn map(&self, address: u64, pages: Arc<dyn DevicePages>) -> io::Result<()> {
        let mut mapped = self.mapped.lock();
        if mapped.contains_key(&address) {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                format!("a doorbell is mapped at {address:#x} already"),
            ));
        }
        let range = SlotRange {
            guest_address: address,
            len: pages.size(),
            host_address: pages.host_address(),
            readonly: false,
        };
        // SAFETY: needed to map pages of this process for the guest. By the trait's contract they
        // are one mapping of this size without references into it, for as long as `pages` lives.
        // The slot keeps `pages`.
        let number = unsafe { self.slots.add(range, Arc::new(pages)) }.map_err(io::Error::other)?;
        mapped.insert(address, number);
        Ok(())
    }

    fn unmap(&self, address: u64) -> io::Result<()> {
        let mut mapped = self.mapped.lock();
        let number = *mapped.get(&address).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::NotFound,
                format!("no doorbell is mapped at {address:#x}"),
            )
        })?;
        self.slots.remove(number).map_err(io::Error::other)?;
        mapped.remove(&address);
        // After the removal: a reader of the old count may have met the slot.
        self.unmapped.fetch_add(1, Ordering::Release);
        Ok(())
    }
}

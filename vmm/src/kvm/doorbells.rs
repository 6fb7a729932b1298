//! Queue kicks as KVM ioeventfds: a guest write to an address signals an
//! eventfd inside the kernel.
//!
//! This module owns the list of addresses that are attached. It must not know
//! which queue an address belongs to. The ioeventfds have no data match and
//! length 0, which to KVM is any write of any width and, on Intel hosts,
//! skips the instruction decoder (`KVM_FAST_MMIO_BUS`). Hosts without
//! `KVM_CAP_IOEVENTFD_NO_LENGTH` (before Linux 4.4) are turned away when
//! `/dev/kvm` is opened; vhost-vdpa needs a younger kernel anyway.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use devices::hypervisor::Doorbells;
use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use vmm_sys_util::eventfd::EventFd;

/// The ioeventfds of one VM.
#[derive(Debug)]
pub struct KvmDoorbells {
    vm: Arc<VmFd>,
    /// Number of the attached eventfd, by address.
    attached: Mutex<BTreeMap<u64, RawFd>>,
}

impl KvmDoorbells {
    /// None attached.
    #[must_use]
    pub fn new(vm: Arc<VmFd>) -> Self {
        Self {
            vm,
            attached: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, RawFd>> {
        self.attached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many are attached now; for leak tests and metrics.
    #[must_use]
    pub fn count(&self) -> usize {
        self.lock().len()
    }
}

impl Doorbells for KvmDoorbells {
    fn attach(&self, address: u64, eventfd: &EventFd) -> io::Result<()> {
        let mut attached = self.lock();
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
        let mut attached = self.lock();
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
}

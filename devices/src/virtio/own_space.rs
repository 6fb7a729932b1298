//! The place of an emulated device behind the guest's IOMMU.
//!
//! ```text
//!               enter (a domain)            leave
//!   reaches  ---------------------> follows -----> reaches nothing
//!   nothing  <---- block ------------ |  ^
//!      |                              +--+ change
//!      +-- the driver starts it: enters its domain again
//! ```
//! The device reads rings and buffers through its own [`AddressSpace`], a copy of its domain. So no
//! access is left when a call returns. A device that gives host addresses to the kernel must first
//! end what the kernel does with them; see [`block`](super::block).
//!
//! Owns the copy and the domain. It must not know queues.

use std::sync::Arc;

use vdpa::iova::IovaRange;
use vdpa::memory::{AddressSpace, Change, DeviceMemory, Mode};

use super::backend::Translated;
use crate::Error;

/// An address space that a device keeps as long as it exists.
#[derive(Debug)]
pub(crate) struct OwnSpace {
    own: Arc<AddressSpace>,
    /// Its domain, or that of bypass; `None`: it reaches nothing.
    domain: Option<Arc<AddressSpace>>,
    /// The space does not follow the domain until the driver starts the device.
    blocked: bool,
}

impl OwnSpace {
    /// Returns the place of a device with this memory; `None` if that is not behind an IOMMU.
    pub(crate) fn of(memory: &DeviceMemory) -> Option<Self> {
        Some(Self {
            own: Arc::clone(memory.space()?),
            domain: None,
            blocked: false,
        })
    }

    /// The driver starts the device, which reaches its domain from here on.
    pub(crate) fn unblock(&mut self) {
        if std::mem::take(&mut self.blocked) {
            self.follow();
        }
    }

    /// As [`Translated::block`], but the translations stay for what the kernel still does.
    pub(crate) fn freeze(&mut self) {
        self.blocked = true;
    }

    fn follow(&self) {
        self.own.change(|own| match &self.domain {
            Some(domain) => own.copy_from(&domain.read()),
            None => own.set_mode(Mode::Blocked),
        });
    }
}

impl Translated for OwnSpace {
    fn reach(&self) -> IovaRange {
        self.own.range()
    }

    fn space(&self) -> Option<Arc<AddressSpace>> {
        self.domain.clone()
    }

    fn enter(&mut self, space: &Arc<AddressSpace>) -> Result<(), Error> {
        self.own.check_reach(space).map_err(Error::as_it_is)?;
        self.domain = Some(Arc::clone(space));
        if !self.blocked {
            self.follow();
        }
        Ok(())
    }

    fn leave(&mut self) -> Result<(), Error> {
        self.domain = None;
        if !self.blocked {
            self.follow();
        }
        Ok(())
    }

    fn change(&mut self, changes: &[Change]) -> Result<(), Error> {
        if self.blocked {
            return Ok(());
        }
        self.own
            .change(|own| own.apply(changes))
            .map_err(Error::as_it_is)
    }

    /// The driver learns it when it kicks next: the ring is not mapped.
    fn block(&mut self) {
        self.blocked = true;
        self.own.change(|own| own.set_mode(Mode::Blocked));
    }
}

//! The mappings of a device of the host behind the guest's IOMMU: it reaches what its address space
//! has, and nothing else of the guest.
//!
//! ```text
//!               enter (a domain)             clear
//!   reaches  ----------------------> follows ------> reaches nothing
//!   nothing  <----+                    |  ^
//!                 |                    |  +-- change
//!                 +--- blocked --------+   (a blocked device follows its domain again once it is
//!                                           unblocked)
//! ```
//! The kernel's mappings in address space 0 and the device's own [`AddressSpace`] have the same
//! contents. Both change before a call returns.
//!
//! Owns the device's domain and what it reaches. It must not know the device, nor requests of the
//! IOMMU's driver.

use std::sync::Arc;

use vdpa::Error;
use vdpa::iotlb::{Access, Iotlb, IotlbSink};
use vdpa::iova::IovaRange;
use vdpa::memory::{AddressSpace, Change, GuestMemory, GuestRegion, Mode, Piece};

#[cfg(doc)]
use crate::virtio::backend::Translated;

#[cfg(test)]
mod tests;

/// The place of a device behind the IOMMU.
#[derive(Debug)]
pub(crate) struct Translation {
    /// What the device reaches. Its rings hold it, so it lives as long as the device.
    own: Arc<AddressSpace>,
    /// Its domain, or that of bypass; `None`: it reaches nothing.
    pub(crate) domain: Option<Arc<AddressSpace>>,
    /// Its mappings are gone, although its domain may have some.
    pub(crate) blocked: bool,
    /// The host has removed the device, which maps nothing any more.
    pub(crate) closed: bool,
    /// Guest RAM.
    ram: Vec<Arc<GuestRegion>>,
}

impl Translation {
    /// Returns the addresses that the guest may map.
    pub(crate) fn reach(&self) -> IovaRange {
        self.own.range()
    }

    /// Creates the place of a device without mappings, which reads rings through `own`.
    pub(crate) fn new(own: Arc<AddressSpace>, memory: &GuestMemory) -> Self {
        Self {
            own,
            domain: None,
            blocked: false,
            closed: false,
            ram: GuestRegion::all(memory),
        }
    }

    /// Moves the device to a domain.
    ///
    /// # Errors
    /// Those of [`Translated::enter`].
    pub(crate) fn enter<S: IotlbSink>(
        &mut self,
        iotlb: &mut Iotlb<S>,
        domain: &Arc<AddressSpace>,
    ) -> Result<(), Error> {
        self.own.check_reach(domain)?;
        if !self.blocked {
            self.follow(iotlb, domain)?;
        }
        self.domain = Some(Arc::clone(domain));
        Ok(())
    }

    /// Gives a blocked device its domain again.
    pub(crate) fn unblock<S: IotlbSink>(&mut self, iotlb: &mut Iotlb<S>) -> Result<(), Error> {
        if let Some(domain) = self.domain.clone().filter(|_| self.blocked) {
            self.follow(iotlb, &domain)?;
        }
        self.blocked = false;
        Ok(())
    }

    /// Follows changes of the domain.
    ///
    /// # Errors
    /// Those of [`Translated::change`].
    pub(crate) fn change<S: IotlbSink>(
        &mut self,
        iotlb: &mut Iotlb<S>,
        changes: &[Change],
    ) -> Result<(), Error> {
        if self.blocked {
            return Ok(());
        }
        self.apply(iotlb, changes)?;
        self.own.change(|own| own.apply(changes))
    }

    /// Changes the kernel's mappings.
    fn apply<S: IotlbSink>(&self, iotlb: &mut Iotlb<S>, changes: &[Change]) -> Result<(), Error> {
        if self.closed {
            return Ok(());
        }
        iotlb.apply(0, changes, &self.ram)
    }

    /// Removes all mappings of the guest.
    pub(crate) fn clear<S: IotlbSink>(&self, iotlb: &mut Iotlb<S>) -> Result<(), Error> {
        let range = self.own.range();
        let unmapped = self.apply(iotlb, &[Change::Unmap { range }]);
        self.own.change(|own| own.set_mode(Mode::Blocked));
        unmapped
    }

    /// Makes kernel and own space the same as `domain`.
    fn follow<S: IotlbSink>(
        &self,
        iotlb: &mut Iotlb<S>,
        domain: &AddressSpace,
    ) -> Result<(), Error> {
        let domain = domain.read();
        let stays = self.own.read().mode() == Mode::Identity && domain.mode() == Mode::Identity;
        // RAM stays pinned when the guest's kernel passes the device through.
        if !stays {
            let range = self.own.range();
            let mut changes = vec![Change::Unmap { range }];
            if domain.mode() == Mode::Identity {
                changes.extend(self.ram.iter().filter_map(|region| {
                    let range = region.range()?;
                    let (gpa, access) = (range.first(), Access::ReadWrite);
                    let piece = Piece { gpa, access };
                    Some(Change::Map { range, piece })
                }));
            }
            let mapped = domain.mappings().iter();
            changes.extend(mapped.map(|(range, &piece)| Change::Map { range, piece }));
            self.apply(iotlb, &changes)?;
        }
        self.own.change(|own| own.copy_from(&domain));
        Ok(())
    }
}

//! The memory that a function reaches behind the guest's IOMMU.
//!
//! Each function has an address space of the kernel for itself. It follows the function's domain by
//! single requests: `vfio-ioctls` maps all memory writable.
//!
//! ```text
//!   virtio-iommu ── enter, change, leave ──> TranslatedDma ── MAP, UNMAP ──> kernel
//! ```
//! The guest programs MSI-X with addresses of its own, and the host's vectors do not use them. So
//! interrupts need no mapping.
//!
//! Must not know the function's registers, nor requests of the IOMMU's driver.

use std::io;
use std::sync::Arc;

use vdpa::ErrorKind as Cause;
use vdpa::iotlb::{Iotlb, IotlbLimits, IotlbMessage, IotlbSink};
use vdpa::iova::IovaRange;
use vdpa::memory::{AddressSpace, Change, GuestMemory};
use vdpa::uapi::BackendFeatures;

use super::dma::Space;
use crate::Error;
use crate::translation::Translation;
use crate::virtio::backend::Translated;

/// What one function reaches; see the module.
#[derive(Debug)]
pub struct TranslatedDma {
    iotlb: Iotlb<Space>,
    translation: Translation,
}

impl TranslatedDma {
    /// Creates an empty one for the function in this address space, up to the address `last`.
    pub(super) fn new(space: Space, last: u64, memory: &GuestMemory) -> Self {
        let range = IovaRange::new(0, last).unwrap_or(IovaRange::ALL);
        let limits = IotlbLimits {
            range,
            address_spaces: 1,
            features: BackendFeatures::empty(),
        };
        Self {
            iotlb: Iotlb::new(space, limits),
            translation: Translation::new(Arc::new(AddressSpace::new(range)), memory),
        }
    }

    /// Gives a blocked function its domain again. Called after each reset of the function.
    pub(super) fn unblock(&mut self) {
        if let Err(error) = self.translation.unblock(&mut self.iotlb) {
            let error = &error as &dyn std::error::Error;
            tracing::error!(
                error,
                "a function reaches no guest memory until its next reset"
            );
            self.translation.blocked = true;
        }
    }

    /// Returns the error of a change. If the mappings are unknown afterwards, the function is
    /// blocked.
    fn checked(&mut self, changed: Result<(), vdpa::Error>) -> Result<(), Error> {
        let Err(source) = changed else {
            return Ok(());
        };
        if source.kind() == Cause::NotRolledBack {
            self.block();
        }
        Err(Error::other("cannot change the memory that a function reaches").because(source))
    }
}

impl Translated for TranslatedDma {
    fn reach(&self) -> IovaRange {
        self.translation.reach()
    }

    fn space(&self) -> Option<Arc<AddressSpace>> {
        self.translation.domain.clone()
    }

    fn enter(&mut self, space: &Arc<AddressSpace>) -> Result<(), Error> {
        let entered = self.translation.enter(&mut self.iotlb, space);
        self.checked(entered)
    }

    fn leave(&mut self) -> Result<(), Error> {
        if self.translation.clear(&mut self.iotlb).is_err() {
            self.block();
        }
        self.translation.domain = None;
        Ok(())
    }

    fn change(&mut self, changes: &[Change]) -> Result<(), Error> {
        let changed = self.translation.change(&mut self.iotlb, changes);
        self.checked(changed)
    }

    /// The function runs on, and its accesses fail. If the kernel keeps mappings, they are of the
    /// guest's own memory.
    fn block(&mut self) {
        self.translation.blocked = true;
        if let Err(error) = self.translation.clear(&mut self.iotlb) {
            let error = &error as &dyn std::error::Error;
            tracing::error!(error, "cannot take guest memory from a function");
        }
    }
}

impl IotlbSink for Space {
    fn send(&self, message: &IotlbMessage) -> io::Result<()> {
        match *message {
            IotlbMessage::Update {
                iova,
                size,
                host_address,
                access,
                ..
            } => {
                // SAFETY: needed to map guest memory. `Iotlb` sends addresses of a `DmaRegion`, and
                // keeps the region while it is mapped.
                unsafe { self.map(iova, size, host_address, access) }
            }
            IotlbMessage::Invalidate { iova, size, .. } => self.unmap(iova, size),
            // The kernel has no brackets: each request takes effect at once.
            IotlbMessage::BatchBegin { .. } | IotlbMessage::BatchEnd { .. } => Ok(()),
        }
    }

    /// Does nothing: the function is closed before, and the address space ends with this value.
    fn stop(&self) -> io::Result<()> {
        Ok(())
    }
}

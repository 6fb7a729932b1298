//! A virtio-pci function behind an IOMMU of the guest.

use std::sync::Arc;

use vdpa::iova::IovaRange;
use vdpa::memory::{AddressSpace, Change};

use super::VirtioPciDevice;
use super::transport::Transport;
use crate::Error;
use crate::virtio::backend::Translated;
use crate::virtio::iommu::Endpoint;

impl Transport {
    fn translated(&mut self) -> Result<&mut dyn Translated, Error> {
        let translated = self.backend.translated();
        translated.ok_or_else(|| Error::other("the device is not behind an IOMMU: give iommu=on"))
    }
}

impl Endpoint for VirtioPciDevice {
    fn reach(&self) -> Result<IovaRange, Error> {
        Ok(self.transport.lock().translated()?.reach())
    }

    fn enter(&self, space: &Arc<AddressSpace>) -> Result<(), Error> {
        self.transport.lock().translated()?.enter(space)
    }

    fn leave(&self) -> Result<(), Error> {
        self.transport.lock().translated()?.leave()
    }

    fn change(&self, changes: &[Change]) -> Result<(), Error> {
        self.transport.lock().translated()?.change(changes)
    }

    fn block(&self) {
        if let Ok(translated) = self.transport.lock().translated() {
            translated.block();
        }
    }
}

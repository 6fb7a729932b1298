//! A device behind the guest's IOMMU: see [`Translation`].
//!
//! The VMM reads rings and the control queue through the device's own address space. The private
//! window lies above all addresses that the guest may map, so the VMM's own rings stay mapped,
//! whatever the guest does.
//!
//! The device may run meanwhile. A driver that moves a running device to another domain takes its
//! rings away.
//!
//! Owns the rule that a device with unknown mappings is stopped. It must not know requests of the
//! IOMMU's driver, nor its other devices.

use std::sync::Arc;

use vdpa::iotlb::Iotlb;
use vdpa::iova::{DeviceAddress, IovaRange};
use vdpa::memory::{AddressSpace, Change, DeviceMemory};
use vdpa::{Error as VdpaError, ErrorKind as Cause};

use super::device::VdpaBackend;
use super::eventfd::signal;
use super::rings::Rings;
use super::write_log::mark;
use crate::Error;
use crate::translation::Translation;
use crate::virtio::backend::Translated;

/// The error for a device that is not behind the IOMMU.
fn not_behind() -> Error {
    Error::other("the device is not behind the guest's IOMMU")
}

impl VdpaBackend {
    /// Gives a blocked device its domain again. Called before each negotiation.
    pub(super) fn unblock(&mut self) -> Result<(), Error> {
        match self.translation {
            Some(_) => self.translate(&[], Translation::unblock),
            None => Ok(()),
        }
    }

    /// The memory that the device may have written without a mark through mappings that end:
    /// guest-physical addresses and lengths.
    fn written(&self, ending: impl FnOnce(&DeviceMemory) -> Vec<(u64, u64)>) -> Vec<(u64, u64)> {
        if self.log.on {
            ending(&self.rings.memory)
        } else {
            Vec::new()
        }
    }

    /// Changes the mappings, and then marks `written`. If the mappings are unknown afterwards, the
    /// device is blocked.
    fn translate(
        &mut self,
        written: &[(u64, u64)],
        change: impl FnOnce(&mut Translation, &mut Iotlb) -> Result<(), VdpaError>,
    ) -> Result<(), Error> {
        let Self {
            translation,
            rings: Rings { iotlb, id, .. },
            ..
        } = self;
        let translation = translation.as_mut().ok_or_else(not_behind)?;
        let changed = change(translation, iotlb);
        // Not before: the device writes until its mappings have ended.
        mark(self.rings.memory.ram(), written);
        let Err(source) = changed else {
            return Ok(());
        };
        let unknown = source.kind() == Cause::NotRolledBack;
        let message = format!("cannot change the memory that device {id} reaches");
        if unknown {
            self.block();
        }
        Err(Error::other(message).because(source))
    }
}

impl Translated for VdpaBackend {
    fn reach(&self) -> IovaRange {
        let translation = self.translation.as_ref();
        translation.map_or(IovaRange::ALL, Translation::reach)
    }

    fn space(&self) -> Option<Arc<AddressSpace>> {
        self.translation.as_ref()?.domain.clone()
    }

    fn enter(&mut self, space: &Arc<AddressSpace>) -> Result<(), Error> {
        let written = self.written(DeviceMemory::writable);
        self.translate(&written, |translation, iotlb| {
            translation.enter(iotlb, space)
        })
    }

    fn leave(&mut self) -> Result<(), Error> {
        let written = self.written(DeviceMemory::writable);
        // A device that keeps a mapping is stopped.
        if self
            .translate(&written, |translation, iotlb| translation.clear(iotlb))
            .is_err()
        {
            self.block();
            // The device wrote until then.
            mark(self.rings.memory.ram(), &written);
        }
        if let Some(translation) = &mut self.translation {
            translation.domain = None;
        }
        Ok(())
    }

    fn change(&mut self, changes: &[Change]) -> Result<(), Error> {
        let written = self.written(|memory| {
            let mut written = Vec::new();
            for change in changes {
                if let Change::Unmap { range } = change {
                    let len = range.size().unwrap_or(u64::MAX);
                    memory.for_each_written(DeviceAddress(range.first()), len, |gpa, len| {
                        written.push((gpa, len))
                    });
                }
            }
            written
        });
        self.translate(&written, |translation, iotlb| {
            translation.change(iotlb, changes)
        })
    }

    fn block(&mut self) {
        self.stop();
        let Rings {
            iotlb, device, id, ..
        } = &mut self.rings;
        if let Some(translation) = &mut self.translation {
            translation.blocked = true;
            if let Err(error) = translation.clear(iotlb) {
                tracing::error!(
                    device = %id,
                    error = &error as &dyn std::error::Error,
                    "cannot take guest memory from a device: it stays stopped"
                );
                device.give_up();
            }
        }
        self.fail();
        signal(&self.log.failed);
    }
}

#[cfg(test)]
mod tests;

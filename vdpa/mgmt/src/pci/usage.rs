//! Checks whether a PCI function is in use.
//!
//! Unbinding a function, or deleting the virtual functions of a physical one, may make the kernel
//! wait in a sleep that no signal ends. `vp-vdpa` and similar drivers wait until
//! `/dev/vhost-vdpa-N` is closed, `vfio-pci` until its file is. So this check comes first. If a
//! process opens a file between the check and the action, the kernel still waits.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use super::{Address, Function, Pci};
use crate::bus::in_use;
use crate::error::{Error, ErrorKind, existing};
use crate::sysfs::names;
use vdpa::device::holder::holders;

/// The driver that passes functions to programs.
pub(super) const VFIO: &str = "vfio-pci";

impl Pci {
    /// Fails if the function, or one of its virtual functions, is in use.
    ///
    /// The check opens vDPA devices for a moment, which resets those that are not open.
    ///
    /// # Errors
    /// `InUse` with the holders; `Failed`.
    pub fn check_unused(&self, function: &Function) -> Result<(), Error> {
        self.check_virtual_functions_unused(function)?;
        self.check_alone(function)
    }

    /// Fails if a virtual function of this one is in use.
    pub(crate) fn check_virtual_functions_unused(&self, function: &Function) -> Result<(), Error> {
        for &(_, address) in &function.virtual_functions {
            // `None` if it vanished meanwhile.
            if let Some(one) = existing(self.function(address))? {
                self.check_alone(&one)?;
            }
        }
        Ok(())
    }

    fn check_alone(&self, function: &Function) -> Result<(), Error> {
        for name in &function.vdpa_devices {
            match self.vdpa.device(name) {
                Ok(device) => device.check_unused().map_err(|source| {
                    let message = format!("a vDPA device on {} is open", function.address);
                    Error::new(ErrorKind::InUse, message).because(source)
                })?,
                Err(error) if error.is_missing() => {}
                Err(error) => {
                    tracing::debug!(%error, name, "cannot find the users of the device");
                }
            }
        }
        if function.has_vfio_driver() {
            for path in self.vfio_files(function)? {
                let Ok(file) = fs::metadata(&path) else {
                    continue;
                };
                let holders = holders(file.rdev());
                if !holders.is_empty() {
                    return Err(in_use(function.address, &holders, &path));
                }
            }
        }
        Ok(())
    }

    /// The files through which programs use the function: its group's, and the function's own on
    /// newer kernels.
    pub(super) fn vfio_files(&self, function: &Function) -> Result<Vec<PathBuf>, Error> {
        let directory = self.directory(function.address).join("vfio-dev");
        let own = names(&directory)?;
        let group = function.iommu_group;
        Ok(group
            .map(|group| self.vfio.join(group.to_string()))
            .into_iter()
            .chain(own.iter().map(|name| self.vfio.join("devices").join(name)))
            .collect())
    }

    /// The other functions of the function's IOMMU group.
    ///
    /// # Errors
    /// `Failed`.
    pub fn shares_group_with(&self, function: &Function) -> Result<Vec<Address>, Error> {
        let Some(group) = function.iommu_group else {
            return Ok(Vec::new());
        };
        let mut members = self.group(group)?;
        members.retain(|&address| address != function.address);
        Ok(members)
    }
}

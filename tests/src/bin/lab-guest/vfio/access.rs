//! The way of a driver in this process to its PCI function: VFIO where an IOMMU translates the
//! function's addresses, otherwise sysfs and physical addresses.

use super::group::Group;
use super::physical::Physical;
use lab::error::{Error, Result};
use lab::files;
use std::fs::File;
use std::path::Path;

/// `VFIO_PCI_CONFIG_REGION_INDEX`; smaller ones are BARs.
const CONFIG_SPACE: u32 = 7;

/// A function that this process owns.
pub(super) enum Access {
    Vfio(Group),
    Physical(Physical),
}

impl Access {
    /// Takes the function from its driver.
    pub(super) fn open(function: &Path) -> Result<Self> {
        if function.join("iommu_group").exists() {
            bind(function, "vfio-pci")?;
            Group::open(function).map(Self::Vfio)
        } else {
            unbind(function)?;
            Physical::open(function).map(Self::Physical)
        }
    }

    /// The function's directory in sysfs.
    pub(super) fn function(&self) -> &Path {
        match self {
            Self::Vfio(group) => group.function(),
            Self::Physical(physical) => physical.function(),
        }
    }

    pub(super) fn translates(&self) -> bool {
        matches!(self, Self::Vfio(_))
    }

    /// The function's group, whose mappings a test changes.
    pub(super) fn group(&self) -> Result<&Group> {
        match self {
            Self::Vfio(group) => Ok(group),
            Self::Physical(_) => Err(Error::Usage("no IOMMU translates for this NIC".into())),
        }
    }

    /// The file with the function's configuration space, and its offset there.
    pub(super) fn config(&self) -> Result<(File, u64)> {
        match self {
            Self::Vfio(group) => group.region(CONFIG_SPACE),
            Self::Physical(physical) => physical.config(),
        }
    }

    /// The file with a BAR that can be mapped, and its offset there.
    pub(super) fn bar(&self, index: u8) -> Result<(File, u64)> {
        match self {
            Self::Vfio(group) => group.region(index.into()),
            Self::Physical(physical) => physical.bar(index),
        }
    }

    /// Lets the function reach `len` bytes of this process, and returns their address for it. That
    /// is `iova` if an IOMMU translates. All are whole pages, which outlive their mapping here only
    /// behind an IOMMU.
    ///
    /// # Safety
    /// The caller accesses the memory as volatile, since the function writes there. The memory
    /// stays mapped until the function is reset.
    pub(super) unsafe fn map(&self, host: u64, len: u64, iova: u64) -> Result<u64> {
        match self {
            // SAFETY: the caller's promise.
            Self::Vfio(group) => unsafe { group.map(host, len, iova) }.map(|()| iova),
            Self::Physical(_) => super::physical::address(host, len),
        }
    }

    /// Undoes one [`Access::map`].
    pub(super) fn unmap(&self, iova: u64, len: u64) -> Result<()> {
        match self {
            Self::Vfio(group) => group.unmap(iova, len),
            Self::Physical(_) => Ok(()),
        }
    }
}

/// Takes a PCI function from its driver, if it has one.
fn unbind(function: &Path) -> Result<()> {
    let driver = function.join("driver");
    if driver.exists() {
        files::write(&driver.join("unbind"), address(function)?)?;
    }
    Ok(())
}

/// Gives a PCI function to a driver; an empty line is the kernel's choice.
pub(super) fn bind(function: &Path, driver: &str) -> Result<()> {
    files::write(&function.join("driver_override"), driver)?;
    unbind(function)?;
    files::write(Path::new("/sys/bus/pci/drivers_probe"), address(function)?)
}

/// The bus address, which is the name of the directory in sysfs.
pub(super) fn address(function: &Path) -> Result<&str> {
    let name = function.file_name().and_then(|name| name.to_str());
    name.ok_or_else(|| Error::invalid(function.display().to_string(), "it is no PCI function"))
}

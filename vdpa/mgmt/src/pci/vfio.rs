//! Functions for guests by VFIO: whether a function can be given away, its binding, and its return.
//!
//! ```text
//!   NIC driver ── checked; former driver noted ──> vfio-pci ──> former driver and override
//! ```
//! A function with a VFIO driver stays as it is: its owner has bound it. A VMM checks what only the
//! open device shows, such as its reset.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::usage::VFIO;
use super::{Address, Function, Pci};
use crate::error::{Error, ErrorKind, existing};
use crate::sysfs::{link_name, names};

/// Drivers that leave the memory of their function to the other functions of its IOMMU group.
const HARMLESS: [&str; 2] = ["pci-stub", "pcieport"];

/// The driver and the override of a function before it was bound to vfio-pci.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FormerDriver {
    /// The function.
    pub function: Address,
    /// Its driver.
    pub driver: Option<String>,
    /// Its driver override.
    pub driver_override: Option<String>,
}

impl Function {
    /// Whether it is bound to vfio-pci, or to a variant for one type of device.
    #[must_use]
    pub fn has_vfio_driver(&self) -> bool {
        self.driver.as_deref().is_some_and(is_vfio)
    }
}

fn is_vfio(driver: &str) -> bool {
    driver.contains("vfio")
}

fn unusable(message: String) -> Error {
    Error::new(ErrorKind::Unusable, message)
}

impl Pci {
    /// Checks whether a function can be given to a guest by VFIO. It may have another driver still.
    ///
    /// # Errors
    /// `Unusable` with the reason and the remedy, `InUse` with the holders, or `Failed`.
    pub fn check_vfio(&self, function: &Function, allow_pf: bool) -> Result<(), Error> {
        let address = function.address;
        if !allow_pf && function.physical_function.is_none() {
            return Err(unusable(format!(
                "{address} is not a virtual function: its guest would control the whole device, \
                 with the functions of other guests. Create virtual functions (`bellhop vf count \
                 pci/{address} N`), or allow it with allow_pf"
            )));
        }
        let Some(group) = function.iommu_group else {
            return Err(unusable(format!(
                "{address} has no IOMMU group: enable the IOMMU; `bellhop doctor` names the \
                 settings"
            )));
        };
        let others = self.in_use_beside(function)?;
        if !others.is_empty() {
            let names: Vec<String> = others.iter().map(Address::to_string).collect();
            return Err(unusable(format!(
                "the IOMMU group {group} of {address} also has {}, which this host uses: unbind \
                 them or bind them to vfio-pci; all functions of a group belong together",
                names.join(", ")
            )));
        }
        if !function.has_vfio_driver() {
            if let Some(device) = function.vdpa_devices.first() {
                return Err(unusable(format!(
                    "{address} has the vDPA device {device}: delete it first"
                )));
            }
            if !function.virtual_functions.is_empty() {
                return Err(unusable(format!(
                    "{address} has virtual functions, which would go with its driver: remove them \
                     first (`bellhop vf count pci/{address} 0`)"
                )));
            }
            if !self.has_driver(VFIO) {
                return Err(super::bind::no_driver(VFIO));
            }
        }
        self.check_unused(function)
    }

    /// All functions that are bound to a VFIO driver, by address.
    ///
    /// # Errors
    /// `Failed`.
    pub fn bound_to_vfio(&self) -> Result<Vec<Address>, Error> {
        let mut found = Vec::new();
        for name in names(&self.devices)? {
            let Ok(address) = name.parse() else { continue };
            let driver = link_name(&self.directory(address).join("driver"))?;
            if driver.is_some_and(|driver| is_vfio(&driver)) {
                found.push(address);
            }
        }
        found.sort();
        Ok(found)
    }

    /// The other functions of its IOMMU group that have a driver of the host: then no guest can
    /// have it.
    ///
    /// # Errors
    /// `Failed`.
    pub fn in_use_beside(&self, function: &Function) -> Result<Vec<Address>, Error> {
        let mut used = Vec::new();
        for address in self.shares_group_with(function)? {
            // `None` if it vanished meanwhile.
            let other = existing(self.function(address))?;
            let driver = other.and_then(|other| other.driver);
            if driver.is_some_and(|driver| !is_vfio(&driver) && !HARMLESS.contains(&&*driver)) {
                used.push(address);
            }
        }
        Ok(used)
    }

    /// Binds a function to vfio-pci, unless it is.
    ///
    /// # Errors
    /// As [`Pci::bind`].
    pub fn give_to_vfio(&self, former: &FormerDriver) -> Result<(), Error> {
        self.bind(former.function, VFIO).map(drop)
    }

    /// Undoes [`Pci::give_to_vfio`], also if it was not finished. Returns why the function stays as
    /// it is, if another driver has it meanwhile.
    ///
    /// # Errors
    /// As [`Pci::bind`].
    pub fn take_from_vfio(&self, former: &FormerDriver) -> Result<Option<String>, Error> {
        let Some(function) = existing(self.function(former.function))? else {
            return Ok(None);
        };
        let now = function.driver.as_deref();
        if let Some(now) = now.filter(|&now| now != VFIO && Some(now) != former.driver.as_deref()) {
            let address = function.address;
            return Ok(Some(format!("{address} now has the driver {now}")));
        }
        let (driver, driver_override) = (&former.driver, &former.driver_override);
        self.restore(
            &function,
            VFIO,
            driver.as_deref(),
            driver_override.as_deref(),
        )?;
        Ok(None)
    }

    /// The files through which a program uses a function: those of the function and its IOMMU
    /// group, VFIO's own, and that of iommufd.
    ///
    /// # Errors
    /// `Failed`.
    pub fn files_for_vfio(&self, function: &Function) -> Result<Vec<PathBuf>, Error> {
        let mut files = self.vfio_files(function)?;
        files.push(self.vfio.join(VFIO_CONTAINER));
        files.extend(Some(self.vfio.with_file_name(IOMMUFD)).filter(|file| file.exists()));
        Ok(files)
    }
}

/// The file of IOMMU mappings, beside those of groups.
const VFIO_CONTAINER: &str = "vfio";
/// The file of iommufd, beside the directory of VFIO.
const IOMMUFD: &str = "iommu";

//! PCI functions in sysfs: their drivers and devices, and rebinding to another driver.
//!
//! ```text
//!   NIC driver ── bind: not in use ──> unbind ──> bind ──> driver read back
//!   vp-vdpa     <──                               └─fails──> old driver_override, old driver
//!   vfio-pci
//! ```
//!
//! This module owns `/sys/bus/pci`, and a function's part of `/sys/kernel/iommu_groups`. It does
//! not use netlink. [`super::sriov`] changes the number of virtual functions.

mod address;
mod bind;
mod usage;
mod vfio;

use std::fs;
use std::io::ErrorKind as IoErrorKind;
use std::path::{Path, PathBuf};

pub use address::Address;
pub(super) use bind::no_driver;
pub use vfio::FormerDriver;

use super::bus::Bus;
use super::error::{Error, ErrorKind, existing};
use super::name::is_name;
use super::sysfs::{attribute, link_name, names, number};

/// More virtual functions than a physical one can have (NumVFs is a register of 16 bits).
const VIRTUAL_FUNCTIONS_MAX: usize = 1 << 16;

/// A PCI function, at the time of the query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    /// Its address.
    pub address: Address,
    /// Its driver, such as `mlx5_core`, `virtio-pci`, `vp-vdpa` or `vfio-pci`; none if unbound.
    pub driver: Option<String>,
    /// The driver override: the only driver that may bind to it, if set.
    pub driver_override: Option<String>,
    /// The physical function of a virtual one.
    pub physical_function: Option<Address>,
    /// The virtual functions of a physical one: number and address, by number.
    pub virtual_functions: Vec<(u32, Address)>,
    /// Maximum number of virtual functions; none without SR-IOV.
    pub total_vfs: Option<u32>,
    /// Its IOMMU group; none without an IOMMU.
    pub iommu_group: Option<u32>,
    /// The NUMA node next to it; none if unknown.
    pub numa_node: Option<u32>,
    /// Its network interfaces in this network namespace, by name, without the representors of its
    /// virtual functions and subfunctions.
    pub netdevs: Vec<String>,
    /// The vDPA devices on it, by name.
    pub vdpa_devices: Vec<String>,
}

impl Function {
    /// Fails for a virtual function.
    ///
    /// # Errors
    /// `NoSriov`, which names the physical function.
    pub fn check_physical(&self) -> Result<(), Error> {
        let Some(physical) = self.physical_function else {
            return Ok(());
        };
        let message = format!(
            "{} is a virtual function; name its physical function, pci/{physical}",
            self.address
        );
        Err(Error::new(ErrorKind::NoSriov, message))
    }

    /// Fails if it cannot have this many virtual functions.
    pub(super) fn check_count(&self, count: u32) -> Result<(), Error> {
        let total = self.total_vfs.ok_or_else(|| no_sriov(self.address))?;
        if count <= total {
            return Ok(());
        }
        let message = format!(
            "{} can have {total} virtual functions at most, not {count}",
            self.address
        );
        Err(Error::new(ErrorKind::Unusable, message))
    }
}

/// The function has no SR-IOV.
pub(super) fn no_sriov(address: Address) -> Error {
    let message = format!(
        "{address} cannot have virtual functions; `bellhop vf show` lists those that can (SR-IOV \
         may be disabled in the firmware)"
    );
    Error::new(ErrorKind::NoSriov, message)
}

/// The PCI bus.
#[derive(Debug, Clone)]
pub struct Pci {
    devices: PathBuf,
    drivers: PathBuf,
    groups: PathBuf,
    interfaces: PathBuf,
    vdpa_devices: PathBuf,
    /// The directory of VFIO's files: `/dev/vfio`.
    vfio: PathBuf,
    vdpa: Bus,
}

impl Default for Pci {
    fn default() -> Self {
        Self::at(Path::new("/sys"))
    }
}

impl Pci {
    /// The bus in the sysfs mounted at `sysfs`.
    #[must_use]
    pub fn at(sysfs: &Path) -> Self {
        Self {
            devices: sysfs.join("bus/pci/devices"),
            drivers: sysfs.join("bus/pci/drivers"),
            groups: sysfs.join("kernel/iommu_groups"),
            interfaces: sysfs.join("class/net"),
            vdpa_devices: sysfs.join("bus/vdpa/devices"),
            vfio: PathBuf::from("/dev/vfio"),
            vdpa: Bus::at(sysfs),
        }
    }

    /// The function at `address`.
    ///
    /// # Errors
    /// `NotFound` or `Failed`.
    pub fn function(&self, address: Address) -> Result<Function, Error> {
        let directory = self.directory(address);
        if !directory.is_dir() {
            return Err(no_function(address));
        }
        Ok(Function {
            address,
            driver: link_name(&directory.join("driver"))?,
            driver_override: attribute(&directory.join("driver_override"))?
                .filter(|text| text != "(null)"),
            physical_function: link_name(&directory.join("physfn"))?
                .and_then(|name| name.parse().ok()),
            virtual_functions: virtual_functions(&directory)?,
            total_vfs: number(&directory.join("sriov_totalvfs"))?,
            iommu_group: link_name(&directory.join("iommu_group"))?
                .and_then(|name| name.parse().ok()),
            // -1 if unknown.
            numa_node: number(&directory.join("numa_node"))?,
            netdevs: netdevs(&directory)?,
            vdpa_devices: self.vdpa_devices(&directory)?,
        })
    }

    /// All physical functions with SR-IOV, by address.
    ///
    /// # Errors
    /// `Failed`.
    pub fn physical_functions(&self) -> Result<Vec<Function>, Error> {
        let mut found = Vec::new();
        for name in names(&self.devices)? {
            let Ok(address) = name.parse() else { continue };
            if !self.directory(address).join("sriov_totalvfs").exists() {
                continue;
            }
            // `None` if it vanished meanwhile.
            found.extend(existing(self.function(address))?);
        }
        found.sort_by_key(|function: &Function| function.address);
        Ok(found)
    }

    /// The functions of an IOMMU group, by address. They can access each other's memory, so all of
    /// them belong to one user.
    ///
    /// # Errors
    /// `Failed`.
    pub fn group(&self, group: u32) -> Result<Vec<Address>, Error> {
        let directory = self.groups.join(group.to_string()).join("devices");
        let mut found: Vec<Address> = names(&directory)?
            .iter()
            .filter_map(|name| name.parse().ok())
            .collect();
        found.sort();
        Ok(found)
    }

    /// The function behind a network interface, if it is a PCI function.
    ///
    /// # Errors
    /// `NotFound` or `Failed`.
    pub fn behind(&self, netdev: &str) -> Result<Option<Address>, Error> {
        let interface = self.interfaces.join(netdev);
        if !is_name(netdev) || !interface.exists() {
            let message = format!(
                "there is no network interface {netdev} in this network namespace; `ip link` lists \
                 them"
            );
            return Err(Error::new(ErrorKind::NotFound, message));
        }
        let device = interface.join("device");
        let path = match fs::canonicalize(&device) {
            Err(error) if error.kind() == IoErrorKind::NotFound => return Ok(None),
            path => path.map_err(Error::read(&device))?,
        };
        // A virtio device may lie between the function and the interface.
        Ok(path
            .ancestors()
            .take(2)
            .filter_map(|path| path.file_name()?.to_str()?.parse().ok())
            .next())
    }

    /// The vendor id of the function.
    pub(super) fn vendor(&self, address: Address) -> Result<Option<u32>, Error> {
        let text = attribute(&self.directory(address).join("vendor"))?;
        Ok(text.and_then(|text| u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()))
    }

    pub(super) fn directory(&self, address: Address) -> PathBuf {
        self.devices.join(address.to_string())
    }

    /// Names of the vDPA devices whose parent is in this directory, sorted. The parent is the
    /// function, or a device that its driver created.
    fn vdpa_devices(&self, directory: &Path) -> Result<Vec<String>, Error> {
        let directory = fs::canonicalize(directory).map_err(Error::read(directory))?;
        let mut found: Vec<String> = names(&self.vdpa_devices)?
            .into_iter()
            .filter(|name| {
                fs::canonicalize(self.vdpa_devices.join(name))
                    .is_ok_and(|path| path.starts_with(&directory))
            })
            .collect();
        found.sort();
        Ok(found)
    }
}

/// Its virtual functions: links `virtfnN`.
fn virtual_functions(directory: &Path) -> Result<Vec<(u32, Address)>, Error> {
    let mut found = Vec::new();
    for name in names(directory)? {
        let Some(index) = name.strip_prefix("virtfn") else {
            continue;
        };
        let target = link_name(&directory.join(&name))?;
        let address = target.and_then(|target| target.parse().ok());
        if let (Ok(index), Some(address)) = (index.parse(), address)
            && found.len() < VIRTUAL_FUNCTIONS_MAX
        {
            found.push((index, address));
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// Its network interfaces: below the function, or below the virtio device on it.
fn netdevs(directory: &Path) -> Result<Vec<String>, Error> {
    let mut parents = vec![directory.to_owned()];
    let devices = names(directory)?;
    parents.extend(
        devices
            .iter()
            .filter(|name| name.starts_with("virtio"))
            .map(|name| directory.join(name)),
    );
    let mut found = Vec::new();
    for parent in parents {
        let interfaces = parent.join("net");
        found.extend(
            names(&interfaces)?
                .into_iter()
                .filter(|name| !represents(&interfaces.join(name))),
        );
    }
    found.sort();
    Ok(found)
}

/// Whether an interface represents a virtual function or a subfunction on the NIC's switch, by the
/// kernel's port names: `pf0vf1`, `c1pf0sf88`.
fn represents(interface: &Path) -> bool {
    // Most drivers have no such name, and return an error.
    let name = fs::read_to_string(interface.join("phys_port_name")).unwrap_or_default();
    name.contains("pf") && (name.contains("vf") || name.contains("sf"))
}

/// There is no such function.
pub(super) fn no_function(address: Address) -> Error {
    let message = format!(
        "there is no PCI function {address}; `bellhop vf show` lists those with SR-IOV, `lspci -D` \
         all"
    );
    Error::new(ErrorKind::NotFound, message)
}

#[cfg(test)]
pub(super) mod tests;

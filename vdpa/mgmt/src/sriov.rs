//! SR-IOV: the number of virtual functions of a physical function, and the NIC's settings for each.
//!
//! ```text
//!   Pci::set_virtual_functions ──> sriov_numvfs:  n ──(none in use)──> 0 ──> m
//!                                                                        └─fails──> n again
//!   Links ── RTM_GETLINK with RTEXT_FILTER_VF ──> Link, its VirtualFunctions
//!         ── RTM_SETLINK, one setting each ─────> the NIC's driver
//!                     └─fails──> those before it restored
//! ```
//!
//! The settings (address, VLAN, spoof check, trust, rates, link state) belong to the network
//! interface of the physical function. So they go through rtnetlink. The driver of a virtual
//! function does not matter here.
//!
//! ```no_run
//! use vdpa_mgmt::pci::Pci;
//! use vdpa_mgmt::sriov::{Links, Setting};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let pci = Pci::default();
//! let physical = pci.set_virtual_functions("0000:01:00.0".parse()?, 4)?;
//! let settings = [Setting::Mac([0x52, 0x54, 0, 0x12, 0x34, 0x56]), Setting::Trust(false)];
//! Links::open()?.set(&physical.netdevs[0], 0, &settings)?;
//! pci.bind(physical.virtual_functions[0].1, "vp-vdpa")?;
//! # Ok(())
//! # }
//! ```

mod decode;
mod links;
mod settings;

pub use links::Links;
pub use settings::{LinkState, Rates, Setting, VirtualFunction, Vlan, VlanProtocol};

use std::io;

use super::error::{Error, ErrorKind};
use super::pci::{Address, Function, Pci, no_sriov};
use super::sysfs;

/// A network interface, with its NIC's settings for virtual functions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Its index in this network namespace.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Their settings, by number. Empty if the driver does not report them.
    pub virtual_functions: Vec<VirtualFunction>,
}

impl Pci {
    /// Checks whether [`Pci::set_virtual_functions`] can change the number. Returns the function;
    /// nothing is changed.
    ///
    /// # Errors
    /// `InUse` with the holders; `NoSriov`, `Unusable`; or as [`Pci::function`].
    pub fn check_virtual_functions(&self, address: Address, count: u32) -> Result<Function, Error> {
        let function = self.function(address)?;
        function.check_physical()?;
        function.check_count(count)?;
        if count != self.count(address)? {
            self.check_virtual_functions_unused(&function)?;
        }
        Ok(function)
    }

    /// Sets the number of virtual functions of the physical function at `address`, and returns its
    /// new state. The kernel changes the number only to and from zero. All of them are deleted
    /// first, so none may be in use.
    ///
    /// # Errors
    /// `InUse` with the holders; `NoSriov`, `Unusable`, `NotPermitted`; `Refused` after an attempt
    /// to restore the former number; or as [`Pci::function`].
    pub fn set_virtual_functions(&self, address: Address, count: u32) -> Result<Function, Error> {
        let function = self.check_virtual_functions(address, count)?;
        let now = self.count(address)?;
        if count == now {
            return Ok(function);
        }
        if now != 0 {
            self.write_count(address, 0)
                .map_err(|source| self.count_error(address, count, source))?;
        }
        if count != 0
            && let Err(source) = self.write_count(address, count)
        {
            if now != 0
                && let Err(error) = self.write_count(address, now)
            {
                tracing::warn!(%address, now, %error, "cannot restore the former virtual \
                                                       functions");
            }
            return Err(self.count_error(address, count, source));
        }
        self.function(address)
    }

    /// Creates virtual functions on a physical function without any. The kernel refuses if it has
    /// some, so none is deleted.
    ///
    /// # Errors
    /// `NotPermitted`, `Refused`, or as [`Pci::function`].
    pub(super) fn count_from_zero(&self, address: Address, count: u32) -> Result<Function, Error> {
        self.write_count(address, count)
            .map_err(|source| self.count_error(address, count, source))?;
        self.function(address)
    }

    /// Its current number of virtual functions.
    fn count(&self, address: Address) -> Result<u32, Error> {
        let path = self.directory(address).join("sriov_numvfs");
        sysfs::number(&path)?.ok_or_else(|| no_sriov(address))
    }

    fn write_count(&self, address: Address, count: u32) -> io::Result<()> {
        let path = self.directory(address).join("sriov_numvfs");
        sysfs::write(&path, &count.to_string())
    }

    fn count_error(&self, function: Address, count: u32, source: io::Error) -> Error {
        let now = self.count(function).unwrap_or_default();
        let message = |source: &io::Error| {
            let remedy = remedy(source);
            format!("cannot give {function} {count} virtual functions; it now has {now}{remedy}")
        };
        Error::write(&function.to_string(), source, ErrorKind::Refused, message)
    }
}

/// The meaning of an errno of `sriov_numvfs` (drivers/pci/pci-sysfs.c, drivers/pci/iov.c).
fn remedy(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::ENOENT) => {
            ": it has no driver, or one without SR-IOV; bind it to its NIC driver first"
        }
        Some(libc::EBUSY) => {
            ": its driver is not ready or has them in use; try again when its link is up"
        }
        Some(libc::ENOMEM) => {
            ": the firmware of this machine left too few bus numbers or too little address space \
             (try `pci=realloc`)"
        }
        _ => "",
    }
}

/// For the fuzz target.
#[cfg(any(test, feature = "fuzz"))]
pub(super) fn decode_anything(message: &super::netlink::message::Message) {
    let _ = Link::of(message);
}

#[cfg(test)]
mod tests;

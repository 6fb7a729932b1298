//! Finds the source of a NIC by the user's name for it.

use super::error::NicError;
use super::nics::Nics;
use super::request::Kind;
use super::software::SOFTWARE;
use crate::MgmtDeviceName;
use crate::devlink::{Devlink, EswitchMode, Handle};
use crate::error::{Error, ErrorKind, existing};
use crate::link::Links;
use crate::pci::{Address, Function};

/// The source of a NIC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// A management device that creates devices by itself.
    MgmtDevice(MgmtDeviceName),
    /// A PCI physical function. It may have a devlink instance, too.
    Physical(Box<Function>),
    /// A NIC that is known by its devlink instance only.
    Instance(Handle),
    /// No hardware: a process of this host.
    Software,
}

/// The function to create, and its source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Plan {
    MgmtDevice(MgmtDeviceName),
    VirtualFunction(Box<Function>),
    Subfunction { handle: Handle, pfnum: u16 },
    Software,
}

impl Nics {
    /// Finds the object for a text: `pci/0000:01:00.0` or that address alone, a network interface,
    /// a management device, a devlink instance such as `pci/0000:01:00.0`, or `software`.
    ///
    /// A physical function with SR-IOV counts as such, even if it is a management device as well. A
    /// virtual function is found only if it is a management device.
    ///
    /// # Errors
    /// [`NicError::NoOrigin`], [`NicError::NotPci`], or the kernel's error.
    pub fn find(&self, text: &str) -> Result<Origin, NicError> {
        if text == SOFTWARE {
            return Ok(Origin::Software);
        }
        if let Ok(address) = text.parse::<Address>() {
            return self.physical(address);
        }
        if let Some(mgmtdev) = self.mgmt_device(text)? {
            return Ok(Origin::MgmtDevice(mgmtdev));
        }
        if let Ok(handle) = text.parse::<Handle>() {
            return if has_instance(&handle)? {
                Ok(Origin::Instance(handle))
            } else {
                Err(NicError::NoOrigin(text.to_owned()))
            };
        }
        let Some(behind) = existing(self.pci.behind(text))? else {
            return Err(NicError::NoOrigin(text.to_owned()));
        };
        if let Some(address) = behind {
            return self.physical(address);
        }
        let parent = Links::open()?.link(text)?.parent;
        let handle = parent.and_then(|(bus, device)| Handle::new(&bus, &device).ok());
        match handle {
            Some(handle) if has_instance(&handle)? => Ok(Origin::Instance(handle)),
            _ => Err(NicError::NotPci(text.to_owned())),
        }
    }

    fn physical(&self, address: Address) -> Result<Origin, NicError> {
        let function = self.pci.function(address)?;
        if function.total_vfs.is_none()
            && let Some(mgmtdev) = self.mgmt_device(&format!("pci/{address}"))?
        {
            return Ok(Origin::MgmtDevice(mgmtdev));
        }
        function.check_physical()?;
        Ok(Origin::Physical(Box::new(function)))
    }

    /// Selects the function of a source for a NIC.
    pub(super) fn plan(&self, origin: Origin, text: &str, kind: Kind) -> Result<Plan, NicError> {
        let none = |what| Err(NicError::NoSuchKind(text.to_owned(), what));
        match (origin, kind) {
            (Origin::MgmtDevice(mgmtdev), Kind::Auto) => Ok(Plan::MgmtDevice(mgmtdev)),
            (Origin::Software, Kind::Auto) => Ok(Plan::Software),
            (
                Origin::MgmtDevice(_) | Origin::Instance(_) | Origin::Software,
                Kind::VirtualFunction,
            ) => none("virtual functions"),
            (Origin::MgmtDevice(_) | Origin::Software, Kind::Subfunction) => none("subfunctions"),
            (Origin::Instance(handle), Kind::Auto | Kind::Subfunction) => {
                Ok(Plan::Subfunction { handle, pfnum: 0 })
            }
            (Origin::Physical(function), kind) => {
                let handle = instance_of(function.address);
                let subfunction = match kind {
                    Kind::Auto => match &handle {
                        Some(handle) => is_switchdev(handle)?,
                        None => false,
                    },
                    Kind::VirtualFunction => false,
                    Kind::Subfunction => true,
                };
                match handle {
                    Some(handle) if subfunction => Ok(Plan::Subfunction {
                        handle,
                        pfnum: u16::from(function.address.function()),
                    }),
                    _ if subfunction => none("subfunctions"),
                    _ => Ok(Plan::VirtualFunction(function)),
                }
            }
        }
    }

    /// The management device of that name, if there is one.
    fn mgmt_device(&self, text: &str) -> Result<Option<MgmtDeviceName>, NicError> {
        let Ok(name) = text.parse() else {
            return Ok(None);
        };
        Ok(self.has_mgmt_device(&name)?.then_some(name))
    }
}

/// The kernel's devlink, if it has one.
fn devlink() -> Result<Option<Devlink>, Error> {
    match Devlink::open() {
        Err(error) if error.kind() == ErrorKind::NoDevlink => Ok(None),
        devlink => devlink.map(Some),
    }
}

/// Whether this network namespace has such a devlink instance.
fn has_instance(handle: &Handle) -> Result<bool, Error> {
    let Some(devlink) = devlink()? else {
        return Ok(false);
    };
    Ok(existing(devlink.instance(handle))?.is_some())
}

/// The name of a function's devlink instance.
fn instance_of(address: Address) -> Option<Handle> {
    Handle::new("pci", &address.to_string()).ok()
}

/// Whether a NIC's switch has representors. A NIC without devlink or such a switch has none.
pub(super) fn is_switchdev(handle: &Handle) -> Result<bool, Error> {
    let Some(devlink) = devlink()? else {
        return Ok(false);
    };
    match devlink.eswitch(handle) {
        Ok(eswitch) => Ok(eswitch.mode == Some(EswitchMode::Switchdev)),
        Err(error) => match error.kind() {
            ErrorKind::NotFound | ErrorKind::NotSupported => Ok(false),
            _ => Err(error),
        },
    }
}

/// Whether a function's NIC has representors.
pub(super) fn has_representors(address: Address) -> Result<bool, Error> {
    instance_of(address).map_or(Ok(false), |handle| is_switchdev(&handle))
}

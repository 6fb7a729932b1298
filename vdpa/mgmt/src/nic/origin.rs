//! What a NIC is made of, found by what a user calls it.

use super::error::NicError;
use super::nics::Nics;
use super::request::Kind;
use crate::MgmtDeviceName;
use crate::devlink::{Devlink, EswitchMode, Handle};
use crate::error::{Error, ErrorKind, existing};
use crate::link::Links;
use crate::pci::{Address, Function};

/// What a NIC is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// A management device, which makes devices itself.
    MgmtDevice(MgmtDeviceName),
    /// A physical function of the PCI bus. It may have a devlink instance, too.
    Physical(Box<Function>),
    /// A NIC that is known by its devlink instance only.
    Instance(Handle),
}

/// What is to be made on what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Plan {
    MgmtDevice(MgmtDeviceName),
    VirtualFunction(Box<Function>),
    Subfunction { handle: Handle, pfnum: u16 },
}

impl Nics {
    /// Finds what a text names: `pci/0000:01:00.0` or that address alone, a network interface, a management
    /// device, or a devlink instance such as `pci/0000:01:00.0`.
    ///
    /// A physical function that can have virtual ones is taken for that, even if it is a management
    /// device as well; a virtual function only if it is one.
    ///
    /// # Errors
    /// [`NicError::NoOrigin`], [`NicError::NotPci`], or what the kernel says.
    pub fn find(&self, text: &str) -> Result<Origin, NicError> {
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

    /// What of an origin a NIC is to be made on.
    pub(super) fn plan(&self, origin: Origin, text: &str, kind: Kind) -> Result<Plan, NicError> {
        let none = |what| Err(NicError::NoSuchKind(text.to_owned(), what));
        match (origin, kind) {
            (Origin::MgmtDevice(mgmtdev), Kind::Auto) => Ok(Plan::MgmtDevice(mgmtdev)),
            (Origin::MgmtDevice(_) | Origin::Instance(_), Kind::VirtualFunction) => {
                none("virtual functions")
            }
            (Origin::MgmtDevice(_), Kind::Subfunction) => none("subfunctions"),
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

/// Whether there is such a devlink instance here.
fn has_instance(handle: &Handle) -> Result<bool, Error> {
    let Some(devlink) = devlink()? else {
        return Ok(false);
    };
    Ok(existing(devlink.instance(handle))?.is_some())
}

/// What a function's devlink instance is called.
fn instance_of(address: Address) -> Option<Handle> {
    Handle::new("pci", &address.to_string()).ok()
}

/// Whether a NIC's switch has representors. What has no devlink, or no such switch, has not.
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

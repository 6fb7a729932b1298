//! What a NIC is made of, found by what a user calls it.

use super::{NicError, Nics};
use crate::mgmt::pci::{Address, Function, PciError};
use crate::mgmt::{MgmtDeviceName, MgmtError};

/// What a NIC is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// A management device, which makes devices itself.
    MgmtDevice(MgmtDeviceName),
    /// A physical function.
    Physical(Box<Function>),
}

impl Nics {
    /// Finds what a text names: `pci/0000:01:00.0` or that address alone, a network interface, or a
    /// management device.
    ///
    /// A physical function that can have virtual ones is taken for that, even if it is a management
    /// device as well; a virtual function only if it is one.
    ///
    /// # Errors
    /// [`NicError::NoOrigin`], [`NicError::NotPci`], or what the kernel says.
    pub fn find(&self, text: &str) -> Result<Origin, NicError> {
        let Ok(address) = text.parse::<Address>() else {
            if let Some(mgmtdev) = self.mgmt_device(text)? {
                return Ok(Origin::MgmtDevice(mgmtdev));
            }
            return match self.pci.behind(text) {
                Ok(Some(address)) => self.physical(address),
                Ok(None) => Err(NicError::NotPci(text.to_owned())),
                Err(PciError::NoInterface(_)) => Err(NicError::NoOrigin(text.to_owned())),
                Err(error) => Err(error.into()),
            };
        };
        self.physical(address)
    }

    fn physical(&self, address: Address) -> Result<Origin, NicError> {
        let function = self.pci.function(address)?;
        if function.total_vfs.is_none()
            && let Some(mgmtdev) = self.mgmt_device(&format!("pci/{address}"))?
        {
            return Ok(Origin::MgmtDevice(mgmtdev));
        }
        if let Some(physical) = function.physical_function {
            return Err(PciError::Virtual {
                function: address,
                physical,
            }
            .into());
        }
        if function.total_vfs.is_none() {
            return Err(PciError::NoSriov(address).into());
        }
        Ok(Origin::Physical(Box::new(function)))
    }

    /// The management device of that name, if there is one.
    fn mgmt_device(&self, text: &str) -> Result<Option<MgmtDeviceName>, NicError> {
        let Ok(name) = text.parse() else {
            return Ok(None);
        };
        match self.connection.mgmt_device(&name) {
            Ok(_) => Ok(Some(name)),
            Err(MgmtError::NoMgmtDevice { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

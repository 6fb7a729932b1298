//! What a NIC is to be like.

use crate::connectivity::Connectivity;
use crate::sriov::Rates;
use crate::{Error, MgmtDeviceName, NewDevice};

/// What a vDPA device is made on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Kind {
    /// What the origin has: a management device as it is; of a NIC in switchdev mode a subfunction, of another one a
    /// virtual function.
    #[default]
    Auto,
    /// A virtual function of a NIC (SR-IOV).
    VirtualFunction,
    /// A subfunction of a NIC that is in switchdev mode.
    Subfunction,
}

/// A NIC to be made. What is `None` is as the hardware or the kernel chooses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicRequest {
    /// Its name, which becomes the vDPA device's.
    pub name: String,
    /// What it is made of: a physical function by its address (`pci/0000:01:00.0`) or by its network
    /// interface, a NIC by its devlink handle, or a management device that makes devices itself
    /// (`vdpasim_net`).
    pub from: String,
    /// Whom it is made for: goes into its record, for that one to know it by. Up to 256 bytes.
    pub owner: Option<String>,
    /// What the device is made on.
    pub kind: Kind,
    /// Its address.
    pub mac: Option<[u8; 6]>,
    /// Its MTU, in bytes.
    pub mtu: Option<u16>,
    /// Its queue pairs.
    pub max_vqp: Option<u16>,
    /// Its virtio feature bits.
    pub device_features: Option<u64>,
    /// What it is connected with.
    pub connectivity: Option<Connectivity>,
    /// Limits of what it sends.
    pub rates: Option<Rates>,
    /// How many virtual functions the NIC gets if it has none; as many as it can have, but at most
    /// eight, if this is `None`.
    pub virtual_functions: Option<u32>,
}

impl NicRequest {
    /// A NIC with everything as the hardware or the kernel chooses.
    #[must_use]
    pub fn new(name: impl Into<String>, from: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            from: from.into(),
            owner: None,
            kind: Kind::Auto,
            mac: None,
            mtu: None,
            max_vqp: None,
            device_features: None,
            connectivity: None,
            rates: None,
            virtual_functions: None,
        }
    }

    /// The vDPA device that is to be added.
    ///
    /// # Errors
    /// `Invalid` for values that no device can have.
    pub fn device(&self, mgmtdev: MgmtDeviceName) -> Result<NewDevice, Error> {
        let device = NewDevice::new(&self.name, mgmtdev)?.mac(self.mac)?;
        let device = device.mtu(self.mtu)?.max_vqp(self.max_vqp)?;
        Ok(device.device_features(self.device_features))
    }
}

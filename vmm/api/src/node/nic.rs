//! A NIC of a VM, as clients describe it.

use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::DeviceId;
use crate::config::{
    DoorbellMode, FeatureMask, KeyValueError, MacAddress, from_key_value_but, schema,
};

/// The name of a NIC.
pub type NicId = DeviceId;

described! {
    /// Which kind of function backs the vDPA device.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    pub enum NicKind {
        /// Automatic: the named management device; in switchdev mode a subfunction; else a virtual
        /// function.
        #[default]
        #[serde(alias = "Auto")]
        Auto,
        /// A virtual function.
        #[serde(alias = "Vf", alias = "VF")]
        Vf,
        /// A subfunction.
        #[serde(alias = "Sf", alias = "SF")]
        Sf,
    }
}

/// Defines a NIC: its own fields, those of all NICs that are created from a NIC of the host, then
/// the rest of its own. With serde's `flatten` an error would name neither the path of a wrong
/// field nor the known fields.
macro_rules! created_nic {
    ($(#[$meta:meta])* $name:ident { $($own:tt)* } { $($more:tt)* }) => {
        $(#[$meta])*
        #[serde(deny_unknown_fields)]
        pub struct $name {
            $($own)*
            /// The kind of function that backs the vDPA device.
            #[serde(default, skip_serializing_if = "is_default")]
            pub kind: NicKind,
            /// The bridge to connect it to.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub bridge: Option<String>,
            /// Its VLAN; the guest sees no tags.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            #[schema(minimum = 1, maximum = 4094)]
            pub vlan: Option<u16>,
            /// With `from` `software`: the network interface of which it gets a queue, instead of
            /// a bridge.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub port: Option<String>,
            /// The queue of the port, from 0.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            pub queue: Option<u16>,
            /// Its MAC address.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            #[schema(value_type = Option<String>)]
            #[schema(pattern = "^[0-9A-Fa-f][02468ACEace](:[0-9A-Fa-f]{2}){5}$")]
            pub mac: Option<MacAddress>,
            /// Its MTU, in bytes.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            #[schema(minimum = 68)]
            pub mtu: Option<u16>,
            /// Its queue pairs.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            #[schema(minimum = 1, maximum = 32768)]
            pub queue_pairs: Option<u16>,
            /// With `from` `software`: the share of a processor that each queue pair may spend on
            /// polling, in percent. By default it does not poll.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            #[schema(minimum = 1, maximum = 100)]
            pub poll: Option<u8>,
            /// The virtio features that it may offer, as a mask; by default all that it has. A
            /// running guest can move to another device that has those of this mask.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            #[schema(value_type = Option<u64>)]
            pub device_features: Option<FeatureMask>,
            /// Its maximum transmit rate, in Mbit/s.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            #[schema(minimum = 1)]
            pub max_tx_rate: Option<u32>,
            /// Its guaranteed transmit rate, in Mbit/s.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            #[schema(minimum = 1)]
            pub min_tx_rate: Option<u32>,
            /// The number of virtual functions to create if the host's NIC has none.
            #[serde(default, skip_serializing_if = "Option::is_none")]
            #[schema(minimum = 1)]
            pub virtual_functions: Option<u32>,
            $($more)*
        }
    };
}

created_nic! {
    /// A NIC of a virtual machine: created from a NIC of the host (`from`), or an existing vDPA
    /// device (`path` or `device`).
    #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
    NicSettings {
        /// Its name in this machine.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(required, value_type = String, pattern = "^[A-Za-z0-9._:-]{1,64}$")]
        pub id: Option<NicId>,
        /// The source of a created device: a network interface, `pci/ADDRESS`, a devlink handle, a
        /// management device such as `vdpasim_net`, or `software` for one without hardware. The
        /// device is deleted with the machine.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub from: Option<String>,
        /// An existing vhost-vdpa character device.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(value_type = Option<String>)]
        pub path: Option<PathBuf>,
        /// An existing vDPA device, by its name.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub device: Option<String>,
    } {
        /// Whether the guest may change neither its MAC address nor the device's filters.
        #[serde(default, skip_serializing_if = "is_default")]
        pub mac_lock: bool,
        /// Whether the NIC is the standby of a failover pair (VIRTIO_NET_F_STANDBY). While the
        /// guest has another device with the same MAC address, the primary, it sends through that.
        #[serde(default, skip_serializing_if = "is_default")]
        pub standby: bool,
        /// Whether the guest kicks by stores to the device's own doorbell pages.
        #[serde(default, skip_serializing_if = "is_default")]
        #[schema(schema_with = schema::doorbell)]
        pub doorbell: DoorbellMode,
        /// Whether the guest's IOMMU decides which memory the device reaches.
        #[serde(default, skip_serializing_if = "is_default")]
        pub iommu: bool,
        /// When a queue is stuck, kick the device and interrupt the driver once.
        #[serde(default, alias = "rescue", skip_serializing_if = "is_default")]
        pub stall_kick: bool,
        /// Its backup device.
        #[serde(default, alias = "failover", skip_serializing_if = "Option::is_none")]
        pub backup: Option<NicBackup>,
    }
}

created_nic! {
    /// A NIC to create on the host: a vDPA device with its function and connection.
    #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
    HostNicSpec {
        /// Its name, and that of the vDPA device.
        #[schema(value_type = String, pattern = "^[A-Za-z0-9._:-]{1,63}$")]
        pub name: NicId,
        /// The source of the device: a network interface, `pci/ADDRESS`, a devlink handle, a
        /// management device such as `vdpasim_net`, or `software` for one without hardware.
        pub from: String,
    } {}
}

impl HostNicSpec {
    /// The same settings as those of a virtual machine's NIC.
    #[must_use]
    pub fn settings(&self) -> NicSettings {
        NicSettings {
            id: Some(self.name.clone()),
            from: Some(self.from.clone()),
            kind: self.kind,
            bridge: self.bridge.clone(),
            vlan: self.vlan,
            port: self.port.clone(),
            queue: self.queue,
            mac: self.mac,
            mtu: self.mtu,
            queue_pairs: self.queue_pairs,
            poll: self.poll,
            device_features: self.device_features,
            max_tx_rate: self.max_tx_rate,
            min_tx_rate: self.min_tx_rate,
            virtual_functions: self.virtual_functions,
            ..NicSettings::default()
        }
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// The backup of a NIC's vDPA device: one of `from`, `path` and `device`.
///
/// The NIC moves to it once, when its own device reports DEVICE_NEEDS_RESET or devlink reports an
/// error. The guest's driver continues.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NicBackup {
    /// The source of a created device, which is created and deleted with the NIC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// An existing vhost-vdpa character device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub path: Option<PathBuf>,
    /// An existing vDPA device, by its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
}

impl NicBackup {
    /// A NIC that is created from this source.
    #[must_use]
    pub fn created_from(from: &str) -> Self {
        Self {
            from: Some(from.to_owned()),
            ..Self::default()
        }
    }
}

impl From<String> for NicBackup {
    /// Parses an option: a path is an existing device, any other text is the source of a created
    /// one.
    fn from(text: String) -> Self {
        if text.starts_with('/') {
            Self {
                path: Some(text.into()),
                ..Self::default()
            }
        } else {
            Self::created_from(&text)
        }
    }
}

/// Why an option does not describe a NIC.
#[derive(Debug, thiserror::Error)]
pub enum NicSettingsError {
    /// A key or a value is invalid.
    #[error(transparent)]
    KeyValue(#[from] KeyValueError),
    /// Not exactly one of the three sources is given.
    #[error("give one of from=NIC, path=/dev/vhost-vdpa-N and device=NAME")]
    Source,
}

impl FromStr for NicSettings {
    type Err = NicSettingsError;

    fn from_str(text: &str) -> Result<Self, NicSettingsError> {
        let (mut nic, backup): (Self, _) = from_key_value_but(text, &["backup", "failover"])?;
        nic.backup = backup.map(NicBackup::from);
        let given = [nic.from.is_some(), nic.path.is_some(), nic.device.is_some()];
        match given.into_iter().filter(|given| *given).count() {
            1 => Ok(nic),
            _ => Err(NicSettingsError::Source),
        }
    }
}

/// The new vDPA device of a NIC: `path` or `device`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NicMove {
    /// An existing vhost-vdpa character device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub path: Option<PathBuf>,
    /// An existing vDPA device, by its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
}

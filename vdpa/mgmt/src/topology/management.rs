//! The answers of the kernel's vDPA management, for the tree.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use serde::Serialize;

use super::directory::{Identity, identity};
use crate::bus::Bus;
use crate::config::{ClassConfig, DeviceConfig, NetConfig};
use crate::connection::Connection;
use crate::device::{MgmtDevice, VdpaDevice};
use crate::error::{Error, ErrorKind};

/// Maximum time to wait for an answer. A user who inspects the tree may be searching for the
/// process that blocks the management.
const PATIENCE: Duration = Duration::from_secs(5);

/// The devices of the vdpa bus.
const BUS: &str = "/sys/bus/vdpa/devices";

/// Whether the kernel's vDPA management answered.
///
/// * `known`: it did
/// * `absent`: this kernel has none, or its module is not loaded
/// * `other_namespace`: it is in the initial network namespace only
/// * `blocked`: it did not answer, because another request holds its lock
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum ManagementState {
    /// It did.
    Known,
    /// This kernel has none, or its module is not loaded.
    Absent,
    /// It is in the initial network namespace only.
    OtherNamespace,
    /// It did not answer: something holds its lock, mostly a `dev del` of a device that is open.
    /// That device is off the bus already, so the tree does not have it. This process cannot end
    /// before the lock is free: the request sleeps in the kernel, where no signal reaches it.
    Blocked,
}

/// The answers of the kernel's vDPA management of a machine.
#[derive(Debug, Clone)]
pub struct Management {
    pub(super) state: ManagementState,
    pub(super) mgmt_devices: Vec<MgmtDevice>,
    pub(super) devices: HashMap<String, VdpaDevice>,
    pub(super) net: HashMap<String, NetConfig>,
    /// Devices of the bus that it does not know, each with the identity that distinguishes it from
    /// a later one of the same name. Other devices missing from its answer appeared later. `None`
    /// without an answer: then there is nothing to compare with.
    pub(super) unmanaged: Option<HashMap<String, Identity>>,
}

impl Management {
    /// Queries the management.
    ///
    /// # Errors
    /// [`Error`].
    pub fn ask(connection: &Connection) -> Result<Self, Error> {
        // Before the list, so that a device missing from the list is unmanaged, and not new.
        let on_bus = match Bus::default().names() {
            Ok(names) => names,
            Err(error) if error.kind() == ErrorKind::NoVdpa => Vec::new(),
            Err(error) => {
                tracing::debug!(%error, "cannot compare the vdpa bus with the kernel's management");
                Vec::new()
            }
        };
        let directory = Path::new(BUS);
        let on_bus = on_bus
            .into_iter()
            .filter_map(|name| Some((identity(&directory.join(&name))?, name)))
            .map(|(identity, name)| (name, identity))
            .collect();
        let mgmt_devices = connection.mgmt_devices()?;
        let devices = connection.devices()?;
        let configs = connection.configs()?;
        Ok(Self::new(mgmt_devices, devices, configs, on_bus))
    }

    /// Queries the kernel of this machine. A missing answer is no error, but a [`ManagementState`].
    ///
    /// # Errors
    /// [`Error`] for any other failure.
    pub fn of_this_machine() -> Result<Self, Error> {
        let asked =
            Connection::with_patience(PATIENCE).and_then(|connection| Self::ask(&connection));
        asked.or_else(|error| {
            Ok(Self::silent(match error.kind() {
                ErrorKind::NoVdpa => ManagementState::Absent,
                ErrorKind::OtherNamespace => ManagementState::OtherNamespace,
                ErrorKind::NoAnswer { .. } => ManagementState::Blocked,
                _ => return Err(error),
            }))
        })
    }

    /// A machine without an answer of its vDPA management, for this reason.
    #[must_use]
    pub fn silent(state: ManagementState) -> Self {
        Self {
            state,
            mgmt_devices: Vec::new(),
            devices: HashMap::new(),
            net: HashMap::new(),
            unmanaged: None,
        }
    }

    /// Stores the answers; `on_bus` are the devices that were on the bus before.
    pub(super) fn new(
        mgmt_devices: Vec<MgmtDevice>,
        devices: Vec<VdpaDevice>,
        configs: Vec<DeviceConfig>,
        mut on_bus: HashMap<String, Identity>,
    ) -> Self {
        let devices: HashMap<String, VdpaDevice> = devices
            .into_iter()
            .map(|device| (device.name.clone(), device))
            .collect();
        on_bus.retain(|name, _| !devices.contains_key(name));
        let net = configs.into_iter().filter_map(|config| match config.class {
            ClassConfig::Net(net) => Some((config.name, net)),
            _ => None,
        });
        Self {
            state: ManagementState::Known,
            mgmt_devices,
            net: net.collect(),
            unmanaged: Some(on_bus),
            devices,
        }
    }
}

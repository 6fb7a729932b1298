//! What the kernel's vDPA management says, as the tree needs it.

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

/// How long an answer is waited for. Who looks at the tree may well look for the one that keeps the
/// management waiting.
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
    /// It did not answer: something holds its lock, mostly a `dev del` of a device that is open. That device is
    /// off the bus already, so the tree does not have it. This process cannot end before the lock is free: the
    /// request sleeps in the kernel, where no signal reaches it.
    Blocked,
}

/// What the kernel's vDPA management said of a machine.
#[derive(Debug, Clone)]
pub struct Management {
    pub(super) state: ManagementState,
    pub(super) mgmt_devices: Vec<MgmtDevice>,
    pub(super) devices: HashMap<String, VdpaDevice>,
    pub(super) net: HashMap<String, NetConfig>,
    /// Devices of the bus that it does not know, with what tells each from a later one of the same
    /// name. All the others that it did not name came later. None if it said nothing: then there is
    /// nothing to compare with.
    pub(super) unmanaged: Option<HashMap<String, Identity>>,
}

impl Management {
    /// Asks.
    ///
    /// # Errors
    /// [`Error`].
    pub fn ask(connection: &Connection) -> Result<Self, Error> {
        // Before the list, so that what the list lacks is unmanaged, and not new.
        let on_bus = match Bus::default().names() {
            Ok(names) => names,
            Err(error) if error.kind() == ErrorKind::NoVdpa => Vec::new(),
            Err(error) => {
                tracing::debug!(%error, "the vdpa bus cannot be compared with its management");
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

    /// Asks the kernel of this machine. One that cannot answer is no error, but a
    /// [`ManagementState`].
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

    /// A machine of whose vDPA management nothing is known, but why.
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

    /// What was answered; `on_bus` is what was on the bus before.
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

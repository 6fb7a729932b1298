//! Instances: a NIC's function or a subfunction, with its driver's description.

use super::connection::Devlink;
use super::handle::{Handle, NestedDevlink};
use super::operation::Operation;
use super::reload::{ReloadStat, reload_stats};
use super::uapi::*;
use crate::error::Error;
use crate::netlink::attributes::Attributes;
use crate::netlink::error::Malformed;
use crate::netlink::message::Message;

/// A devlink instance (`DEVLINK_CMD_GET`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instance {
    /// Its name.
    pub handle: Handle,
    /// Whether its last reload failed, which leaves it without ports and most other objects.
    pub reload_failed: bool,
    /// Number of its reloads from this host.
    pub reloads: Vec<ReloadStat>,
    /// Number of its reloads from another host that shares the NIC.
    pub remote_reloads: Vec<ReloadStat>,
    /// Instances that belong to it.
    pub nested: Vec<NestedDevlink>,
}

impl Instance {
    pub(super) fn of(message: &Message) -> Result<Self, Malformed> {
        let attributes = Attributes::parse(&message.attributes)?;
        let stats = attributes.nested(DEVLINK_ATTR_DEV_STATS)?;
        let of = |kind| match &stats {
            Some(stats) => reload_stats(stats, kind),
            None => Ok(Vec::new()),
        };
        let nested = attributes.each(DEVLINK_ATTR_NESTED_DEVLINK);
        let nested = nested.map(|value| NestedDevlink::of(&Attributes::parse(value)?));
        Ok(Self {
            handle: Handle::of(&attributes)?,
            reload_failed: attributes.flag(DEVLINK_ATTR_RELOAD_FAILED)? == Some(true),
            reloads: of(DEVLINK_ATTR_RELOAD_STATS)?,
            remote_reloads: of(DEVLINK_ATTR_REMOTE_RELOAD_STATS)?,
            nested: nested.collect::<Result<_, _>>()?,
        })
    }
}

/// A driver's description of its device (`DEVLINK_CMD_INFO_GET`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Info {
    /// The instance.
    pub handle: Handle,
    /// The driver.
    pub driver: Option<String>,
    /// The device's serial number.
    pub serial_number: Option<String>,
    /// The board's serial number.
    pub board_serial_number: Option<String>,
    /// Fixed properties: `board.id`, `asic.rev`, …: name and value, in the driver's order.
    pub fixed: Vec<(String, String)>,
    /// Running versions: `fw`, `fw.mgmt`, ….
    pub running: Vec<(String, String)>,
    /// Versions on flash, which run after the next activation.
    pub stored: Vec<(String, String)>,
}

impl Info {
    pub(super) fn of(message: &Message) -> Result<Self, Malformed> {
        let attributes = Attributes::parse(&message.attributes)?;
        let versions = |wanted| {
            let mut found = Vec::new();
            for value in attributes.each(wanted) {
                let version = Attributes::parse(value)?;
                found.push((
                    version.needed_string(DEVLINK_ATTR_INFO_VERSION_NAME)?,
                    version
                        .string(DEVLINK_ATTR_INFO_VERSION_VALUE)
                        .unwrap_or_default(),
                ));
            }
            Ok(found)
        };
        Ok(Self {
            handle: Handle::of(&attributes)?,
            driver: attributes.string(DEVLINK_ATTR_INFO_DRIVER_NAME),
            serial_number: attributes.string(DEVLINK_ATTR_INFO_SERIAL_NUMBER),
            board_serial_number: attributes.string(DEVLINK_ATTR_INFO_BOARD_SERIAL_NUMBER),
            fixed: versions(DEVLINK_ATTR_INFO_VERSION_FIXED)?,
            running: versions(DEVLINK_ATTR_INFO_VERSION_RUNNING)?,
            stored: versions(DEVLINK_ATTR_INFO_VERSION_STORED)?,
        })
    }
}

/// The command of a request, and that of its answers.
const GET: (u8, u8) = (DEVLINK_CMD_GET, DEVLINK_CMD_NEW);
const INFO: (u8, u8) = (DEVLINK_CMD_INFO_GET, DEVLINK_CMD_INFO_GET);

impl Devlink {
    /// All instances of this network namespace, in the kernel's order.
    ///
    /// # Errors
    /// [`Error`].
    pub fn instances(&self) -> Result<Vec<Instance>, Error> {
        let operation = Operation::List("instances");
        self.family.dump(&operation, GET, Vec::new(), Instance::of)
    }

    /// One instance.
    ///
    /// # Errors
    /// `NotFound`, or another one.
    pub fn instance(&self, handle: &Handle) -> Result<Instance, Error> {
        let operation = Operation::Show {
            what: "instance",
            handle,
        };
        self.family
            .get(&operation, GET, handle.attributes(), Instance::of)
    }

    /// The driver's description of an instance.
    ///
    /// # Errors
    /// `NotFound`, or another one.
    pub fn info(&self, handle: &Handle) -> Result<Info, Error> {
        let operation = Operation::Show {
            what: "information",
            handle,
        };
        self.family
            .get(&operation, INFO, handle.attributes(), Info::of)
    }
}

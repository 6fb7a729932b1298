//! Health reporters: parts of a driver that watch a part of the device, and mend it.

use super::connection::Devlink;
use super::handle::Handle;
use super::numbered::numbered;
use super::operation::{Operation, invalid};
use super::uapi::*;
use crate::error::Error;
use crate::name::is_name;
use crate::netlink::attributes::Attributes;
use crate::netlink::error::Malformed;
use crate::netlink::message::{Message, string, value};

numbered! {
    /// How something is.
    HealthState: u8, "state" {
        /// It works.
        Healthy = 0 "healthy",
        /// It failed, and is not mended.
        Error = 1 "error",
    }
}

/// A health reporter (`DEVLINK_CMD_HEALTH_REPORTER_GET`). None is what it does not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthReporter {
    /// The instance that has it.
    pub handle: Handle,
    /// The port that it watches, if it is one port's.
    pub port_index: Option<u32>,
    /// Its name, such as `fw_fatal`, `tx`, `vnic`.
    pub name: String,
    /// How what it watches is.
    pub state: HealthState,
    /// How often that failed.
    pub error_count: u64,
    /// How often it was mended.
    pub recover_count: u64,
    /// How long after a recovery the next one begins by itself at the earliest, in milliseconds.
    pub graceful_period: Option<u64>,
    /// Whether it is mended without being asked.
    pub auto_recover: Option<bool>,
    /// Whether the device's state is kept at the first failure.
    pub auto_dump: Option<bool>,
    /// When that was, in nanoseconds since 1970.
    pub dump_time: Option<u64>,
}

impl HealthReporter {
    pub(super) fn of(message: &Message) -> Result<Self, Malformed> {
        let attributes = Attributes::parse(&message.attributes)?;
        let reporter = attributes.needed_nested(DEVLINK_ATTR_HEALTH_REPORTER)?;
        let count = |kind| Ok(reporter.u64(kind)?.unwrap_or(0));
        Ok(Self {
            handle: Handle::of(&attributes)?,
            port_index: attributes.u32(DEVLINK_ATTR_PORT_INDEX)?,
            name: reporter.needed_string(DEVLINK_ATTR_HEALTH_REPORTER_NAME)?,
            state: HealthState::from(reporter.needed_u8(DEVLINK_ATTR_HEALTH_REPORTER_STATE)?),
            error_count: count(DEVLINK_ATTR_HEALTH_REPORTER_ERR_COUNT)?,
            recover_count: count(DEVLINK_ATTR_HEALTH_REPORTER_RECOVER_COUNT)?,
            graceful_period: reporter.u64(DEVLINK_ATTR_HEALTH_REPORTER_GRACEFUL_PERIOD)?,
            auto_recover: reporter.flag(DEVLINK_ATTR_HEALTH_REPORTER_AUTO_RECOVER)?,
            auto_dump: reporter.flag(DEVLINK_ATTR_HEALTH_REPORTER_AUTO_DUMP)?,
            dump_time: reporter.u64(DEVLINK_ATTR_HEALTH_REPORTER_DUMP_TS_NS)?,
        })
    }
}

/// What is asked with, and what answers.
const GET: (u8, u8) = (
    DEVLINK_CMD_HEALTH_REPORTER_GET,
    DEVLINK_CMD_HEALTH_REPORTER_GET,
);

impl Devlink {
    /// All health reporters of all instances and ports, in the kernel's order.
    ///
    /// # Errors
    /// [`Error`].
    pub fn health_reporters(&self) -> Result<Vec<HealthReporter>, Error> {
        let operation = Operation::List("health reporters");
        self.family
            .dump(&operation, GET, Vec::new(), HealthReporter::of)
    }

    /// Has a reporter mend what it watches. What works already is left alone.
    ///
    /// # Errors
    /// `NotSupported` if the reporter can't, `NotPermitted`, `NotFound`, or another one.
    pub fn recover(
        &self,
        handle: &Handle,
        port_index: Option<u32>,
        reporter: &str,
    ) -> Result<(), Error> {
        if !is_name(reporter) {
            return Err(invalid(format!(
                "{reporter:?} does not name a health reporter"
            )));
        }
        let operation = Operation::Recover { handle, reporter };
        let mut attributes = handle.attributes();
        attributes
            .extend(port_index.map(|port| value(DEVLINK_ATTR_PORT_INDEX, &port.to_ne_bytes())));
        attributes.push(string(DEVLINK_ATTR_HEALTH_REPORTER_NAME, reporter));
        let command = DEVLINK_CMD_HEALTH_REPORTER_RECOVER;
        self.family.change(&operation, command, attributes)
    }
}

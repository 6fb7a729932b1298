//! Health reporters: parts of a driver that watch a part of the device, and recover it.

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
    /// The state of a watched part.
    HealthState: u8, "state" {
        /// It works.
        Healthy = 0 "healthy",
        /// It failed, and has not recovered.
        Error = 1 "error",
    }
}

/// A health reporter (`DEVLINK_CMD_HEALTH_REPORTER_GET`). `None` is a field that it does not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthReporter {
    /// The instance of the reporter.
    pub handle: Handle,
    /// The port that it watches, if it belongs to a port.
    pub port_index: Option<u32>,
    /// Its name, such as `fw_fatal`, `tx`, `vnic`.
    pub name: String,
    /// The state of the watched part.
    pub state: HealthState,
    /// Number of failures.
    pub error_count: u64,
    /// Number of recoveries.
    pub recover_count: u64,
    /// Minimum time between a recovery and the next automatic one, in milliseconds.
    pub graceful_period: Option<u64>,
    /// Whether it recovers automatically.
    pub auto_recover: Option<bool>,
    /// Whether the device's state is dumped at the first failure.
    pub auto_dump: Option<bool>,
    /// The time of that dump, in nanoseconds since 1970.
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

/// The command of a request, and that of its answers.
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

    /// Makes a reporter recover its part of the device. A healthy part stays unchanged.
    ///
    /// # Errors
    /// `NotSupported` if the reporter cannot, `NotPermitted`, `NotFound`, or another one.
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

//! The connection to the family `devlink`, for the requests of the other files.

use std::time::Duration;

use super::handle::Handle;
use super::operation::{Operation, no_instance, not_switchdev, refused};
use super::uapi::*;
use crate::error::{Error, ErrorKind, Texts};
use crate::netlink::attributes::Attributes;
use crate::netlink::error::{CallError, Refusal};
use crate::netlink::family::{self, Description, Family};
use crate::netlink::message::Message;

/// Default time to wait for an answer. Drivers take tens of seconds to change the mode of an
/// eswitch, and to reload.
pub const PATIENCE: Duration = Duration::from_secs(120);

static DEVLINK: Description = Description {
    name: DEVLINK_GENL_NAME,
    version: DEVLINK_GENL_VERSION,
    texts: Texts {
        listed: "they",
        holder: "A driver still works on it; the kernel log (`dmesg`) may show why",
    },
    absent: || {
        let message = "this kernel has no devlink: load a NIC driver that provides it (such as \
                       `modprobe mlx5_core`), or use a kernel with CONFIG_NET_DEVLINK";
        Error::new(ErrorKind::NoDevlink, message)
    },
};

/// A connection to the kernel's devlink, to the instances of this network namespace. One thread
/// sends all its requests, one after the other.
#[derive(Debug)]
pub struct Devlink {
    pub(super) family: Family,
}

impl Devlink {
    /// Connects; waits for each answer up to [`PATIENCE`].
    ///
    /// # Errors
    /// `NoDevlink` if the kernel has no devlink, `Failed` without netlink.
    pub fn open() -> Result<Self, Error> {
        Self::with_patience(PATIENCE)
    }

    /// Connects; waits for each answer up to `patience`.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn with_patience(patience: Duration) -> Result<Self, Error> {
        let family = Family::open(&DEVLINK, patience, &Operation::Connect)?;
        Ok(Self { family })
    }
}

impl family::Operation for Operation<'_> {
    /// The error for a refusal, with its remedy. Finds the cause if the kernel uses one errno for
    /// several.
    fn refused(&self, family: &Family, refusal: Refusal) -> Error {
        let Some(handle) = self.handle() else {
            return refused(self, refusal);
        };
        let error = refused(self, refusal.clone());
        match error.kind() {
            // Or the whole instance does not exist.
            ErrorKind::NotFound if !exists(family, handle) => no_instance(handle, refusal),
            // Ports are added, and nodes created, in switchdev mode only.
            ErrorKind::NotSupported | ErrorKind::Refused
                if self.needs_switchdev() && is_legacy(family, handle) =>
            {
                not_switchdev(self, handle, refusal)
            }
            _ => error,
        }
    }
}

fn exists(family: &Family, handle: &Handle) -> bool {
    !matches!(family.ask(DEVLINK_CMD_GET, handle.attributes()),
        Err(CallError::Refused(refusal)) if refusal.errno() == libc::ENODEV)
}

/// Whether the eswitch of the instance is in legacy mode.
fn is_legacy(family: &Family, handle: &Handle) -> bool {
    let command = DEVLINK_CMD_ESWITCH_GET;
    let mode =
        |message: &Message| Attributes::parse(&message.attributes)?.u16(DEVLINK_ATTR_ESWITCH_MODE);
    let answer = family.ask(command, handle.attributes()).ok();
    let mode = answer.and_then(|answer| family::one(&answer.messages, command, mode).ok());
    mode.flatten() == Some(DEVLINK_ESWITCH_MODE_LEGACY)
}

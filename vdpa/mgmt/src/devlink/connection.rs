//! The way to the family `devlink` and back, for the requests of the other files.

use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use netlink_packet_core::DefaultNla;

use super::eswitch::{Eswitch, EswitchMode};
use super::handle::Handle;
use super::operation::{Operation, no_instance, not_switchdev, refused};
use super::uapi::{
    DEVLINK_CMD_ESWITCH_GET, DEVLINK_CMD_GET, DEVLINK_GENL_NAME, DEVLINK_GENL_VERSION,
};
use crate::error::{Error, ErrorKind, Texts};
use crate::netlink::exchange::{Answer, Malformed, Refusal};
use crate::netlink::family;
use crate::netlink::message::{Message, Mode, Protocol, Request};
use crate::netlink::worker::{CallError, Worker};

/// How long an answer is waited for, unless something else is asked for. Drivers change the mode of an
/// eswitch, and reload, in tens of seconds.
pub const PATIENCE: Duration = Duration::from_secs(120);

const TEXTS: Texts = Texts {
    listed: "they",
    holder: "A driver is still at work on it; the kernel's log (`dmesg`) may say on what",
};

/// A connection to the kernel's devlink, to the instances of this network namespace. All its requests
/// go through one thread, one after the other.
#[derive(Debug)]
pub struct Devlink {
    worker: Worker,
    /// The family's number; another one after devlink was loaded again as a module.
    family: AtomicU16,
}

impl Devlink {
    /// Connects; answers are waited for [`PATIENCE`].
    ///
    /// # Errors
    /// `NoDevlink` if the kernel has no devlink, `Failed` without netlink.
    pub fn open() -> Result<Self, Error> {
        Self::with_patience(PATIENCE)
    }

    /// Connects; answers are waited for this long.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn with_patience(patience: Duration) -> Result<Self, Error> {
        let devlink = Self {
            worker: Worker::start(Protocol::Generic, patience).map_err(Error::netlink)?,
            family: AtomicU16::new(0),
        };
        devlink.resolve(&Operation::Connect)?;
        Ok(devlink)
    }

    /// Asks for the description of the family; its number is remembered.
    pub(super) fn resolve(&self, operation: &Operation) -> Result<Answer, Error> {
        let answer = match self.worker.call(family::request(DEVLINK_GENL_NAME)) {
            Ok(answer) => answer,
            Err(CallError::Refused(refusal)) if refusal.errno() == libc::ENOENT => {
                let message = "this kernel has no devlink: it is there once a NIC driver that has \
                               it is loaded (such as `modprobe mlx5_core`), unless the kernel was \
                               built without it (CONFIG_NET_DEVLINK)";
                return Err(Error::new(ErrorKind::NoDevlink, message));
            }
            Err(error) => return Err(self.error(operation, error)),
        };
        let number = family::number(&answer.messages, DEVLINK_GENL_NAME)
            .map_err(Error::malformed(operation))?;
        self.family.store(number, Ordering::Relaxed);
        Ok(answer)
    }

    /// The family's number, as it was last.
    pub(super) fn family(&self) -> u16 {
        self.family.load(Ordering::Relaxed)
    }

    /// Sends a request and waits for the whole answer.
    pub(super) fn call(
        &self,
        operation: &Operation,
        command: u8,
        mode: Mode,
        attributes: Vec<DefaultNla>,
    ) -> Result<Answer, Error> {
        let version = DEVLINK_GENL_VERSION;
        let mut request = Request::generic(self.family(), command, version, mode, attributes);
        let outcome = match self.worker.call(request.clone()) {
            // A number that no family has.
            Err(CallError::Refused(refusal)) if refusal.errno() == libc::ENOENT => {
                self.resolve(operation)?;
                if self.family() == request.message_type {
                    return Err(self.refused(operation, refusal));
                }
                request.message_type = self.family();
                self.worker.call(request)
            }
            outcome => outcome,
        };
        let answer = outcome.map_err(|error| self.error(operation, error))?;
        if let Some(warning) = &answer.warning {
            tracing::debug!(%operation, warning, "done, with a warning of the kernel's");
        }
        Ok(answer)
    }

    /// All that a dump lists.
    pub(super) fn dump<T>(
        &self,
        operation: &Operation,
        (request, answer): (u8, u8),
        attributes: Vec<DefaultNla>,
        of: impl Fn(&Message) -> Result<T, Malformed>,
    ) -> Result<Vec<T>, Error> {
        let messages = self.call(operation, request, Mode::Dump, attributes)?;
        read(&messages.messages, answer, of).map_err(Error::malformed(operation))
    }

    /// The one thing that was asked for.
    pub(super) fn get<T>(
        &self,
        operation: &Operation,
        (request, answer): (u8, u8),
        attributes: Vec<DefaultNla>,
        of: impl Fn(&Message) -> Result<T, Malformed>,
    ) -> Result<T, Error> {
        let messages = self.call(operation, request, Mode::Do, attributes)?;
        one(&messages.messages, answer, of).map_err(Error::malformed(operation))
    }

    /// A refusal with its remedy. Looks up the cause of an errno that the kernel uses for several
    /// causes.
    fn refused(&self, operation: &Operation, refusal: Refusal) -> Error {
        let Some(handle) = operation.handle() else {
            return refused(operation, refusal);
        };
        let error = refused(operation, refusal.clone());
        match error.kind() {
            // Or the whole instance is not there.
            ErrorKind::NotFound if !self.exists(handle) => no_instance(handle, refusal),
            // Ports are added, and nodes made, in switchdev mode only.
            ErrorKind::NotSupported | ErrorKind::Refused
                if operation.needs_switchdev() && self.is_legacy(handle) =>
            {
                not_switchdev(operation, handle, refusal)
            }
            _ => error,
        }
    }

    fn exists(&self, handle: &Handle) -> bool {
        !matches!(self.ask(DEVLINK_CMD_GET, handle),
            Err(CallError::Refused(refusal)) if refusal.errno() == libc::ENODEV)
    }

    /// Whether the eswitch of the instance is in legacy mode.
    fn is_legacy(&self, handle: &Handle) -> bool {
        let command = DEVLINK_CMD_ESWITCH_GET;
        let answer = self.ask(command, handle).ok();
        let eswitch = answer.and_then(|answer| one(&answer.messages, command, Eswitch::of).ok());
        eswitch.and_then(|eswitch| eswitch.mode) == Some(EswitchMode::Legacy)
    }

    /// A request about an instance whose failure is of no interest.
    fn ask(&self, command: u8, handle: &Handle) -> Result<Answer, CallError> {
        let (version, attributes) = (DEVLINK_GENL_VERSION, handle.attributes());
        let request = Request::generic(self.family(), command, version, Mode::Do, attributes);
        self.worker.call(request)
    }

    fn error(&self, operation: &Operation, error: CallError) -> Error {
        let refused = |refusal| self.refused(operation, refusal);
        TEXTS.explain(operation, error, self.worker.patience(), refused)
    }
}

/// All messages of an answer. Those with another command are not about this.
pub(super) fn read<T>(
    answer: &[Message],
    command: u8,
    of: impl Fn(&Message) -> Result<T, Malformed>,
) -> Result<Vec<T>, Malformed> {
    let messages = answer.iter().filter(|one| one.command() == command);
    messages.map(of).collect()
}

/// The message of an answer that has one.
pub(super) fn one<T>(
    answer: &[Message],
    command: u8,
    of: impl Fn(&Message) -> Result<T, Malformed>,
) -> Result<T, Malformed> {
    let mut all = read(answer, command, of)?;
    match (all.pop(), all.is_empty()) {
        (Some(one), true) => Ok(one),
        _ => Err(Malformed::new(
            "answer",
            "it does not have exactly one entry",
        )),
    }
}

//! The way to the family `devlink` and back, for the requests of the other files.

use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use netlink_packet_core::DefaultNla;

use super::error::{DevlinkError, DevlinkOperation};
use super::eswitch::{Eswitch, EswitchMode};
use super::handle::Handle;
use super::rate::RateObject;
use super::uapi::{
    DEVLINK_CMD_ESWITCH_GET, DEVLINK_CMD_GET, DEVLINK_GENL_NAME, DEVLINK_GENL_VERSION,
};
use crate::netlink::exchange::{Answer, Malformed, Refusal};
use crate::netlink::family;
use crate::netlink::message::{Message, Mode, Protocol, Request};
use crate::netlink::worker::{CallError, Worker};

/// How long an answer is waited for, unless something else is asked for. Drivers change the mode of an
/// eswitch, and reload, in tens of seconds.
pub const PATIENCE: Duration = Duration::from_secs(120);

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
    /// [`DevlinkError::NoFamily`] if the kernel has no devlink, [`DevlinkError::Socket`] without netlink.
    pub fn open() -> Result<Self, DevlinkError> {
        Self::with_patience(PATIENCE)
    }

    /// Connects; answers are waited for this long.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn with_patience(patience: Duration) -> Result<Self, DevlinkError> {
        let devlink = Self {
            worker: Worker::start(Protocol::Generic, patience).map_err(DevlinkError::Socket)?,
            family: AtomicU16::new(0),
        };
        devlink.resolve(&DevlinkOperation::Connect)?;
        Ok(devlink)
    }

    /// Asks for the description of the family; its number is remembered.
    pub(super) fn resolve(&self, operation: &DevlinkOperation) -> Result<Answer, DevlinkError> {
        let answer = match self.worker.call(family::request(DEVLINK_GENL_NAME)) {
            Ok(answer) => answer,
            Err(CallError::Refused(refusal)) if refusal.errno() == libc::ENOENT => {
                return Err(DevlinkError::NoFamily);
            }
            Err(error) => return Err(self.error(operation, error)),
        };
        let number =
            family::number(&answer.messages, DEVLINK_GENL_NAME).map_err(malformed(operation))?;
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
        operation: &DevlinkOperation,
        command: u8,
        mode: Mode,
        attributes: Vec<DefaultNla>,
    ) -> Result<Answer, DevlinkError> {
        let version = DEVLINK_GENL_VERSION;
        let mut request = Request::generic(self.family(), command, version, mode, attributes);
        let outcome = match self.worker.call(request.clone()) {
            // A number that no family has.
            Err(CallError::Refused(refusal)) if refusal.errno() == libc::ENOENT => {
                self.resolve(operation)?;
                if self.family() == request.message_type {
                    return Err(refused(operation, refusal));
                }
                request.message_type = self.family();
                self.worker.call(request)
            }
            outcome => outcome,
        };
        let answer = outcome.map_err(|error| self.explained(self.error(operation, error)))?;
        if let Some(warning) = &answer.warning {
            tracing::debug!(%operation, warning, "done, with a warning of the kernel's");
        }
        Ok(answer)
    }

    /// All that a dump lists.
    pub(super) fn dump<T>(
        &self,
        operation: &DevlinkOperation,
        (request, answer): (u8, u8),
        attributes: Vec<DefaultNla>,
        of: impl Fn(&Message) -> Result<T, Malformed>,
    ) -> Result<Vec<T>, DevlinkError> {
        let messages = self.call(operation, request, Mode::Dump, attributes)?;
        read(&messages.messages, answer, of).map_err(malformed(operation))
    }

    /// The one thing that was asked for.
    pub(super) fn get<T>(
        &self,
        operation: &DevlinkOperation,
        (request, answer): (u8, u8),
        attributes: Vec<DefaultNla>,
        of: impl Fn(&Message) -> Result<T, Malformed>,
    ) -> Result<T, DevlinkError> {
        let messages = self.call(operation, request, Mode::Do, attributes)?;
        one(&messages.messages, answer, of).map_err(malformed(operation))
    }

    /// Asks what is behind an errno that the kernel uses for several things.
    fn explained(&self, error: DevlinkError) -> DevlinkError {
        match error {
            // Or the whole instance is not there.
            DevlinkError::NoPort { ref port, .. } if !self.exists(port.handle()) => {
                error.of_instance()
            }
            DevlinkError::NoRate { ref object, .. } if !self.exists(object.handle()) => {
                error.of_instance()
            }
            // Ports are added, and nodes made, in switchdev mode only.
            DevlinkError::NotSupported { operation, source }
                if operation.needs_switchdev() && self.is_legacy(&operation) =>
            {
                DevlinkError::NotSwitchdev { operation, source }
            }
            DevlinkError::Refused { operation, source }
                if operation.needs_switchdev() && self.is_legacy(&operation) =>
            {
                DevlinkError::NotSwitchdev { operation, source }
            }
            error => error,
        }
    }

    fn exists(&self, handle: &Handle) -> bool {
        !matches!(self.ask(DEVLINK_CMD_GET, handle),
            Err(CallError::Refused(refusal)) if refusal.errno() == libc::ENODEV)
    }

    /// Whether the eswitch of what the operation is about is in legacy mode.
    fn is_legacy(&self, operation: &DevlinkOperation) -> bool {
        let command = DEVLINK_CMD_ESWITCH_GET;
        let answer = operation.handle().map(|handle| self.ask(command, handle));
        let eswitch = answer
            .and_then(Result::ok)
            .and_then(|answer| one(&answer.messages, command, Eswitch::of).ok());
        eswitch.and_then(|eswitch| eswitch.mode) == Some(EswitchMode::Legacy)
    }

    /// A request about an instance whose failure is of no interest.
    fn ask(&self, command: u8, handle: &Handle) -> Result<Answer, CallError> {
        let (version, attributes) = (DEVLINK_GENL_VERSION, handle.attributes());
        let request = Request::generic(self.family(), command, version, Mode::Do, attributes);
        self.worker.call(request)
    }

    fn error(&self, operation: &DevlinkOperation, error: CallError) -> DevlinkError {
        let operation = operation.clone();
        match error {
            CallError::Refused(refusal) => refused(&operation, refusal),
            CallError::Malformed(source) => DevlinkError::Malformed { operation, source },
            CallError::Socket(source) => DevlinkError::Socket(source),
            CallError::Interrupted => DevlinkError::Interrupted { operation },
            CallError::Timeout { sent } => DevlinkError::Timeout {
                operation,
                patience: self.worker.patience(),
                sent,
            },
        }
    }
}

pub(super) fn malformed(operation: &DevlinkOperation) -> impl Fn(Malformed) -> DevlinkError {
    move |source| DevlinkError::Malformed {
        operation: operation.clone(),
        source,
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

/// A refusal with its remedy.
pub(super) fn refused(operation: &DevlinkOperation, source: Refusal) -> DevlinkError {
    use DevlinkOperation as Of;
    let operation = operation.clone();
    match (source.errno(), &operation) {
        (libc::EPERM | libc::EACCES, _) => DevlinkError::NotPermitted { operation, source },
        (
            libc::ENODEV,
            Of::ShowRate(object @ RateObject::Node(_))
            | Of::SetRate(object @ RateObject::Node(_))
            | Of::DeleteRate(object),
        ) => DevlinkError::NoRate {
            object: object.clone(),
            source,
        },
        // The kernel says the same of an instance and of its port; `Devlink::explained` tells them apart.
        (libc::ENODEV, _) => match (operation.port(), operation.handle()) {
            (Some(port), _) => DevlinkError::NoPort {
                port: port.clone(),
                source,
            },
            (None, Some(handle)) => DevlinkError::NoInstance {
                handle: handle.clone(),
                source,
            },
            (None, None) => DevlinkError::Refused { operation, source },
        },
        (
            libc::EEXIST,
            Of::AddPort {
                handle,
                sfnum: Some(sfnum),
            },
        ) => DevlinkError::SfnumTaken {
            handle: handle.clone(),
            sfnum: *sfnum,
            source,
        },
        (libc::EEXIST, Of::AddRate(object)) => DevlinkError::NodeTaken {
            object: object.clone(),
            source,
        },
        (libc::EINVAL, Of::ShowParam { handle, name }) => DevlinkError::NoParam {
            handle: handle.clone(),
            name: name.clone(),
            source,
        },
        (libc::EOPNOTSUPP, _) => DevlinkError::NotSupported { operation, source },
        _ => DevlinkError::Refused { operation, source },
    }
}

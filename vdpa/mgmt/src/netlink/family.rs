//! Families of generic netlink, and their controller. It maps a family's name to its number, which
//! changes each time its module is loaded (include/uapi/linux/genetlink.h).
//!
//! This module sends requests to a family and decodes their answers. It has no code for a
//! particular family.

use std::fmt;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use netlink_packet_core::DefaultNla;

use super::attributes::Attributes;
use super::error::{CallError, Malformed, Refusal};
use super::exchange::Answer;
use super::message::{Message, Mode, Protocol, Request, string};
use super::worker::Worker;
use crate::error::{Error, Texts};

/// The controller's own number.
const GENL_ID_CTRL: u16 = 16;
const CTRL_CMD_NEWFAMILY: u8 = 1;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
const CTRL_ATTR_MCAST_GROUPS: u16 = 7;
/// In each group of the list.
const CTRL_ATTR_MCAST_GRP_NAME: u16 = 1;
const CTRL_ATTR_MCAST_GRP_ID: u16 = 2;
const CTRL_VERSION: u8 = 1;

/// A family's description in this program.
#[derive(Debug)]
pub(crate) struct Description {
    pub(crate) name: &'static str,
    pub(crate) version: u8,
    pub(crate) texts: Texts,
    /// The error if the kernel lacks the family.
    pub(crate) absent: fn() -> Error,
}

/// A request to a family, for error messages.
pub(crate) trait Operation: fmt::Display {
    /// The error when the kernel refuses it.
    fn refused(&self, family: &Family, refusal: Refusal) -> Error;
}

/// A connection to a family. One thread sends all its requests, one after the other.
#[derive(Debug)]
pub(crate) struct Family {
    description: &'static Description,
    worker: Worker,
    /// Changes when the family's module is reloaded.
    number: AtomicU16,
}

impl Family {
    /// Connects; waits for each answer up to `patience`.
    ///
    /// # Errors
    /// The kernel does not have the family, or there is no netlink.
    pub(crate) fn open(
        description: &'static Description,
        patience: Duration,
        operation: &impl Operation,
    ) -> Result<Self, Error> {
        let family = Self {
            description,
            worker: Worker::start(Protocol::Generic, patience)?,
            number: AtomicU16::new(0),
        };
        family.resolve(operation)?;
        Ok(family)
    }

    /// Queries the controller about the family, and stores its number.
    pub(crate) fn resolve(&self, operation: &impl Operation) -> Result<Answer, Error> {
        let name = self.description.name;
        let answer = match self.worker.call(request(name)) {
            Err(CallError::Refused(refusal)) if refusal.errno() == libc::ENOENT => {
                return Err((self.description.absent)());
            }
            answer => answer.map_err(|error| self.error(operation, error))?,
        };
        let number = number(&answer.messages, name).map_err(Error::malformed(operation))?;
        self.number.store(number, Ordering::Relaxed);
        Ok(answer)
    }

    /// The family's last known number.
    pub(crate) fn number(&self) -> u16 {
        self.number.load(Ordering::Relaxed)
    }

    fn request(&self, command: u8, mode: Mode, attributes: Vec<DefaultNla>) -> Request {
        let version = self.description.version;
        Request::generic(self.number(), command, version, mode, attributes)
    }

    /// Sends a request and waits for the whole answer.
    pub(crate) fn call(
        &self,
        operation: &impl Operation,
        command: u8,
        mode: Mode,
        attributes: Vec<DefaultNla>,
    ) -> Result<Answer, Error> {
        let mut request = self.request(command, mode, attributes);
        let outcome = match self.worker.call(request.clone()) {
            // No family has this number any more.
            Err(CallError::Refused(refusal)) if refusal.errno() == libc::ENOENT => {
                self.resolve(operation)?;
                if self.number() == request.message_type {
                    return Err(operation.refused(self, refusal));
                }
                request.message_type = self.number();
                self.worker.call(request)
            }
            outcome => outcome,
        };
        let answer = outcome.map_err(|error| self.error(operation, error))?;
        if let Some(warning) = &answer.warning {
            tracing::debug!(%operation, warning, "done, with a kernel warning");
        }
        Ok(answer)
    }

    /// Sends a request that changes something.
    pub(crate) fn change(
        &self,
        operation: &impl Operation,
        command: u8,
        attributes: Vec<DefaultNla>,
    ) -> Result<(), Error> {
        self.call(operation, command, Mode::Do, attributes)
            .map(drop)
    }

    /// All objects of a dump.
    pub(crate) fn dump<T>(
        &self,
        operation: &impl Operation,
        (request, answer): (u8, u8),
        attributes: Vec<DefaultNla>,
        of: impl Fn(&Message) -> Result<T, Malformed>,
    ) -> Result<Vec<T>, Error> {
        let messages = self.call(operation, request, Mode::Dump, attributes)?;
        read(&messages.messages, answer, of).map_err(Error::malformed(operation))
    }

    /// The one object of a request.
    pub(crate) fn get<T>(
        &self,
        operation: &impl Operation,
        (request, answer): (u8, u8),
        attributes: Vec<DefaultNla>,
        of: impl Fn(&Message) -> Result<T, Malformed>,
    ) -> Result<T, Error> {
        let messages = self.call(operation, request, Mode::Do, attributes)?;
        one(&messages.messages, answer, of).map_err(Error::malformed(operation))
    }

    /// Sends an auxiliary request for another one, without its error texts.
    pub(crate) fn ask(
        &self,
        command: u8,
        attributes: Vec<DefaultNla>,
    ) -> Result<Answer, CallError> {
        self.worker
            .call(self.request(command, Mode::Do, attributes))
    }

    fn error(&self, operation: &impl Operation, error: CallError) -> Error {
        let refused = |refusal| operation.refused(self, refusal);
        let patience = self.worker.patience();
        let texts = &self.description.texts;
        texts.explain(operation, error, patience, refused)
    }
}

/// All objects in an answer, from the messages with this command.
pub(crate) fn read<T>(
    answer: &[Message],
    command: u8,
    of: impl Fn(&Message) -> Result<T, Malformed>,
) -> Result<Vec<T>, Malformed> {
    let messages = answer.iter().filter(|one| one.command() == command);
    messages.map(of).collect()
}

/// The only object in an answer.
pub(crate) fn one<T>(
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

/// The request for the number of the family called `name`.
fn request(name: &str) -> Request {
    let attributes = vec![string(CTRL_ATTR_FAMILY_NAME, name)];
    Request::generic(
        GENL_ID_CTRL,
        CTRL_CMD_GETFAMILY,
        CTRL_VERSION,
        Mode::Do,
        attributes,
    )
}

/// The number in the answer.
pub(crate) fn number(answer: &[Message], name: &str) -> Result<u16, Malformed> {
    description(answer, name)?.needed_u16(CTRL_ATTR_FAMILY_ID)
}

/// The number of one of the family's multicast groups in the answer.
pub(crate) fn group(answer: &[Message], name: &str, group: &str) -> Result<u32, Malformed> {
    let groups = description(answer, name)?.needed_nested(CTRL_ATTR_MCAST_GROUPS)?;
    // Each group is in an attribute whose type is its position.
    for (_, value) in groups.iter() {
        let found = Attributes::parse(value)?;
        if found.string(CTRL_ATTR_MCAST_GRP_NAME).as_deref() == Some(group) {
            return found.needed_u32(CTRL_ATTR_MCAST_GRP_ID);
        }
    }
    Err(Malformed::new("answer", "it does not have the group"))
}

/// The attributes of the family called `name`.
fn description<'a>(answer: &'a [Message], name: &str) -> Result<Attributes<'a>, Malformed> {
    for message in answer {
        if message.message_type != GENL_ID_CTRL || message.command() != CTRL_CMD_NEWFAMILY {
            continue;
        }
        let attributes = Attributes::parse(&message.attributes)?;
        if attributes.string(CTRL_ATTR_FAMILY_NAME).as_deref() == Some(name) {
            return Ok(attributes);
        }
    }
    Err(Malformed::new("answer", "it does not have the family"))
}

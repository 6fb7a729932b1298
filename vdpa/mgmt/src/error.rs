//! The one error of management: a kind for code, a message with the remedy for the user.

use std::fmt;
use std::io::{self, ErrorKind as IoErrorKind};
use std::path::Path;
use std::time::Duration;

use super::netlink::error::{CallError, Malformed, Refusal};

/// The cases that code decides on. The error's text has the details.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The kernel has no vDPA, or its module is not loaded.
    NoVdpa,
    /// The kernel has vDPA, in the initial network namespace only.
    OtherNamespace,
    /// The kernel has no devlink.
    NoDevlink,
    /// The text is not a valid name.
    BadName,
    /// The values are out of range for any object. No request was sent.
    Invalid,
    /// This device or function cannot have the values or the driver.
    Unusable,
    /// No device, function, interface, port or namespace has that name.
    NotFound,
    /// No management device has that name.
    NoMgmtDevice,
    /// The devlink instance has no such parameter.
    NoParam,
    /// The function is virtual itself, or has no SR-IOV.
    NoSriov,
    /// The management device has room for one device only.
    NoRoom,
    /// Another object has the name or the number.
    NameTaken,
    /// A process has the device open: the kernel would wait for it, with its lock held.
    InUse,
    /// The caller lacks the right.
    NotPermitted,
    /// No driver has negotiated features yet.
    NotNegotiated,
    /// The driver has no such request or setting.
    NotSupported,
    /// The kernel or a driver refused for another reason.
    Refused,
    /// The request failed, and its rollback failed too: the former state may not be back.
    NotUndone,
    /// A list changed each time that it was read.
    Interrupted,
    /// The kernel did not answer in time.
    NoAnswer {
        /// Whether the kernel has the request, and may still carry it out.
        sent: bool,
    },
    /// The kernel's answer cannot be decoded.
    Malformed,
    /// The host failed: no netlink, or a file of sysfs that cannot be read.
    Failed,
}

vdpa::opaque_error! {
    /// A failed request about devices, NICs and their connections. The text is a sentence that
    /// names the remedy. The source is the kernel's answer.
    pub
}

impl Error {
    /// An error of another kind and text with the same source.
    #[must_use]
    pub(super) fn renamed(mut self, kind: ErrorKind, message: String) -> Self {
        self.0.kind = kind;
        self.0.message = Some(message);
        self
    }

    /// The case that code decides on.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Whether the named object does not exist.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        self.kind() == ErrorKind::NotFound
    }

    /// The kernel's refusal, if a netlink request was refused.
    #[must_use]
    pub fn refusal(&self) -> Option<&Refusal> {
        self.0.source.as_ref()?.downcast_ref()
    }

    /// The error of a system call, if the source is one.
    pub(super) fn io(&self) -> Option<&io::Error> {
        self.0.source.as_ref()?.downcast_ref()
    }

    /// The netlink socket failed.
    pub(super) fn netlink(source: io::Error) -> Self {
        let message = "cannot talk to the kernel through netlink";
        Self::new(ErrorKind::Failed, message).because(source)
    }

    /// The kernel's answer to an operation cannot be decoded.
    pub(super) fn malformed(operation: &impl fmt::Display) -> impl Fn(Malformed) -> Self {
        move |source| {
            let message = format!("cannot {operation}: the kernel's answer is malformed");
            Self::new(ErrorKind::Malformed, message).because(source)
        }
    }

    /// A file of sysfs cannot be read.
    pub(super) fn read(path: &Path) -> impl Fn(io::Error) -> Self {
        move |source| {
            let message = format!("cannot read {}", path.display());
            Self::new(ErrorKind::Failed, message).because(source)
        }
    }

    /// A write to sysfs about `object` was refused. `kind` and `message` describe every cause
    /// except a missing right.
    pub(super) fn write(
        object: &str,
        source: io::Error,
        kind: ErrorKind,
        message: impl FnOnce(&io::Error) -> String,
    ) -> Self {
        let error = if source.kind() == IoErrorKind::PermissionDenied {
            let message = format!("no permission to change {object}: run this as root");
            Self::new(ErrorKind::NotPermitted, message)
        } else {
            Self::new(kind, message(&source))
        };
        error.because(source)
    }
}

/// `None` if the named object does not exist.
pub(super) fn existing<T>(found: Result<T, Error>) -> Result<Option<T>, Error> {
    match found {
        Err(error) if error.is_missing() => Ok(None),
        found => found.map(Some),
    }
}

/// The words for one netlink family in the sentences of errors.
#[derive(Debug)]
pub(super) struct Texts {
    /// The objects of a list.
    pub(super) listed: &'static str,
    /// The usual cause of a missing answer.
    pub(super) holder: &'static str,
}

impl Texts {
    /// The error of an operation whose call failed.
    pub(super) fn explain(
        &self,
        operation: &impl fmt::Display,
        error: CallError,
        patience: Duration,
        refused: impl FnOnce(Refusal) -> Error,
    ) -> Error {
        let (kind, problem) = match error {
            CallError::Refused(refusal) => return refused(refusal),
            CallError::Malformed(source) => return Error::malformed(operation)(source),
            CallError::Socket(source) => return Error::netlink(source),
            CallError::Interrupted => {
                let problem = format!("{} change too fast; try again", self.listed);
                (ErrorKind::Interrupted, problem)
            }
            CallError::Timeout { sent } => {
                let outcome = if sent {
                    "the kernel may still do it later"
                } else {
                    "the kernel will not do it"
                };
                let (seconds, holder) = (patience.as_secs(), self.holder);
                let problem = format!("no answer in {seconds} s; {outcome}. {holder}");
                (ErrorKind::NoAnswer { sent }, problem)
            }
        };
        Error::new(kind, format!("cannot {operation}: {problem}"))
    }
}

/// An Ethernet address as it is written.
pub(super) fn mac(address: [u8; 6]) -> String {
    address.map(|byte| format!("{byte:02x}")).join(":")
}

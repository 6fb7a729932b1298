//! The one error of the crate: a kind for code, a message with the remedy for the user.

use std::error::Error as StdError;
use std::io;

use crate::ring::Violation;

/// The cases that code decides on. The error's text has the details.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The kernel or the device refused a request.
    Refused,
    /// The guest's driver broke a ring: only a reset by that driver helps.
    BrokenByGuest {
        /// Index of the queue, where it is known.
        queue: Option<u16>,
    },
    /// The device broke a ring: only a reset of the device helps.
    BrokenByDevice,
    /// The device holds chains, and the rings do not show which. It may use them soon.
    InFlightUnknown,
    /// A change of mappings failed, and so did undoing it.
    NotRolledBack,
    /// Any other failure.
    Other,
}

crate::opaque_error! {
    /// A device, a ring or a mapping that cannot be obtained or used.
    pub
}

impl Error {
    /// An error that no code decides on.
    pub(crate) fn other(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Other, message)
    }

    /// For `map_err`: the message, with the error as its source.
    pub(crate) fn context<E>(message: impl Into<String>) -> impl FnOnce(E) -> Self
    where
        E: Into<Box<dyn StdError + Send + Sync>>,
    {
        move |source| Self::other(message).because(source)
    }

    /// For `map_err`: the kernel refused a request of this name in `linux/vhost.h`.
    pub(crate) fn refused(operation: &str) -> impl FnOnce(io::Error) -> Self {
        move |source| {
            let message = format!("the device refused {operation}");
            Self::new(ErrorKind::Refused, message).because(source)
        }
    }

    /// As [`Error::refused`], about a queue.
    pub(crate) fn queue_refused(queue: u16, operation: &str) -> impl FnOnce(io::Error) -> Self {
        move |source| {
            let message = format!("queue {queue}: the device refused {operation}");
            Self::new(ErrorKind::Refused, message).because(source)
        }
    }

    /// The case that code decides on.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The ring rule that a guest or a device broke, if that is the cause.
    #[must_use]
    pub fn violation(&self) -> Option<Violation> {
        std::iter::successors(self.source(), |cause| (*cause).source())
            .find_map(|cause| cause.downcast_ref().copied())
    }
}

impl From<Violation> for Error {
    fn from(source: Violation) -> Self {
        let (kind, message) = if source.is_by_device() {
            (ErrorKind::BrokenByDevice, "the device broke the ring")
        } else {
            let queue = None;
            (
                ErrorKind::BrokenByGuest { queue },
                "the guest broke the ring",
            )
        };
        Self::new(kind, message).because(source)
    }
}

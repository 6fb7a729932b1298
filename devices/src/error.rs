//! The error type of all devices: a kind for code, a message with the remedy for the user.

use std::error::Error as StdError;

/// The cases that code distinguishes. The error's text has the details.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The new device lacks features that the guest's driver uses.
    MissingFeatures,
    /// The new device has another number of queues.
    OtherQueueCount,
    /// The new device differs from the guest's in another respect.
    Incompatible,
    /// The device cannot be replaced now. It continues.
    CannotHandOver,
    /// The new device does not start. The old one continues.
    CannotStart,
    /// Neither the new device nor the old one works: only a reset by the driver helps.
    Lost,
    /// The driver, or the device, broke a ring: only a reset by the driver helps.
    BrokenRing {
        /// Index of the queue.
        queue: u16,
    },
    /// The device holds chains, and the rings do not show which. It may use them soon.
    InFlightUnknown,
    /// Any other failure.
    Other,
}

vdpa::opaque_error! {
    /// A device that cannot be built, run, saved, restored or replaced.
    pub
}

impl Error {
    /// Creates an error that code does not distinguish.
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

    /// For `map_err` of an error that keeps its own text.
    pub(crate) fn as_it_is(source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::transparent(ErrorKind::Other, source)
    }

    /// For `map_err` where a queue is served.
    pub(crate) fn ring(source: vdpa::Error) -> Self {
        Self::other("cannot serve the ring").because(source)
    }

    /// For `map_err` where the strategy of a queue changes.
    pub(crate) fn relay(source: vdpa::Error) -> Self {
        let kind = match source.kind() {
            vdpa::ErrorKind::BrokenByGuest { queue: Some(queue) } => {
                ErrorKind::BrokenRing { queue }
            }
            vdpa::ErrorKind::InFlightUnknown => ErrorKind::InFlightUnknown,
            _ => ErrorKind::Other,
        };
        let message = "cannot change how the guest's queues reach the device";
        Self::new(kind, message).because(source)
    }

    /// Puts a message about the broken queue first, if a queue is broken.
    pub(crate) fn or_broken_ring(self) -> Self {
        let ErrorKind::BrokenRing { queue } = self.kind() else {
            return self;
        };
        let message = format!(
            "queue {queue} is broken until the guest's driver resets the device (unbind and bind)"
        );
        Self::new(self.kind(), message).because(self)
    }

    /// Returns the case that code distinguishes.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Whether a ring is broken, which only a reset by the driver fixes.
    pub(crate) fn is_broken_ring(&self) -> bool {
        matches!(self.kind(), ErrorKind::BrokenRing { .. })
    }
}

/// A refusal by a device. Other errors of `vdpa` get a context where they occur.
impl From<vdpa::Error> for Error {
    fn from(source: vdpa::Error) -> Self {
        Self::other("the device does not work as asked").because(source)
    }
}

#[cfg(test)]
mod tests {
    use vdpa::ErrorKind as Cause;

    use super::*;

    #[test]
    fn only_a_broken_ring_is_one() {
        let guest = |queue| Cause::BrokenByGuest { queue };
        let broken = ErrorKind::BrokenRing { queue: 2 };
        for (cause, kind) in [
            (guest(Some(2)), broken),
            (guest(None), ErrorKind::Other),
            (Cause::BrokenByDevice, ErrorKind::Other),
            (Cause::InFlightUnknown, ErrorKind::InFlightUnknown),
        ] {
            let error = Error::relay(vdpa::Error::new(cause, "so")).or_broken_ring();
            assert_eq!(error.kind(), kind, "{error}");
            let names_queue = error.to_string().starts_with("queue 2 is broken until");
            assert_eq!(names_queue, kind == broken, "{error}");
        }
    }
}

//! The one error of building, running and moving a machine.
//!
//! `ErrorKind` has the cases that code decides on. The text has the rest and names the remedy.

use std::fmt;
use std::io;

use crate::config::CpuAffinityError;

/// The cases that code decides on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// An object that the configuration or the request names cannot be used.
    Unusable,
    /// The machine has no room for another device, or a device has its name.
    NoRoom,
    /// The destination waited for a machine, and none arrived.
    NotArrived,
    /// Listening on a migration's endpoint failed.
    CannotListen,
    /// A migration's endpoint does not answer.
    NoDestination,
    /// Certificates or keys cannot be used, or do not go with the endpoint.
    BadTls,
    /// The host, its kernel or KVM failed.
    Host,
}

vdpa::opaque_error! {
    /// A failure to build, run or move a machine. Dropping the parts that were built undoes them.
    pub
}

impl Error {
    /// The named object cannot be used.
    pub(crate) fn unusable(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unusable, message)
    }

    /// A configuration names a descriptor that was not passed.
    pub(crate) fn no_descriptor(device: &str, number: u32) -> Self {
        Self::unusable(format!(
            "{device}: there is no descriptor fd={number}; send it with the request, or let the \
             process inherit it"
        ))
    }

    /// Certificates or keys that cannot be used.
    pub(crate) fn tls(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::BadTls, message)
    }

    /// A failure of the host.
    pub(crate) fn host(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Host, message)
    }

    /// For `map_err` after a system call or an ioctl.
    pub(crate) fn failed<E: Into<io::Error>>(what: impl fmt::Display) -> impl FnOnce(E) -> Self {
        move |source| Self::host(format!("{what} failed")).because(source.into())
    }

    /// The case that code decides on.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }
}

vdpa::error_from!(CpuAffinityError as error => ErrorKind::Unusable);

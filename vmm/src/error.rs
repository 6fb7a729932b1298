//! The one error of building, running and moving a machine.
//!
//! `ErrorKind` has the cases that code decides on. The text has the rest and names the remedy.

use std::error::Error as StdError;
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

/// A failure to build, run or move a machine. Dropping the parts that were built undoes them.
#[derive(Debug)]
pub struct Error(Box<Inner>);

#[derive(Debug)]
struct Inner {
    kind: ErrorKind,
    /// None if the source speaks for itself.
    message: Option<String>,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl Error {
    /// An error without a source.
    #[must_use]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            kind,
            message: Some(message.into()),
            source: None,
        }))
    }

    /// The same error with its source.
    #[must_use]
    pub fn because(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// A kind for an error of another type, which keeps its text.
    pub(crate) fn transparent(
        kind: ErrorKind,
        source: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> Self {
        Self(Box::new(Inner {
            kind,
            message: None,
            source: Some(source.into()),
        }))
    }

    /// The named object cannot be used.
    pub(crate) fn unusable(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unusable, message)
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

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.0.message, &self.0.source) {
            (Some(message), _) => f.write_str(message),
            (None, Some(source)) => source.fmt(f),
            (None, None) => Ok(()),
        }
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        let source = self.0.source.as_deref()?;
        if self.0.message.is_none() {
            return source.source();
        }
        Some(source)
    }
}

impl From<CpuAffinityError> for Error {
    fn from(source: CpuAffinityError) -> Self {
        Self::transparent(ErrorKind::Unusable, source)
    }
}

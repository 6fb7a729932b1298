//! The one error of this crate: a kind for code, a message with the remedy for the user. The
//! command line has its kinds here, the node daemon in `node/error.rs`.

use std::error::Error as StdError;
use std::fmt;
use std::io;

use hyper::StatusCode;
use vdpa_mgmt::ErrorKind as MgmtErrorKind;

use crate::client::Refusal;
use crate::exit::{Code, Report};

/// An error of one of the kinds `K`. The text is a sentence that names the remedy.
#[derive(Debug)]
pub(crate) struct Failure<K>(Box<Inner<K>>);

#[derive(Debug)]
struct Inner<K> {
    kind: K,
    /// None if the source speaks for itself.
    message: Option<String>,
    hint: Option<&'static str>,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl<K> Failure<K> {
    /// An error without a source.
    pub(crate) fn new(kind: K, message: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            kind,
            message: Some(message.into()),
            hint: None,
            source: None,
        }))
    }

    /// A kind for an error of another type, which keeps its text.
    pub(crate) fn transparent(kind: K, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        let mut error = Self::new(kind, "").because(source);
        error.0.message = None;
        error
    }

    /// The same error with its source.
    pub(crate) fn because(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// The same error with a hint.
    pub(crate) fn hint(mut self, hint: &'static str) -> Self {
        self.0.hint = Some(hint);
        self
    }

    /// The remedy, where it is not in the text.
    pub(crate) fn remedy(&self) -> Option<&'static str> {
        self.0.hint
    }

    /// The case that code decides on.
    pub(crate) fn kind(&self) -> &K {
        &self.0.kind
    }
}

impl<K: Default> Failure<K> {
    /// An error of the default kind.
    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self::new(K::default(), message)
    }

    /// For `map_err`: an error of the default kind with its source.
    pub(crate) fn context<E>(message: impl Into<String>) -> impl FnOnce(E) -> Self
    where
        E: Into<Box<dyn StdError + Send + Sync>>,
    {
        move |source| Self::failed(message).because(source)
    }
}

impl<K> fmt::Display for Failure<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.0.message, &self.0.source) {
            (Some(message), _) => f.write_str(message),
            (None, Some(source)) => source.fmt(f),
            (None, None) => Ok(()),
        }
    }
}

impl<K: fmt::Debug> StdError for Failure<K> {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        let source = self.0.source.as_deref()?;
        if self.0.message.is_none() {
            return source.source();
        }
        Some(source)
    }
}

/// The cases that code decides on. The error's text has the rest.
#[derive(Debug, Default)]
pub(crate) enum ErrorKind {
    /// The command failed.
    #[default]
    Failed,
    /// The command line is wrong.
    WrongCommandLine,
    /// A file does not exist.
    Absent,
    /// The node daemon cannot be reached.
    NoDaemon,
    /// The node daemon did not answer in time.
    TimedOut,
    /// The node daemon refused the request.
    Refused(Refusal),
}

/// A failed command.
pub(crate) type Error = Failure<ErrorKind>;

impl Error {
    /// A wrong command line.
    pub(crate) fn wrong(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::WrongCommandLine, message)
    }

    /// Standard output cannot be written.
    pub(crate) fn output(source: io::Error) -> Self {
        Self::failed("cannot write the result").because(source)
    }

    /// A wrong command line, if the management library rejected an argument.
    pub(crate) fn blame_arguments(mut self) -> Self {
        let source = self.0.source.as_deref();
        let error = source.and_then(|source| source.downcast_ref::<vdpa_mgmt::Error>());
        if error.is_some_and(|error| {
            matches!(
                error.kind(),
                MgmtErrorKind::BadName | MgmtErrorKind::Invalid
            )
        }) {
            self.0.kind = ErrorKind::WrongCommandLine;
        }
        self
    }

    /// Whether a file does not exist.
    pub(crate) fn is_absent(&self) -> bool {
        matches!(self.0.kind, ErrorKind::Absent)
    }

    /// The daemon's refusal, if it refused the request.
    pub(crate) fn refusal(&self) -> Option<&Refusal> {
        match &self.0.kind {
            ErrorKind::Refused(refusal) => Some(refusal),
            _ => None,
        }
    }

    /// The exit code of the command.
    pub(crate) fn code(&self) -> Code {
        match &self.0.kind {
            ErrorKind::Failed | ErrorKind::Absent => Code::Failed,
            ErrorKind::WrongCommandLine => Code::WrongCommandLine,
            ErrorKind::NoDaemon => Code::NoDaemon,
            ErrorKind::TimedOut => Code::TimedOut,
            ErrorKind::Refused(refusal) => match refusal.status {
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Code::NoDaemon,
                _ if refusal.is_not_there() => Code::NotThere,
                _ => Code::Failed,
            },
        }
    }

    /// The error as it is printed.
    pub(crate) fn in_words(&self) -> Report {
        let report = match &self.0.kind {
            ErrorKind::Refused(refusal) => refusal.in_words(),
            _ => Report::of(self),
        };
        match self.0.hint {
            Some(hint) => report.hint(hint),
            None => report,
        }
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        let message = refusal.body.message.clone();
        Self::new(ErrorKind::Refused(refusal), message)
    }
}

macro_rules! failures {
    ($($source:ty),+ $(,)?) => {
        $(impl From<$source> for Error {
            fn from(source: $source) -> Self {
                Self::transparent(ErrorKind::Failed, source)
            }
        })+
    };
}

failures!(
    vdpa::Error,
    vdpa_mgmt::Error,
    vdpa_mgmt::nic::RemoveError,
    vmm::Error,
    vmm::api::ServerError,
    vmm::config::DescriptorError,
    vmm::machine::SnapshotError,
);

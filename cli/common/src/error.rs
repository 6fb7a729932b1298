//! The error type of the command line and its client: a kind for code, and a message with the
//! remedy for the user.

use std::error::Error as StdError;

use vdpa_mgmt::ErrorKind as MgmtErrorKind;
use vdpa_mgmt::nic::{MakeError, NicError, RemoveError, StoreError};

use crate::client::Refusal;
use crate::exit::{Code, Report};

/// The cases that code distinguishes. The error's text has the rest.
#[derive(Debug, Default)]
pub enum ErrorKind {
    /// The command failed.
    #[default]
    Failed,
    /// The command line is wrong.
    WrongCommandLine,
    /// A file does not exist.
    Absent,
    /// The named object does not exist.
    NotThere,
    /// The state of the named object does not allow the command.
    Conflict,
    /// A value in a file is invalid.
    InvalidInput,
    /// The node daemon is unreachable.
    NoDaemon,
    /// The node daemon did not answer in time.
    TimedOut,
    /// The node daemon refused the request.
    Refused(Refusal),
}

impl ErrorKind {
    /// The error code for programs.
    fn word(&self) -> &str {
        match self {
            Self::Failed => "failed",
            Self::WrongCommandLine => "wrong_command_line",
            Self::Absent => "absent",
            Self::NotThere => "not_there",
            Self::Conflict => "conflict",
            Self::InvalidInput => "invalid_input",
            Self::NoDaemon => "no_daemon",
            Self::TimedOut => "timed_out",
            Self::Refused(refusal) => &refusal.body.code,
        }
    }
}

vdpa::opaque_error! {
    /// A failed command or request. The text is a sentence that names the remedy.
    pub
}

impl Error {
    /// The kind, for decisions in code.
    #[must_use]
    pub fn kind(&self) -> &ErrorKind {
        &self.0.kind
    }

    /// An error of the default kind.
    #[must_use]
    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::default(), message)
    }

    /// For `map_err`: an error of the default kind with its source.
    pub fn context<E>(message: impl Into<String>) -> impl FnOnce(E) -> Self
    where
        E: Into<Box<dyn StdError + Send + Sync>>,
    {
        move |source| Self::failed(message).because(source)
    }

    /// A wrong command line.
    #[must_use]
    pub fn wrong(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::WrongCommandLine, message)
    }

    /// The named object does not exist.
    #[must_use]
    pub fn not_there(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::NotThere, message)
    }

    /// The state of the named object does not allow the command.
    #[must_use]
    pub fn conflict(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Conflict, message)
    }

    /// A value in a file is invalid.
    #[must_use]
    pub fn invalid_input(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidInput, message)
    }

    /// The result cannot be written.
    #[must_use]
    pub fn unwritten(source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::failed("cannot write the result").because(source)
    }

    /// Converts the error to that of a wrong command line, if the management library rejected an
    /// argument.
    #[must_use]
    pub fn blame_arguments(mut self) -> Self {
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
    #[must_use]
    pub fn is_absent(&self) -> bool {
        matches!(self.0.kind, ErrorKind::Absent)
    }

    /// The daemon's refusal, if it refused the request.
    #[must_use]
    pub fn refusal(&self) -> Option<&Refusal> {
        match &self.0.kind {
            ErrorKind::Refused(refusal) => Some(refusal),
            _ => None,
        }
    }

    /// Returns the same error. If it is a refusal with this code, its hint names the command that
    /// helps instead of the request.
    #[must_use]
    pub fn advise(mut self, code: &str, hint: impl Into<String>) -> Self {
        if let ErrorKind::Refused(refusal) = &mut self.0.kind
            && refusal.body.code == code
        {
            refusal.body.hint = Some(hint.into());
        }
        self
    }

    /// The exit code of the command.
    #[must_use]
    pub fn code(&self) -> Code {
        match &self.0.kind {
            ErrorKind::Failed | ErrorKind::Absent => Code::Failed,
            ErrorKind::WrongCommandLine => Code::WrongCommandLine,
            ErrorKind::NoDaemon => Code::NoDaemon,
            ErrorKind::TimedOut => Code::TimedOut,
            ErrorKind::NotThere => Code::NotThere,
            ErrorKind::Conflict => Code::Conflict,
            ErrorKind::InvalidInput => Code::InvalidInput,
            ErrorKind::Refused(refusal) => refusal.exit_code(),
        }
    }

    /// The error in printed form.
    #[must_use]
    pub fn in_words(&self) -> Report {
        let report = match &self.0.kind {
            ErrorKind::Refused(refusal) => refusal.in_words(),
            kind => Report::of(self).code(kind.word()),
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

vdpa::error_from! {
    vdpa::Error as error => ErrorKind::Failed,
    vdpa_mgmt::Error as error => ErrorKind::Failed,
    RemoveError as error => ErrorKind::Failed,
    vmm::Error as error => ErrorKind::Failed,
    vmm::api::ServerError as error => ErrorKind::Failed,
    vmm::config::DescriptorError as error => ErrorKind::Failed,
    vmm::machine::SnapshotError as error => ErrorKind::Failed,
    NicError as error => kind(&error),
    MakeError as error => kind(&error.source),
    StoreError as error => match error {
        StoreError::Name(_) => ErrorKind::WrongCommandLine,
        _ => ErrorKind::Failed,
    },
}

fn kind(error: &NicError) -> ErrorKind {
    match error {
        NicError::NoCount | NicError::NoOrigin(_) => ErrorKind::WrongCommandLine,
        NicError::Mgmt(error) if error.kind() == MgmtErrorKind::Invalid => {
            ErrorKind::WrongCommandLine
        }
        _ => ErrorKind::Failed,
    }
}

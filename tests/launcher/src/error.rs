//! The lab's error type.
//!
//! This module owns the wording: every message names the cause and, where the user can act, the
//! remedy. Deeper causes are only in `source()`; [`report`] prints the chain once.

use std::io;
use std::path::PathBuf;

/// The error and its causes in one line, outermost first, joined by `: `.
pub fn report(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}

/// The lab's result.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of the lab.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be read, written, renamed, …
    #[error("cannot {action} {}", path.display())]
    File {
        /// The action as a verb ("read", "create").
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A system call that names no file failed.
    #[error("cannot {action}")]
    System {
        /// The action as a verb with its object.
        action: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A program could not be started.
    #[error("cannot start {program}")]
    Start {
        /// The program's name or path.
        program: String,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// A program failed.
    #[error("{program} failed ({status}); its last lines:\n{tail}")]
    Program {
        /// The program's name or path.
        program: String,
        /// Exit status or signal, as text.
        status: String,
        /// The end of what it printed.
        tail: String,
    },
    /// Something that the lab needs is missing.
    #[error("{what}; remedy: {remedy}")]
    Missing {
        /// The missing thing.
        what: String,
        /// The remedy.
        remedy: String,
    },
    /// Invalid input: a recipe, a message, a table.
    #[error("{what} is not valid: {why}")]
    Invalid {
        /// Which input.
        what: String,
        /// The reason.
        why: String,
    },
    /// The lab host did not boot.
    #[error("the lab host did not boot ({why}); its console: {}", console.display())]
    Boot {
        /// Why the lab gave up the boot.
        why: String,
        /// The log of the serial console.
        console: PathBuf,
    },
    /// The connection to the lab host's agent broke.
    #[error("the lab host went away ({why}); its console: {}", console.display())]
    HostLost {
        /// The symptom.
        why: String,
        /// The log of the serial console.
        console: PathBuf,
    },
    /// A guest did not do what the test requested.
    #[error("the guest {what}; the end of its serial console:\n{console}")]
    Guest {
        /// The guest's failure ("did not boot in 3 attempts").
        what: String,
        /// The last lines of its console.
        console: String,
    },
    /// The request names something that does not exist or cannot be combined.
    #[error("{0}")]
    Usage(String),
}

impl Error {
    /// For `map_err`: wraps an I/O error with the action and the file.
    pub fn file(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File {
            action,
            path,
            source,
        }
    }

    /// For `map_err`: wraps an error of a system call that names no file.
    pub fn system<E: Into<io::Error>>(action: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::System {
            action,
            source: source.into(),
        }
    }

    /// Something missing and its remedy.
    pub fn missing(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Missing {
            what: what.into(),
            remedy: remedy.into(),
        }
    }

    /// Invalid input and the reason.
    pub fn invalid(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Invalid {
            what: what.into(),
            why: why.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_prints_each_cause_once() {
        let error = Error::File {
            action: "read",
            path: PathBuf::from("/x"),
            source: io::Error::other("gone"),
        };
        assert_eq!(report(&error), "cannot read /x: gone");
    }
}

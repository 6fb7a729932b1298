//! Why a request has no answer: the kernel refuses it, the answer is malformed, or none comes.

use std::fmt;
use std::io;

/// An answer that does not follow the protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {problem}")]
pub(crate) struct Malformed {
    what: String,
    problem: String,
}

impl Malformed {
    pub(crate) fn new(what: impl Into<String>, problem: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            problem: problem.into(),
        }
    }

    pub(crate) fn attribute(kind: u16, problem: impl Into<String>) -> Self {
        Self::new(format!("attribute {kind}"), problem)
    }
}

/// The kernel's refusal of a request, with its own explanation if it has one (extended
/// acknowledgement).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub(super) errno: i32,
    pub(super) explanation: Option<String>,
}

impl Refusal {
    /// The errno, positive.
    #[must_use]
    pub fn errno(&self) -> i32 {
        self.errno
    }

    /// The extended acknowledgement's text, such as `vdpa: device not found`.
    #[must_use]
    pub fn explanation(&self) -> Option<&str> {
        self.explanation.as_deref()
    }

    #[cfg(test)]
    pub(crate) fn of(errno: i32, explanation: Option<&str>) -> Self {
        Self {
            errno,
            explanation: explanation.map(str::to_owned),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let error = io::Error::from_raw_os_error(self.errno);
        match &self.explanation {
            Some(text) => write!(f, "the kernel reports \"{text}\": {error}"),
            None => write!(f, "the kernel reports: {error}"),
        }
    }
}

impl std::error::Error for Refusal {}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error("netlink socket")]
    Socket(#[source] io::Error),
    #[error("dump interrupted")]
    Interrupted,
    /// No answer came in time. `sent` is true if the kernel may still carry the request out.
    #[error("no answer in time")]
    Timeout { sent: bool },
}

//! Why a daemon did not do what it was asked, and how that is said.

use std::error::Error;
use std::io;
use std::time::Duration;

use bellhop_api::ErrorBody;
use hyper::StatusCode;

use super::{Answer, TlsError};
use crate::exit::{Code, Report};

/// As much of an answer that is not understood is shown, in bytes.
const SHOWN: usize = 200;

/// Why there is no good answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClientError {
    #[error("the node daemon cannot be reached at {address}")]
    Connect { address: String, source: io::Error },
    #[error("the node daemon at {address} did not answer within {} s", time.as_secs())]
    TimeLimit { address: String, time: Duration },
    #[error("the connection to the node daemon broke")]
    Broken(#[source] Box<dyn Error + Send + Sync>),
    #[error("the node daemon answers with more than {0} bytes")]
    TooLarge(usize),
    #[error("the request cannot be put into words")]
    Body(#[source] serde_json::Error),
    #[error(
        "the node daemon's answer is not understood; is it of another version? `bellhop report` tells"
    )]
    Answer(#[source] serde_json::Error),
    #[error("{}", .0.body.message)]
    Refused(Box<Refusal>),
    #[error("cannot talk HTTP to the node daemon")]
    Start(#[source] io::Error),
    #[error(transparent)]
    Tls(#[from] TlsError),
}

impl From<Refusal> for ClientError {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(Box::new(refusal))
    }
}

/// The daemon's own words about what it refuses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) status: StatusCode,
    pub(crate) body: ErrorBody,
}

impl Refusal {
    pub(super) fn of(answer: &Answer) -> Self {
        let status = answer.status;
        let body = serde_json::from_slice(&answer.body);
        // Something between us and it, or nothing of ours at all.
        let body = body.unwrap_or_else(|_| {
            let shown = answer.body.get(..SHOWN).unwrap_or(&answer.body);
            let text = String::from_utf8_lossy(shown).trim().to_owned();
            ErrorBody {
                code: String::new(),
                message: format!("the node daemon answers {status}"),
                causes: Some(text)
                    .filter(|text| !text.is_empty())
                    .into_iter()
                    .collect(),
                hint: None,
                request_id: String::new(),
            }
        });
        Self { status, body }
    }

    /// Why, with its causes.
    pub(crate) fn reason(&self) -> String {
        let mut reason = self.body.message.clone();
        for cause in &self.body.causes {
            reason.push_str(": ");
            reason.push_str(cause);
        }
        reason
    }

    /// What helps, in its words.
    pub(crate) fn hint(&self) -> Option<&str> {
        self.body.hint.as_deref()
    }

    /// Whether the named object does not exist. A path that a daemon of another version does not have
    /// is another case.
    pub(crate) fn is_not_there(&self) -> bool {
        self.status == StatusCode::NOT_FOUND && self.body.code != "no_such_path"
    }
}

impl ClientError {
    /// Says it on standard error; what the command ends with.
    pub(crate) fn report(&self) -> Code {
        self.in_words().print();
        self.code()
    }

    /// What is said about it.
    pub(crate) fn in_words(&self) -> Report {
        match self {
            Self::Refused(refusal) => {
                let body = &refusal.body;
                let causes = body.causes.iter().cloned();
                let messages = std::iter::once(body.message.clone()).chain(causes);
                let mut report = Report::from_messages(messages);
                if let Some(hint) = &body.hint {
                    report = report.hint(hint);
                }
                if !body.request_id.is_empty() {
                    report = report.request_id(&body.request_id);
                }
                report
            }
            Self::Connect { source, .. } => {
                let report = Report::of(self);
                match source.kind() {
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => report.hint(
                        "start it with `systemctl start bellhop` or `bellhop serve`, or say where it is with --node",
                    ),
                    io::ErrorKind::PermissionDenied => report.hint(
                        "run this as root, or as a member of the group that `bellhop serve --group` gives the socket to",
                    ),
                    _ => report,
                }
            }
            _ => Report::of(self),
        }
    }

    pub(super) fn code(&self) -> Code {
        match self {
            Self::Connect { .. } => Code::NoDaemon,
            Self::TimeLimit { .. } => Code::TimedOut,
            Self::Tls(TlsError::Missing(..)) => Code::WrongCommandLine,
            Self::Refused(refusal) => match refusal.status {
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Code::NoDaemon,
                _ if refusal.is_not_there() => Code::NotThere,
                _ => Code::Failed,
            },
            _ => Code::Failed,
        }
    }
}

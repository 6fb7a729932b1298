//! The answer of a daemon that refuses a request.

use bellhop_api::ErrorBody;
use hyper::StatusCode;

use crate::exit::Report;

/// As much of an answer that is not understood is shown, in bytes.
const SHOWN: usize = 200;

/// A daemon's refusal, in its own words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The status of the answer.
    pub status: StatusCode,
    /// What the daemon reports about it.
    pub body: ErrorBody,
}

impl Refusal {
    pub(super) fn of(status: StatusCode, answer: &[u8]) -> Self {
        let body = serde_json::from_slice(answer);
        // Something between us and it, or nothing of ours at all.
        let body = body.unwrap_or_else(|_| {
            let shown = answer.get(..SHOWN).unwrap_or(answer);
            let text = String::from_utf8_lossy(shown).trim().to_owned();
            ErrorBody {
                message: format!("the node daemon answers {status}"),
                causes: Some(text)
                    .filter(|text| !text.is_empty())
                    .into_iter()
                    .collect(),
                ..ErrorBody::default()
            }
        });
        Self { status, body }
    }

    /// Why, with its causes.
    #[must_use]
    pub fn reason(&self) -> String {
        let mut reason = self.body.message.clone();
        for cause in &self.body.causes {
            reason.push_str(": ");
            reason.push_str(cause);
        }
        reason
    }

    /// What helps, in its words.
    #[must_use]
    pub fn hint(&self) -> Option<&str> {
        self.body.hint.as_deref()
    }

    /// Whether the named object does not exist. A path that a daemon of another version does not
    /// have is another case.
    #[must_use]
    pub fn is_not_there(&self) -> bool {
        self.status == StatusCode::NOT_FOUND && self.body.code != "no_such_path"
    }

    /// The refusal as it is printed.
    pub(crate) fn in_words(&self) -> Report {
        let body = &self.body;
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
}

//! The answer of a daemon that refuses a request.

use bellhop_api::ErrorBody;
use hyper::StatusCode;

use crate::exit::{Code, Report};

/// The maximum size of the quoted part of an answer that cannot be parsed, in bytes.
const SHOWN: usize = 200;

/// The text for an answer that cannot be decoded.
pub const STRANGE: &str =
    "cannot decode the node daemon's answer; `bellhop version` shows whether its version differs";

/// The text for a connection that ended early.
pub(super) const BROKEN: &str = "the connection to the node daemon broke";

/// A daemon's refusal, in its own words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The status of the answer.
    pub status: StatusCode,
    /// The daemon's error.
    pub body: Box<ErrorBody>,
}

impl Refusal {
    pub(super) fn of(status: StatusCode, answer: &[u8]) -> Self {
        let body = serde_json::from_slice(answer);
        // The answer comes from a proxy, or from another program.
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
        Self {
            status,
            body: Box::new(body),
        }
    }

    /// The reason, with its causes.
    #[must_use]
    pub fn reason(&self) -> String {
        let mut reason = self.body.message.clone();
        for cause in &self.body.causes {
            reason.push_str(": ");
            reason.push_str(cause);
        }
        reason
    }

    /// The daemon's hint.
    #[must_use]
    pub fn hint(&self) -> Option<&str> {
        self.body.hint.as_deref()
    }

    /// Whether the named object does not exist. A path that a daemon of another version lacks is a
    /// different case.
    #[must_use]
    pub fn is_not_there(&self) -> bool {
        match self.status {
            StatusCode::NOT_FOUND => self.body.code != "no_such_path",
            // The precondition was that it exists.
            StatusCode::PRECONDITION_FAILED => self.body.code == "no_such_vm",
            _ => false,
        }
    }

    /// Whether the request was only to create a VM, and a VM of its name exists.
    #[must_use]
    pub fn is_there_already(&self) -> bool {
        self.body.code == "vm_exists"
    }

    /// The exit code of the command: the one table from statuses to codes.
    pub(crate) fn exit_code(&self) -> Code {
        match self.status {
            _ if self.is_not_there() => Code::NotThere,
            // A graceful stop whose grace period expired.
            StatusCode::CONFLICT if self.body.code == "still_runs" => Code::TimedOut,
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Code::NotAllowed,
            StatusCode::REQUEST_TIMEOUT | StatusCode::GATEWAY_TIMEOUT => Code::TimedOut,
            StatusCode::CONFLICT
            | StatusCode::PRECONDITION_FAILED
            | StatusCode::PRECONDITION_REQUIRED => Code::Conflict,
            StatusCode::BAD_REQUEST
            | StatusCode::PAYLOAD_TOO_LARGE
            | StatusCode::UNSUPPORTED_MEDIA_TYPE
            | StatusCode::UNPROCESSABLE_ENTITY => Code::InvalidInput,
            _ => Code::Failed,
        }
    }

    /// The hint in the form of a command. The API's hints name requests, for its other clients.
    fn hint_for_users(&self) -> Option<&str> {
        let hint = self.hint()?;
        if !hint.contains("/v1/") {
            return Some(hint);
        }
        match self.body.code.as_str() {
            "no_such_vm" => Some("`bellhop vm list` lists them"),
            "no_such_operation" => Some("`bellhop operation list` lists them"),
            "no_such_path" | "method_not_allowed" => {
                Some("the daemon may have another version: `bellhop version` shows both")
            }
            "invalid_body" => Some("`bellhop vm create --help` lists the keys and their values"),
            "console_in_use" => {
                Some("--read-only shows the output; --take disconnects the other client")
            }
            "arriving" => Some("`bellhop vm migration cancel NAME` cancels it"),
            "vm_runs" => Some("`bellhop vm stop NAME` stops it"),
            "part_of_nic" => Some(
                "`bellhop nic delete NAME` undoes all steps; for a VM, use `bellhop vm nic remove \
                 VM ID`",
            ),
            _ => None,
        }
    }

    /// The refusal in printed form.
    pub(crate) fn in_words(&self) -> Report {
        let body = &self.body;
        let causes = body.causes.iter().cloned();
        let messages = std::iter::once(body.message.clone()).chain(causes);
        let mut report = Report::from_messages(messages);
        if !body.code.is_empty() {
            report = report.code(&body.code);
        }
        if let Some(hint) = self.hint_for_users() {
            report = report.hint(hint);
        }
        if !body.request_id.is_empty() {
            report = report.request_id(&body.request_id);
        }
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hint(code: &str, hint: &str) -> Option<String> {
        let body = serde_json::json!({"code": code, "message": "no", "hint": hint});
        let refusal = Refusal::of(StatusCode::CONFLICT, body.to_string().as_bytes());
        refusal.hint_for_users().map(str::to_owned)
    }

    #[test]
    fn requests_in_hints_become_commands() {
        let listed = hint("no_such_vm", "GET /v1/vms lists them").unwrap();
        assert_eq!(listed, "`bellhop vm list` lists them");
        let schema = hint("invalid_body", "GET /v1/openapi.json describes all paths");
        assert!(schema.unwrap().contains("vm create --help"));
        // A hint without a request suits every client.
        assert_eq!(hint("busy", "try again later").unwrap(), "try again later");
        assert_eq!(hint("new_code", "PUT /v1/new does it"), None);
    }
}

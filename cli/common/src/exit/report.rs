//! The printed form of an error: one line for the error, one for each cause, one for the remedy.
//!
//! ```text
//! error: cannot open the socket
//!   caused by: Permission denied (os error 13)
//! hint: run it as root
//! ```
//!
//! A command whose result is JSON prints errors as one JSON object with the same members.
//!
//! Messages may quote a file, a device or another host, so control characters do not reach a
//! terminal.

use std::error::Error;
use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use clap::builder::styling::Style;
use serde_json::{Value, json};

use crate::colour;
use crate::text::printable;

/// The maximum depth of a chain of causes; real chains have a handful of links.
const CAUSES_MAX: usize = 32;

/// Whether errors are JSON objects.
static JSON: AtomicBool = AtomicBool::new(false);

/// The printed parts of an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    code: String,
    messages: Vec<String>,
    hint: Option<String>,
    request_id: Option<String>,
}

impl Report {
    /// An error, its causes, and the remedy if errors of this kind have a known one.
    #[must_use]
    pub fn of(error: &(dyn Error + 'static)) -> Self {
        let mut messages = Vec::new();
        let mut denied = false;
        let mut next = Some(error);
        while let (Some(error), true) = (next, messages.len() < CAUSES_MAX) {
            messages.push(error.to_string());
            denied |= is_denied(error);
            next = error.source();
        }
        let report = Self::from_messages(messages);
        // Some messages contain it already.
        let said = |message: &String| message.contains("root") || message.contains("CAP_");
        let hint = denied && !rustix::process::geteuid().is_root();
        if hint && !report.messages.iter().any(said) {
            report.hint("run it as root, or as a user with these permissions")
        } else {
            report
        }
    }

    /// A message and its causes, outermost first, as another program has composed them.
    #[must_use]
    pub fn from_messages(messages: impl IntoIterator<Item = String>) -> Self {
        let mut kept: Vec<String> = Vec::new();
        for message in messages.into_iter().take(CAUSES_MAX) {
            // A cause that a message already contains, as whole words at its end, is not repeated.
            let said = |before: &String| {
                before
                    .strip_suffix(message.as_str())
                    .is_some_and(|rest| !rest.ends_with(char::is_alphanumeric))
            };
            if !message.is_empty() && !kept.iter().any(said) {
                kept.push(message);
            }
        }
        Self {
            code: "failed".to_owned(),
            messages: kept,
            hint: None,
            request_id: None,
        }
    }

    /// Adds an error code for programs, as in the API's errors.
    #[must_use]
    pub fn code(mut self, code: impl Into<String>) -> Self {
        self.code = code.into();
        self
    }

    /// Adds the remedy.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Adds the ID of the request, which also is in the daemon's log.
    #[must_use]
    pub(crate) fn request_id(mut self, id: impl Into<String>) -> Self {
        self.request_id = Some(id.into());
        self
    }

    /// From now on this process prints errors as JSON objects.
    pub fn use_json() {
        JSON.store(true, Ordering::Relaxed);
    }

    /// Prints the error on standard error.
    pub fn print(&self) {
        let stderr = io::stderr().lock();
        self.print_to(stderr);
    }

    fn print_to(&self, mut stream: impl Write + IsTerminal) {
        let text = if JSON.load(Ordering::Relaxed) {
            format!("{}\n", self.json())
        } else {
            self.text(colour::wanted(&stream))
        };
        // There is no other place to report a failure.
        let _ = stream.write_all(text.as_bytes());
    }

    fn json(&self) -> Value {
        let (message, causes) = self.messages.split_first().unzip();
        let mut json = json!({
            "code": self.code,
            "message": message.map_or("", String::as_str),
            "causes": causes.unwrap_or_default(),
        });
        for (key, value) in [("hint", &self.hint), ("request_id", &self.request_id)] {
            if let Some(value) = value {
                json[key] = value.as_str().into();
            }
        }
        json
    }

    /// The lines, each with its line break.
    fn text(&self, colours: bool) -> String {
        let word = |style: Style, word: &str| {
            if colours {
                format!("{style}{word}{style:#}")
            } else {
                word.to_owned()
            }
        };
        let mut messages = self.messages.iter();
        let first = messages.next().map(String::as_str).unwrap_or_default();
        let mut text = format!("{} {}\n", word(colour::ERROR, "error:"), lines(first));
        for cause in messages {
            text.push_str(&format!("  caused by: {}\n", lines(cause)));
        }
        if let Some(id) = &self.request_id {
            text.push_str(&format!("  request: {}\n", lines(id)));
        }
        if let Some(hint) = &self.hint {
            text.push_str(&format!(
                "{} {}\n",
                word(colour::HINT, "hint:"),
                lines(hint)
            ));
        }
        text
    }
}

/// The message with its line breaks (a parser quotes the line that it cannot read), without other
/// control characters.
fn lines(message: &str) -> String {
    let lines: Vec<String> = message.trim_end().lines().map(printable).collect();
    lines.join("\n")
}

fn is_denied(error: &(dyn Error + 'static)) -> bool {
    let by_io = error
        .downcast_ref::<io::Error>()
        .is_some_and(|error| error.kind() == io::ErrorKind::PermissionDenied);
    let by_errno = error
        .downcast_ref::<rustix::io::Errno>()
        .is_some_and(|&errno| {
            errno == rustix::io::Errno::PERM || errno == rustix::io::Errno::ACCESS
        });
    by_io || by_errno
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{self, ErrorKind};

    fn chain(texts: &[&'static str]) -> Option<error::Error> {
        let (text, rest) = texts.split_first()?;
        let error = error::Error::new(ErrorKind::Failed, *text);
        Some(match chain(rest) {
            Some(source) => error.because(source),
            None => error,
        })
    }

    fn text_of(texts: &[&'static str]) -> String {
        Report::of(&chain(texts).unwrap()).text(false)
    }

    #[test]
    fn each_cause_is_printed_once() {
        assert_eq!(
            text_of(&["cannot start", "no such file", "no such file"]),
            "error: cannot start\n  caused by: no such file\n"
        );
        assert_eq!(
            text_of(&["cannot start: no such file", "no such file"]),
            "error: cannot start: no such file\n"
        );
        // Not a repetition, although the ends are alike.
        assert_eq!(
            text_of(&["queue12", "2"]),
            "error: queue12\n  caused by: 2\n"
        );
        assert_eq!(text_of(&["a", "", "b"]), "error: a\n  caused by: b\n");
    }

    #[test]
    fn a_chain_without_an_end_is_cut() {
        let report = Report::from_messages((0..).map(|number| format!("cause {number}.")));
        assert_eq!(report.messages.len(), CAUSES_MAX);
    }

    #[test]
    fn hints_and_requests_come_last_and_colours_where_they_are_wanted() {
        let report = Report::from_messages(["no".to_owned(), "because\x1b[2J".to_owned()])
            .hint("do it\nso")
            .request_id("4f");
        assert_eq!(
            report.text(false),
            "error: no\n  caused by: because?[2J\n  request: 4f\nhint: do it\nso\n"
        );
        let coloured = report.text(true);
        assert!(
            coloured.starts_with("\x1b[1m\x1b[31merror:\x1b[0m no\n"),
            "{coloured:?}"
        );
        assert!(coloured.contains("hint:\x1b[0m do it"));
        assert!(!coloured.contains("[2J\x1b") && coloured.contains("?[2J"));
    }

    #[test]
    fn programs_get_an_object() {
        let report = Report::from_messages(["no".to_owned(), "because\x1b".to_owned()])
            .code("busy")
            .hint("wait");
        let expected = r#"{"causes":["because\u001b"],"code":"busy","hint":"wait","message":"no"}"#;
        assert_eq!(report.json().to_string(), expected);
        let empty = Report::from_messages([]).json();
        assert_eq!(empty["code"], "failed");
        assert_eq!(empty["causes"], json!([]));
    }

    #[test]
    fn rights_that_are_missing_have_a_hint_unless_the_message_has_it() {
        let denied = || io::Error::from(io::ErrorKind::PermissionDenied);
        assert!(is_denied(&denied()));
        assert!(is_denied(&rustix::io::Errno::PERM));
        assert!(!is_denied(&rustix::io::Errno::NOENT));
        let is_root = rustix::process::geteuid().is_root();
        assert_eq!(Report::of(&denied()).hint.is_none(), is_root);
    }
}

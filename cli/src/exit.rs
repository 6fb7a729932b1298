//! Exit codes, and how an error is shown.
//!
//! Owns the one table of codes ([`TABLE`]) and the layout of an error: what went wrong, its causes, each
//! once, and what can be done. Must not know what was asked for.

mod report;

use std::process::ExitCode;

use hyper::StatusCode;

pub(crate) use report::Report;

use crate::error::{Error, ErrorKind};

/// What each exit code says, as `--help` and the manual show it: the code, and its meaning on one line or more.
const TABLE: [(&str, &str); 10] = [
    (
        "0",
        "done: the guest powered off, the console was left with Ctrl-A X, the API stopped it;\n\
         probe: nothing failed; doctor: nothing is missing; vm compat, vm migrate --dry-run:\n\
         the VM can move",
    ),
    (
        "1",
        "an error, said on standard error with its causes; probe: something failed;\n\
         doctor: something needed is missing; vm compat, vm migrate --dry-run: the VM cannot move",
    ),
    ("2", "the command line is wrong"),
    (
        "3",
        "the guest crashed (triple fault, or KVM could not go on)",
    ),
    (
        "4",
        "the node daemon cannot be reached, or does not know who asks",
    ),
    (
        "5",
        "there is no VM or NIC of that name, or no migration of it",
    ),
    ("6", "not done within the time limit"),
    (
        "7",
        "the guest runs elsewhere: it was sent to another process",
    ),
    (
        "8",
        "the guest was being sent to another process, and nobody knows whether it runs\n\
         there or nowhere: look there before it is started again",
    ),
    (
        "128+N",
        "stopped by signal N: 130 for SIGINT, 143 for SIGTERM",
    ),
];

/// The table of exit codes, for `--help`.
pub(crate) fn help() -> String {
    let mut text = "Exit codes:".to_owned();
    for (code, meaning) in TABLE {
        for (number, line) in meaning.lines().enumerate() {
            let code = if number == 0 { code } else { "" };
            text.push_str(&format!("\n  {code:<7}{line}"));
        }
    }
    text
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Code {
    /// All went as asked.
    Success,
    /// An error was reported.
    Failed,
    /// The command line is wrong, and that was reported.
    WrongCommandLine,
    /// The guest crashed.
    GuestCrashed,
    /// No daemon, or none that lets us in; reported.
    NoDaemon,
    /// What was named is not there; reported.
    NotThere,
    /// Not done in time; reported.
    TimedOut,
    /// The guest runs elsewhere: it was sent to another process.
    Moved,
    /// The guest runs where it was sent, or nowhere.
    Unsettled,
    /// A signal asked us to stop.
    Signal(u8),
}

impl Code {
    fn number(self) -> u8 {
        match self {
            Self::Success => 0,
            Self::Failed => 1,
            Self::WrongCommandLine => 2,
            Self::GuestCrashed => 3,
            Self::NoDaemon => 4,
            Self::NotThere => 5,
            Self::TimedOut => 6,
            Self::Moved => 7,
            Self::Unsettled => 8,
            Self::Signal(number) => number.saturating_add(128),
        }
    }
}

impl From<&Error> for Code {
    fn from(error: &Error) -> Self {
        match error.kind() {
            ErrorKind::Failed | ErrorKind::Absent => Self::Failed,
            ErrorKind::WrongCommandLine => Self::WrongCommandLine,
            ErrorKind::NoDaemon => Self::NoDaemon,
            ErrorKind::TimedOut => Self::TimedOut,
            ErrorKind::Refused(refusal) => match refusal.status {
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Self::NoDaemon,
                _ if refusal.is_not_there() => Self::NotThere,
                _ => Self::Failed,
            },
        }
    }
}

impl From<Code> for ExitCode {
    fn from(code: Code) -> Self {
        Self::from(code.number())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::made_up::MadeUp;

    #[test]
    fn every_code_is_in_the_table() {
        let codes = [
            Code::Success,
            Code::Failed,
            Code::WrongCommandLine,
            Code::GuestCrashed,
            Code::NoDaemon,
            Code::NotThere,
            Code::TimedOut,
            Code::Moved,
            Code::Unsettled,
        ];
        for (code, (name, _)) in codes.into_iter().zip(TABLE) {
            assert_eq!(code.number().to_string(), name);
        }
        assert_eq!(TABLE.len(), codes.len() + 1);
        assert_eq!(Code::Signal(15).number(), 143);
        assert_eq!(Code::Signal(255).number(), 255);
        assert!(help().contains("\n  128+N  stopped by signal N"));
        assert!(help().contains("\n         doctor: something needed"));
    }

    fn refused(status: u16, body: &Value) -> Error {
        let made_up = MadeUp::default().answer(status, body);
        made_up.node().get::<Value>("/v1/vms/a").unwrap_err()
    }

    #[test]
    fn a_refusal_is_told_in_the_daemons_words() {
        let error = refused(
            409,
            &json!({"code": "wrong_state", "message": "the VM runs", "causes": ["because", "it does"],
                    "hint": "stop it", "request_id": "4f", "new": 1}),
        );
        let messages = ["the VM runs", "because", "it does"].map(str::to_owned);
        let wanted = Report::from_messages(messages)
            .hint("stop it")
            .request_id("4f");
        assert_eq!(Report::from(&error), wanted);
        assert_eq!(Code::from(&error), Code::Failed);
        assert_eq!(error.to_string(), "the VM runs");
    }

    #[test]
    fn what_is_no_refusal_of_ours_is_shown_as_far_as_it_fits() {
        let page = format!("<html>{}", "x".repeat(10_000));
        let error = refused(502, &json!(page));
        let said = format!("{:?}", Report::from(&error));
        assert!(said.contains("502 Bad Gateway"), "{said}");
        assert!(said.contains("<html>xxx") && said.len() < 600, "{said}");
        let error = refused(500, &Value::Null);
        assert!(error.refusal().unwrap().body.causes.is_empty());
    }

    #[test]
    fn the_exit_code_tells_why() {
        let body = |code: &str| json!({"code": code, "message": "no"});
        let code = |error: Error| Code::from(&error);
        assert_eq!(code(refused(404, &body("no_such_vm"))), Code::NotThere);
        assert_eq!(code(refused(404, &body("no_such_path"))), Code::Failed);
        assert_eq!(code(refused(401, &body("who"))), Code::NoDaemon);
        assert_eq!(code(refused(403, &body("role"))), Code::NoDaemon);
        assert_eq!(code(refused(500, &body("internal"))), Code::Failed);
        let without_answer = |kind| code(Error::new(kind, "no"));
        assert_eq!(without_answer(ErrorKind::TimedOut), Code::TimedOut);
        assert_eq!(without_answer(ErrorKind::NoDaemon), Code::NoDaemon);
    }

    #[test]
    fn the_remedy_of_an_error_is_its_hint() {
        let error = Error::new(ErrorKind::NoDaemon, "no").hint("start one");
        let wanted = Report::from_messages(["no".to_owned()]).hint("start one");
        assert_eq!(Report::from(&error), wanted);
    }
}

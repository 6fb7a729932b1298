//! Exit codes, and the printed form of errors.
//!
//! Owns the one table of codes (`TABLE`) and the layout of an error: the failure, its causes, each
//! once, and the remedy. Must not know the command.

mod report;

use std::process::ExitCode;

pub use report::Report;

/// The meaning of each exit code for `--help` and the manual: the code, and one or more lines.
const TABLE: [(&str, &str); 13] = [
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
        "the node daemon cannot be reached, or the connection broke",
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
        "9",
        "not allowed: the node daemon does not know the client, or its role is too low",
    ),
    (
        "10",
        "conflict: it exists already or was changed, or its state does not allow the command",
    ),
    (
        "11",
        "invalid input: a value in a file, or one that the node daemon rejects",
    ),
    (
        "128+N",
        "stopped by signal N: 130 for SIGINT, 143 for SIGTERM",
    ),
];

/// The table of exit codes, for `--help`.
#[must_use]
pub fn help() -> String {
    let mut text = "Exit codes:".to_owned();
    for (code, meaning) in TABLE {
        for (number, line) in meaning.lines().enumerate() {
            let code = if number == 0 { code } else { "" };
            text.push_str(&format!("\n  {code:<7}{line}"));
        }
    }
    text
}

/// The result of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    /// The command succeeded.
    Success,
    /// An error was reported.
    Failed,
    /// The command line is wrong, and that was reported.
    WrongCommandLine,
    /// The guest crashed.
    GuestCrashed,
    /// The daemon is unreachable; reported.
    NoDaemon,
    /// The named object does not exist; reported.
    NotThere,
    /// A timeout expired; reported.
    TimedOut,
    /// The guest runs elsewhere: it was sent to another process.
    Moved,
    /// The guest runs where it was sent, or nowhere.
    Unsettled,
    /// The daemon does not permit this client to do it; reported.
    NotAllowed,
    /// The state of the named object does not allow it; reported.
    Conflict,
    /// A value in a file or in a request is invalid; reported.
    InvalidInput,
    /// A signal ended the command.
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
            Self::NotAllowed => 9,
            Self::Conflict => 10,
            Self::InvalidInput => 11,
            Self::Signal(number) => number.saturating_add(128),
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
    use super::*;

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
            Code::NotAllowed,
            Code::Conflict,
            Code::InvalidInput,
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
}

//! Exit codes, and the printed form of errors.
//!
//! Owns the one table of codes (`TABLE`) and the layout of an error: the failure, its causes, each
//! once, and the remedy.

mod report;

use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitCode, ExitStatus};

pub use report::Report;

/// The meaning of each exit code for `--help` and the manual: the code, and one or more lines.
const TABLE: [(&str, &str); 13] = [
    (
        "0",
        "success: the guest powered off, Ctrl-A X left the console, the API stopped the VM;\n\
         probe: no test failed; doctor: no required part is missing; vm compat,\n\
         vm migrate --dry-run: the VM can migrate",
    ),
    (
        "1",
        "failure, with its causes on standard error; probe: a test failed;\n\
         doctor: a required part is missing; vm compat, vm migrate --dry-run: the VM cannot\n\
         migrate",
    ),
    ("2", "the command line is wrong"),
    (
        "3",
        "the guest crashed (triple fault, or KVM cannot continue)",
    ),
    ("4", "cannot reach the node daemon, or the connection broke"),
    ("5", "no VM or NIC has that name, or it has no migration"),
    ("6", "the time limit expired"),
    (
        "7",
        "the guest runs elsewhere: it migrated to another process",
    ),
    (
        "8",
        "the migration's outcome is unknown: the guest runs at the destination or nowhere.\n\
         Check there before you start it again",
    ),
    (
        "9",
        "not permitted: the node daemon does not know the client, or its role is too low",
    ),
    (
        "10",
        "conflict: the object exists already or was changed, or its state forbids the command",
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
    /// The guest runs elsewhere: it migrated to another process.
    Moved,
    /// The guest runs where it was sent, or nowhere.
    Indeterminate,
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
    /// All but the signals.
    const REPORTED: [Self; 12] = [
        Self::Success,
        Self::Failed,
        Self::WrongCommandLine,
        Self::GuestCrashed,
        Self::NoDaemon,
        Self::NotThere,
        Self::TimedOut,
        Self::Moved,
        Self::Indeterminate,
        Self::NotAllowed,
        Self::Conflict,
        Self::InvalidInput,
    ];

    /// The code with which another process of this program ended.
    #[must_use]
    pub fn of(status: ExitStatus) -> Self {
        let signal = status.signal().map(|signal| signal.saturating_add(128));
        let ended = signal.or(status.code());
        let Some(number) = ended.and_then(|number| u8::try_from(number).ok()) else {
            return Self::Failed;
        };
        let known = Self::REPORTED
            .into_iter()
            .find(|code| code.number() == number);
        known
            .or(number.checked_sub(128).map(Self::Signal))
            .unwrap_or(Self::Failed)
    }

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
            Self::Indeterminate => 8,
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
        let codes = Code::REPORTED;
        for (code, (name, _)) in codes.into_iter().zip(TABLE) {
            assert_eq!(code.number().to_string(), name);
        }
        assert_eq!(TABLE.len(), codes.len() + 1);
        assert_eq!(Code::Signal(15).number(), 143);
        // As wait(2) reports them: the code in the second byte, a signal in the first.
        for (raw, code) in [
            (10 << 8, Code::Conflict),
            (143 << 8, Code::Signal(15)),
            (9, Code::Signal(9)),
            (50 << 8, Code::Failed),
        ] {
            assert_eq!(Code::of(ExitStatus::from_raw(raw)), code);
        }
        assert_eq!(Code::Signal(255).number(), 255);
        assert!(help().contains("\n  128+N  stopped by signal N"));
        assert!(help().contains("\n         doctor: a required part"));
    }
}

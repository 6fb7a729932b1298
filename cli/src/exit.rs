//! Exit codes, and how an error is shown.

use std::error::Error;
use std::process::ExitCode;

/// The table of exit codes, for `--help`.
pub(crate) const HELP: &str = "\
Exit codes:
  0        done: the guest powered off, the console was left with Ctrl-A X; probe: nothing failed;
           doctor: nothing is missing
  1        an error, said on standard error with its causes; probe: something failed;
           doctor: something needed is missing
  2        the command line is wrong
  3        the guest crashed (triple fault, or KVM could not go on)
  128+N    stopped by signal N: 130 for SIGINT, 143 for SIGTERM";

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
    /// A signal asked us to stop.
    Signal(u8),
}

impl From<Code> for ExitCode {
    fn from(code: Code) -> Self {
        match code {
            Code::Success => Self::SUCCESS,
            Code::Failed => Self::from(1),
            Code::WrongCommandLine => Self::from(2),
            Code::GuestCrashed => Self::from(3),
            Code::Signal(number) => Self::from(number.saturating_add(128)),
        }
    }
}

/// Prints an error and its causes, each once, on standard error.
pub(crate) fn report(error: &dyn Error) {
    eprintln!("error: {error}");
    let mut cause = error.source();
    while let Some(error) = cause {
        eprintln!("  caused by: {error}");
        cause = error.source();
    }
}

/// Ends a command whose error is about its command line as clap ends one: the error is said here, and the
/// exit code is 2. All other outcomes stay as they are.
pub(crate) fn wrong_command_line<E: Error>(
    outcome: Result<Code, E>,
    is_it: impl FnOnce(&E) -> bool,
) -> Result<Code, E> {
    match outcome {
        Err(error) if is_it(&error) => {
            report(&error);
            Ok(Code::WrongCommandLine)
        }
        outcome => outcome,
    }
}

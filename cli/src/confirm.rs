//! The confirmation before a command ends or deletes something.
//!
//! The question goes to standard error and the answer comes from standard input, only if both are
//! terminals. A script never waits for an answer.

use std::fmt::Display;
use std::io::{self, BufRead as _, BufReader, IsTerminal, Read, Write};

use bellhop_common::error::Error;
use bellhop_common::text::printable;

/// The longest answer, in bytes.
const ANSWER_MAX: u64 = 1024;

/// Whether a command asks before it ends or deletes something.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct Confirmation {
    /// Do not ask for confirmation; without a terminal the command never asks
    #[arg(short, long)]
    yes: bool,
}

impl Confirmation {
    /// Asks the user on a terminal.
    ///
    /// # Errors
    /// The answer is not yes.
    pub(crate) fn ask(self, question: impl Display) -> Result<(), Error> {
        self.ask_on(io::stdin(), io::stderr(), question)
    }

    fn ask_on(
        self,
        input: impl Read + IsTerminal,
        mut output: impl Write + IsTerminal,
        question: impl Display,
    ) -> Result<(), Error> {
        if self.yes || !input.is_terminal() || !output.is_terminal() {
            return Ok(());
        }
        let question = printable(&question.to_string());
        let mut answer = String::new();
        write!(output, "{question} [y/N] ")
            .and_then(|()| output.flush())
            .and_then(|()| BufReader::new(input.take(ANSWER_MAX)).read_line(&mut answer))
            .map_err(Error::context("cannot ask for confirmation"))?;
        match answer.trim().to_lowercase().as_str() {
            "y" | "yes" => Ok(()),
            _ => Err(Error::failed("not confirmed: nothing was changed")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::fs::{Mode, OFlags};
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};

    use super::*;

    /// The user's end of a terminal, and the command's.
    fn terminal() -> (File, File) {
        let user = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&user).unwrap();
        unlockpt(&user).unwrap();
        let name = ptsname(&user, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY;
        let command = rustix::fs::open(&*name, flags, Mode::empty()).unwrap();
        // The kernel echoes in another thread: an echo may come within the question.
        let mut modes = tcgetattr(&command).unwrap();
        modes.local_modes.remove(LocalModes::ECHO);
        tcsetattr(&command, OptionalActions::Now, &modes).unwrap();
        (user.into(), command.into())
    }

    /// Whether the command continues after `typed`, and the terminal's output.
    fn ask(yes: bool, typed: &[u8]) -> (bool, String) {
        let (mut user, command) = terminal();
        user.write_all(typed).unwrap();
        let input = command.try_clone().unwrap();
        let output = command.try_clone().unwrap();
        let asked = Confirmation { yes }.ask_on(input, output, "Delete a\x1b[2J?");
        // Ensures that there is something to read even without a question.
        (&command).write_all(b".").unwrap();
        let mut shown = Vec::new();
        let mut buffer = [0; 256];
        while shown.last() != Some(&b'.') {
            let count = user.read(&mut buffer).unwrap();
            shown.extend_from_slice(&buffer[..count]);
        }
        (asked.is_ok(), String::from_utf8(shown).unwrap())
    }

    #[test]
    fn a_terminal_is_asked_and_only_yes_continues() {
        for yes in ["y\n", "Y\n", "yes\n", " YES \n"] {
            let (continues, shown) = ask(false, yes.as_bytes());
            assert!(continues, "{yes:?}");
            assert!(shown.contains("Delete a?[2J? [y/N] "), "{shown:?}");
        }
        // The last one is Ctrl-D.
        for no in ["\n", "n\n", "yesterday\n", "\x04"] {
            let (continues, shown) = ask(false, no.as_bytes());
            assert!(!continues, "{no:?}");
            assert!(shown.contains("[y/N]"), "{shown:?}");
        }
    }

    #[test]
    fn yes_and_scripts_are_not_asked() {
        let (continues, shown) = ask(true, b"");
        assert!(continues && !shown.contains("[y/N]"), "{shown:?}");
        let null = || {
            let file = File::options().read(true).write(true).open("/dev/null");
            file.unwrap()
        };
        let never = Confirmation { yes: false };
        let (_user, terminal) = terminal();
        let second = terminal.try_clone().unwrap();
        never.ask_on(null(), terminal, "Delete?").unwrap();
        never.ask_on(second, null(), "Delete?").unwrap();
    }
}

//! Lines that a test prints for the test runner, past the capture of Rust's test harness.
//!
//! libtest keeps the output of `println!` and drops it when the test passes. A notice goes to
//! standard error itself, so the runner always reads it, counts it and repeats it at the end of
//! the run. Both ends of the format are here.

use std::fmt;
use std::io::Write as _;

/// The kind of a notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The test proves less than its claim in this run; `cargo lab soak` proves all of it.
    Thinned,
    /// A guest's boot is repeated after a known fault of the emulation.
    Retried,
    /// A known fault of the emulation, with its evidence. The runner may repeat the test.
    EmulatorFault,
    /// A fixture cannot be removed: something still holds it. The runner fails the test's file.
    LeftBehind,
    /// A measured figure.
    Figure,
}

impl Kind {
    const ALL: [Self; 5] = [
        Self::Thinned,
        Self::Retried,
        Self::EmulatorFault,
        Self::LeftBehind,
        Self::Figure,
    ];

    const fn prefix(self) -> &'static str {
        match self {
            Self::Thinned => "lab: thinned: ",
            Self::Retried => "lab: retried: ",
            Self::EmulatorFault => "lab: emulator fault: ",
            Self::LeftBehind => "lab: left behind: ",
            Self::Figure => "lab: figure: ",
        }
    }
}

/// Formats a notice as its line, without the line break.
pub fn line(kind: Kind, text: impl fmt::Display) -> String {
    let text = text.to_string().replace('\n', " | ");
    format!("{}{text}", kind.prefix())
}

/// Prints a notice of one line.
pub fn notice(kind: Kind, text: impl fmt::Display) {
    let line = format!("{}\n", line(kind, text));
    // If the runner has exited, the test's result does not change.
    let _ = std::io::stderr().lock().write_all(line.as_bytes());
}

/// For `Drop`, which cannot fail: reports what could not be removed or restored.
pub fn left_behind<T>(result: crate::error::Result<T>) {
    if let Err(error) = result {
        notice(Kind::LeftBehind, crate::error::report(&error));
    }
}

/// Parses the notice in a line of a test's output. The test's name may precede it.
pub fn read(line: &str) -> Option<(Kind, &str)> {
    Kind::ALL.into_iter().find_map(|kind| {
        let (_, text) = line.split_once(kind.prefix())?;
        Some((kind, text))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notice_is_found_behind_a_test_name() {
        for kind in Kind::ALL {
            let line = format!("test one ... {}5 of 14 steps", kind.prefix());
            assert_eq!(read(&line), Some((kind, "5 of 14 steps")));
        }
        assert_eq!(read("lab: something else"), None);
    }
}

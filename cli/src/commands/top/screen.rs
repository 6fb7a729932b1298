//! The terminal of `bellhop top`: another screen in raw mode, and keys.
//!
//! Owns the escape sequences (ECMA-48, and xterm's alternate screen).

use std::io::{self, Write as _};
use std::time::Duration;

use bellhop_common::text::printable;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::termios::tcgetwinsize;

use crate::terminal::{EscapeKey, Terminal};

/// How a line is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    Plain,
    Heading,
    Selected,
    Alarm,
}

/// A line without control characters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Line {
    pub(super) text: String,
    pub(super) style: Style,
}

impl Line {
    pub(super) fn new(text: &str, style: Style) -> Self {
        let text = printable(text);
        Self { text, style }
    }
}

/// A key that has a meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Key {
    Up,
    Down,
    Enter,
    Back,
    Quit,
}

/// Columns and rows.
pub(super) type Size = (usize, usize);

/// The terminal while it shows the picture; dropping it restores the terminal.
#[derive(Debug)]
pub(super) struct Screen {
    _raw: Terminal,
}

impl Screen {
    pub(super) fn enter() -> io::Result<Self> {
        let raw = Terminal::attach(EscapeKey::default())?;
        let in_background =
            || io::Error::other("another job uses it: run this command in the foreground");
        let screen = Self {
            _raw: raw.ok_or_else(in_background)?,
        };
        // The alternate screen, without a cursor.
        print("\x1b[?1049h\x1b[?25l")?;
        Ok(screen)
    }

    /// Replaces the picture.
    pub(super) fn draw(&mut self, lines: &[Line]) -> io::Result<()> {
        let mut text = "\x1b[H".to_owned();
        for (row, Line { text: line, style }) in lines.iter().enumerate() {
            if row > 0 {
                text.push_str("\r\n");
            }
            text.push_str(match style {
                Style::Plain => "",
                Style::Heading => "\x1b[1m",
                Style::Selected => "\x1b[7m",
                Style::Alarm => "\x1b[1;31m",
            });
            text.push_str(line);
            // The rest of the line has no style.
            text.push_str("\x1b[0m\x1b[K");
        }
        text.push_str("\x1b[J");
        print(&text)
    }

    /// The next key; none after `limit`, or for keys without a meaning.
    pub(super) fn key(&mut self, limit: Duration) -> io::Result<Option<Key>> {
        let stdin = rustix::stdio::stdin();
        let limit = Timespec::try_from(limit).unwrap_or_default();
        match poll(&mut [PollFd::new(&stdin, PollFlags::IN)], Some(&limit)) {
            Ok(0) | Err(Errno::INTR) => return Ok(None),
            ready => ready?,
        };
        let mut bytes = [0; 16];
        match rustix::io::read(stdin, &mut bytes) {
            // The terminal is gone.
            Ok(0) => Ok(Some(Key::Quit)),
            Ok(count) => Ok(key(bytes.get(..count).unwrap_or_default())),
            Err(Errno::INTR | Errno::AGAIN) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A terminal that is gone needs no restoring.
        let _ = print("\x1b[?25h\x1b[?1049l");
    }
}

fn print(text: &str) -> io::Result<()> {
    let mut output = io::stdout().lock();
    output.write_all(text.as_bytes())?;
    output.flush()
}

/// The size of the terminal; 80 times 24 if it does not know.
pub(super) fn size() -> io::Result<Size> {
    let size = tcgetwinsize(rustix::stdio::stdout())?;
    Ok(match (size.ws_col, size.ws_row) {
        (0, _) | (_, 0) => (80, 24),
        (columns, rows) => (columns.into(), rows.into()),
    })
}

/// The key that sends these bytes.
fn key(bytes: &[u8]) -> Option<Key> {
    match bytes {
        b"\x1b[A" | b"\x1bOA" | b"k" => Some(Key::Up),
        b"\x1b[B" | b"\x1bOB" | b"j" => Some(Key::Down),
        b"\r" | b"\n" => Some(Key::Enter),
        b"\x1b" | b"\x7f" | b"\x08" => Some(Key::Back),
        b"q" | b"\x03" => Some(Key::Quit),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_known_by_their_bytes() {
        for (bytes, wanted) in [
            (&b"q"[..], Some(Key::Quit)),
            (b"\x03", Some(Key::Quit)),
            (b"\x1b[A", Some(Key::Up)),
            (b"\x1bOB", Some(Key::Down)),
            (b"\r", Some(Key::Enter)),
            (b"\x1b", Some(Key::Back)),
            (b"\x1b[24~", None),
            (b"", None),
            (b"quit", None),
        ] {
            assert_eq!(key(bytes), wanted, "{bytes:?}");
        }
    }
}

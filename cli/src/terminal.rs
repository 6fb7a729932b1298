//! The user's terminal as the guest's console.
//!
//! Owns the terminal's mode while a guest runs. The mode is raw from [`Terminal::attach`] until the
//! value is dropped. The panic hook restores it, too, because a release build aborts on panic and
//! runs no destructor. Output processing stays on, so our own log lines begin in the first column.
//! The escape key is Ctrl-A unless the user chooses another, as in QEMU's `-nographic`:
//!
//! ```text
//!            Ctrl-A             x: leave
//!   passing -------> escaped -> Ctrl-A or a: send one Ctrl-A
//!      ^               |        anything else: dropped
//!      +---------------+
//! ```

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::str::FromStr;
use std::sync::Once;

use parking_lot::Mutex;
use rustix::termios::{self, InputModes, LocalModes, OptionalActions, SpecialCodeIndex, Termios};
use vmm::console::{ConsoleInput, ConsoleRead};

/// The bit that a letter has and its control character lacks.
const LETTER: u8 = 0x40;

/// The key that begins a command to the terminal instead of input for the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EscapeKey(u8);

impl Default for EscapeKey {
    /// Ctrl-A.
    fn default() -> Self {
        Self(b'A' ^ LETTER)
    }
}

impl FromStr for EscapeKey {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.as_bytes() {
            [b'^', key] => match key.to_ascii_uppercase() {
                key @ b'A'..=b'_' => Ok(Self(key ^ LETTER)),
                _ => Err("there is no such control character: give ^A to ^Z, or one of ^[ ^] ^_"),
            },
            [key @ b'!'..=b'~'] => Ok(Self(*key)),
            _ => Err("give one ASCII character, or a control character such as ^A"),
        }
    }
}

impl fmt::Display for EscapeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(key) = *self;
        if key.is_ascii_control() {
            write!(f, "Ctrl-{}", char::from(key ^ LETTER))
        } else {
            write!(f, "{}", char::from(key))
        }
    }
}

/// The original mode, for [`restore`] on every path.
static SAVED: Mutex<Option<Termios>> = Mutex::new(None);

/// Restores the terminal's mode if it was changed.
fn restore() {
    let saved = SAVED.lock().take();
    if let Some(saved) = saved {
        // A closed terminal cannot be restored.
        let _ = termios::tcsetattr(rustix::stdio::stdin(), OptionalActions::Now, &saved);
    }
}

/// Standard input as the guest's console input.
#[derive(Debug)]
pub(crate) struct Terminal {
    escapes: Option<EscapeFilter>,
}

impl Terminal {
    /// Takes standard input for the guest's console: a terminal in raw mode, other files unchanged.
    /// `None` if the terminal belongs to another job.
    pub(crate) fn attach(escape: EscapeKey) -> io::Result<Option<Self>> {
        let stdin = rustix::stdio::stdin();
        if !termios::isatty(stdin) {
            return Ok(Some(Self { escapes: None }));
        }
        // A background job that changes the mode is stopped with SIGTTOU.
        if termios::tcgetpgrp(stdin)? != rustix::process::getpgrp() {
            return Ok(None);
        }
        let saved = termios::tcgetattr(stdin)?;
        let mut raw = saved.clone();
        raw.input_modes -= InputModes::BRKINT
            | InputModes::ICRNL
            | InputModes::INLCR
            | InputModes::IGNCR
            | InputModes::ISTRIP
            | InputModes::IXON;
        raw.local_modes -= LocalModes::ECHO
            | LocalModes::ECHONL
            | LocalModes::ICANON
            | LocalModes::IEXTEN
            | LocalModes::ISIG;
        raw.special_codes[SpecialCodeIndex::VMIN] = 1;
        raw.special_codes[SpecialCodeIndex::VTIME] = 0;

        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let previous = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                restore();
                previous(info);
            }));
        });
        *SAVED.lock() = Some(saved);
        let terminal = Self {
            escapes: Some(EscapeFilter::new(escape)),
        };
        termios::tcsetattr(stdin, OptionalActions::Now, &raw)?;
        Ok(Some(terminal))
    }

    /// Whether escapes are recognized (that is, input comes from a person).
    pub(crate) fn is_interactive(&self) -> bool {
        self.escapes.is_some()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        restore();
    }
}

impl AsFd for Terminal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        rustix::stdio::stdin()
    }
}

impl ConsoleInput for Terminal {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<ConsoleRead> {
        let count =
            rustix::io::retry_on_intr(|| rustix::io::read(rustix::stdio::stdin(), &mut *buffer))?;
        if count == 0 {
            return Ok(ConsoleRead::Closed);
        }
        Ok(match &mut self.escapes {
            None => ConsoleRead::Bytes(count),
            Some(filter) => match filter.apply(&mut buffer[..count]) {
                Some(kept) => ConsoleRead::Bytes(kept),
                None => ConsoleRead::Leave,
            },
        })
    }
}

/// Finds sequences that begin with the escape key in the input.
#[derive(Debug)]
struct EscapeFilter {
    key: u8,
    escaped: bool,
}

impl EscapeFilter {
    fn new(EscapeKey(key): EscapeKey) -> Self {
        let escaped = false;
        Self { key, escaped }
    }

    /// Removes escapes in place. Returns the number of kept bytes, or `None` for the escape key
    /// and X.
    fn apply(&mut self, bytes: &mut [u8]) -> Option<usize> {
        let mut kept = 0;
        for index in 0..bytes.len() {
            let byte = bytes[index];
            let pass = match (self.escaped, byte) {
                (false, byte) if byte == self.key => {
                    self.escaped = true;
                    None
                }
                (false, other) => Some(other),
                (true, b'x' | b'X') => return None,
                (true, byte) => {
                    self.escaped = false;
                    let letter = self.key | LETTER;
                    let repeats = byte == self.key || byte.to_ascii_uppercase() == letter;
                    repeats.then_some(self.key)
                }
            };
            if let Some(byte) = pass {
                bytes[kept] = byte;
                kept += 1;
            }
        }
        Some(kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(filter: &mut EscapeFilter, text: &[u8]) -> Option<Vec<u8>> {
        let mut bytes = text.to_vec();
        let kept = filter.apply(&mut bytes)?;
        bytes.truncate(kept);
        Some(bytes)
    }

    #[test]
    fn escapes_are_found_also_across_reads() {
        let mut filter = EscapeFilter::new(EscapeKey::default());
        assert_eq!(typed(&mut filter, b"ls\r").unwrap(), b"ls\r");
        assert_eq!(typed(&mut filter, b"a\x01ab").unwrap(), b"a\x01b");
        assert_eq!(typed(&mut filter, b"\x01\x01").unwrap(), b"\x01");
        assert_eq!(typed(&mut filter, b"1\x01").unwrap(), b"1");
        assert_eq!(typed(&mut filter, b"z2").unwrap(), b"2");
        assert_eq!(typed(&mut filter, b"\x01").unwrap(), b"");
        assert_eq!(typed(&mut filter, b"x"), None);
    }

    #[test]
    fn another_key_can_be_the_escape() {
        let mut filter = EscapeFilter::new("^]".parse().unwrap());
        assert_eq!(typed(&mut filter, b"\x01x").unwrap(), b"\x01x");
        assert_eq!(typed(&mut filter, b"a\x1d\x1d").unwrap(), b"a\x1d");
        assert_eq!(typed(&mut filter, b"\x1d]").unwrap(), b"\x1d");
        assert_eq!(typed(&mut filter, b"\x1dx"), None);
        let mut filter = EscapeFilter::new("~".parse().unwrap());
        assert_eq!(typed(&mut filter, b"a~~b").unwrap(), b"a~b");
        assert_eq!(typed(&mut filter, b"~X"), None);
        for (text, shown) in [("^a", "Ctrl-A"), ("^]", "Ctrl-]"), ("~", "~")] {
            assert_eq!(text.parse::<EscapeKey>().unwrap().to_string(), shown);
        }
        for bad in ["", "^", "^^^", "ab", "^1", " ", "\u{e4}"] {
            assert_eq!(bad.parse::<EscapeKey>().is_ok(), bad == "^", "{bad:?}");
        }
    }
}

//! The result of a check: a state, a sentence, and the commands that fix it.
//!
//! Text comes partly from files of others and goes to a terminal, so every string is cleaned and
//! truncated here, in one place.

use serde::Serialize;
use vdpa::causes::in_one_line;

use bellhop_common::error::Error;

/// The longest text of a finding or line of a remedy, in characters.
const TEXT_MAX: usize = 400;

/// The state of a checked object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Good, or not needed.
    Ok,
    /// Works, but with limits.
    Warning,
    /// Needed, but absent.
    Missing,
    /// Cannot be determined.
    Unknown,
}

/// The result for one checked object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The name of the object.
    pub name: String,
    /// The state of the object.
    pub state: State,
    /// The result, one sentence.
    pub found: String,
    /// The fix: lines to type or to put into a file; empty if none is needed.
    pub remedy: Vec<String>,
}

impl Finding {
    fn new(name: impl AsRef<str>, state: State, found: impl AsRef<str>) -> Self {
        Self {
            name: clean(name.as_ref()),
            state,
            found: clean(found.as_ref()),
            remedy: Vec::new(),
        }
    }

    /// The object is good.
    pub(crate) fn ok(name: impl AsRef<str>, found: impl AsRef<str>) -> Self {
        Self::new(name, State::Ok, found)
    }

    /// The object works with limits.
    pub(crate) fn warning(name: impl AsRef<str>, found: impl AsRef<str>) -> Self {
        Self::new(name, State::Warning, found)
    }

    /// The object is needed, but absent.
    pub(crate) fn missing(name: impl AsRef<str>, found: impl AsRef<str>) -> Self {
        Self::new(name, State::Missing, found)
    }

    /// The object cannot be read.
    pub(crate) fn unknown(name: impl AsRef<str>, why: impl AsRef<str>) -> Self {
        Self::new(name, State::Unknown, why)
    }

    /// The object cannot be read, for this reason.
    pub(crate) fn unread(name: impl AsRef<str>, why: &Error) -> Self {
        Self::unknown(name, in_one_line(why))
    }

    /// The result, or the reason why it cannot be read.
    pub(crate) fn or_unread(name: impl AsRef<str>, found: Result<Self, Error>) -> Self {
        found.unwrap_or_else(|why| Self::unread(name, &why))
    }

    /// Adds a line of the remedy.
    pub(crate) fn mend(mut self, line: impl AsRef<str>) -> Self {
        self.remedy.push(clean(line.as_ref()));
        self
    }
}

/// The first `max` items, and the number of further ones.
pub(super) fn first<T>(
    things: &[T],
    max: usize,
    name: &str,
    describe: impl FnMut(&T) -> Finding,
) -> Vec<Finding> {
    let more = things.len().saturating_sub(max);
    let more = (more > 0).then(|| Finding::ok(name, format!("{more} more")));
    let shown = things.iter().take(max).map(describe);
    shown.chain(more).collect()
}

/// Removes control characters, which could move a terminal's cursor, and characters that change the
/// direction of writing. Limits the length.
fn clean(text: &str) -> String {
    let mut shown: String = text
        .chars()
        .take(TEXT_MAX)
        .map(|c| match c {
            '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => '?',
            c if c.is_control() => '?',
            c => c,
        })
        .collect();
    if text.chars().nth(TEXT_MAX).is_some() {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_text_is_cleaned_and_cut() {
        let finding = Finding::ok("a\x1b[2Jb", "x".repeat(10_000)).mend("c\u{202e}d\n");
        assert_eq!(finding.name, "a?[2Jb");
        assert_eq!(finding.found.chars().count(), TEXT_MAX + 1);
        assert_eq!(finding.remedy, ["c?d?"]);
        assert_eq!(clean(&"y".repeat(TEXT_MAX)).chars().count(), TEXT_MAX);
    }
}

//! What a check says: a state, a sentence, and the commands that mend it.
//!
//! Text comes partly from files that others wrote and goes to a terminal, so
//! every string is cleaned and cut here, in one place.

use serde::Serialize;
use vdpa::causes::in_one_line;

use bellhop_common::error::Error;

/// Longest text of a finding or line of a remedy, in characters.
const TEXT_MAX: usize = 400;

/// How something stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// As it should be, or not needed.
    Ok,
    /// Works, but not for everything or not well.
    Warning,
    /// Needed, and not there.
    Missing,
    /// Could not be found out.
    Unknown,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was looked at.
    pub name: String,
    /// How it stands.
    pub state: State,
    /// What was found, one sentence.
    pub found: String,
    /// What mends it: lines to type or to put into a file; empty if nothing is to be done.
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

    /// All is well.
    pub(crate) fn ok(name: impl AsRef<str>, found: impl AsRef<str>) -> Self {
        Self::new(name, State::Ok, found)
    }

    /// Could be better.
    pub(crate) fn warning(name: impl AsRef<str>, found: impl AsRef<str>) -> Self {
        Self::new(name, State::Warning, found)
    }

    /// Needed and not there.
    pub(crate) fn missing(name: impl AsRef<str>, found: impl AsRef<str>) -> Self {
        Self::new(name, State::Missing, found)
    }

    /// Could not be read.
    pub(crate) fn unknown(name: impl AsRef<str>, why: impl AsRef<str>) -> Self {
        Self::new(name, State::Unknown, why)
    }

    /// Could not be read, for this reason.
    pub(crate) fn unread(name: impl AsRef<str>, why: &Error) -> Self {
        Self::unknown(name, in_one_line(why))
    }

    /// What was found, or why it could not be found out.
    pub(crate) fn or_unread(name: impl AsRef<str>, found: Result<Self, Error>) -> Self {
        found.unwrap_or_else(|why| Self::unread(name, &why))
    }

    /// Adds a line that mends it.
    pub(crate) fn mend(mut self, line: impl AsRef<str>) -> Self {
        self.remedy.push(clean(line.as_ref()));
        self
    }
}

/// The first `max` of some things, and how many more there are.
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

/// Without control characters (which could move a terminal's cursor) and
/// characters that change the direction of writing, and not endless.
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

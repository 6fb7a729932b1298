//! A rule, and the check that tries it.

use super::subject::Subject;
use super::verdict::Attempt;

/// One rule.
pub(super) struct Rule {
    /// Theme and name.
    pub(super) id: &'static str,
    /// In words.
    pub(super) rule: &'static str,
    /// Where it is written.
    pub(super) source: &'static str,
    pub(super) check: fn(&Subject<'_>) -> Attempt,
}

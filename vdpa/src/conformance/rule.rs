//! A rule and the check that tries it.

use super::subject::Subject;
use super::verdict::Attempt;

/// A rule to try.
pub(super) struct Rule {
    /// Theme and name.
    pub(super) id: &'static str,
    /// The rule as a sentence.
    pub(super) rule: &'static str,
    /// Section of the specification, or function of the kernel.
    pub(super) source: &'static str,
    pub(super) check: fn(&Subject<'_>) -> Attempt,
}

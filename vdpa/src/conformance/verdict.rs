//! The verdict on a rule, and helpers that build one.

use std::error::Error;

use crate::causes::in_one_line;

/// The result of a check. The detail is for people and may be empty.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum Verdict {
    /// The device keeps the rule.
    Pass {
        /// The observation.
        detail: String,
    },
    /// The parent driver breaks the rule.
    Fail {
        /// The observation.
        detail: String,
    },
    /// The kernel breaks the rule, independently of the parent.
    Quirk {
        /// The consequence for a driver.
        detail: String,
    },
    /// The check could not run.
    Skipped {
        /// The reason.
        detail: String,
    },
}

pub(super) fn pass() -> Verdict {
    noted("")
}

pub(super) fn noted(detail: impl Into<String>) -> Verdict {
    let detail = detail.into();
    Verdict::Pass { detail }
}

pub(super) fn fail(detail: impl Into<String>) -> Verdict {
    let detail = detail.into();
    Verdict::Fail { detail }
}

pub(super) fn quirk(detail: impl Into<String>) -> Verdict {
    let detail = detail.into();
    Verdict::Quirk { detail }
}

pub(super) fn skipped(detail: impl Into<String>) -> Verdict {
    let detail = detail.into();
    Verdict::Skipped { detail }
}

/// The result of a check, which may end early with a verdict.
pub(super) type Attempt = Result<Verdict, Verdict>;

impl<E: Error> From<E> for Verdict {
    /// An error counts as a failure of the rule.
    fn from(error: E) -> Self {
        fail(in_one_line(&error))
    }
}

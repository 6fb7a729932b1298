//! The verdict on a rule.

use std::error::Error;

use crate::causes::in_one_line;

/// What was found of a rule. The detail is for people and may be empty.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum Verdict {
    /// It is kept.
    Pass {
        /// What was seen.
        detail: String,
    },
    /// It is broken.
    Fail {
        /// What was seen.
        detail: String,
    },
    /// It is broken by the kernel whatever the parent does.
    Quirk {
        /// What that means for a driver.
        detail: String,
    },
    /// It could not be tried.
    Skipped {
        /// Why.
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

/// What a check gives; it may end early with a verdict.
pub(super) type Attempt = Result<Verdict, Verdict>;

impl<E: Error> From<E> for Verdict {
    /// An error counts as a failure of the rule.
    fn from(error: E) -> Self {
        fail(in_one_line(&error))
    }
}

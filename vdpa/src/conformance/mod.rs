//! Whether a parent driver keeps the rules: for `bellhop probe --conformance`.
//!
//! ```text
//!   RULES, a table of (id, rule, where it is written, check)
//!     each check opens the device afresh ----> Pass | Fail | Quirk | Skipped
//! ```
//! Rules are those of the virtio specification (1.3) and of the kernel's vhost-vdpa interface,
//! of which only the kernel's own source is the text. A *quirk* is where the kernel itself
//! breaks the rule for all parents. What the library's types forbid is done here by plain ioctls.
//! Checks that move frames send them to an address that nobody has. The module must not know how
//! a report is shown.

mod completion;
mod config;
mod doorbell;
mod features;
mod groups;
mod memory;
mod status;
mod subject;
mod suspend;
mod vring;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Instant;

use self::subject::Subject;
use crate::device::Device;

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

fn pass() -> Verdict {
    noted("")
}

fn noted(detail: impl Into<String>) -> Verdict {
    let detail = detail.into();
    Verdict::Pass { detail }
}

fn fail(detail: impl Into<String>) -> Verdict {
    let detail = detail.into();
    Verdict::Fail { detail }
}

fn quirk(detail: impl Into<String>) -> Verdict {
    let detail = detail.into();
    Verdict::Quirk { detail }
}

fn skipped(detail: impl Into<String>) -> Verdict {
    let detail = detail.into();
    Verdict::Skipped { detail }
}

/// What a check gives; an error counts as a failure of the rule.
type Attempt = Result<Verdict, Box<dyn Error>>;

/// One rule.
struct Rule {
    /// Theme and name.
    id: &'static str,
    /// In words.
    rule: &'static str,
    /// Where it is written.
    source: &'static str,
    check: fn(&Subject<'_>) -> Attempt,
}

/// A rule and what was found.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Line {
    /// Theme and name, such as `suspend.base`.
    pub id: &'static str,
    /// The rule in words.
    pub rule: &'static str,
    /// Section of the specification or function of the kernel.
    pub source: &'static str,
    /// What was found.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// How long it took.
    pub milliseconds: u64,
}

/// The report.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Report {
    /// The character device.
    pub path: PathBuf,
    /// All rules, by theme.
    pub lines: Vec<Line>,
}

impl Report {
    /// Whether no rule is broken by the parent.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.lines
            .iter()
            .all(|line| !matches!(line.verdict, Verdict::Fail { .. }))
    }
}

/// Tries every rule on the device at `path`, which is opened and reset many times.
/// `progress` is told the id of each rule.
///
/// # Errors
/// The device can't be opened at first.
pub fn report(path: &Path, progress: &mut dyn FnMut(&str)) -> Result<Report, crate::Error> {
    let device_id = Device::open(path)?.device_id();
    let subject = Subject::new(path, device_id);
    let themes = [
        status::RULES,
        features::RULES,
        config::RULES,
        vring::RULES,
        groups::RULES,
        memory::RULES,
        completion::RULES,
        suspend::RULES,
        doorbell::RULES,
    ];
    let lines = themes
        .into_iter()
        .flatten()
        .map(|rule| {
            progress(rule.id);
            let begin = Instant::now();
            let verdict = match (rule.check)(&subject) {
                Ok(verdict) => verdict,
                Err(error) => fail(crate::causes::in_one_line(error.as_ref())),
            };
            Line {
                id: rule.id,
                rule: rule.rule,
                source: rule.source,
                verdict,
                milliseconds: u64::try_from(begin.elapsed().as_millis()).unwrap_or(u64::MAX),
            }
        })
        .collect();
    Ok(Report {
        path: path.to_owned(),
        lines,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_names_each_rule_once_and_counts_failures_only() {
        let line = |id, verdict| Line {
            id,
            rule: "r",
            source: "s",
            verdict,
            milliseconds: 0,
        };
        let mut report = Report {
            path: PathBuf::new(),
            lines: vec![
                line("a", pass()),
                line("b", quirk("")),
                line("c", skipped("")),
            ],
        };
        assert!(report.is_good());
        report.lines.push(line("d", fail("why")));
        assert!(!report.is_good());
        let mut ids: Vec<&str> = [
            status::RULES,
            features::RULES,
            config::RULES,
            vring::RULES,
            groups::RULES,
            memory::RULES,
            completion::RULES,
            suspend::RULES,
            doorbell::RULES,
        ]
        .into_iter()
        .flatten()
        .map(|rule| rule.id)
        .collect();
        let count = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), count);
    }

    #[test]
    fn a_device_that_cannot_be_opened_has_no_report() {
        let error = super::report(Path::new("/dev/null"), &mut |_| ()).unwrap_err();
        assert!(error.to_string().contains("not a vhost-vdpa device"));
    }
}

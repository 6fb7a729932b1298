//! Checks whether a parent driver keeps the rules, for `bellhop probe --conformance`.
//!
//! ```text
//!   RULES, a table of (id, rule, where it is written, check)
//!     each check opens the device afresh ----> Pass | Fail | Quirk | Skipped
//! ```
//! The rules come from the virtio specification (1.3) and from the kernel's vhost-vdpa interface.
//! The only text of the latter is the kernel's source. A *quirk* is a rule that the kernel itself
//! breaks for all parents. Where the library's types forbid an operation, the check issues plain
//! ioctls. Checks that move frames send them to an unassigned address. The module does not format
//! reports.

mod completion;
mod config;
mod doorbell;
mod features;
mod groups;
mod memory;
mod rule;
mod status;
mod subject;
mod suspend;
mod verdict;
mod vring;

use std::path::{Path, PathBuf};
use std::time::Instant;

use self::rule::Rule;
use self::subject::Subject;
pub use self::verdict::Verdict;
use crate::device::Device;

/// All rules, by theme.
const THEMES: [&[Rule]; 9] = [
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

/// A rule and its verdict.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Line {
    /// Theme and name, such as `suspend.base`.
    pub id: &'static str,
    /// The rule as a sentence.
    pub rule: &'static str,
    /// Section of the specification, or function of the kernel.
    pub source: &'static str,
    /// The verdict.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// Duration of the check.
    pub milliseconds: u64,
}

/// The results of all rules for one device.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Report {
    /// The character device.
    pub path: PathBuf,
    /// All rules, by theme.
    pub lines: Vec<Line>,
}

impl Report {
    /// Whether the parent driver breaks no rule.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.lines
            .iter()
            .all(|line| !matches!(line.verdict, Verdict::Fail { .. }))
    }
}

/// Tries every rule on the device at `path`, opening and resetting it many times. `progress`
/// receives the id of each rule.
///
/// # Errors
/// The device cannot be opened at first.
pub fn report(path: &Path, progress: &mut dyn FnMut(&str)) -> Result<Report, crate::Error> {
    let device_id = Device::open(path)?.device_id();
    let subject = Subject::new(path, device_id);
    let lines = THEMES
        .into_iter()
        .flatten()
        .map(|rule| {
            progress(rule.id);
            let begin = Instant::now();
            let (Ok(verdict) | Err(verdict)) = (rule.check)(&subject);
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
    use super::verdict::{fail, pass, quirk, skipped};
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
        let mut ids: Vec<&str> = THEMES.into_iter().flatten().map(|rule| rule.id).collect();
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

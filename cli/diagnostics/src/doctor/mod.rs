//! Checks whether this host is ready for VMs on vDPA NICs, and how to fix it.
//!
//! Each group is one file with a function `check` that reads the [`Host`] and returns [`Finding`]s;
//! `CHECKS` is the list of them. A new check is a file and a line there. Checks change nothing,
//! need no permissions and open no vDPA device, because opening one resets it. A part that cannot
//! be read becomes [`State::Unknown`] with the reason.

mod devices;
#[cfg(test)]
mod fake;
mod finding;
mod guest_iommu;
mod host;
mod hugepages;
mod iommu;
mod iotlb;
mod kernel;
mod kvm;
mod memlock;
mod modules;
mod next;
mod nics;
mod numa;
mod rights;
mod software;
mod text;
mod vfio;

use serde::Serialize;

pub use finding::{Finding, State};
pub use host::Host;
pub(crate) use text::wrapped;
pub use text::{COLUMNS, table, text};

/// The function of a check.
type Look = fn(&Host) -> Vec<Finding>;

/// All checks, each with the name of its group, in the order of the report.
const CHECKS: [(&str, Look); 14] = [
    ("kvm", kvm::check),
    ("kernel", kernel::check),
    ("modules", modules::check),
    ("swnic", software::check),
    ("iommu", iommu::check),
    ("nics", nics::check),
    ("devices", devices::check),
    ("vfio", vfio::check),
    ("memlock", memlock::check),
    ("hugepages", hugepages::check),
    ("iotlb", iotlb::check),
    ("guest-iommu", guest_iommu::check),
    ("numa", numa::check),
    ("rights", rights::check),
];

/// A finding and its group.
#[derive(Debug, Serialize)]
pub struct Line {
    /// The group.
    pub group: &'static str,
    /// The finding.
    #[serde(flatten)]
    pub finding: Finding,
}

/// All findings. In JSON: `{"fit": bool, "findings": [{"group", "name", "state", "found", "remedy":
/// [lines]}], "next": [commands]}`.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Whether no needed part is missing.
    pub fit: bool,
    /// The findings, in the order of the groups.
    pub findings: Vec<Line>,
    /// Commands that lead to a VM on this host, once nothing is missing.
    pub next: Vec<String>,
}

impl Report {
    /// The number of findings in this state.
    pub(crate) fn count(&self, state: State) -> usize {
        self.findings
            .iter()
            .filter(|line| line.finding.state == state)
            .count()
    }
}

/// Runs all checks.
#[must_use]
pub fn report(host: &Host) -> Report {
    let findings: Vec<Line> = CHECKS
        .iter()
        .flat_map(|(group, look)| {
            look(host)
                .into_iter()
                .map(|finding| Line { group, finding })
        })
        .collect();
    let fit = findings
        .iter()
        .all(|line| line.finding.state != State::Missing);
    Report {
        fit,
        findings,
        next: next::commands(host),
    }
}

#[cfg(test)]
mod tests;

//! Reports of [`vdpa::probe`] and [`vdpa::conformance`] as text for people.

use std::fmt::Write;

use vdpa::conformance::{self, Verdict};
use vdpa::probe::{Identity, Outcome, Report};

use bellhop_common::table::Table;
use bellhop_common::text::address;

use crate::doctor::{COLUMNS, wrapped};

/// Names of the virtio device types that vDPA parents provide (virtio 1.3, section 5).
fn type_name(device_id: u32) -> &'static str {
    match device_id {
        1 => "network",
        2 => "block",
        _ => "other",
    }
}

/// Width of a name. A space and the value follow.
const NAME: usize = 18;

/// Lines `name  value`, aligned.
struct Lines(String);

impl Lines {
    fn line(&mut self, name: &str, value: impl std::fmt::Display) {
        // Writing to a String does not fail.
        let _ = writeln!(self.0, "{name:<NAME$} {value}");
    }
}

fn or_dash(text: Option<&String>) -> &str {
    text.map_or("-", String::as_str)
}

fn identity(lines: &mut Lines, identity: &Identity) {
    lines.line("device", identity.path.display());
    lines.line("name", or_dash(identity.place.name.as_ref()));
    lines.line(
        "parent",
        format!(
            "{} (driver {})",
            or_dash(identity.place.parent.as_ref()),
            or_dash(identity.place.driver.as_ref())
        ),
    );
    let kind = type_name(identity.device_id);
    lines.line("type", format!("{} ({kind})", identity.device_id));
    if let Some(network) = &identity.network {
        let mac = network.mac.map_or("-".to_owned(), |mac| address(&mac));
        lines.line("MAC", mac);
        lines.line(
            "link",
            match network.link {
                Some(true) => "up",
                Some(false) => "down",
                None => "unknown",
            },
        );
        let mtu = network.mtu.map_or("-".to_owned(), |mtu| mtu.to_string());
        lines.line("MTU", mtu);
        lines.line("max_vqp", network.max_virtqueue_pairs);
    }
    features(lines, identity);
    lines.line("backend features", identity.backend_features.join(" "));
    let sizes: Vec<u16> = identity.queues.iter().map(|queue| queue.max_size).collect();
    let largest = sizes.iter().max().copied().unwrap_or_default();
    lines.line(
        "queues",
        format!("{}, rings of up to {largest} entries", sizes.len()),
    );
    let groups: Vec<String> = identity
        .queues
        .iter()
        .map(|queue| {
            queue
                .group
                .map_or("-".to_owned(), |group| group.to_string())
        })
        .collect();
    lines.line(
        "groups, ASIDs",
        format!(
            "{}, {} (group of each queue: {})",
            identity.groups,
            identity.address_spaces,
            groups.join(" ")
        ),
    );
    let (first, last) = identity.iova_range;
    lines.line("IOVA range", format!("{first:#x}-{last:#x}"));
    lines.line("config size", format!("{} bytes", identity.config_size));
}

fn features(lines: &mut Lines, identity: &Identity) {
    let mut taken = Vec::new();
    let mut withheld = Vec::new();
    for feature in &identity.features {
        let name = match feature.name {
            Some(name) => name.to_owned(),
            None => format!("bit {}", feature.bit),
        };
        match &feature.withheld {
            None => taken.push(name),
            Some(reason) => withheld.push(format!("{name}: {reason}")),
        }
    }
    lines.line("features", wrapped(&taken.join(" "), NAME + 1, COLUMNS));
    let bits = identity.features.iter().map(|feature| feature.bit);
    let mask = bits.fold(0_u64, |mask, bit| mask | 1 << bit);
    lines.line("feature mask", format!("{mask:#x}"));
    for (index, text) in withheld.iter().enumerate() {
        lines.line(if index == 0 { "not for guests" } else { "" }, text);
    }
}

fn outcome(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Ok => "ok",
        Outcome::Failed => "FAILED",
        Outcome::NotOffered => "not offered",
        Outcome::Inconclusive => "inconclusive",
    }
}

/// The checks of a probe.
#[must_use]
pub fn checks(report: &Report) -> Table {
    let rows = report.checks.iter().map(|check| {
        [
            check.name.to_owned(),
            outcome(check.outcome).to_lowercase(),
            check.milliseconds.to_string(),
            check.detail.clone(),
        ]
    });
    Table::new(["NAME", "OUTCOME", "MILLISECONDS", "DETAIL"], rows)
}

fn verdict(verdict: &Verdict) -> (&'static str, &str) {
    match verdict {
        Verdict::Pass { detail } => ("pass", detail),
        Verdict::Fail { detail } => ("FAIL", detail),
        Verdict::Quirk { detail } => ("quirk", detail),
        Verdict::Skipped { detail } => ("skipped", detail),
    }
}

/// The rules of a conformance report.
#[must_use]
pub fn rules(report: &conformance::Report) -> Table {
    let rows = report.lines.iter().map(|line| {
        let (word, detail) = verdict(&line.verdict);
        let cells = [
            line.id,
            &word.to_lowercase(),
            line.rule,
            detail,
            line.source,
        ];
        cells.map(str::to_owned)
    });
    Table::new(["ID", "VERDICT", "RULE", "DETAIL", "SOURCE"], rows)
}

/// The report of a probe.
#[must_use]
pub fn probe(report: &Report) -> String {
    let mut lines = Lines(String::new());
    identity(&mut lines, &report.identity);
    lines.0.push('\n');
    for check in &report.checks {
        let outcome = outcome(check.outcome);
        let (time, detail) = (check.milliseconds, &check.detail);
        lines.line(
            check.name,
            format!("{outcome:<13}{time:>6} ms  {detail}").trim_end(),
        );
    }
    lines.0
}

/// The conformance report.
#[must_use]
pub fn conformance(report: &conformance::Report) -> String {
    let mut text = String::new();
    let (mut passed, mut failed, mut other) = (0, 0, 0);
    for line in &report.lines {
        let (word, detail) = verdict(&line.verdict);
        *match line.verdict {
            Verdict::Pass { .. } => &mut passed,
            Verdict::Fail { .. } => &mut failed,
            Verdict::Quirk { .. } | Verdict::Skipped { .. } => &mut other,
        } += 1;
        let _ = writeln!(text, "{word:<8} {:<22} {}", line.id, line.rule);
        if !detail.is_empty() {
            let _ = writeln!(text, "{:31} {detail}", "");
        }
        let _ = writeln!(text, "{:31} [{}]", "", line.source);
    }
    let _ = writeln!(
        text,
        "\n{passed} passed, {failed} failed, {other} skipped or known quirks of the kernel"
    );
    text
}

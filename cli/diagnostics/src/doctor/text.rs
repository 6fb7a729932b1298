//! The report as text for people.

use std::fmt::Write;

use bellhop_common::table::Table;

use super::{Report, State};

/// The columns are group, state and name; the result follows.
const INDENT: usize = 20;

/// The word for a state, and its colour on a terminal.
fn word(state: State) -> (&'static str, u8) {
    match state {
        State::Ok => ("ok", 32),
        State::Warning => ("warning", 33),
        State::Missing => ("MISSING", 31),
        State::Unknown => ("unknown", 36),
    }
}

/// The findings, with their remedies in the last column.
#[must_use]
pub fn table(report: &Report) -> Table {
    let rows = report.findings.iter().map(|line| {
        let finding = &line.finding;
        [
            finding.name.clone(),
            line.group.to_owned(),
            word(finding.state).0.to_lowercase(),
            finding.found.clone(),
            finding.remedy.join("; "),
        ]
    });
    Table::new(["NAME", "GROUP", "STATE", "FOUND", "REMEDY"], rows)
}

/// The report for people, with a summary line. `colours`: the output is a terminal.
#[must_use]
pub fn text(report: &Report, colours: bool) -> String {
    let mut text = String::new();
    let mut last = "";
    for line in &report.findings {
        let finding = &line.finding;
        let group = if line.group == last { "" } else { line.group };
        last = line.group;
        let (word, colour) = word(finding.state);
        let state = if colours {
            format!("\x1b[{colour}m{word:<8}\x1b[0m")
        } else {
            format!("{word:<8}")
        };
        let _ = writeln!(
            text,
            "{group:<11}{state} {:<18} {}",
            finding.name, finding.found
        );
        for (index, remedy) in finding.remedy.iter().enumerate() {
            let mark = if index == 0 { "fix:" } else { "" };
            let _ = writeln!(text, "{:INDENT$}{mark:<6}{remedy}", "");
        }
    }
    let counted = |state, one: &str, many: &str| match report.count(state) {
        1 => format!("1 {one}"),
        n => format!("{n} {many}"),
    };
    let rest = format!(
        "{}, {} unknown",
        counted(State::Warning, "warning", "warnings"),
        report.count(State::Unknown)
    );
    let _ = if report.fit {
        writeln!(text, "\nNo required part is missing ({rest}).")
    } else {
        writeln!(
            text,
            "\nNot ready for VMs on vDPA NICs: {} missing ({rest}).",
            counted(State::Missing, "required part is", "required parts are")
        )
    };
    if !report.next.is_empty() {
        let first = if report.fit {
            ""
        } else {
            " fix the MISSING parts as shown above, then"
        };
        let _ = writeln!(text, "\nNext:{first}");
        for command in &report.next {
            let _ = writeln!(text, "  {command}");
        }
    }
    text
}

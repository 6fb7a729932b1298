//! The report as text for people.

use std::fmt::Write;

use bellhop_common::table::Table;

use super::{Report, State};

/// The widest report, in columns.
pub const COLUMNS: usize = 100;
/// The narrowest report, in columns.
const COLUMNS_MIN: usize = 60;
/// The columns are group, state and name; the result follows.
const FOUND: usize = 39;
/// The column of a remedy's mark.
const MARK: usize = 20;
/// The column of a remedy.
const REMEDY: usize = 26;

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

/// Breaks a text between words, so that it fits behind an indentation.
pub(crate) fn wrapped(text: &str, indent: usize, columns: usize) -> String {
    let width = columns.clamp(COLUMNS_MIN, COLUMNS).saturating_sub(indent);
    let options = textwrap::Options::new(width).break_words(false);
    let options = options.word_splitter(textwrap::WordSplitter::NoHyphenation);
    let separator = format!("\n{:indent$}", "");
    textwrap::wrap(text, options).join(&separator)
}

/// The report for people, with a summary line.
///
/// `colours`: the output is a terminal. `columns`: its width; the report is at most [`COLUMNS`]
/// wide. A word that is longer stays whole, because it can be a path.
#[must_use]
pub fn text(report: &Report, colours: bool, columns: usize) -> String {
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
        let found = wrapped(&finding.found, FOUND, columns);
        let _ = writeln!(text, "{group:<11}{state} {:<18} {found}", finding.name);
        for (index, remedy) in finding.remedy.iter().enumerate() {
            let mark = if index == 0 { "fix:" } else { "" };
            let remedy = wrapped(remedy, REMEDY, columns);
            let _ = writeln!(text, "{:MARK$}{mark:<6}{remedy}", "");
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
    let summary = if report.fit {
        format!("No required part is missing ({rest}).")
    } else {
        format!(
            "Not ready for VMs on vDPA NICs: {} missing ({rest}).",
            counted(State::Missing, "required part is", "required parts are")
        )
    };
    let _ = writeln!(text, "\n{}", wrapped(&summary, 0, columns));
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

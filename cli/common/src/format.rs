//! The format of a command's result: text for people, or JSON, YAML, CSV and names for programs.
//!
//! Owns the options, and the output of each. Must not know any command. JSON and YAML have the same
//! members and keep them; tables may change with each version.

use std::io::{self, Write as _};

use serde::Serialize;

use crate::error::Error;
use crate::exit::Code;
use crate::json::json;
use crate::table::Table;

/// How a command prints its result: options of each command.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct Format {
    /// Print JSON: the same as -o json
    #[arg(short, long, global = true, help_heading = "Output options")]
    json: bool,

    /// The format of the result
    #[arg(
        short = 'o',
        long = "output",
        value_name = "FORMAT",
        global = true,
        value_enum,
        conflicts_with = "json",
        help_heading = "Output options"
    )]
    output: Option<Output>,

    /// Indent JSON, with -j or -o json
    #[arg(
        short,
        long,
        global = true,
        hide_short_help = true,
        help_heading = "Output options"
    )]
    pretty: bool,

    /// Only these columns of a table or CSV: their headings, separated by commas
    #[arg(
        long,
        value_name = "NAMES",
        global = true,
        value_parser = columns,
        hide_short_help = true,
        help_heading = "Output options"
    )]
    columns: Option<Columns>,

    /// Omit the heading of a table or CSV
    #[arg(
        long,
        global = true,
        hide_short_help = true,
        help_heading = "Output options"
    )]
    no_headers: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
enum Output {
    /// Text for people, which may change
    #[default]
    Table,
    /// The same with more columns
    Wide,
    /// JSON, which is stable
    Json,
    /// YAML with the members of the JSON
    Yaml,
    /// Names only, one per line
    Name,
    /// Comma-separated values with all columns
    Csv,
}

/// Names of columns.
type Columns = &'static [&'static str];

/// The command line is parsed once, and its format is used until the process ends.
fn columns(text: &str) -> Result<Columns, &'static str> {
    if text.split(',').any(|name| name.trim().is_empty()) {
        return Err("a column has no name");
    }
    let names: Vec<&str> = text.to_owned().leak().split(',').map(str::trim).collect();
    Ok(names.leak())
}

impl Format {
    /// Whether the format is JSON.
    #[must_use]
    pub fn is_json(self) -> bool {
        self.output() == Output::Json
    }

    /// Whether the format is text for people.
    #[must_use]
    pub fn is_text(self) -> bool {
        matches!(self.output(), Output::Table | Output::Wide) && self.columns.is_none()
    }

    fn output(self) -> Output {
        if self.json {
            Output::Json
        } else {
            self.output.unwrap_or_default()
        }
    }

    /// Prints a value on standard output, as text for people or in the format for programs.
    ///
    /// # Errors
    /// Standard output cannot be written, or the value has no such column.
    pub fn print(
        self,
        value: &impl Serialize,
        text: impl FnOnce() -> String,
    ) -> Result<Code, Error> {
        if self.is_text() {
            return print(text().as_bytes());
        }
        let table = || {
            let value = serde_json::to_value(value);
            value.map(Table::of_value).map_err(Error::unwritten)
        };
        self.print_or(value, table)
    }

    /// Prints the result of a command that prints nothing for people.
    ///
    /// # Errors
    /// As for [`print`](Self::print).
    pub fn print_done(self, value: &impl Serialize) -> Result<Code, Error> {
        self.print(value, String::new)
    }

    /// Prints a value that has a table.
    ///
    /// # Errors
    /// As for [`print`](Self::print).
    pub fn print_table(
        self,
        value: &impl Serialize,
        table: impl FnOnce() -> Table,
    ) -> Result<Code, Error> {
        self.print_or(value, || Ok(table()))
    }

    fn print_or(
        self,
        value: &impl Serialize,
        table: impl FnOnce() -> Result<Table, Error>,
    ) -> Result<Code, Error> {
        let text = self.text(value, table)?;
        print(text.as_bytes())
    }

    fn text(
        self,
        value: &impl Serialize,
        table: impl FnOnce() -> Result<Table, Error>,
    ) -> Result<String, Error> {
        let headers = !self.no_headers;
        let chosen = |table: Table| match self.columns {
            Some(columns) => table.with_columns(columns),
            None => Ok(table),
        };
        match self.output() {
            Output::Json => json(value, self.pretty),
            Output::Yaml => serde_saphyr::to_string(value).map_err(Error::unwritten),
            Output::Name => Ok(table()?.names()),
            Output::Csv => Ok(chosen(table()?)?.csv(headers)),
            Output::Table if self.columns.is_none() => Ok(table()?.narrow().draw(headers)),
            Output::Table | Output::Wide => Ok(chosen(table()?)?.draw(headers)),
        }
    }
}

/// Prints on standard output.
///
/// # Errors
/// Standard output cannot be written.
pub fn print(bytes: &[u8]) -> Result<Code, Error> {
    #[cfg(feature = "testing")]
    if testing::capture(bytes) {
        return Ok(Code::Success);
    }
    let mut output = io::stdout().lock();
    match output.write_all(bytes).and_then(|()| output.flush()) {
        // The reader has closed the pipe, as `head` does.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(Code::Success),
        written => written.map(|()| Code::Success).map_err(Error::unwritten),
    }
}

/// Captures results, for tests of commands.
#[cfg(feature = "testing")]
pub(crate) mod testing {
    use std::cell::RefCell;

    thread_local! {
        /// The results so far, while they are captured.
        static RESULTS: RefCell<Option<Vec<u8>>> = const { RefCell::new(None) };
    }

    /// Runs `act`, and returns what it printed on this thread instead of printing it.
    pub fn captured<T>(act: impl FnOnce() -> T) -> (String, T) {
        RESULTS.set(Some(Vec::new()));
        let done = act();
        let results = RESULTS.take().unwrap_or_default();
        (String::from_utf8_lossy(&results).into_owned(), done)
    }

    /// Whether the bytes are captured.
    pub(super) fn capture(bytes: &[u8]) -> bool {
        RESULTS.with_borrow_mut(|results| {
            results
                .as_mut()
                .map(|results| results.extend(bytes))
                .is_some()
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::{Value, json};

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        format: Format,
    }

    fn format(line: &str) -> Result<Format, clap::Error> {
        let words = std::iter::once("x").chain(line.split_whitespace());
        Line::try_parse_from(words).map(|line| line.format)
    }

    /// A list with its table, as a command with this format prints it.
    fn printed(line: &str) -> String {
        let value = json!([{"name": "a", "pid": 7, "on": "yes"}, {"name": "b", "pid": null}]);
        let row = |name: &str, pid: &str, on: &str| [name, pid, on].map(str::to_owned);
        let rows = [row("a", "7", "yes"), row("b", "-", "-")];
        let table = || Ok(Table::new(["NAME", "PID", "ON"], rows).with_wide(1));
        format(line).unwrap().text(&value, table).unwrap()
    }

    #[test]
    fn a_list_has_each_format() {
        assert_eq!(printed(""), "NAME  PID\na     7\nb     -\n");
        let wide = "NAME  PID  ON\na     7    yes\nb     -    -\n";
        assert_eq!(printed("-o wide"), wide);
        assert_eq!(
            printed("--columns on,name --no-headers"),
            "yes  a\n-    b\n"
        );
        let value: Value = serde_json::from_str(&printed("-o json")).unwrap();
        assert_eq!(value[0]["on"], "yes");
        assert_eq!(printed("-j"), printed("--output json"));
        assert!(printed("-jp").contains("\n"));
        assert_eq!(printed("-o name"), "a\nb\n");
        assert_eq!(printed("-o csv"), "NAME,PID,ON\na,7,yes\nb,-,-\n");
        let chosen = printed("-o csv --columns pid --no-headers");
        assert_eq!(chosen, "7\n-\n");
    }

    #[test]
    fn yaml_has_the_members_of_the_json_and_no_booleans_from_text() {
        let yaml = printed("-o yaml");
        for line in ["- name: a", "  pid: 7", "  pid: null"] {
            assert!(yaml.contains(line), "{line}: {yaml}");
        }
        assert!(!yaml.contains("on: yes"), "{yaml}");
    }

    #[test]
    fn text_for_people_is_one_format_of_three() {
        for line in ["", "-o table", "-o wide", "--no-headers"] {
            assert!(format(line).unwrap().is_text(), "{line}");
        }
        for line in ["-j", "-o yaml", "-o name", "-o csv", "--columns name"] {
            assert!(!format(line).unwrap().is_text(), "{line}");
        }
        for line in ["-o xml", "-j -o table", "-o", "--columns a,,b"] {
            format(line).unwrap_err();
        }
    }
}

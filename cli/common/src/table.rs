//! Tables: as text in columns, as CSV (RFC 4180), or as names alone.
//!
//! Owns the layout and the choice of columns. Cells are not trusted: control characters do not
//! reach a terminal.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use crate::error::Error;
use crate::text::printable;

/// Spaces between columns.
const GAP: usize = 2;

/// A heading, and rows with the same number of cells. The first column names the object of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    heading: Vec<String>,
    rows: Vec<Vec<String>>,
    /// The number of columns without `-o wide`.
    narrow: usize,
}

impl Table {
    /// A table with these columns.
    pub fn new<const N: usize>(
        heading: [&str; N],
        rows: impl IntoIterator<Item = [String; N]>,
    ) -> Self {
        Self {
            heading: heading.map(str::to_owned).into(),
            rows: rows.into_iter().map(Vec::from).collect(),
            narrow: N,
        }
    }

    /// Marks the last `count` columns as shown with `-o wide` and in CSV only.
    #[must_use]
    pub fn with_wide(mut self, count: usize) -> Self {
        self.narrow = self.heading.len().saturating_sub(count);
        self
    }

    /// Any value: a row for each item of a list, or for each entry of a listing.
    pub(crate) fn of_value(value: Value) -> Self {
        let rows = items(value);
        let keys: BTreeSet<&String> = rows.iter().flat_map(Map::keys).collect();
        let mut heading: Vec<String> = keys.into_iter().cloned().collect();
        // Names first, other columns by name.
        heading.sort_by_key(|key| match key.as_str() {
            "name" => 0,
            "id" => 1,
            _ => 2,
        });
        let cells = |row: &Map<String, Value>| -> Vec<String> {
            heading.iter().map(|key| cell(row.get(key))).collect()
        };
        Self {
            rows: rows.iter().map(cells).collect(),
            narrow: heading.len(),
            heading,
        }
    }

    /// Removes the columns that only `-o wide` and CSV have.
    #[must_use]
    pub fn narrow(mut self) -> Self {
        for row in std::iter::once(&mut self.heading).chain(&mut self.rows) {
            row.truncate(self.narrow);
        }
        self
    }

    /// Selects these columns, in this order; names are case-insensitive. Without names the table is
    /// unchanged.
    ///
    /// # Errors
    /// The table has no such column.
    pub(crate) fn with_columns(self, names: &[&str]) -> Result<Self, Error> {
        if self.heading.is_empty() {
            return Ok(self);
        }
        let find = |name: &&str| {
            let mut heading = self.heading.iter();
            heading
                .position(|column| column.eq_ignore_ascii_case(name))
                .ok_or_else(|| {
                    let known = self.heading.join(", ");
                    Error::wrong(format!("no column {name:?}: use {known}"))
                })
        };
        let chosen = names.iter().map(find).collect::<Result<Vec<_>, _>>()?;
        let pick = |row: &Vec<String>| -> Vec<String> {
            let cells = chosen.iter().filter_map(|&column| row.get(column));
            cells.cloned().collect()
        };
        Ok(Self {
            heading: pick(&self.heading),
            rows: self.rows.iter().map(pick).collect(),
            narrow: chosen.len(),
        })
    }

    fn lines(&self, headers: bool) -> impl Iterator<Item = Vec<String>> + Clone {
        let heading = Some(&self.heading).filter(|heading| headers && !heading.is_empty());
        let rows = heading.into_iter().chain(&self.rows);
        rows.map(|row| row.iter().map(|cell| printable(cell)).collect())
    }

    /// Draws columns as wide as their cells, without trailing spaces.
    #[must_use]
    pub fn draw(&self, headers: bool) -> String {
        let lines = self.lines(headers);
        let mut widths = vec![0; self.heading.len()];
        for line in lines.clone() {
            for (width, cell) in widths.iter_mut().zip(line) {
                *width = cell.chars().count().max(*width);
            }
        }
        let mut text = String::new();
        for line in lines {
            let cells = line.iter().zip(&widths);
            let mut padded = String::new();
            for (cell, width) in cells {
                // Not by the formatter, whose widths have 16 bits.
                let fill = width.saturating_sub(cell.chars().count()) + GAP;
                padded.push_str(cell);
                padded.extend(std::iter::repeat_n(' ', fill));
            }
            text.push_str(padded.trim_end());
            text.push('\n');
        }
        text
    }

    /// Comma-separated values.
    pub(crate) fn csv(&self, headers: bool) -> String {
        let quoted = |cell: String| {
            if cell.contains([',', '"']) {
                format!("\"{}\"", cell.replace('"', "\"\""))
            } else {
                cell
            }
        };
        self.lines(headers)
            .map(|line| line.into_iter().map(quoted).collect::<Vec<_>>().join(",") + "\n")
            .collect()
    }

    /// The first cell of each row, on a line of its own.
    pub(crate) fn names(&self) -> String {
        let names = self.lines(false).filter_map(|line| line.into_iter().next());
        names.map(|name| name + "\n").collect()
    }
}

/// The items of a value: elements, entries with their names, or the value alone.
fn items(value: Value) -> Vec<Map<String, Value>> {
    let row = |value| match value {
        Value::Object(row) => row,
        value => Map::from_iter([("value".to_owned(), value)]),
    };
    match value {
        Value::Array(items) => items.into_iter().map(row).collect(),
        // The one key of a listing names its kind.
        Value::Object(mut map)
            if map.len() == 1 && map.values().all(|it| it.is_object() || it.is_array()) =>
        {
            let listed = map.values_mut().next().map(Value::take);
            let Some(Value::Object(entries)) = listed else {
                return items(listed.unwrap_or_default());
            };
            let named = entries.into_iter().map(|(name, entry)| {
                let mut entry = row(entry);
                entry.insert("name".to_owned(), name.into());
                entry
            });
            named.collect()
        }
        value => vec![row(value)],
    }
}

/// A text without quotes, nothing for null, anything else as JSON.
fn cell(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(value) => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn table() -> Table {
        let row = |name: &str, pid: &str, note: &str| [name, pid, note].map(str::to_owned);
        let rows = [row("a", "12345", ""), row("lönger\x1b", "1", "x, \"y\"")];
        Table::new(["NAME", "PID", "NOTE"], rows).with_wide(1)
    }

    #[test]
    fn columns_are_as_wide_as_their_cells() {
        let wide = "NAME     PID    NOTE\na        12345\nlönger?  1      x, \"y\"\n";
        assert_eq!(table().draw(true), wide);
        assert_eq!(
            table().narrow().draw(true),
            "NAME     PID\na        12345\nlönger?  1\n"
        );
        let chosen = table().with_columns(&["pid", "NAME"]).unwrap();
        let long = "x".repeat(1 << 17);
        let wide = Table::new(["A", "B"], [[long.clone(), "b".to_owned()]]);
        assert!(wide.draw(false).starts_with(&(long + "  b")));
        assert_eq!(chosen.draw(false), "12345  a\n1      lönger?\n");
        let error = table().with_columns(&["nam"]).unwrap_err().to_string();
        assert!(error.contains("NAME, PID, NOTE"), "{error}");
    }

    #[test]
    fn csv_and_names_are_for_programs() {
        assert_eq!(
            table().csv(true),
            "NAME,PID,NOTE\na,12345,\nlönger?,1,\"x, \"\"y\"\"\"\n"
        );
        assert_eq!(table().names(), "a\nlönger?\n");
    }

    #[test]
    fn any_value_has_rows() {
        for value in [
            json!([{"mtu": 1, "name": "n0"}, {"name": "n1", "on": [true]}]),
            json!({"items": [{"mtu": 1, "name": "n0"}, {"name": "n1", "on": [true]}]}),
            json!({"dev": {"n0": {"mtu": 1}, "n1": {"on": [true], "x": null}}}),
        ] {
            let table = Table::of_value(value);
            assert_eq!(table.names(), "n0\nn1\n");
            let chosen = table.with_columns(&["NAME", "mtu", "on"]).unwrap();
            assert_eq!(chosen.csv(false), "n0,1,\nn1,,[true]\n");
        }
        let one = json!({"id": "net0", "nics": [{"id": "a"}], "deleted": true});
        assert_eq!(
            Table::of_value(one).csv(true),
            "id,deleted,nics\nnet0,true,\"[{\"\"id\"\":\"\"a\"\"}]\"\n"
        );
        assert_eq!(Table::of_value(json!({"steps": ["a"]})).names(), "a\n");
        let none = Table::of_value(json!({"dev": {}}));
        assert_eq!(none.with_columns(&["mtu"]).unwrap().csv(true), "");
        assert_eq!(Table::of_value(json!(1)).names(), "1\n");
        assert_eq!(Table::of_value(json!({"on": true})).csv(true), "on\ntrue\n");
    }
}

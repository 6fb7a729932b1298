//! Tables for people: a heading, and columns as wide as what is in them.
//!
//! What is in a table is not trusted: control characters do not reach a terminal.

use bellhop_common::text::printable;

/// Between columns.
const GAP: usize = 2;

/// A line for the heading and one for each row, without blanks at their ends. Rows have as many cells as the
/// heading.
pub(crate) fn draw<const N: usize>(heading: [&str; N], rows: &[[String; N]]) -> String {
    let heading = heading.map(str::to_owned);
    let rows: Vec<[String; N]> = std::iter::once(&heading)
        .chain(rows)
        .map(|row| std::array::from_fn(|column| printable(row.get(column).map_or("", |cell| cell))))
        .collect();
    let mut widths = [0; N];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let mut text = String::new();
    for row in &rows {
        let line: String = row
            .iter()
            .zip(widths)
            .map(|(cell, width)| format!("{cell:<fill$}", fill = width + GAP))
            .collect();
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_what_is_in_them() {
        let row = |name: &str, pid: &str| [name.to_owned(), pid.to_owned()];
        let rows = [row("a", "12345"), row("lönger\x1b", "1"), row("", "")];
        let text = draw(["NAME", "PID"], &rows);
        assert_eq!(text, "NAME     PID\na        12345\nlönger?  1\n\n");
    }
}

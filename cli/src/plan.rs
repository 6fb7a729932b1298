//! The steps that a command with `--dry-run` would take, as text and JSON.

use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::text::printable;
use serde_json::json;

/// Prints the steps: one in a line, or as JSON `{"steps": […]}`.
pub(crate) fn print(steps: &[String], format: Format) -> Result<Code, Error> {
    format.print(&json!({ "steps": steps }), || text(steps))
}

fn text(steps: &[String]) -> String {
    if steps.is_empty() {
        return "nothing to do\n".to_owned();
    }
    let lines = steps.iter().zip(1..);
    lines
        .map(|(step, number)| format!("{number}. {}\n", printable(step)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_numbered() {
        let steps = ["bind a\x1b".to_owned(), "bind b".to_owned()];
        assert_eq!(text(&steps), "1. bind a?\n2. bind b\n");
        assert_eq!(text(&[]), "nothing to do\n");
    }
}

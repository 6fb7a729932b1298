//! Metrics in the Prometheus text format, version 0.0.4.
//!
//! Owns the form of a family and of its samples; escapes label values. It must not know any figure.

use std::fmt::Write as _;

use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};

/// The version of the format is a part of its type.
const FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The text, family by family.
#[derive(Debug, Default)]
pub struct Text(String);

impl Text {
    /// Begins a family: all its samples follow.
    pub fn family(&mut self, name: &'static str, kind: &str, help: &str) -> Family<'_> {
        // Writing to a string does not fail.
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
        Family { text: self, name }
    }

    /// The text so far.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl IntoResponse for Text {
    fn into_response(self) -> Response {
        ([(CONTENT_TYPE, FORMAT)], self.0).into_response()
    }
}

/// Samples of one name.
#[derive(Debug)]
pub struct Family<'a> {
    text: &'a mut Text,
    name: &'static str,
}

impl Family<'_> {
    /// Adds a sample.
    pub fn sample(&mut self, labels: &[(&str, &str)], value: u64) -> &mut Self {
        let out = &mut self.text.0;
        out.push_str(self.name);
        for (number, (label, value)) in labels.iter().enumerate() {
            out.push(if number == 0 { '{' } else { ',' });
            let value = value
                .replace('\\', "\\\\")
                .replace('"', "\\\"")
                .replace('\n', "\\n");
            let _ = write!(out, "{label}=\"{value}\"");
        }
        if !labels.is_empty() {
            out.push('}');
        }
        let _ = writeln!(out, " {value}");
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped() {
        let mut text = Text::default();
        text.family("x", "gauge", "help")
            .sample(&[("a", "q\"\\\n"), ("b", "")], 7)
            .sample(&[], u64::MAX);
        assert_eq!(
            text.as_str(),
            "# HELP x help\n# TYPE x gauge\nx{a=\"q\\\"\\\\\\n\",b=\"\"} 7\n\
             x 18446744073709551615\n"
        );
    }
}

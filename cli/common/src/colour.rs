//! Colours, for terminals only.
//!
//! Owns the decision and the palette: help and errors of clap, our own errors, log lines and tables
//! use the same one. Output to a file or a pipe has no escape sequences.

use std::ffi::OsString;
use std::io::IsTerminal;

use clap::builder::styling::{AnsiColor, Style, Styles};

/// clap's palette: for help, and for errors in the command line.
pub const STYLES: Styles = Styles::styled()
    .header(Style::new().bold())
    .usage(Style::new().bold())
    .literal(AnsiColor::Cyan.on_default())
    .placeholder(Style::new())
    .error(ERROR)
    .valid(AnsiColor::Green.on_default())
    .invalid(AnsiColor::Yellow.on_default());

/// The word before an error.
pub const ERROR: Style = AnsiColor::Red.on_default().bold();
/// The word before a hint.
pub const HINT: Style = AnsiColor::Green.on_default().bold();

/// Whether output to `stream` may have colours: it is a terminal that supports them, and NO_COLOR
/// (no-color.org) is unset or empty.
pub fn wanted(stream: &impl IsTerminal) -> bool {
    wanted_by(
        stream.is_terminal(),
        std::env::var_os("NO_COLOR"),
        std::env::var_os("TERM"),
    )
}

fn wanted_by(terminal: bool, no_color: Option<OsString>, term: Option<OsString>) -> bool {
    let refused = no_color.is_some_and(|value| !value.is_empty());
    let able = term.is_some_and(|term| !term.is_empty() && term != "dumb");
    terminal && able && !refused
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_need_a_capable_terminal_and_no_opt_out() {
        let of = |terminal, no_color: Option<&str>, term: Option<&str>| {
            wanted_by(terminal, no_color.map(Into::into), term.map(Into::into))
        };
        assert!(of(true, None, Some("xterm")));
        assert!(of(true, Some(""), Some("xterm")));
        assert!(!of(true, Some("1"), Some("xterm")));
        assert!(!of(true, None, Some("dumb")));
        assert!(!of(true, None, None));
        assert!(!of(false, None, Some("xterm")));
    }
}

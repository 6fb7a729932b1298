//! The layout of `--help` and of usage lines: examples before options.
//!
//! Owns the order of a help's parts.

use clap::Command;
use clap::builder::{Resettable, StyledStr};

/// The heading of a help's examples.
const EXAMPLES: &str = "Examples:";

/// The output of the command without arguments.
pub(crate) const START: &str = "\
Run virtual machines whose NICs are vDPA devices of the host

Start with:
  bellhop doctor                        check this host, and show the next commands
  bellhop nic create NAME --from NIC    create a vDPA device for a guest
  bellhop run --kernel FILE --vdpa DEV  run a VM on this terminal
  bellhop vm create NAME --kernel FILE  create a VM of the node daemon
  bellhop vm list                       list the VMs of the node daemon

`bellhop --help` lists all commands, and `bellhop COMMAND --help` explains one.
";

/// Applies this layout to the help of each subcommand.
///
/// A usage line names required options. Without this, errors would show options from the
/// environment as required.
pub(crate) fn laid_out(mut command: Command) -> Command {
    // Usage lines begin with the names of the parent commands.
    command.build();
    with_layout(command)
}

fn with_layout(mut command: Command) -> Command {
    let usage = command.render_usage().ansi().to_string();
    if let Some((_, usage)) = usage
        .split_once("Usage:")
        .and_then(|(_, usage)| usage.split_once(' '))
    {
        command = command.override_usage(usage.to_owned());
    }
    let about = command.get_long_about().or_else(|| command.get_about());
    let about = about.map(|about| about.ansi().to_string());
    let notes = command.get_after_long_help().map(ToString::to_string);
    if let (Some(about), Some(notes)) = (about, notes)
        && let Some((examples, notes)) = split(&notes)
    {
        let notes = Some(notes.trim()).filter(|notes| !notes.is_empty());
        let notes = notes.map_or(Resettable::Reset, |notes| {
            Resettable::Value(StyledStr::from(notes.to_owned()))
        });
        command = command
            .long_about(format!("{about}\n\n{examples}"))
            .after_long_help(notes);
    }
    command.mut_subcommands(with_layout)
}

/// The examples, and the notes before and after them.
fn split(notes: &str) -> Option<(String, String)> {
    let is_begin = |line: &&str| *line == EXAMPLES;
    let before: Vec<&str> = notes.lines().take_while(|line| !is_begin(line)).collect();
    let mut rest = notes.lines().skip(before.len()).peekable();
    rest.peek()?;
    let mut examples: Vec<&str> = rest.next().into_iter().collect();
    while let Some(line) = rest.next_if(|line| line.is_empty() || line.starts_with(' ')) {
        examples.push(line);
    }
    let notes: Vec<&str> = before.into_iter().chain(rest).collect();
    Some((examples.join("\n").trim_end().to_owned(), notes.join("\n")))
}

/// The message of an error, without usage.
pub(crate) fn message(error: &clap::Error) -> String {
    let text = error.to_string();
    let (message, _) = text.split_once("\n\n").unwrap_or((&text, ""));
    let message = message.trim();
    message
        .strip_prefix("error: ")
        .unwrap_or(message)
        .to_owned()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    /// The output for a command line that is wrong, or requests help.
    fn printed(words: &[&str]) -> String {
        let command = laid_out(crate::Arguments::command());
        let line = std::iter::once(&"bellhop").chain(words);
        command.try_get_matches_from(line).unwrap_err().to_string()
    }

    #[track_caller]
    fn in_order(text: &str, parts: &[&str]) {
        let mut from = 0;
        for part in parts {
            let found = text[from..].find(part);
            from += found.unwrap_or_else(|| panic!("no {part:?} at its place in {text}"));
        }
    }

    #[test]
    fn examples_come_first_and_global_options_last() {
        for words in [
            &["vm", "create", "--help"][..],
            &["vm", "migrate", "--help"],
            &["vm", "pause", "--help"],
        ] {
            in_order(
                &printed(words),
                &[
                    "Examples:\n  bellhop vm ",
                    "Usage: bellhop vm ",
                    "\nArguments:",
                    "\nConnection options:",
                    "--node <ADDRESS>",
                    "--node-ca <FILE>",
                    "\nOutput options:",
                    "--json",
                    "\nGlobal options:",
                    "--log-level",
                ],
            );
        }
        in_order(
            &printed(&["run", "--help"]),
            &["Examples:", "Usage:", "\nOptions:", "\nGlobal options:"],
        );
        in_order(
            &printed(&["nic", "create", "--help"]),
            &[
                "Examples:",
                "Usage:",
                "--from <NIC>",
                "\nOutput options:",
                "Steps, each",
            ],
        );
        in_order(
            &printed(&["serve", "--help"]),
            &["Examples:", "Usage:", "--state-dir", "SIGHUP reads"],
        );
    }

    #[test]
    fn the_short_help_has_one_line_for_connections() {
        let help = printed(&["vm", "pause", "-h"]);
        in_order(
            &help,
            &["Usage: bellhop vm pause", "--node <ADDRESS>", "--log-level"],
        );
        for hidden in [
            "--node-ca",
            "--node-token-file",
            "--log-format",
            "Examples:",
        ] {
            assert!(!help.contains(hidden), "{hidden}: {help}");
        }
        assert!(help.lines().count() < 30, "{help}");
    }

    #[test]
    fn usage_lines_name_only_required_arguments() {
        let error = printed(&["vm", "show", "--node", "/run/x"]);
        assert!(
            error.contains("Usage: bellhop vm show [OPTIONS] <NAME>\n"),
            "{error}"
        );
        let error = printed(&["run"]);
        for way in [
            "--kernel",
            "--file",
            "--restore",
            "--receive",
            "--api-socket",
        ] {
            assert!(error.contains(way), "{way}: {error}");
        }
    }

    #[test]
    fn the_commands_to_start_with_exist() {
        let root = crate::Arguments::command();
        let lines = START
            .lines()
            .filter_map(|line| line.strip_prefix("  bellhop "));
        let mut count = 0;
        for line in lines {
            let is_name = |word: &&str| word.starts_with(|first: char| first.is_ascii_lowercase());
            let mut command = &root;
            for name in line.split(' ').take_while(is_name) {
                let found = command.find_subcommand(name);
                command = found.unwrap_or_else(|| panic!("no {name} in {line}"));
            }
            assert!(!command.has_subcommands(), "{line}");
            count += 1;
        }
        assert_eq!(count, 5);
        assert!(START.lines().all(|line| line.chars().count() <= 100));
    }

    #[test]
    fn notes_around_examples_stay() {
        let (examples, notes) = split("a\n\nExamples:\n  x\n\n  y\n\nb\n").unwrap();
        assert_eq!(examples, "Examples:\n  x\n\n  y");
        assert_eq!(notes, "a\n\nb");
        assert_eq!(split("a\nb"), None);
    }
}

//! Tests: `docs/cli-reference.md` is the help of the commands.
//!
//! `BELLHOP_WRITE_CLI=1 cargo test -p bellhop --lib reference` writes it.

use std::fmt::Write as _;

use clap::{Arg, Command, CommandFactory as _};

use crate::{help, manual};

/// The copy in the repository.
const COPY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/cli-reference.md");

/// The lines before the first command.
const HEAD: &str = "\
# Command reference

The help of each command. A test writes it from the program (`cli/src/reference.rs`). Options that a
command inherits from its parent are in the parent's section only. [Command line](cli.md) explains
the concepts.
";

/// Adds a section for the command and each of its visible subcommands.
fn add(command: &Command, parent: Option<&Command>, text: &mut String) {
    let is_inherited = |argument: &Arg| {
        let mut known = parent.into_iter().flat_map(Command::get_arguments);
        argument.is_global_set() && known.any(|other| other.get_id() == argument.get_id())
    };
    let shown = command.clone().term_width(96).mut_args(|argument| {
        let argument = argument.hide_env_values(true);
        if is_inherited(&argument) {
            argument.hide(true)
        } else {
            argument
        }
    });
    let name = command.get_bin_name().unwrap_or(command.get_name());
    let help = shown.clone().render_long_help().to_string();
    let lines: Vec<&str> = help.lines().map(str::trim_end).collect();
    write!(
        text,
        "\n## {name}\n\n```text\n{}\n```\n",
        lines.join("\n").trim_end()
    )
    .unwrap();
    for subcommand in manual::shown(command).filter(|one| one.get_name() != "help") {
        add(subcommand, Some(command), text);
    }
}

#[test]
fn the_reference_is_the_help_of_the_program() {
    let mut text = HEAD.to_owned();
    add(
        &help::laid_out(crate::Arguments::command()),
        None,
        &mut text,
    );
    if std::env::var_os("BELLHOP_WRITE_CLI").is_some() {
        std::fs::write(COPY, &text).unwrap();
    }
    let copy = std::fs::read_to_string(COPY).unwrap();
    let differs = copy.lines().zip(text.lines()).find(|(old, new)| old != new);
    assert_eq!(differs, None, "BELLHOP_WRITE_CLI=1 writes {COPY}");
    assert_eq!(copy.len(), text.len(), "BELLHOP_WRITE_CLI=1 writes {COPY}");
}

//! The `bellhop` command as a library: cargo compiles it while `vmm` still generates code, which it
//! does not do for a program.
//!
//! Each subcommand is one file under `commands`; a new one is a file there and a variant of
//! `commands::Command`. Knows the terminal, files and signals; must not know ring layouts or KVM.

mod commands;
mod completion;
mod config_file;
mod confirm;
mod help;
#[cfg(test)]
mod json_shapes;
mod logging;
mod manual;
mod plan;
mod progress;
#[cfg(test)]
mod reference;
mod setting;
mod signals;
mod terminal;
mod units;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use bellhop_common::exit::Report;
use bellhop_common::listing::Format;
use bellhop_common::{colour, exit};
use clap::{CommandFactory as _, FromArgMatches as _, Parser};
use tracing::level_filters::LevelFilter;

/// Run virtual machines whose NICs are vDPA devices of the host
///
/// A guest gets an ordinary virtio device. Its data path leads straight to the device behind
/// /dev/vhost-vdpa-N, and Bellhop touches no packet.
#[derive(Debug, Parser)]
#[command(name = "bellhop", version, after_help = exit::help(), styles = colour::STYLES)]
struct Arguments {
    #[command(flatten)]
    format: Format,

    #[command(flatten)]
    logs: Logs,

    #[command(subcommand)]
    command: commands::Command,
}

#[derive(Debug, clap::Args)]
struct Logs {
    /// Log level: error, warn, info, debug or trace
    #[arg(
        long,
        global = true,
        value_name = "LEVEL",
        value_parser = logging::level(),
        default_value = "warn",
        env = "BELLHOP_LOG",
        help_heading = "Global options"
    )]
    log_level: LevelFilter,

    /// Format of log lines: text or json
    #[arg(
        long,
        global = true,
        value_name = "FORMAT",
        default_value = "text",
        env = "BELLHOP_LOG_FORMAT",
        hide_possible_values = true,
        hide_short_help = true,
        help_heading = "Global options"
    )]
    log_format: logging::LogFormat,

    /// Log to this file instead of standard error, each line with its time; at 16 MiB it becomes
    /// FILE.1
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        env = "BELLHOP_LOG_FILE",
        help_heading = "Global options"
    )]
    log_file: Option<PathBuf>,
}

/// The same command line for a program that takes over a VM: the guest is paused, and building all
/// other subcommands takes a while.
#[derive(Debug, Parser)]
struct HandedOver {
    #[command(flatten)]
    logs: Logs,

    #[command(subcommand)]
    command: commands::GoesOn,
}

impl Arguments {
    /// Parses the command line of this process.
    fn read(words: &[OsString]) -> Result<Self, clap::Error> {
        if commands::is_handed_over()
            && let Ok(HandedOver { logs, command }) = HandedOver::try_parse()
        {
            let command = command.into();
            let format = Format::default();
            return Ok(Self {
                format,
                logs,
                command,
            });
        }
        // The layout of help and errors takes longer than parsing a correct command line.
        Self::try_parse_from(words).or_else(|_| {
            let matches = help::laid_out(Self::command()).try_get_matches_from(words)?;
            Self::from_arg_matches(&matches)
        })
    }
}

/// Whether a wrong command line requests JSON; clap may have stopped at an earlier word.
fn wants_json(words: impl Iterator<Item = OsString>) -> bool {
    let words: Vec<OsString> = words.collect();
    let is = |word: &OsString, known: &[&str]| known.iter().any(|known| word == known);
    let json = ["-j", "-jp", "-pj", "--json", "-ojson", "--output=json"];
    let option = |pair: &[OsString]| match pair {
        [option, format] => is(option, &["-o", "--output"]) && format == "json",
        _ => false,
    };
    words.iter().any(|word| is(word, &json)) || words.windows(2).any(option)
}

/// The error of a wrong command line; none for a request for help.
fn wrong_line(error: &clap::Error) -> Option<Report> {
    if !error.use_stderr()
        || error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
    {
        return None;
    }
    Some(Report::from_messages([help::message(error)]).code("wrong_command_line"))
}

/// Makes each panic end the process, as in a release build. Cargo's profile for tests cannot: the
/// test harness needs to unwind.
fn abort_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
}

/// Runs the command line of this process and returns its exit code.
pub fn main() -> ExitCode {
    if cfg!(panic = "unwind") {
        abort_on_panic();
    }
    completion::answer_shell(Arguments::command);
    let words = std::env::args_os().collect();
    let words = match commands::with_file(Arguments::command, words) {
        Ok(words) => words,
        Err(error) => {
            error.in_words().print();
            return error.code().into();
        }
    };
    let arguments = Arguments::read(&words).unwrap_or_else(|error| {
        // The command line of another version may be invalid for this one.
        commands::refuse_hand_over(&error);
        match wrong_line(&error) {
            Some(report) if wants_json(std::env::args_os()) => {
                Report::use_json();
                report.print();
                std::process::exit(error.exit_code())
            }
            None if words.len() < 2 => {
                eprint!("{}", help::START);
                std::process::exit(error.exit_code())
            }
            _ => error.exit(),
        }
    });
    if arguments.format.is_json() {
        Report::use_json();
    }
    let logs = &arguments.logs;
    if let Err(error) = arguments.command.confine(logs.log_file.as_deref()) {
        commands::refuse_hand_over(&error);
        error.in_words().print();
        return error.code().into();
    }
    logging::start(
        logs.log_level,
        logs.log_format,
        logs.log_file.as_deref(),
        arguments.command.log_rate(),
    );
    match arguments
        .command
        .execute(arguments.format, Arguments::command)
    {
        Ok(code) => code.into(),
        Err(error) => {
            error.in_words().print();
            error.code().into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_command_has_the_same_formats() {
        for line in [
            "doctor -o csv --columns name,state",
            "probe nic0 -o yaml",
            "report -j",
            "vm list -o wide --no-headers",
            "-o json vm delete web",
            "node shutdown-guests -o name",
            "version -jp",
        ] {
            let words = std::iter::once("bellhop").chain(line.split(' '));
            let arguments = Arguments::try_parse_from(words).unwrap();
            assert!(
                !arguments.format.is_text() || line.contains("wide"),
                "{line}"
            );
        }
    }

    #[test]
    fn a_wrong_line_has_a_message_and_help_has_none() {
        let error = |line: &str| {
            let words = std::iter::once("bellhop").chain(line.split(' '));
            wrong_line(&Arguments::try_parse_from(words).unwrap_err())
        };
        let report = error("vm show web -j --nosuch").unwrap();
        let expected = "unexpected argument '--nosuch' found";
        assert_eq!(
            report,
            Report::from_messages([expected.to_owned()]).code("wrong_command_line")
        );
        for line in ["vm", "--help", "vm list --help", "--version"] {
            assert_eq!(error(line), None, "{line}");
        }
        for (line, json) in [
            ("vm lst -o json", true),
            ("vm list --output=json --nosuch", true),
            ("-jp nosuch", true),
            ("vm lst -o table", false),
            ("vm show json -o", false),
        ] {
            assert_eq!(
                wants_json(line.split(' ').map(OsString::from)),
                json,
                "{line}"
            );
        }
    }
}

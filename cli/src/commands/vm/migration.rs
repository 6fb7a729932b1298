//! `bellhop vm migration`: the last migration of a VM, while it is under way and after it.

use std::time::{Duration, Instant};

use bellhop_api::machine::{EndReason, MigrationPhase, MigrationStatus, Place, SettleRequest};
use bellhop_common::client::{MAKING, Node, Refusal};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::text::printable;
use hyper::Method;
use serde_json::{Value, json};

use super::migrate::{Destination, at, line, summary};
use super::{PERIOD, read, vm};
use crate::confirm::Confirmation;
use crate::progress::ProgressLine;

/// How long a process may take to end that does not answer any more.
const ENDING: Duration = Duration::from_secs(5);

/// Show, follow, cancel or settle the migration of a VM
///
/// `bellhop vm migrate` starts one.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  bellhop vm migration show web
  bellhop vm migration watch web
  bellhop vm migration cancel web
  bellhop vm migration settle web there")]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Show the phase and progress of the last migration
    #[command(
        visible_alias = "get",
        after_long_help = "\
Examples:
  bellhop vm migration show web
  bellhop vm migration show web -o json | jq .left_bytes"
    )]
    Show(Vm),
    /// Follow the migration until it has ended
    #[command(after_long_help = "\
The exit code is 0 if the guest has moved. Without a terminal the command prints a line of progress
every 10 seconds, but not with -o json.

Examples:
  bellhop vm migration watch web")]
    Watch(Vm),
    /// Cancel the migration: the guest stays here
    ///
    /// This works until the guest is handed over. A VM that was to come from another node is
    /// deleted.
    #[command(after_long_help = "\
The command does not wait: `bellhop vm migration watch` follows the migration to its end.

Examples:
  bellhop vm migration cancel web")]
    Cancel(Vm),
    /// Say where the guest is, after a migration with an unknown outcome
    ///
    /// If the connection breaks while the guest is handed over, it stays paused on both hosts. If
    /// the process ended before it reported the outcome, the VM stays stopped.
    #[command(after_long_help = "\
Look at the destination first: the daemon cannot check the answer. The same guest on both hosts
ruins its disks.

Examples:
  bellhop vm migration settle web here        the destination does not have it
  bellhop vm migration settle web there       it runs there; the one here ends")]
    Settle {
        #[command(flatten)]
        vm: Vm,
        /// The host that has the guest
        #[arg(value_name = "WHERE")]
        place: PlaceWord,
        #[command(flatten)]
        confirmation: Confirmation,
    },
}

// A doc comment here would take the place of the subcommands' own.
#[derive(Debug, clap::Args)]
struct Vm {
    /// The VM
    #[arg(value_name = "NAME")]
    name: String,
}

/// Which host has a guest.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum PlaceWord {
    /// This one: it resumes, or may be started again
    Here,
    /// The other one: the VM here ends
    There,
}

/// Does what was asked.
pub(super) fn execute(arguments: &Arguments, node: &Node, format: Format) -> Result<Code, Error> {
    match &arguments.command {
        Command::Show(Vm { name }) => {
            let answer: Value = node.get(&at(name))?;
            let status: MigrationStatus = read(&answer)?;
            format.print(&answer, || text(name, &status))
        }
        Command::Watch(Vm { name }) => {
            // There is one; a VM that is gone later has moved to another node.
            node.get::<Value>(&at(name))?;
            wait(node, name, None, format)
        }
        Command::Cancel(Vm { name }) => {
            node.change(Method::DELETE, &at(name))?;
            format.print_done(&json!({ "name": name, "cancelled": true }))
        }
        Command::Settle {
            vm: Vm { name },
            place,
            confirmation,
        } => {
            let settle = match place {
                PlaceWord::Here => {
                    confirmation.ask(format!(
                        "Keep the guest of {name} here? A second one at the destination ruins its \
                         disks."
                    ))?;
                    Place::Here
                }
                PlaceWord::There => {
                    confirmation.ask(format!(
                        "End the VM {name} here? A guest that does not run at the destination is \
                         lost."
                    ))?;
                    Place::There
                }
            };
            node.send(Method::PATCH, &at(name), &SettleRequest { settle }, MAKING)?;
            format.print_done(&json!({ "name": name, "settled": settle }))
        }
    }
}

/// Follows a migration to its end. `destination` is what the user calls it, if that is known.
pub(super) fn wait(
    node: &Node,
    name: &str,
    destination: Option<&Destination>,
    format: Format,
) -> Result<Code, Error> {
    let answer = match follow(node, name, format) {
        Err(error) if error.refusal().is_some() => {
            return gone(node, name, destination, error, format);
        }
        answer => answer?,
    };
    let status: MigrationStatus = read(&answer)?;
    match status.phase {
        MigrationPhase::Moved => {
            let peer = destination.map_or_else(|| status.peer.clone(), ToString::to_string);
            format.print(&answer, || summary(name, &peer, &status))
        }
        MigrationPhase::Unsettled => {
            let why = why(&status);
            Err(Error::failed(format!(
                "it is not settled where {name} is, so it stands still here: {why}. Look at the \
                 destination; if it runs there, say `bellhop vm migration settle {name} there`, \
                 else `bellhop vm migration settle {name} here`"
            )))
        }
        _ => {
            let why = why(&status);
            Err(Error::failed(format!(
                "{name} did not move, it stays here: {why}"
            )))
        }
    }
}

/// The process does not answer any more: what the daemon knows of it.
fn gone(
    node: &Node,
    name: &str,
    destination: Option<&Destination>,
    error: Error,
    format: Format,
) -> Result<Code, Error> {
    let start = Instant::now();
    let view = loop {
        let view = match vm(node, name) {
            // The other node has all of it.
            Err(error)
                if error.refusal().is_some_and(Refusal::is_not_there)
                    && !matches!(destination, Some(Destination::Endpoint(_))) =>
            {
                return say_moved(name, destination, format);
            }
            view => view?.0,
        };
        if view.pid.is_none() || start.elapsed() >= ENDING {
            break view;
        }
        std::thread::sleep(PERIOD);
    };
    if let Some(departure) = view.may_be_elsewhere {
        let why = printable(&format!("{}; {}", departure.reason, departure.remedy));
        return Err(Error::failed(format!("nothing answers for {name}: {why}")));
    }
    let moved = view.pid.is_none()
        && view
            .last_end
            .is_some_and(|end| end.reason == EndReason::Moved);
    if !moved {
        return Err(error);
    }
    say_moved(name, destination, format)
}

fn say_moved(name: &str, destination: Option<&Destination>, format: Format) -> Result<Code, Error> {
    let place = destination.map_or_else(|| "its destination".to_owned(), ToString::to_string);
    let text = || {
        format!(
            "{} runs at {} now; its process here ended before it could say how long it stood \
             still\n",
            printable(name),
            printable(&place),
        )
    };
    format.print(
        &json!({ "name": name, "phase": MigrationPhase::Moved, "peer": place }),
        text,
    )
}

fn why(status: &MigrationStatus) -> String {
    let why = status.error.as_deref().unwrap_or("no reason is given");
    printable(why)
}

/// Polls until it has ended, and shows its progress.
fn follow(node: &Node, name: &str, format: Format) -> Result<Value, Error> {
    let mut progress = if format.is_json() {
        ProgressLine::new()
    } else {
        ProgressLine::with_lines()
    };
    let at = at(name);
    loop {
        let started = Instant::now();
        let answer: Value = node.get(&at)?;
        let status: MigrationStatus = read(&answer)?;
        progress.show(line(name, &status));
        if matches!(
            status.phase,
            MigrationPhase::Moved | MigrationPhase::Stayed | MigrationPhase::Unsettled
        ) {
            return Ok(answer);
        }
        std::thread::sleep(PERIOD.saturating_sub(started.elapsed()));
    }
}

fn text(name: &str, status: &MigrationStatus) -> String {
    match (status.phase, &status.error) {
        (MigrationPhase::Moved, _) => summary(name, &status.peer, status),
        (_, Some(error)) => format!("{}: {}\n", line(name, status), printable(error)),
        (_, None) => line(name, status) + "\n",
    }
}

//! `bellhop vm migration`: the last migration of a VM, in progress or ended.

use bellhop_api::machine::{MigrationPhase, MigrationStatus, Place, ResolveRequest};
use bellhop_common::client::{MAKING, Node};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::text::printable;
use hyper::Method;
use serde_json::{Value, json};

use super::migrate::{at, followed, line, summary};
use super::read;
use crate::commands::operation;
use crate::confirm::Confirmation;

/// Show, follow, cancel or resolve the migration of a VM
///
/// `bellhop vm migrate` starts one.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  bellhop vm migration show web
  bellhop vm migration watch web
  bellhop vm migration cancel web
  bellhop vm migration resolve web there")]
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
    /// Follow the migration to its end
    #[command(after_long_help = "\
The exit code is 0 if the guest has moved. Without a terminal the command prints a line of progress
every 10 seconds, but not with -o json.

Examples:
  bellhop vm migration watch web")]
    Watch(Vm),
    /// Cancel the migration: the guest stays here
    ///
    /// This works before the handover of the guest. An incoming VM is deleted.
    #[command(after_long_help = "\
The command does not wait: `bellhop vm migration watch` follows the migration to its end.

Examples:
  bellhop vm migration cancel web")]
    Cancel(Vm),
    /// Set the guest's location after an unknown outcome
    ///
    /// If the connection breaks during the handover, the guest stays paused on both hosts. If the
    /// process ended before it reported the outcome, the VM stays stopped.
    #[command(
        alias = "settle",
        after_long_help = "\
Check the destination first: the daemon cannot check the answer. The same guest on both hosts
corrupts its disks.

Examples:
  bellhop vm migration resolve web here        the destination does not have it
  bellhop vm migration resolve web there       it runs there; the VM here ends"
    )]
    Resolve {
        #[command(flatten)]
        vm: Vm,
        /// The host that has the guest
        #[arg(value_name = "WHERE")]
        place: PlaceWord,
        #[command(flatten)]
        confirmation: Confirmation,
    },
}

// A doc comment here would replace the subcommands' own.
#[derive(Debug, clap::Args)]
struct Vm {
    /// The VM
    #[arg(value_name = "NAME")]
    name: String,
}

/// The host that has the guest.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum PlaceWord {
    /// This host: the guest resumes, or may be started again
    Here,
    /// The other host: the VM here ends
    There,
}

/// Runs the subcommand.
pub(super) fn execute(arguments: &Arguments, node: &Node, format: Format) -> Result<Code, Error> {
    match &arguments.command {
        Command::Show(Vm { name }) => {
            let answer: Value = node.get(&at(name))?;
            let status: MigrationStatus = read(&answer)?;
            format.print(&answer, || text(name, &status))
        }
        Command::Watch(Vm { name }) => followed(name, None, format, |look| {
            operation::follow_migration(node, name, look)
        }),
        Command::Cancel(Vm { name }) => {
            node.change(Method::DELETE, &at(name))?;
            format.print_done(&json!({ "name": name, "cancelled": true }))
        }
        Command::Resolve {
            vm: Vm { name },
            place,
            confirmation,
        } => {
            let resolve = match place {
                PlaceWord::Here => {
                    confirmation.ask(format!(
                        "Keep the guest of {name} here? A second guest elsewhere corrupts its \
                         disks."
                    ))?;
                    Place::Here
                }
                PlaceWord::There => {
                    confirmation.ask(format!(
                        "End the VM {name} here? If the guest does not run at the destination, \
                         it is lost."
                    ))?;
                    Place::There
                }
            };
            node.send(
                Method::PATCH,
                &at(name),
                &ResolveRequest { resolve },
                MAKING,
            )?;
            format.print_done(&json!({ "name": name, "resolved": resolve }))
        }
    }
}

fn text(name: &str, status: &MigrationStatus) -> String {
    match (status.phase, &status.error) {
        (MigrationPhase::Moved, _) => summary(name, &status.peer, status),
        (_, Some(error)) => format!("{}: {}\n", line(name, status), printable(error)),
        (_, None) => line(name, status) + "\n",
    }
}

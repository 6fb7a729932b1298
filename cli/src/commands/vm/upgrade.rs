//! `bellhop vm upgrade`.

use std::path::PathBuf;
use std::time::Duration;

use bellhop_api::machine::UpgradeRequest;
use bellhop_api::node::UpgradeInfo;
use bellhop_common::client::{Address, MAKING, Node, NodeArguments, STRANGE, path};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::text::printable;
use serde_json::json;

use super::{absolute, of_vm};
use crate::commands::operation;
use crate::units::seconds;

/// Replace the VMM of a running VM in place (live upgrade)
///
/// The guest is paused for a moment. Its memory stays in place, and its process keeps its PID. If
/// the new program cannot take the VM over, the present program continues.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
The program closes vDPA devices and opens them again: their files must still exist, and the guest
loses incoming frames meanwhile.

Examples:
  bellhop vm upgrade web                                     with the program of this command
  bellhop vm upgrade web --program /opt/bellhop-0.2/bellhop")]
pub(crate) struct Arguments {
    /// The VM
    #[arg(value_name = "NAME")]
    name: String,

    /// The new `bellhop` program, a file on the node (default: this program)
    #[arg(long, value_name = "PATH")]
    program: Option<PathBuf>,

    /// Time limit, such as 90s or 10m; without a unit in seconds
    #[arg(
        long,
        alias = "time-limit",
        value_name = "DURATION",
        default_value_t = 120,
        value_parser = seconds(1..=86_400)
    )]
    timeout: u32,
}

pub(super) fn execute(
    arguments: &Arguments,
    which: &NodeArguments,
    node: &Node,
    format: Format,
) -> Result<Code, Error> {
    let name = &arguments.name;
    let program = program(arguments.program.clone(), which.address())?;
    let at = format!("{}{}", of_vm(name), path(["upgrade"]));
    let body = UpgradeRequest { program };
    let limit = Duration::from_secs(arguments.timeout.into());
    let result = operation::carry_through(node, &at, &body, MAKING, limit, |_| ())?;
    let upgrade = result.upgrade.ok_or_else(|| Error::failed(STRANGE))?;
    let UpgradeInfo {
        before,
        after,
        downtime_ms,
    } = &upgrade;
    let answer = json!({
        "name": name, "before": before, "after": after, "downtime_ms": downtime_ms,
    });
    let text = || {
        let stood = downtime_ms.map(|ms| format!("; its guest was paused for {ms:.0} ms"));
        format!(
            "{}: bellhop {} runs it now; before it was {}{}\n",
            printable(name),
            printable(after),
            printable(before),
            stood.unwrap_or_default()
        )
    };
    format.print(&answer, text)
}

/// The program's path on the node. The default, this command's own path, is valid only if the node
/// is this host.
fn program(given: Option<PathBuf>, node: &Address) -> Result<PathBuf, Error> {
    match (given, node) {
        (Some(path), address) => absolute(&path, address),
        (None, Address::Socket(_)) => std::env::current_exe().map_err(Error::context(
            "cannot find the path of this program: name one with --program",
        )),
        (None, Address::Https { .. } | Address::Ssh { .. }) => Err(Error::wrong(
            "the node is another host: name the program there with --program",
        )),
    }
}

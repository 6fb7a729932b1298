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

/// Have another version of Bellhop run a VM without a reboot
///
/// The guest stands still for a moment. Its memory stays in place, and its process keeps its
/// number. If the program cannot take the VM, the present program continues.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
vDPA devices are closed and opened again: their files have to be there still, and frames for the guest are lost meanwhile.

Examples:
  bellhop vm upgrade web                                     with the program that this command is
  bellhop vm upgrade web --program /opt/bellhop-0.2/bellhop")]
pub(crate) struct Arguments {
    /// The VM
    #[arg(value_name = "NAME")]
    name: String,

    /// The `bellhop` that is to go on with it, a file on the node; by default this one
    #[arg(long, value_name = "PATH")]
    program: Option<PathBuf>,

    /// How long it may take, such as 90s or 10m; without a unit in seconds
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
        let stood = downtime_ms.map(|ms| format!("; its guest stood still for {ms:.0} ms"));
        format!(
            "{}: bellhop {} runs it now; before, it was {}{}\n",
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
            "cannot tell which program this is; name one with --program",
        )),
        (None, Address::Https { .. } | Address::Ssh { .. }) => Err(Error::wrong(
            "the node is another host: name the program there with --program",
        )),
    }
}

//! `bellhop vm upgrade`.

use std::path::PathBuf;
use std::time::Duration;

use bellhop_api::machine::{UpgradeRequest, VmStatus};
use bellhop_common::client::{Address, MAKING, Node, NodeArguments, path};
use bellhop_common::error::Error;
use bellhop_common::exit::{Code, Report};
use bellhop_common::listing::Format;
use bellhop_common::text::printable;
use hyper::Method;
use serde_json::json;

use super::{absolute, of_vm, until, vm};
use crate::units::seconds;

/// Have another version of Bellhop go on with a running VM
///
/// The guest stands still for a moment; its memory stays where it is, and its process keeps its number. If the program cannot
/// take the VM, the one that runs it goes on with it.
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
    let before = look(node, name)?;
    let at = format!("{}{}", of_vm(name), path(["upgrade"]));
    node.send(Method::POST, &at, &UpgradeRequest { program }, MAKING)?;
    let limit = Duration::from_secs(arguments.timeout.into());
    let Some(after) = follow(node, name, &before, limit)? else {
        let message = format!(
            "the VM {name} has not said within {} s that another program goes on with it",
            arguments.timeout
        );
        let hint = format!("`bellhop vm show {name}` shows which version runs it");
        Report::from_messages([message]).hint(hint).print();
        return Ok(Code::TimedOut);
    };
    let downtime = after.upgrade_downtime_ms;
    let answer = json!({
        "name": name, "before": before.version, "after": after.version, "downtime_ms": downtime,
    });
    let text = || {
        let stood = downtime.map(|ms| format!("; its guest stood still for {ms:.0} ms"));
        format!(
            "{}: bellhop {} goes on with it, before it was {}{}\n",
            printable(name),
            printable(&after.version),
            printable(&before.version),
            stood.unwrap_or_default()
        )
    };
    format.print(&answer, text)
}

/// The program's path on the node. This command's own is one only if that is this host.
fn program(given: Option<PathBuf>, node: &Address) -> Result<PathBuf, Error> {
    match (given, node) {
        (Some(path), address) => absolute(&path, address),
        (None, Address::Socket(_)) => std::env::current_exe().map_err(Error::context(
            "cannot tell which program this is; name one with --program",
        )),
        (None, Address::Https { .. }) => Err(Error::wrong(
            "the node is another host: name the program there with --program",
        )),
    }
}

/// The machine by its own account.
fn look(node: &Node, name: &str) -> Result<VmStatus, Error> {
    let at = format!("{}{}?since=0&timeout_s=0", of_vm(name), path(["watch"]));
    node.get(&at)
}

/// Looks until another program runs it, at most so long. Its API is away while it is taken over.
fn follow(
    node: &Node,
    name: &str,
    before: &VmStatus,
    limit: Duration,
) -> Result<Option<VmStatus>, Error> {
    until(limit, || match look(node, name) {
        Ok(now) if now.upgrades > before.upgrades => Ok(Some(now)),
        Ok(VmStatus {
            upgrade_error: Some(why),
            ..
        }) => Err(Error::failed(format!(
            "the VM {name} keeps its present program: {}",
            printable(&why)
        ))),
        Ok(_) => Ok(None),
        Err(error) if error.refusal().is_none() || vm(node, name)?.0.pid.is_none() => Err(error),
        Err(_) => Ok(None),
    })
}

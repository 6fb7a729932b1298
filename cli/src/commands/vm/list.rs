//! `bellhop vm list`.

use serde_json::Value;

use super::{CommandError, VmView};
use crate::client::{ClientError, Node};
use crate::columns;
use crate::exit::Code;
use crate::listing::Format;

/// List this node's VMs
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Columns:
  STATE   Creating, Starting, Running, Paused, Stopped, Deleting, or Unknown: its process does not answer
  PID     the process that runs it
  MEMORY  the guest's
  UPTIME  since its process was started; resets of the guest do not count
  RESTARTS  how often the node has started it again

Examples:
  bellhop vm list
  bellhop vm list -o json | jq -r '.[] | select(.phase == \"Stopped\") | .name'")]
pub(crate) struct Arguments {}

pub(super) fn execute(node: &Node, format: Format) -> Result<Code, CommandError> {
    let answer: Value = node.get("/v1/vms")?;
    let vms = answer.as_array().map(Vec::as_slice).unwrap_or_default();
    let vms = vms
        .iter()
        .map(VmView::read)
        .collect::<Result<Vec<_>, ClientError>>()?;
    format
        .print(&answer, || table(&vms))
        .map_err(CommandError::Output)?;
    Ok(Code::Success)
}

pub(super) fn table(vms: &[VmView]) -> String {
    let unknown = || "-".to_owned();
    let rows: Vec<_> = vms
        .iter()
        .map(|vm| {
            [
                vm.name.clone(),
                vm.phase.clone(),
                vm.pid.map_or_else(unknown, |pid| pid.to_string()),
                vm.cpus.map_or_else(unknown, |cpus| cpus.to_string()),
                vm.memory.clone().unwrap_or_else(unknown),
                vm.nics.len().to_string(),
                vm.uptime().unwrap_or_else(unknown),
                vm.restarts.to_string(),
            ]
        })
        .collect();
    let heading = [
        "NAME", "STATE", "PID", "VCPUS", "MEMORY", "NICS", "UPTIME", "RESTARTS",
    ];
    columns::draw(heading, &rows)
}

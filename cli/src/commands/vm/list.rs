//! `bellhop vm list`.

use serde_json::Value;

use super::{CommandError, VmView, of_vm};
use crate::client::{ClientError, Node, path};
use crate::columns;
use crate::exit::Code;
use crate::listing::Format;

/// List this node's VMs
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Columns:
  STATE   Creating, Starting, Running, Paused, Stopped, Deleting; Receiving: it is to come from another node
          (`bellhop vm migrate NAME --cancel` calls it off); Unknown: its process does not answer; or MayBeElsewhere:
          it was being migrated when its process ended (`bellhop vm show NAME` says what to do)
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
    let mut views = Vec::new();
    for vm in vms {
        let mut view = VmView::read(vm)?;
        if !format.is_json() && (view.cpus.is_none() || view.memory.is_none()) {
            fill(&mut view, node)?;
        }
        views.push(view);
    }
    format
        .print(&answer, || table(&views))
        .map_err(CommandError::Output)?;
    Ok(Code::Success)
}

/// Takes what the list does not tell from what the machine was asked to be.
fn fill(view: &mut VmView, node: &Node) -> Result<(), CommandError> {
    let spec = format!("{}{}", of_vm(&view.name), path(["spec"]));
    let spec: Value = match node.get(&spec) {
        Ok(spec) => spec,
        // It went away meanwhile.
        Err(ClientError::Refused(_)) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let memory = spec.get("memory");
    let memory = memory.and_then(|memory| memory.get("size").unwrap_or(memory).as_str());
    view.cpus = view.cpus.or_else(|| spec.get("cpus")?.as_u64());
    view.memory = view.memory.take().or_else(|| memory.map(str::to_owned));
    Ok(())
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

#[cfg(test)]
pub(super) fn filled(vm: &Value, node: &Node) -> Result<VmView, CommandError> {
    let mut view = VmView::read(vm)?;
    fill(&mut view, node)?;
    Ok(view)
}

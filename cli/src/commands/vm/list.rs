//! `bellhop vm list`.

use bellhop_api::Items;
use bellhop_api::node::{Selector, VmInfo, VmPhase};
use bellhop_common::client::{Node, path, with_query};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use serde_json::Value;

use super::view::{health, uptime};
use super::{of_vm, read};
use crate::columns;

/// List this node's VMs
#[derive(Debug, clap::Args)]
#[command(
    visible_alias = "ls",
    after_long_help = "\
Columns:
  STATE   Creating, Starting, Running, Paused, Stopped, Deleting; Receiving: it is to come from another node
          (`bellhop vm migrate NAME --cancel` calls it off); Unknown: its process does not answer; or MayBeElsewhere:
          it was being migrated when its process ended (`bellhop vm show NAME` says what to do)
  PID     the process that runs it
  MEMORY  the guest's
  HEALTH  ok; net0 q1 STUCK (or DRIVERSTALLED, INCONSISTENT): a queue hangs; net0 failed over: the
          NIC is on its backup device; (+N): N more findings (`bellhop vm show NAME`)
  UPTIME  since its process was started; resets of the guest do not count
  RESTARTS  how often the node has started it again

Examples:
  bellhop vm list
  bellhop vm list -l tier=web --phase running
  bellhop vm list -o json | jq -r '.[] | select(.phase == \"Stopped\") | .name'"
)]
pub(crate) struct Arguments {
    /// Only those with these labels, such as tier=web,env
    ///
    /// KEY=VALUE, or KEY with any value, with commas between.
    #[arg(short = 'l', long, value_name = "LABELS")]
    selector: Option<Selector>,

    /// Only those in this state
    #[arg(long, value_name = "STATE")]
    phase: Option<VmPhase>,
}

/// A machine, and what of it the list does not tell: what it was asked to be.
#[derive(Debug)]
pub(super) struct Row {
    vm: VmInfo,
    cpus: Option<u64>,
    memory: Option<String>,
}

pub(super) fn execute(arguments: &Arguments, node: &Node, format: Format) -> Result<Code, Error> {
    let label = arguments.selector.as_ref().map(ToString::to_string);
    let phase = arguments.phase.as_ref().map(ToString::to_string);
    let at = with_query("/v1/vms", [("label", label), ("phase", phase)]);
    let answer: Items<Value> = node.get(&at)?;
    let rows = if format.is_json() {
        Vec::new()
    } else {
        let rows = answer.items.iter().map(|vm| row(read(vm)?, node));
        rows.collect::<Result<_, _>>()?
    };
    format.print(&answer.items, || table(&rows))
}

pub(super) fn row(vm: VmInfo, node: &Node) -> Result<Row, Error> {
    let spec = format!("{}{}", of_vm(&vm.name), path(["spec"]));
    let spec: Value = match node.get(&spec) {
        Ok(spec) => spec,
        // It went away meanwhile.
        Err(error) if error.refusal().is_some() => Value::Null,
        Err(error) => return Err(error),
    };
    let memory = spec.get("memory");
    let memory = memory.and_then(|memory| memory.get("size").unwrap_or(memory).as_str());
    Ok(Row {
        cpus: spec.get("cpus").and_then(Value::as_u64),
        memory: memory.map(str::to_owned),
        vm,
    })
}

pub(super) fn table(rows: &[Row]) -> String {
    let unknown = || "-".to_owned();
    let rows: Vec<_> = rows
        .iter()
        .map(|Row { vm, cpus, memory }| {
            [
                vm.name.clone(),
                vm.phase.to_string(),
                vm.pid.map_or_else(unknown, |pid| pid.to_string()),
                cpus.map_or_else(unknown, |cpus| cpus.to_string()),
                memory.clone().unwrap_or_else(unknown),
                vm.nics.len().to_string(),
                health(vm).unwrap_or_else(unknown),
                uptime(vm).unwrap_or_else(unknown),
                vm.restarts.to_string(),
            ]
        })
        .collect();
    let heading = [
        "NAME", "STATE", "PID", "VCPUS", "MEMORY", "NICS", "HEALTH", "UPTIME", "RESTARTS",
    ];
    columns::draw(heading, &rows)
}

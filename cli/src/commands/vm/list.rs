//! `bellhop vm list`.

use bellhop_api::Items;
use bellhop_api::config::{CpuCount, MemoryConfig};
use bellhop_api::node::{Restart, Selector, Vm, VmPhase};
use bellhop_common::client::{Node, with_query};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::table::Table;
use serde_json::Value;

use super::read;
use super::view::{health, mac, uptime};

/// List this node's VMs
#[derive(Debug, clap::Args)]
#[command(
    visible_alias = "ls",
    after_long_help = "\
Columns:
  STATE   Creating, Starting, Running, Paused, Stopped, Deleting; Receiving: it arrives from another
          node (`bellhop vm migration cancel NAME` cancels that); Unknown: its process does not
          answer; Stopping: its guest was asked to power off, or its process was killed and has
          not ended; MigrationUnknown: its process ended during a migration (`bellhop vm show NAME`
          has the remedy)
  PID     its process
  MEMORY  the guest's
  HEALTH  ok; net0 q1 STUCK (or DRIVERSTALLED, INCONSISTENT): a queue hangs; net0 failed over: the
          NIC is on its backup device; (+N): N more findings (`bellhop vm show NAME`); stop
          pending: why its process has not ended
  UPTIME  of its process; resets of the guest do not count
  RESTARTS  how often the daemon has restarted it
  RESTART, VERSION, MACS  with -o wide: its restart policy, the version of Bellhop that runs it, and
          the configured addresses of its NICs

Examples:
  bellhop vm list
  bellhop vm list -l tier=web --phase running
  bellhop vm list -o json | jq -r '.[] | select(.status.phase == \"Stopped\") | .name'"
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

pub(super) fn execute(arguments: &Arguments, node: &Node, format: Format) -> Result<Code, Error> {
    let label = arguments.selector.as_ref().map(ToString::to_string);
    let phase = arguments.phase.as_ref().map(ToString::to_string);
    let at = with_query("/v1/vms", [("label", label), ("phase", phase)]);
    let answer: Items<Value> = node.get(&at)?;
    let vms = answer.items.iter().map(read);
    let vms = vms.collect::<Result<Vec<Vm>, _>>()?;
    format.print_table(&answer.items, || table(&vms))
}

/// A row for each VM.
pub(crate) fn table(vms: &[Vm]) -> Table {
    let unknown = || "-".to_owned();
    let rows = vms.iter().map(|vm| {
        let status = &vm.status;
        let nics = status.nic_devices.iter();
        let macs: Vec<String> = nics.filter_map(|nic| mac(vm, &nic.id)).collect();
        let cpus = |cpus: CpuCount| cpus.get().to_string();
        let memory = |memory: MemoryConfig| memory.size.to_string();
        let restart = |restart: Restart| restart.to_string();
        [
            vm.name.clone(),
            status.phase.to_string(),
            status.pid.map_or_else(unknown, |pid| pid.to_string()),
            vm.desired("cpus").map_or_else(unknown, cpus),
            vm.desired("memory").map_or_else(unknown, memory),
            status.nic_devices.len().to_string(),
            health(vm).unwrap_or_else(unknown),
            uptime(vm).unwrap_or_else(unknown),
            status.restarts.to_string(),
            vm.desired("restart").map_or_else(unknown, restart),
            status.version.clone().unwrap_or_else(unknown),
            macs.join(" "),
        ]
    });
    let heading = [
        "NAME", "STATE", "PID", "VCPUS", "MEMORY", "NICS", "HEALTH", "UPTIME", "RESTARTS",
        "RESTART", "VERSION", "MACS",
    ];
    Table::new(heading, rows).with_wide(3)
}

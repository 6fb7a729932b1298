//! `bellhop vm wait`: waits until a VM is in a given state.
//!
//! Events wake the command, and the VM's state decides. The stream of events begins before the
//! first query, so no change is missed.

use std::time::{Duration, Instant};

use bellhop_api::machine::NicInfo;
use bellhop_api::node::{EventQuery, Vm, VmPhase};
use bellhop_common::client::{Node, connection_broke, path};
use bellhop_common::error::{Error, ErrorKind};
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use clap::ValueEnum;
use serde_json::{Value, json};

use super::{say, vm};
use crate::units::seconds;

/// The interval of queries without events.
const PERIOD: Duration = Duration::from_secs(5);
/// The interval for changes that cause no event: those of the guest's drivers.
const DRIVER_PERIOD: Duration = Duration::from_millis(500);

/// Wait until a VM runs, stops, is deleted or has ready NICs
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
The exit code is 0 as soon as the condition holds, also if it already did. It is 5 if there is no
such VM (except for deleted), and 6 after the time limit.

Examples:
  bellhop vm wait web --for running
  bellhop vm wait web --for nic-ready --timeout 2m && ssh web.example
  bellhop vm stop web & bellhop vm wait web --for stopped")]
pub(crate) struct Arguments {
    /// The VM
    #[arg(value_name = "NAME")]
    name: String,

    /// The state to wait for
    #[arg(long = "for", value_name = "CONDITION")]
    condition: Condition,

    /// Time limit, such as 90s or 10m; without a unit in seconds
    #[arg(long, value_name = "DURATION", default_value_t = 60, value_parser = seconds(0..=86_400))]
    timeout: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Condition {
    /// Its vCPUs run
    Running,
    /// It has no process
    Stopped,
    /// No VM has that name
    Deleted,
    /// It runs, and the guest's drivers use all of its NICs
    NicReady,
}

pub(super) fn execute(arguments: &Arguments, node: &Node, format: Format) -> Result<Code, Error> {
    let (name, condition) = (&arguments.name, arguments.condition);
    let end = Instant::now() + Duration::from_secs(arguments.timeout.into());
    let period = match condition {
        Condition::NicReady => DRIVER_PERIOD,
        _ => PERIOD,
    };
    let mut events = node.events(EventQuery {
        vm: Some(name.clone()),
        ..EventQuery::default()
    });
    let mut last = None;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        events.next(left.min(period))?;
        match look(node, name, condition) {
            Ok(Look::Met(answer)) if condition == Condition::Deleted => {
                return format.print(&answer, || format!("{name}: deleted\n"));
            }
            Ok(Look::Met(answer)) => return say(&answer, format),
            Ok(Look::Not(phase)) => last = Some(phase),
            // The daemon is being replaced.
            Err(error)
                if connection_broke(&error)
                    || (last.is_some()
                        && matches!(error.kind(), ErrorKind::NoDaemon | ErrorKind::TimedOut)) => {}
            Err(error) => return Err(error),
        }
        if left.is_zero() {
            let phase = last.map_or_else(|| "unknown".to_owned(), |phase| phase.to_string());
            let wanted = condition.to_possible_value();
            let wanted = wanted.as_ref().map_or("so", |value| value.get_name());
            let message = format!(
                "the VM {name} is {phase}, not {wanted}, after {} s",
                arguments.timeout
            );
            let hint = "`bellhop events --vm NAME` shows the events of a VM";
            return Err(Error::new(ErrorKind::TimedOut, message).hint(hint));
        }
    }
}

/// The result of a query of a VM.
enum Look {
    /// The condition holds; the VM as the daemon describes it.
    Met(Value),
    /// The condition does not hold.
    Not(VmPhase),
}

fn look(node: &Node, name: &str, condition: Condition) -> Result<Look, Error> {
    let (view, answer) = match vm(node, name) {
        Err(error)
            if condition == Condition::Deleted
                && error
                    .refusal()
                    .is_some_and(|refusal| refusal.is_not_there()) =>
        {
            return Ok(Look::Met(json!({ "name": name, "deleted": true })));
        }
        found => found?,
    };
    let is_so = match condition {
        Condition::Running => view.status.phase == VmPhase::Running,
        Condition::Stopped => view.status.phase == VmPhase::Stopped,
        Condition::Deleted => false,
        Condition::NicReady => {
            if view.status.nic_devices.is_empty() {
                return Err(Error::failed(format!(
                    "the VM {name} has no NICs to wait for"
                )));
            }
            view.status.phase == VmPhase::Running && nics_are_ready(node, &view)?
        }
    };
    Ok(if is_so {
        Look::Met(answer)
    } else {
        Look::Not(view.status.phase)
    })
}

fn nics_are_ready(node: &Node, vm: &Vm) -> Result<bool, Error> {
    for nic in &vm.status.nic_devices {
        let nic: NicInfo = match node.get(&path(["v1", "vms", &vm.name, "nics", &nic.id])) {
            Ok(nic) => nic,
            // The VM, or its NIC, is being created or deleted.
            Err(error) if error.refusal().is_some() => return Ok(false),
            Err(error) => return Err(error),
        };
        if !nic
            .device
            .is_some_and(|device| device.driver_ok && !device.broken)
        {
            return Ok(false);
        }
    }
    Ok(true)
}

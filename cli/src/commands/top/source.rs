//! Snapshots of a node, by requests to its daemon.
//!
//! Owns the requests, and the rates between two snapshots.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use bellhop_api::Items;
use bellhop_api::node::{Event, EventQuery, Operation, OperationPhase, Vm};
use bellhop_common::client::{EventStream, Node, Notice};
use bellhop_common::error::Error;
use bellhop_common::table::Table;
use serde::Deserialize as _;
use serde_json::Value;

use crate::commands::vm::stats;

/// The delay of a snapshot after an event: others may follow.
const SOON: Duration = Duration::from_millis(200);
/// The maximum number of events in a snapshot.
const EVENTS_MAX: usize = 64;

/// A VM and one of its NICs.
pub(super) type NicName = (String, String);

/// The rings of a NIC.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Rings {
    /// Whether the guest's driver runs it.
    pub(super) driver_ok: bool,
    /// Whether the device or its driver gave up.
    pub(super) broken: bool,
    /// Queues in use.
    pub(super) queues: u64,
    /// Buffers that the device used so far.
    completed: u64,
    /// The same per second since the last snapshot.
    pub(super) completed_per_s: Option<u64>,
}

/// The state of a node at one moment.
#[derive(Debug, Default)]
pub(super) struct Snapshot {
    pub(super) vms: Vec<Vm>,
    /// Of VMs that answer.
    pub(super) rings: BTreeMap<NicName, Rings>,
    /// Those that run.
    pub(super) operations: Vec<Operation>,
    /// The last ones, the newest last.
    pub(super) events: VecDeque<Event>,
    /// The queues of a VM.
    pub(super) details: Option<(String, Table)>,
}

impl Snapshot {
    /// Adds the events that the daemon keeps.
    ///
    /// # Errors
    /// The daemon is unreachable, or refuses.
    pub(super) fn read_past_events(&mut self, node: &Node) -> Result<(), Error> {
        for event in node.past_events(EventQuery::default())? {
            push(&mut self.events, &event);
        }
        Ok(())
    }
}

fn push(events: &mut VecDeque<Event>, event: &Value) {
    // One of a later version may be unreadable.
    if let Ok(event) = Event::deserialize(event) {
        events.push_back(event);
    }
    let excess = events.len().saturating_sub(EVENTS_MAX);
    events.drain(..excess);
}

/// Takes snapshots.
pub(super) struct Source<'a> {
    node: &'a Node,
    stream: EventStream<'a>,
    events: VecDeque<Event>,
    last: Option<(Instant, BTreeMap<NicName, Rings>)>,
}

vdpa::opaque_debug!(Source<'_>);

impl<'a> Source<'a> {
    pub(super) fn new(node: &'a Node) -> Self {
        let query = EventQuery {
            since: Some(0),
            ..EventQuery::default()
        };
        Self {
            node,
            stream: node.events(query),
            events: VecDeque::new(),
            last: None,
        }
    }

    /// Waits for `period`, or until shortly after an event, and reads events meanwhile.
    ///
    /// # Errors
    /// The daemon is unreachable, or refuses.
    pub(super) fn wait(&mut self, period: Duration) -> Result<(), Error> {
        let mut end = Instant::now() + period;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.stream.next(left)? {
                Some(Notice::Event(event)) => {
                    push(&mut self.events, &event);
                    end = end.min(Instant::now() + SOON);
                }
                Some(Notice::Begin | Notice::Lost) => {}
                None => return Ok(()),
            }
        }
    }

    /// The state now, with the queues of the VM `open`.
    ///
    /// # Errors
    /// The daemon is unreachable, or refuses.
    pub(super) fn snapshot(&mut self, open: Option<&str>) -> Result<Snapshot, Error> {
        let vms: Items<Vm> = self.node.list_vms().send()?;
        let operations: Items<Operation> = self.node.list_operations().send()?;
        let operations = operations.items.into_iter();
        let running = operations.filter(|one| one.phase == OperationPhase::Running);
        let mut rings = rings(&self.node.get_node_metrics().send()?);
        let now = Instant::now();
        if let Some((before, last)) = &self.last {
            set_rates(&mut rings, last, now.duration_since(*before));
        }
        self.last = Some((now, rings.clone()));
        // A VM that does not answer, or is gone, has no details.
        let details = open.and_then(|name| {
            let table = stats::of_vm(name, self.node).ok()?;
            Some((name.to_owned(), table))
        });
        Ok(Snapshot {
            vms: vms.items,
            rings,
            operations: running.collect(),
            events: self.events.clone(),
            details,
        })
    }
}

/// The rings in the node's metrics. Samples of unknown form are skipped.
fn rings(metrics: &str) -> BTreeMap<NicName, Rings> {
    let mut all: BTreeMap<NicName, Rings> = BTreeMap::new();
    for line in metrics.lines() {
        let Some((name, labels, value)) = sample(line) else {
            continue;
        };
        let (Some(vm), Some(nic)) = (label(labels, "vm"), label(labels, "nic")) else {
            continue;
        };
        let rings = || (vm.to_owned(), nic.to_owned());
        match name {
            "bellhop_nic_driver_ok" => all.entry(rings()).or_default().driver_ok = value != 0,
            "bellhop_nic_broken" => all.entry(rings()).or_default().broken = value != 0,
            "bellhop_nic_queues" => {
                let queues = &mut all.entry(rings()).or_default().queues;
                *queues = queues.saturating_add(value);
            }
            "bellhop_queue_completed_total" => {
                let completed = &mut all.entry(rings()).or_default().completed;
                *completed = completed.saturating_add(value);
            }
            _ => {}
        }
    }
    all
}

/// The name, the labels and the value of a line `NAME{LABELS} VALUE`.
fn sample(line: &str) -> Option<(&str, &str, u64)> {
    let (name, rest) = line.split_once('{')?;
    let (labels, value) = rest.rsplit_once("} ")?;
    Some((name, labels, value.parse().ok()?))
}

/// The value of a label; names of VMs and NICs have no quotation marks.
fn label<'a>(labels: &'a str, name: &str) -> Option<&'a str> {
    labels.split(',').find_map(|label| {
        let (key, value) = label.split_once('=')?;
        let value = value.strip_prefix('"')?.strip_suffix('"')?;
        (key == name).then_some(value)
    })
}

fn set_rates(
    rings: &mut BTreeMap<NicName, Rings>,
    last: &BTreeMap<NicName, Rings>,
    time: Duration,
) {
    for (name, rings) in rings {
        // A count that shrank is that of another process.
        let count = last.get(name);
        let count = count.and_then(|last| rings.completed.checked_sub(last.completed));
        let per_s = count.and_then(|count| {
            let per_s = u128::from(count) * 1000;
            u64::try_from(per_s.checked_div(time.as_millis())?).ok()
        });
        rings.completed_per_s = per_s;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const METRICS: &str = "\
# HELP bellhop_nic_driver_ok Whether the guest's driver runs the NIC
bellhop_build_info{version=\"0.1.0\",api=\"1\"} 1
bellhop_node_pinned_bytes 4096
bellhop_nic_driver_ok{vm=\"web\",nic=\"net0\"} 1
bellhop_nic_broken{vm=\"web\",nic=\"net0\"} 0
bellhop_nic_queues{vm=\"web\",nic=\"net0\",kick=\"exit\"} 1
bellhop_nic_queues{vm=\"web\",nic=\"net0\",kick=\"doorbell\"} 2
bellhop_queue_completed_total{vm=\"web\",nic=\"net0\",queue=\"0\"} 1000
bellhop_queue_completed_total{vm=\"web\",nic=\"net0\",queue=\"1\"} 500
bellhop_queue_completed_total{vm=\"web\",nic=\"net0\",queue=\"2\"} no
bellhop_queue_alarm{vm=\"web\",disk=\"a\\\"b\",queue=\"0\",alarm=\"Stuck\"} 1
bellhop_nic_broken{vm=\"web\"
";

    #[test]
    fn rings_are_read_from_metrics() {
        let all = rings(METRICS);
        let wanted = Rings {
            driver_ok: true,
            broken: false,
            queues: 3,
            completed: 1500,
            completed_per_s: None,
        };
        let name = ("web".to_owned(), "net0".to_owned());
        assert_eq!(all, BTreeMap::from([(name.clone(), wanted)]));
        // Two seconds later.
        let mut later = all.clone();
        later.get_mut(&name).unwrap().completed = 3500;
        set_rates(&mut later, &all, Duration::from_secs(2));
        assert_eq!(later[&name].completed_per_s, Some(1000));
        // Another process, and no time.
        let mut earlier = all.clone();
        set_rates(&mut earlier, &later, Duration::from_secs(2));
        assert_eq!(earlier[&name].completed_per_s, None);
        set_rates(&mut earlier, &all, Duration::ZERO);
        assert_eq!(earlier[&name].completed_per_s, None);
    }
}

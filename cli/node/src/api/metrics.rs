//! `/v1/metrics`: the node and its VMs in the Prometheus text format.
//!
//! Owns the names, and the one pass over the VMs' processes.
//!
//! ```text
//!   records, views, /proc ─────────────────────> samples of every VM
//!   GET /v1/vm/nics/{id} of each that runs ────> samples of its queues: none of a
//!     64 VMs at a time, 1 s for all              VM that does not answer by then
//! ```
//! Processes may be hostile: names come from the record, and each sample occurs once. Prometheus
//! rejects a whole text that contains duplicates.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use bellhop_api::machine::{Kick, NicInfo, PlugPhase, QueueInfo, WatchInfo};
use bellhop_api::node::{Desired, Vm, VmPhase};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};
use vmm::http::metrics::Text;

use super::state::Api;
use super::{version, vms};
use crate::machines::process::{self, Memory};
use crate::machines::record::Record;
use crate::machines::spec::NicId;
use crate::machines::vmm::Vmm;

/// The number of VMs that all scrapes together query at a time.
static TURNS: Semaphore = Semaphore::const_new(64);
/// The time limit of the pass over all VMs.
const PASS: Duration = Duration::from_secs(1);
/// The most queues per NIC.
const QUEUES_MAX: usize = 256;

/// The daemon's data of a VM.
struct Sample {
    info: Vm,
    boots: Option<u64>,
    memory: Option<Memory>,
    /// The NICs that it reports; none without a process that answers.
    nics: Option<BTreeMap<NicId, Nic>>,
}

/// A NIC as its VM reports it.
struct Nic {
    plugged: bool,
    driver_ok: bool,
    broken: bool,
    queues: BTreeMap<u16, QueueInfo>,
}

impl From<NicInfo> for Nic {
    fn from(nic: NicInfo) -> Self {
        let device = nic.device.as_ref();
        Self {
            plugged: nic.summary.state == PlugPhase::Plugged,
            driver_ok: device.is_some_and(|device| device.driver_ok),
            broken: device.is_some_and(|device| device.broken),
            queues: nic
                .device
                .into_iter()
                .flat_map(|device| device.queues)
                .filter(|queue| queue.enabled)
                .take(QUEUES_MAX)
                .map(|queue| (queue.index, queue))
                .collect(),
        }
    }
}

/// Read metrics of the node
///
/// Prometheus text: each VM with the label `vm`, its NICs with `nic`, their queues with `queue`.
/// Stopped VMs are among them. A VM whose process does not answer at once has no samples of
/// queues, and its `bellhop_vm_answers` is 0.
#[utoipa::path(get, path = "/v1/metrics", operation_id = "get_node_metrics", responses(
    (status = 200, description = "Prometheus text", body = String, content_type = "text/plain"),
))]
pub(super) async fn show(State(node): Api) -> Text {
    let mut samples = Vec::new();
    let mut asked = Vec::new();
    for (name, view) in node.machines.list() {
        let started = view.record.as_ref().and_then(Record::process);
        let memory = started.and_then(|(identity, _)| process::memory(identity?));
        let nics = view.record.iter().flat_map(|record| record.spec.nics());
        let nics: Vec<NicId> = nics.map(|nic| nic.id().clone()).collect();
        let said = view.live.as_ref().and_then(|live| live.said.as_ref());
        let boots = said.map(|said| said.boots);
        let Some(info) = vms::info(&node, &name, view) else {
            continue;
        };
        if matches!(info.status.phase, VmPhase::Running | VmPhase::Paused)
            && let Ok(vmm) = node.machines.vmm(&name)
        {
            asked.push((info.name.clone(), vmm, nics));
        }
        samples.push(Sample {
            info,
            boots,
            memory,
            nics: None,
        });
    }
    let mut answers = ask_all(asked, PASS).await;
    for sample in &mut samples {
        sample.nics = answers.remove(&sample.info.name);
    }
    let mut text = Text::default();
    write(&mut text, &samples);
    text
}

/// Queries all VMs at once; returns those that answer within `limit`.
async fn ask_all(
    machines: Vec<(String, Vmm, Vec<NicId>)>,
    limit: Duration,
) -> BTreeMap<String, BTreeMap<NicId, Nic>> {
    let end = Instant::now() + limit;
    let mut asked = JoinSet::new();
    for (name, vmm, nics) in machines {
        asked.spawn(async move { (name, ask(&vmm, nics).await) });
    }
    let mut answers = BTreeMap::new();
    // Dropping the set cancels the remaining tasks.
    while let Ok(Some(done)) = timeout_at(end, asked.join_next()).await {
        if let Ok((name, Some(nics))) = done {
            answers.insert(name, nics);
        }
    }
    answers
}

async fn ask(vmm: &Vmm, nics: Vec<NicId>) -> Option<BTreeMap<NicId, Nic>> {
    let _turn = TURNS.acquire().await.ok()?;
    let mut answers = BTreeMap::new();
    for id in nics {
        match vmm.nic(&id).await {
            Ok(nic) => {
                answers.insert(id, nic.into());
            }
            // The guest does not have this NIC now.
            Err(error) if error.is_refused(StatusCode::NOT_FOUND) => {}
            Err(_) => return None,
        }
    }
    Some(answers)
}

fn write(text: &mut Text, samples: &[Sample]) {
    write_node(text, samples);
    write_vms(text, samples);
    write_nics(text, samples);
    write_queues(text, samples);
}

fn write_node(text: &mut Text, samples: &[Sample]) {
    let api = version::API_LEVEL.to_string();
    text.family(
        "bellhop_build_info",
        "gauge",
        "1, with the version of the daemon",
    )
    .sample(&[("version", env!("CARGO_PKG_VERSION")), ("api", &api)], 1);
    let mut phases = text.family("bellhop_node_vms", "gauge", "VMs of the node, by phase");
    for phase in VmPhase::ALL {
        let of_phase = samples.iter().filter(|vm| vm.info.status.phase == phase);
        let count = u64::try_from(of_phase.count()).unwrap_or(u64::MAX);
        phases.sample(&[("phase", &phase.to_string())], count);
    }
    let pinned = samples.iter().filter_map(|vm| Some(vm.memory?.pinned));
    text.family(
        "bellhop_node_pinned_bytes",
        "gauge",
        "Memory that the VMs' processes have pinned for devices",
    )
    .sample(&[], pinned.fold(0, u64::saturating_add));
}

fn write_vms(text: &mut Text, samples: &[Sample]) {
    let mut phases = text.family(
        "bellhop_vm_phase",
        "gauge",
        "1 for the current phase of the VM",
    );
    for vm in samples {
        for phase in VmPhase::ALL {
            let name = phase.to_string();
            let labels = [("vm", vm.info.name.as_str()), ("phase", name.as_str())];
            phases.sample(&labels, u64::from(vm.info.status.phase == phase));
        }
    }
    type Value = fn(&Sample) -> Option<u64>;
    let families: [(&'static str, &str, &str, Value); 8] = [
        (
            "bellhop_vm_wanted",
            "gauge",
            "1: the VM should run; 0: it should be stopped",
            |vm| Some((vm.info.desired("state") == Some(Desired::Running)).into()),
        ),
        (
            "bellhop_vm_answers",
            "gauge",
            "Whether the VM's process answered this scrape; absent without a running VM",
            |vm| match vm.info.status.phase {
                VmPhase::Running | VmPhase::Paused => Some(vm.nics.is_some().into()),
                VmPhase::Unknown => Some(0),
                _ => None,
            },
        ),
        (
            "bellhop_vm_uptime_seconds",
            "gauge",
            "Age of the VM's process",
            |vm| vm.info.status.uptime_s,
        ),
        (
            "bellhop_vm_boots_total",
            "counter",
            "Number of boots and resets of the VM since its process started",
            |vm| vm.boots,
        ),
        (
            "bellhop_vm_restarts_total",
            "counter",
            "Number of restarts of the VM by its restart policy",
            |vm| Some(vm.info.status.restarts),
        ),
        (
            "bellhop_vm_alarms",
            "gauge",
            "Hanging queues of the VM",
            |vm| u64::try_from(vm.info.status.alarms.len()).ok(),
        ),
        (
            "bellhop_vm_resident_bytes",
            "gauge",
            "Resident memory of the VM's process",
            |vm| Some(vm.memory?.resident),
        ),
        (
            "bellhop_vm_pinned_bytes",
            "gauge",
            "Memory that the VM's process has pinned for devices",
            |vm| Some(vm.memory?.pinned),
        ),
    ];
    for (name, kind, help, value) in families {
        let mut family = text.family(name, kind, help);
        for vm in samples {
            if let Some(value) = value(vm) {
                family.sample(&[("vm", &vm.info.name)], value);
            }
        }
    }
}

fn write_nics(text: &mut Text, samples: &[Sample]) {
    let mut failed_over = text.family(
        "bellhop_nic_failed_over",
        "gauge",
        "Whether the NIC is on its backup device because its own failed",
    );
    for vm in samples {
        for nic in &vm.info.status.nic_devices {
            let labels = [("vm", vm.info.name.as_str()), ("nic", nic.id.as_str())];
            failed_over.sample(&labels, nic.failed_over.into());
        }
    }
    type Value = fn(&Nic) -> bool;
    let families: [(&'static str, &str, Value); 3] = [
        (
            "bellhop_nic_plugged",
            "1; 0: the guest is asked to eject the NIC",
            |nic| nic.plugged,
        ),
        (
            "bellhop_nic_driver_ok",
            "Whether the guest's driver uses the NIC",
            |nic| nic.driver_ok,
        ),
        (
            "bellhop_nic_broken",
            "Whether the NIC's device or its driver reports a failure",
            |nic| nic.broken,
        ),
    ];
    for (name, help, value) in families {
        let mut family = text.family(name, "gauge", help);
        for (vm, id, nic) in nics(samples) {
            family.sample(&[("vm", vm), ("nic", id.as_str())], value(nic).into());
        }
    }
    let mut queues = text.family(
        "bellhop_nic_queues",
        "gauge",
        "Enabled queues by the way in which they are kicked",
    );
    for (vm, id, nic) in nics(samples) {
        for (way, kick) in [
            ("exit", Kick::Exit),
            ("eventfd", Kick::Eventfd),
            ("doorbell", Kick::Doorbell),
        ] {
            let kicked = nic.queues.values().filter(|queue| queue.kick == kick);
            let count = u64::try_from(kicked.count()).unwrap_or(u64::MAX);
            queues.sample(&[("vm", vm), ("nic", id.as_str()), ("kick", way)], count);
        }
    }
}

fn nics(samples: &[Sample]) -> impl Iterator<Item = (&str, &NicId, &Nic)> {
    samples.iter().flat_map(|vm| {
        let nics = vm.nics.iter().flatten();
        nics.map(|(id, nic)| (vm.info.name.as_str(), id, nic))
    })
}

/// The results of the ring watch. The alarms are in the daemon's view, so they need no query.
fn write_queues(text: &mut Text, samples: &[Sample]) {
    let mut alarms = text.family(
        "bellhop_queue_alarm",
        "gauge",
        "1 while the queue has this alarm; absent without one",
    );
    for vm in samples {
        let mut once = BTreeMap::new();
        for alarm in &vm.info.status.alarms {
            once.insert((&alarm.device, alarm.queue), alarm.alarm);
        }
        for ((device, queue), alarm) in once {
            let is_nic = vm
                .info
                .status
                .nic_devices
                .iter()
                .any(|nic| nic.id == *device);
            let label = if is_nic { "nic" } else { "disk" };
            let (queue, alarm) = (queue.to_string(), format!("{alarm:?}"));
            let labels = [
                ("vm", vm.info.name.as_str()),
                (label, device.as_str()),
                ("queue", queue.as_str()),
                ("alarm", alarm.as_str()),
            ];
            alarms.sample(&labels, 1);
        }
    }
    type Value = fn(&WatchInfo) -> Option<u64>;
    let families: [(&'static str, &str, &str, Value); 5] = [
        (
            "bellhop_queue_in_flight",
            "gauge",
            "Buffers that the device has not used yet",
            |watch| watch.in_flight.map(u64::from),
        ),
        (
            "bellhop_queue_posted_total",
            "counter",
            "Buffers that the driver posted, by 16-bit indices sampled once a second",
            |watch| Some(watch.posted),
        ),
        (
            "bellhop_queue_completed_total",
            "counter",
            "Buffers that the device used, by 16-bit indices sampled once a second",
            |watch| Some(watch.completed),
        ),
        (
            "bellhop_queue_stuck_seconds",
            "gauge",
            "Seconds that the queue has been stuck",
            |watch| Some(watch.stuck_for_s),
        ),
        (
            "bellhop_queue_rescues_total",
            "counter",
            "Number of kicks of the queue and interrupts of its driver because it hung",
            |watch| Some(watch.rescues),
        ),
    ];
    for (name, kind, help, value) in families {
        let mut family = text.family(name, kind, help);
        for (vm, id, nic) in nics(samples) {
            for (index, queue) in &nic.queues {
                if let Some(value) = queue.watch.as_ref().and_then(value) {
                    let queue = index.to_string();
                    let labels = [("vm", vm), ("nic", id.as_str()), ("queue", queue.as_str())];
                    family.sample(&labels, value);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;

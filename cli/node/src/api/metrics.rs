//! `/v1/metrics`: the node and its VMs in the Prometheus text format.
//!
//! Owns the names of families of a node and a VM, and the one pass over the VMs' processes.
//!
//! ```text
//!   records, views, /proc ─────────────────────> samples of every VM
//!   GET /v1/vm/nics/{id} of each that runs ────> samples of its queues: none of a
//!     64 VMs at a time, 1 s for all              VM that does not answer by then
//! ```
//! Processes may be hostile: names come from the record, and each sample occurs once. Prometheus
//! rejects a whole text that contains duplicates.

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use bellhop_api::machine::{DeviceInfo, NicInfo, PlugPhase, QueueInfo};
use bellhop_api::node::{Desired, Role, Vm, VmPhase};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};
use vmm::http::budget::Budget;
use vmm::http::metrics::{Kind, Text, count};

use super::state::{Api, SenderRole};
use super::{version, vms};
use crate::machines::process::{self, Memory};
use crate::machines::record::Record;
use crate::machines::spec::NicId;
use crate::machines::vmm::Vmm;

/// The number of VMs that all scrapes together query at a time.
static TURNS: LazyLock<Budget> = LazyLock::new(|| Budget::new(64));
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
    device: DeviceInfo,
}

impl From<NicInfo> for Nic {
    fn from(nic: NicInfo) -> Self {
        let device = nic.device.unwrap_or_default();
        let enabled = device.queues.into_iter().filter(|queue| queue.enabled);
        let enabled = enabled.take(QUEUES_MAX);
        let once: BTreeMap<u16, QueueInfo> = enabled.map(|queue| (queue.index, queue)).collect();
        Self {
            plugged: nic.summary.state == PlugPhase::Plugged,
            device: DeviceInfo {
                driver_ok: device.driver_ok,
                broken: device.broken,
                queues: once.into_values().collect(),
                ..DeviceInfo::default()
            },
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
pub(super) async fn show(State(node): Api, SenderRole(role): SenderRole) -> Text {
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
            && let Ok(vmm) = node.machines.vmm_for(&name, role)
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
    let mut answers = ask_all(asked, role, PASS).await;
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
    role: Role,
    limit: Duration,
) -> BTreeMap<String, BTreeMap<NicId, Nic>> {
    let end = Instant::now() + limit;
    let mut asked = JoinSet::new();
    for (name, vmm, nics) in machines {
        asked.spawn(async move { (name, ask(&vmm, role, nics).await) });
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

async fn ask(vmm: &Vmm, role: Role, nics: Vec<NicId>) -> Option<BTreeMap<NicId, Nic>> {
    let _turn = TURNS.take(role).await;
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
    write_alarms(text, samples);
}

fn write_node(text: &mut Text, samples: &[Sample]) {
    let api = version::API_LEVEL.to_string();
    text.gauge("bellhop_build_info", "1, with the version of the daemon")
        .sample(&[("version", env!("CARGO_PKG_VERSION")), ("api", &api)], 1);
    let mut phases = text.gauge("bellhop_node_vms", "VMs of the node, by phase");
    for phase in VmPhase::ALL {
        let of_phase = samples.iter().filter(|vm| vm.info.status.phase == phase);
        phases.sample(&[("phase", &phase.to_string())], count(of_phase.count()));
    }
    let pinned = samples.iter().filter_map(|vm| Some(vm.memory?.pinned));
    let help = "Memory that the VMs' processes have pinned for devices";
    text.gauge("bellhop_node_pinned_bytes", help)
        .sample(&[], pinned.fold(0, u64::saturating_add));
}

fn write_vms(text: &mut Text, samples: &[Sample]) {
    let mut phases = text.gauge("bellhop_vm_phase", "1 for the current phase of the VM");
    for vm in samples {
        for phase in VmPhase::ALL {
            let name = phase.to_string();
            let labels = [("vm", vm.info.name.as_str()), ("phase", name.as_str())];
            phases.sample(&labels, u64::from(vm.info.status.phase == phase));
        }
    }
    type Value = fn(&Sample) -> Option<u64>;
    let families: [(Kind, &str, &str, Value); 8] = [
        (
            Kind::Gauge,
            "bellhop_vm_wanted",
            "1: the VM should run; 0: it should be stopped",
            |vm| Some((vm.info.desired("state") == Some(Desired::Running)).into()),
        ),
        (
            Kind::Gauge,
            "bellhop_vm_answers",
            "Whether the VM's process answered this scrape; absent without a running VM",
            |vm| match vm.info.status.phase {
                VmPhase::Running | VmPhase::Paused => Some(vm.nics.is_some().into()),
                VmPhase::Unknown => Some(0),
                _ => None,
            },
        ),
        (
            Kind::Gauge,
            "bellhop_vm_uptime_seconds",
            "Age of the VM's process",
            |vm| vm.info.status.uptime_s,
        ),
        (
            Kind::Counter,
            "bellhop_vm_boots_total",
            "Number of boots and resets of the VM since its process started",
            |vm| vm.boots,
        ),
        (
            Kind::Counter,
            "bellhop_vm_restarts_total",
            "Number of restarts of the VM by its restart policy",
            |vm| Some(vm.info.status.restarts),
        ),
        (
            Kind::Gauge,
            "bellhop_vm_alarms",
            "Hanging queues of the VM",
            |vm| Some(count(vm.info.status.alarms.len())),
        ),
        (
            Kind::Gauge,
            "bellhop_vm_resident_bytes",
            "Resident memory of the VM's process",
            |vm| Some(vm.memory?.resident),
        ),
        (
            Kind::Gauge,
            "bellhop_vm_pinned_bytes",
            "Memory that the VM's process has pinned for devices",
            |vm| Some(vm.memory?.pinned),
        ),
    ];
    for (kind, name, help, value) in families {
        let mut family = text.family(kind, name, help);
        for vm in samples {
            if let Some(value) = value(vm) {
                family.sample(&[("vm", &vm.info.name)], value);
            }
        }
    }
}

fn write_nics(text: &mut Text, samples: &[Sample]) {
    let mut failed_over = text.gauge(
        "bellhop_nic_failed_over",
        "Whether the NIC is on its backup device because its own failed",
    );
    for vm in samples {
        for nic in &vm.info.status.nic_devices {
            let labels = [("vm", vm.info.name.as_str()), ("nic", nic.id.as_str())];
            failed_over.sample(&labels, nic.failed_over.into());
        }
    }
    let help = "1; 0: the guest is asked to eject the NIC";
    let mut plugged = text.gauge("bellhop_nic_plugged", help);
    let mut devices = Vec::new();
    for vm in samples {
        for (id, nic) in vm.nics.iter().flatten() {
            let labels = vec![("vm", vm.info.name.as_str()), ("nic", id.as_str())];
            plugged.sample(&labels, nic.plugged.into());
            devices.push((labels, &nic.device));
        }
    }
    text.devices("bellhop_nic", &devices);
}

/// The alarms of the ring watch, and of the guest's IOMMU. They are in the daemon's view, so they
/// need no query.
fn write_alarms(text: &mut Text, samples: &[Sample]) {
    let mut alarms = text.gauge(
        "bellhop_queue_alarm",
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
            let label = match alarm {
                _ if is_nic => "nic",
                _ if alarm.is_of_other_device() => "device",
                _ => "disk",
            };
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
}

#[cfg(test)]
mod tests;

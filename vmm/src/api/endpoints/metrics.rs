//! `/v1/metrics`: the VM's metrics for Prometheus.
//!
//! Owns the names of a VM's families; `http::metrics` has those of devices. This module counts
//! nothing: all figures are the current ones of the VM and KVM.

use std::collections::BTreeMap;

use axum::extract::State;
use bellhop_api::machine::{DeviceInfo, IommuInfo, PlugPhase, VmState, VmStatus};
use bellhop_api::responses::HostErrors;
use devices::vfio::FunctionDescription;

use super::state::Api;
use crate::api::error::ApiError;
use crate::console::ConsoleLoss;
use crate::http::metrics::{Text, count};
use crate::machine::{Handle, RequestError, Resources};

/// Read metrics
///
/// Returns the current values in the text format of Prometheus (version 0.0.4). Before the machine
/// is built there are only its state and its number of boots.
#[utoipa::path(get, path = "/v1/metrics", operation_id = "get_metrics", responses(
    (status = 200, description = "Prometheus text", body = String, content_type = "text/plain"),
    HostErrors,
))]
pub(super) async fn show(State(api): Api) -> Result<Text, ApiError> {
    let mut text = Text::default();
    view(&mut text, &api.view());
    if api.is_built() {
        api.ask(Counted::ask).await?.write(&mut text);
    }
    Ok(text)
}

fn view(text: &mut Text, view: &VmStatus) {
    let mut states = text.gauge("bellhop_vm_state", "1 for the state that the machine is in");
    for (name, state) in [
        ("NotStarted", VmState::NotStarted),
        ("Starting", VmState::Starting),
        ("Running", VmState::Running),
        ("Paused", VmState::Paused),
        ("Stopped", VmState::Stopped),
    ] {
        states.sample(&[("state", name)], u64::from(view.state == state));
    }
    let help = "How often the machine was powered on";
    text.counter("bellhop_vm_boots_total", help)
        .sample(&[], view.boots);
    let help = "1; 0 while the guest is asked to eject it";
    let mut nics = text.gauge("bellhop_nic_plugged", help);
    for nic in &view.nics {
        nics.sample(&[("nic", &nic.id)], is_plugged(nic.state));
    }
    let mut disks = text.gauge("bellhop_disk_plugged", help);
    for disk in &view.disks {
        disks.sample(&[("disk", &disk.id)], is_plugged(disk.state));
    }
    let mut functions = text.gauge("bellhop_vfio_plugged", help);
    for function in &view.vfio {
        functions.sample(&[("function", &function.id)], is_plugged(function.state));
    }
}

fn iommu(text: &mut Text, info: &IommuInfo) {
    let help = "Mappings of the guest's IOMMU";
    let mut mappings = text.gauge("bellhop_iommu_mappings", help);
    mappings.sample(&[], info.mappings);
    let help = "How often the guest's IOMMU was kicked, changed a domain's mappings, and mapped or \
                unmapped on request; refused: by a device or a limit";
    let mut total = text.counter("bellhop_iommu_total", help);
    for (what, value) in [
        ("kicks", info.kicks),
        ("change_sets", info.change_sets),
        ("maps", info.maps),
        ("unmaps", info.unmaps),
        ("refused", info.refused),
    ] {
        total.sample(&[("what", what)], value);
    }
}

fn functions(text: &mut Text, functions: &BTreeMap<String, FunctionDescription>) {
    let help = "MSI-X vectors of a PCI function of the host that are connected to the guest";
    let mut vectors = text.gauge("bellhop_vfio_vectors", help);
    for (id, function) in functions {
        vectors.sample(&[("function", id)], function.connected.into());
    }
    let help = "Bytes of its BARs that the guest reaches without an exit";
    let mut mapped = text.gauge("bellhop_vfio_mapped_bytes", help);
    for (id, function) in functions {
        let areas = function.areas.iter();
        let areas = areas.filter(|area| area.address.is_some());
        mapped.sample(&[("function", id)], areas.map(|area| area.size).sum());
    }
    let help = "1 from an uncorrectable error, or a failed reset or resume, to the next reset";
    let mut failed = text.gauge("bellhop_vfio_failed", help);
    for (id, function) in functions {
        failed.sample(&[("function", id)], function.failed.into());
    }
    let help = "Accesses to its BARs that exited; accesses and resets that the host rejected; \
                accesses that it did not answer; its resets; requests of the host for it; its \
                uncorrectable errors, failed resets and resumes";
    let mut total = text.counter("bellhop_vfio_total", help);
    for (id, function) in functions {
        let [reads, writes] = function.trapped;
        for (what, value) in [
            ("trapped_reads", reads),
            ("trapped_writes", writes),
            ("failures", function.failures),
            ("faults", function.faults),
            ("resets", function.resets),
            ("host_requests", function.requests),
            ("errors", function.errors),
        ] {
            total.sample(&[("function", id), ("what", what)], value);
        }
    }
}

fn is_plugged(state: PlugPhase) -> u64 {
    u64::from(state == PlugPhase::Plugged)
}

/// The results of queries to the VM.
struct Counted {
    kvm: BTreeMap<String, u64>,
    resources: Resources,
    devices: Vec<(String, DeviceInfo)>,
    console: ConsoleLoss,
    iommu: Option<IommuInfo>,
    functions: BTreeMap<String, FunctionDescription>,
}

impl Counted {
    fn ask(machine: &Handle) -> Result<Self, RequestError> {
        let devices = machine.devices()?.into_iter();
        let devices = devices.map(|device| (device.id.clone(), DeviceInfo::from(&device)));
        Ok(Self {
            kvm: machine.statistics()?,
            resources: machine.resources()?,
            devices: devices.collect(),
            console: machine.console_loss()?,
            iommu: machine.iommu()?,
            functions: machine.functions()?,
        })
    }

    fn write(&self, text: &mut Text) {
        let mut kvm = text.counter(
            "bellhop_kvm_total",
            "KVM's counters by their names in the kernel, summed over all vCPUs",
        );
        for (name, value) in &self.kvm {
            kvm.sample(&[("counter", name)], *value);
        }
        text.counter(
            "bellhop_console_lost_bytes_total",
            "Output of the guest that a console on a socket lost, because the log could not be \
             written or a client did not read",
        )
        .sample(&[("to", "log")], self.console.log)
        .sample(&[("to", "client")], self.console.clients);
        if let Some(info) = &self.iommu {
            iommu(text, info);
        }
        if !self.functions.is_empty() {
            functions(text, &self.functions);
        }
        let mut held = text.gauge("bellhop_kvm_held", "KVM resources of the machine");
        for (what, value) in [
            ("memory_slots", self.resources.memory_slots),
            ("ioeventfds", self.resources.doorbells),
            ("mapped_doorbells", self.resources.mapped_doorbells),
            ("vectors", self.resources.msi.vectors),
            ("routes", self.resources.msi.routes),
            ("irqfds", self.resources.msi.irqfds),
        ] {
            held.sample(&[("what", what)], count(value));
        }
        let labelled = self.devices.iter();
        let labelled = labelled.map(|(id, device)| (vec![("device", id.as_str())], device));
        text.devices("bellhop_device", &labelled.collect::<Vec<_>>());
        let help = "Requests that failed because of the host's storage";
        let mut errors = text.counter("bellhop_device_io_errors_total", help);
        for (id, device) in &self.devices {
            if let Some(count) = device.io_errors {
                errors.sample(&[("device", id)], count);
            }
        }
        let help = "1 while something is wrong with the queue";
        let mut alarms = text.gauge("bellhop_queue_alarm", help);
        for (id, device) in &self.devices {
            for queue in device.queues.iter().filter(|queue| queue.enabled) {
                if let Some(watch) = &queue.watch {
                    let index = queue.index.to_string();
                    let labels = [("device", id.as_str()), ("queue", index.as_str())];
                    alarms.sample(&labels, watch.state.is_alarm().into());
                }
            }
        }
    }
}

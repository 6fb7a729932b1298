//! `/v1/metrics`: the VM's metrics for Prometheus.
//!
//! Owns the names. This module counts nothing: all figures are the current ones of the VM and KVM.

use axum::extract::State;
use bellhop_api::machine::{PlugPhase, VmState, VmStatus};
use bellhop_api::responses::HostErrors;
use devices::virtio::pci::KickPath;
use devices::virtio::status::DRIVER_OK;

use super::state::Api;
use crate::api::error::ApiError;
use crate::console::ConsoleLoss;
use crate::http::metrics::Text;
use crate::machine::{DeviceStatus, Handle, RequestError, Resources, WatchState, WatchStatus};

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
    let mut states = text.family(
        "bellhop_vm_state",
        "gauge",
        "1 for the state that the machine is in",
    );
    for (name, state) in [
        ("NotStarted", VmState::NotStarted),
        ("Starting", VmState::Starting),
        ("Running", VmState::Running),
        ("Paused", VmState::Paused),
        ("Stopped", VmState::Stopped),
    ] {
        states.sample(&[("state", name)], u64::from(view.state == state));
    }
    text.family(
        "bellhop_vm_boots_total",
        "counter",
        "How often the machine was powered on",
    )
    .sample(&[], view.boots);
    let mut nics = text.family(
        "bellhop_nic_plugged",
        "gauge",
        "1; 0 while the guest is asked to eject it",
    );
    for nic in &view.nics {
        nics.sample(
            &[("nic", &nic.id)],
            u64::from(nic.state == PlugPhase::Plugged),
        );
    }
    let mut disks = text.family(
        "bellhop_disk_plugged",
        "gauge",
        "1; 0 while the guest is asked to eject it",
    );
    for disk in &view.disks {
        disks.sample(
            &[("disk", &disk.id)],
            u64::from(disk.state == PlugPhase::Plugged),
        );
    }
}

/// The results of queries to the VM.
struct Counted {
    kvm: std::collections::BTreeMap<String, u64>,
    resources: Resources,
    devices: Vec<DeviceStatus>,
    console: ConsoleLoss,
}

impl Counted {
    fn ask(machine: &Handle) -> Result<Self, RequestError> {
        Ok(Self {
            kvm: machine.statistics()?,
            resources: machine.resources()?,
            devices: machine.devices()?,
            console: machine.console_loss()?,
        })
    }

    fn write(&self, text: &mut Text) {
        let mut kvm = text.family(
            "bellhop_kvm_total",
            "counter",
            "KVM's counters by their names in the kernel, summed over all vCPUs",
        );
        for (name, value) in &self.kvm {
            kvm.sample(&[("counter", name)], *value);
        }
        text.family(
            "bellhop_console_lost_bytes_total",
            "counter",
            "Output of the guest that a console on a socket lost, because the log could not be \
             written or a client did not read",
        )
        .sample(&[("to", "log")], self.console.log)
        .sample(&[("to", "client")], self.console.clients);
        let mut held = text.family("bellhop_kvm_held", "gauge", "KVM resources of the machine");
        let count = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
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
        let mut running = text.family(
            "bellhop_device_driver_ok",
            "gauge",
            "Whether the guest's driver runs the device",
        );
        for device in &self.devices {
            let running_now = device.description.status & DRIVER_OK != 0;
            running.sample(&[("device", &device.id)], u64::from(running_now));
        }
        let mut broken = text.family(
            "bellhop_device_broken",
            "gauge",
            "Whether the device or its driver failed",
        );
        for device in &self.devices {
            let broken_now = device.description.is_broken();
            broken.sample(&[("device", &device.id)], u64::from(broken_now));
        }
        let mut queues = text.family(
            "bellhop_device_queues",
            "gauge",
            "Enabled queues by the way they are kicked",
        );
        for device in &self.devices {
            for (way, kick) in [
                ("exit", KickPath::Exit),
                ("eventfd", KickPath::Eventfd),
                ("doorbell", KickPath::Doorbell),
            ] {
                let enabled = device.description.queues.iter();
                let kicked = enabled.filter(|queue| queue.enabled && queue.kick == kick);
                queues.sample(
                    &[("device", &device.id), ("kick", way)],
                    count(kicked.count()),
                );
            }
        }
        self.write_watches(text);
    }

    /// The results of the ring watch; no samples if it is off.
    fn write_watches(&self, text: &mut Text) {
        type Value = fn(&WatchStatus) -> Option<u64>;
        let families: [(&'static str, &str, &str, Value); 6] = [
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
                "Seconds for which the queue has been stuck",
                |watch| Some(watch.stuck_for.as_secs()),
            ),
            (
                "bellhop_queue_alarm",
                "gauge",
                "1 while the queue has an alarm",
                |watch| Some(u64::from(matches!(watch.state, WatchState::Alarm(_)))),
            ),
            (
                "bellhop_queue_rescues_total",
                "counter",
                "How often the stuck queue was kicked and its driver interrupted",
                |watch| Some(watch.rescues),
            ),
        ];
        for (name, kind, help, value) in families {
            let mut family = text.family(name, kind, help);
            for device in &self.devices {
                let queues = device.description.queues.iter().zip(&device.watch);
                let enabled = queues.filter(|(queue, _)| queue.enabled);
                for (queue, watch) in enabled {
                    if let Some(value) = value(watch) {
                        let index = queue.index.to_string();
                        family.sample(&[("device", &device.id), ("queue", &index)], value);
                    }
                }
            }
        }
    }
}

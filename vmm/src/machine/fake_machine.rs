//! A fake machine for tests without KVM: a thread with fake devices answers a [`Handle`].

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use bellhop_api::machine::{AlarmInfo, AlarmKind, IommuInfo, IommuRefusal, WatchInfo, WatchPhase};
use devices::pci::Slot;
use devices::vfio::{FunctionDescription, MappedArea};
use devices::virtio::pci::{DeviceDescription, KickPath, QueueDescription};
use parking_lot::Mutex;

use super::parts::Machine;
use super::pluggable::{DeviceConfig, DeviceKind, Pluggable};
use super::queue::{Action, Request, Requests, SwapAnswer};
use super::{
    DeviceStatus, DiskStatus, End, Handle, NicStatus, PlugPhase, RequestError, Resources, RunState,
    VfioStatus,
};
use crate::Error;
use crate::config::{DiskConfig, VdpaConfig, VfioConfig};
use crate::console::ConsoleLoss;
use crate::kvm::msi::MsiCounts;
use crate::layout::Layout;
use crate::memory::GuestRam;

/// A machine with one NIC `nic`, one disk `disk`, one function `vf` and the device `rng`. It ends
/// when it is dropped.
#[derive(Debug)]
pub(crate) struct FakeMachine {
    handle: Handle,
    end: Arc<AtomicBool>,
    reason: Arc<Mutex<Option<End>>>,
    thread: Option<JoinHandle<()>>,
    _ram: Arc<GuestRam>,
}

/// Returns the configuration of its NIC.
pub(crate) fn nic_config() -> VdpaConfig {
    "path=/dev/vhost-vdpa-7,id=nic,doorbell=off"
        .parse()
        .unwrap()
}

/// Returns the configuration of its disk.
pub(crate) fn disk_config() -> DiskConfig {
    "path=/nonexistent.img,id=disk,readonly=on".parse().unwrap()
}

/// Returns the configuration of its function of the host.
pub(crate) fn vfio_config() -> VfioConfig {
    "host=0000:03:10.1,id=vf".parse().unwrap()
}

fn pluggable<C>(config: C, id: &str, slot: u8) -> Pluggable<C> {
    Pluggable {
        id: id.to_owned(),
        config,
        address: Slot::new(slot).unwrap(),
        state: PlugPhase::Plugged,
        serial: slot.into(),
        numa_node: Some(1),
        numa_warning: None,
        failover: None,
    }
}

fn nic() -> NicStatus {
    pluggable(nic_config(), "nic", 3)
}

fn disk() -> DiskStatus {
    pluggable(disk_config(), "disk", 4)
}

fn vfio() -> VfioStatus {
    pluggable(vfio_config(), "vf", 5)
}

fn function() -> FunctionDescription {
    FunctionDescription {
        driver: "vfio-pci".to_owned(),
        vectors: 3,
        connected: 2,
        areas: vec![MappedArea {
            bar: 4,
            offset: 0,
            size: 0x4000,
            address: Some(0x10_0000_0000),
        }],
        failed: false,
        trapped: [11, 12],
        failures: 13,
        faults: 14,
        resets: 15,
        requests: 16,
        errors: 17,
    }
}

/// Marks a device as asked to be ejected.
fn unplugged<C>(device: Pluggable<C>) -> Pluggable<C> {
    Pluggable {
        state: PlugPhase::UnplugRequested,
        ..device
    }
}

fn device() -> DeviceStatus {
    DeviceStatus {
        id: "nic".to_owned(),
        address: Slot::new(3).unwrap(),
        description: DeviceDescription {
            device_type: 1,
            status: 0x0f,
            offered: 1 << 32 | 1 << 5,
            negotiated: Some(1 << 32),
            queues: vec![QueueDescription {
                index: 0,
                size: 256,
                max_size: 256,
                enabled: true,
                vector: Some(1),
                kick: KickPath::Doorbell,
            }],
            io_errors: None,
            dirty_tracking: None,
        },
        watch: vec![WatchInfo {
            state: WatchPhase::Stuck,
            in_flight: Some(7),
            stuck_for_s: 6,
            completed: 41,
            stall_kicks: 1,
            ..WatchInfo::default()
        }],
    }
}

fn alarm() -> AlarmInfo {
    AlarmInfo {
        device: "nic".to_owned(),
        queue: 3,
        alarm: AlarmKind::Stuck,
        detail: None,
    }
}

impl FakeMachine {
    pub(crate) fn new() -> Self {
        let layout = Layout::new(16 << 20, 40).unwrap();
        let ram = Arc::new(GuestRam::new(&layout, None).unwrap());
        let requests = Requests::new(&ram, 16 << 20, Weak::new()).unwrap();
        requests.publish_devices(vec![nic()], vec![disk()], vec![vfio()]);
        requests.publish_boot(false);
        let handle = requests.handle();
        let end = Arc::new(AtomicBool::new(false));
        let reason = Arc::new(Mutex::new(None));
        let thread = thread::spawn({
            let (end, reason) = (end.clone(), reason.clone());
            move || {
                while !end.load(Ordering::Relaxed) {
                    for request in requests.take() {
                        answer(&requests, request);
                    }
                    thread::sleep(Duration::from_millis(1));
                }
                if let Some(reason) = reason.lock().take() {
                    requests.publish_end(reason);
                }
            }
        });
        Self {
            handle,
            end,
            reason,
            thread: Some(thread),
            _ram: ram,
        }
    }

    /// Sets the reason that it publishes when it is dropped.
    pub(crate) fn will_end(&self, end: End) {
        *self.reason.lock() = Some(end);
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }
}

impl Drop for FakeMachine {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

fn answer(requests: &Requests<Machine>, request: Request<Machine>) {
    // The caller may no longer wait.
    let _ = match request {
        Request::Plug { device, answer } => {
            answer.send(Err(RequestError::IdInUse(device.id))).is_ok()
        }
        Request::Swap { device, answer } => answer
            .send(SwapAnswer {
                outcome: Err(RequestError::NoSuchDevice(device.id)),
                unused: device.backend,
            })
            .is_ok(),
        // As for a NIC that was moved meanwhile.
        Request::FailOver { device, answer, .. } => {
            let unused = device.ok().map(|device| device.backend);
            answer.send(unused).is_ok()
        }
        Request::SetBackup { id, backup, answer } => {
            let changed = match id.as_str() {
                "nic" => {
                    let config = VdpaConfig {
                        backup,
                        ..nic_config()
                    };
                    let nic = pluggable(config.clone(), "nic", 3);
                    requests.publish_devices(vec![nic], vec![disk()], vec![vfio()]);
                    Ok(pluggable(DeviceConfig::Nic(config), "nic", 3))
                }
                "disk" | "rng" | "vf" => Err(RequestError::OtherKind {
                    id,
                    wanted: DeviceKind::Nic,
                }),
                _ => Err(RequestError::NoSuchDevice(id)),
            };
            answer.send(changed).is_ok()
        }
        Request::Unplug { id, kind, answer } => {
            let unplugged = match (id.as_str(), kind) {
                ("nic", DeviceKind::Nic) => {
                    requests.publish_devices(vec![unplugged(nic())], vec![disk()], vec![vfio()]);
                    let config = DeviceConfig::Nic(nic_config());
                    Ok(unplugged(pluggable(config, "nic", 3)))
                }
                ("disk", DeviceKind::Disk) => {
                    requests.publish_devices(vec![nic()], vec![unplugged(disk())], vec![vfio()]);
                    let config = DeviceConfig::Disk(disk_config());
                    Ok(unplugged(pluggable(config, "disk", 4)))
                }
                ("vf", DeviceKind::Vfio) => {
                    requests.publish_devices(vec![nic()], vec![disk()], vec![unplugged(vfio())]);
                    let config = DeviceConfig::Vfio(vfio_config());
                    Ok(unplugged(pluggable(config, "vf", 5)))
                }
                ("nic" | "disk" | "rng" | "vf", wanted) => {
                    Err(RequestError::OtherKind { id, wanted })
                }
                _ => Err(RequestError::NoSuchDevice(id)),
            };
            answer.send(unplugged).is_ok()
        }
        Request::Resources { answer } => answer
            .send(Resources {
                memory_slots: 3,
                doorbells: 1,
                mapped_doorbells: 1,
                msi: MsiCounts::default(),
            })
            .is_ok(),
        Request::PlugFunction { function, answer } => {
            let id = function.config.name();
            answer.send(Err(RequestError::IdInUse(id))).is_ok()
        }
        Request::Functions { answer } => {
            answer.send([("vf".to_owned(), function())].into()).is_ok()
        }
        Request::Devices { answer } => answer.send(vec![device()]).is_ok(),
        Request::Statistics { answer } => {
            answer.send(Ok([("exits".to_owned(), 42)].into())).is_ok()
        }
        // As while another snapshot is being written.
        Request::Save { answer } => answer.send(Err(RequestError::Saving)).is_ok(),
        // Dropped, as by a machine that ends just now.
        Request::Migration(_) => false,
        Request::Iommu { answer } => {
            let info = IommuInfo {
                mappings: 5,
                kicks: 8,
                change_sets: 7,
                maps: 9,
                unmaps: 4,
                refused: 1,
                last_refusal: Some(IommuRefusal {
                    device: "nic".to_owned(),
                    iova: Some(0x4000),
                    size: Some(0x1000),
                    cause: "No space left".to_owned(),
                }),
            };
            answer.send(Some(info)).is_ok()
        }
        Request::ConsoleLoss { answer } => answer.send(ConsoleLoss { log: 7, clients: 0 }).is_ok(),
        Request::Perform { action, answer } => answer.send(act(requests, action)).is_ok(),
    };
}

fn act(requests: &Requests<Machine>, action: Action) -> Result<(), RequestError> {
    match action {
        Action::Announce(id) => match id.as_str() {
            // A way for tests to trigger an event.
            "nic" => requests.publish_alarms(vec![alarm()]),
            "rng" => return Err(RequestError::NoAnnouncement(id)),
            _ => return Err(RequestError::NoSuchDevice(id)),
        },
        Action::DirtyLog(_)
        | Action::EnsureFunctionsContinue
        | Action::PowerButton
        | Action::Unquiesce => {}
        Action::Reset => requests.publish_boot(requests.run_state() == RunState::Paused),
        Action::HandOver(_) => return Err(RequestError::Saving),
        Action::Nmi => {
            let source = std::io::Error::from_raw_os_error(libc::EINVAL);
            return Err(Error::failed("KVM_SIGNAL_MSI")(source).into());
        }
        Action::Pause => requests.publish_run(RunState::Paused),
        Action::Resume => requests.publish_run(RunState::Running),
    }
    Ok(())
}

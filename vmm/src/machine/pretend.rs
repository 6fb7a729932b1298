//! What answers a [`Handle`] in tests where there is no KVM: a thread with made-up devices.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use devices::pci::Slot;
use devices::virtio::backend::SharedMemory;
use devices::virtio::pci::{DeviceDescription, KickPath, QueueDescription};

use super::handle::{Request, Requests};
use super::{
    Alarm, DeviceStatus, Handle, MachineError, NicState, NicStatus, QueueAlarm, RequestError,
    Resources, RunState, WatchState, WatchStatus,
};
use crate::config::VdpaConfig;
use crate::kvm::msi::MsiCounts;
use crate::layout::Layout;
use crate::memory::GuestRam;

/// A machine with one NIC `nic` and the device `rng`; ended when it is dropped.
#[derive(Debug)]
pub(crate) struct PretendMachine {
    handle: Handle,
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    _memory: SharedMemory,
}

/// The configuration of its NIC.
pub(crate) fn nic_config() -> VdpaConfig {
    "path=/dev/vhost-vdpa-7,id=nic,doorbell=off"
        .parse()
        .unwrap()
}

fn nic() -> NicStatus {
    NicStatus {
        id: "nic".to_owned(),
        config: nic_config(),
        address: Slot::new(3).unwrap(),
        state: NicState::Plugged,
        serial: 1,
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
        },
        watch: vec![WatchStatus {
            state: WatchState::Alarm(Alarm::Stuck),
            in_flight: Some(7),
            stuck_for: Duration::from_millis(6900),
            completed: 41,
            rescues: 1,
            ..WatchStatus::default()
        }],
    }
}

fn alarm() -> QueueAlarm {
    QueueAlarm {
        device: "nic".to_owned(),
        queue: 3,
        alarm: Alarm::Stuck,
    }
}

impl PretendMachine {
    pub(crate) fn new() -> Self {
        let layout = Layout::new(16 << 20, 40).unwrap();
        let memory: SharedMemory = Arc::new(GuestRam::new(&layout, None).unwrap().memory().clone());
        let requests = Requests::new(&memory, 16 << 20).unwrap();
        requests.publish_nics(vec![nic()]);
        requests.publish_boot(false);
        let handle = requests.handle();
        let end = Arc::new(AtomicBool::new(false));
        let thread = thread::spawn({
            let end = end.clone();
            move || {
                while !end.load(Ordering::Relaxed) {
                    for request in requests.take() {
                        answer(&requests, request);
                    }
                    thread::sleep(Duration::from_millis(1));
                }
            }
        });
        Self {
            handle,
            end,
            thread: Some(thread),
            _memory: memory,
        }
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }
}

impl Drop for PretendMachine {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

fn answer(requests: &Requests, request: Request) {
    // Nobody may wait any more.
    let _ = match request {
        Request::Plug { device, answer } => {
            answer.send(Err(RequestError::IdInUse(device.id))).is_ok()
        }
        Request::Unplug { id, answer } => {
            let unplugged = match id.as_str() {
                "nic" => {
                    let nic = NicStatus {
                        state: NicState::UnplugRequested,
                        ..nic()
                    };
                    requests.publish_nics(vec![nic.clone()]);
                    Ok(nic)
                }
                "rng" => Err(RequestError::NotANic(id)),
                _ => Err(RequestError::NoSuchDevice(id)),
            };
            answer.send(unplugged).is_ok()
        }
        Request::Announce { id, answer } => {
            let announced = match id.as_str() {
                "nic" => {
                    // A way for tests to have something happen.
                    requests.publish_alarms(vec![alarm()]);
                    Ok(())
                }
                "rng" => Err(RequestError::NoAnnouncement(id)),
                _ => Err(RequestError::NoSuchDevice(id)),
            };
            answer.send(announced).is_ok()
        }
        Request::Resources { answer } => answer
            .send(Resources {
                memory_slots: 3,
                doorbells: 1,
                mapped_doorbells: 1,
                msi: MsiCounts::default(),
            })
            .is_ok(),
        Request::Devices { answer } => answer.send(vec![device()]).is_ok(),
        Request::Statistics { answer } => {
            answer.send(Ok([("exits".to_owned(), 42)].into())).is_ok()
        }
        Request::PowerButton { answer } => answer.send(()).is_ok(),
        Request::Reset { answer } => {
            requests.publish_boot(requests.run_state() == RunState::Paused);
            answer.send(()).is_ok()
        }
        Request::Nmi { answer } => {
            let refused = MachineError::Host {
                what: "KVM_SIGNAL_MSI",
                source: std::io::Error::from_raw_os_error(libc::EINVAL),
            };
            answer.send(Err(refused.into())).is_ok()
        }
        Request::Pause { answer } => {
            requests.publish_run(RunState::Paused);
            answer.send(()).is_ok()
        }
        Request::Resume { answer } => {
            requests.publish_run(RunState::Running);
            answer.send(()).is_ok()
        }
    };
}

//! Tests of queue and status without a machine: a thread answers in its place.

use std::sync::Weak;
use std::thread;
use std::time::Duration;

use devices::pci::Slot;
use parking_lot::Mutex;

use super::*;
use crate::config::DeviceSource;
use crate::kvm::msi::MsiCounts;
use crate::layout::Layout;
use crate::machine::error::WAITING_MAX;
use crate::machine::pluggable::PlugPhase;
use crate::machine::status_publisher::RunState;
use crate::memory::GuestRam;

fn ram() -> Arc<GuestRam> {
    let layout = Layout::new(16 << 20, 40).unwrap();
    Arc::new(GuestRam::new(&layout, None).unwrap())
}

fn requests(ram: &Arc<GuestRam>) -> Requests<Machine> {
    Requests::new(ram, 16 << 20, Weak::new()).unwrap()
}

fn nic(id: &str, serial: u64) -> NicStatus {
    NicStatus {
        id: id.to_owned(),
        config: config("/dev/null"),
        address: Slot::new(3).unwrap(),
        state: PlugPhase::Plugged,
        serial,
        numa_node: None,
        numa_warning: None,
        failover: None,
    }
}

fn config(path: &str) -> VdpaConfig {
    VdpaConfig {
        source: DeviceSource::Path(path.into()),
        id: Some("nic".to_owned()),
        mac: None,
        mac_lock: false,
        standby: false,
        num_queues: None,
        doorbell: crate::config::DoorbellMode::Auto,
        iommu: false,
        stall_kick: false,
        backup: None,
    }
}

const LIMIT: Duration = Duration::from_secs(20);

fn unquiesce(answer: Answer<Result<(), RequestError>>) -> Request<Machine> {
    Request::Perform {
        action: Action::Unquiesce,
        answer,
    }
}

#[test]
fn requests_are_answered_and_bounded() {
    let ram = ram();
    let requests = requests(&ram);
    let counted = Resources {
        memory_slots: 7,
        doorbells: 0,
        mapped_doorbells: 0,
        msi: MsiCounts::default(),
    };
    let asking: Vec<_> = (0..WAITING_MAX)
        .map(|_| {
            let handle = requests.handle();
            thread::spawn(move || handle.resources().unwrap())
        })
        .collect();
    let mut waiting = Vec::new();
    let start = Instant::now();
    while waiting.len() < WAITING_MAX && start.elapsed() < LIMIT {
        waiting.extend(requests.take());
    }
    assert_eq!(waiting.len(), WAITING_MAX);
    for request in waiting {
        let Request::Resources { answer } = request else {
            panic!("another request");
        };
        answer.send(counted).unwrap();
    }
    for thread in asking {
        assert_eq!(thread.join().unwrap(), counted);
    }
    assert!(requests.take().is_empty());

    // The machine takes no requests. The one in excess is refused; the others fail when the machine
    // is dropped.
    let asking: Vec<_> = (0..=WAITING_MAX)
        .map(|_| {
            let handle = requests.handle();
            thread::spawn(move || handle.unplug_nic("nic").unwrap_err())
        })
        .collect();
    while !asking.iter().any(thread::JoinHandle::is_finished) {
        thread::yield_now();
    }
    let handle = requests.handle();
    assert!(matches!(handle.resources(), Err(RequestError::Busy)));
    drop(requests);
    let (mut busy, mut ended) = (0, 0);
    for thread in asking {
        match thread.join().unwrap() {
            RequestError::Busy => busy += 1,
            RequestError::Ended => ended += 1,
            other => panic!("{other}"),
        }
    }
    assert_eq!((busy, ended), (1, WAITING_MAX));
    assert!(matches!(handle.resources(), Err(RequestError::Ended)));
}

#[test]
fn the_status_shows_changes_and_the_end() {
    let ram = ram();
    let requests = requests(&ram);
    let handle = requests.handle();
    requests.publish_devices(vec![nic("a", 1)], Vec::new(), Vec::new());
    let first = handle.status();
    assert_eq!((first.generation, first.run), (1, RunState::Off));
    // An identical status is no change.
    requests.publish_devices(vec![nic("a", 1)], Vec::new(), Vec::new());
    assert_eq!(handle.status(), first);
    assert_eq!(handle.nic("a"), Some(nic("a", 1)));
    assert_eq!(handle.nic("b"), None);
    drop(requests);
    let last = handle.status();
    assert!(last.run == RunState::Ended && last.nics.is_empty());
}

#[test]
fn listeners_see_every_change_in_order() {
    let ram = ram();
    let requests = requests(&ram);
    let seen = Arc::new(Mutex::new(Vec::new()));
    requests.handle().on_change({
        let seen = seen.clone();
        move |status| {
            seen.lock().push((
                status.generation,
                status.run,
                status.boots,
                status.nics.len(),
            ));
        }
    });
    requests.publish_boot(false);
    requests.publish_devices(vec![nic("a", 1)], Vec::new(), Vec::new());
    requests.publish_run(RunState::Paused);
    requests.publish_run(RunState::Paused);
    requests.publish_boot(true);
    assert_eq!(requests.run_state(), RunState::Paused);
    drop(requests);
    assert_eq!(
        *seen.lock(),
        [
            (0, RunState::Off, 0, 0),
            (1, RunState::Running, 1, 0),
            (2, RunState::Running, 1, 1),
            (3, RunState::Paused, 1, 1),
            (4, RunState::Paused, 2, 1),
            (5, RunState::Ended, 2, 0),
        ]
    );
}

#[test]
fn a_nic_that_cannot_be_opened_does_not_trouble_the_machine() {
    let ram = ram();
    let requests = requests(&ram);
    let handle = requests.handle();
    requests.publish_devices(vec![nic("nic", 1)], Vec::new(), Vec::new());
    let error = handle.plug_nic(&config("/dev/null")).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the machine has a device nic already; choose another id"
    );
    requests.publish_devices(Vec::new(), Vec::new(), Vec::new());
    for path in ["/nonexistent/vhost-vdpa-0", "/dev/null"] {
        let error = handle.plug_nic(&config(path)).unwrap_err();
        assert_eq!(error.to_string(), "cannot use vDPA device nic");
        assert!(matches!(error, RequestError::Device(_)));
    }
    assert!(requests.take().is_empty());
    // A handle does not keep the memory of a dropped machine.
    drop(ram);
    let error = handle.plug_nic(&config("/dev/null")).unwrap_err();
    assert!(matches!(error, RequestError::Ended));
}

#[test]
fn a_failover_without_a_device_reaches_the_machine() {
    let ram = ram();
    let requests = requests(&ram);
    let handle = requests.handle();
    let failover =
        thread::spawn(move || handle.fail_over("nic", 7, &config("/nonexistent/vhost-vdpa-0")));
    let start = Instant::now();
    let mut notified = false;
    while !notified {
        assert!(start.elapsed() < LIMIT && !failover.is_finished());
        for request in requests.take() {
            let Request::FailOver {
                id,
                serial,
                device,
                answer,
            } = request
            else {
                panic!("another request");
            };
            assert_eq!((id.as_str(), serial), ("nic", 7));
            assert!(matches!(device, Err(RequestError::Device(_))));
            answer.send(None).unwrap();
            notified = true;
        }
    }
    failover.join().unwrap();
    // A machine that has ended needs no device.
    let handle = requests.handle();
    drop(requests);
    handle.fail_over("nic", 7, &config("/dev/null"));
}

#[test]
fn a_device_is_not_its_own_backup() {
    let with = |path: &str| VdpaConfig {
        backup: Some("/dev/vhost-vdpa-1".into()),
        ..config(path)
    };
    let other = with("/dev/vhost-vdpa-0");
    assert_eq!(swap::without_itself(other.clone()), other);
    let itself = swap::without_itself(with("/dev/vhost-vdpa-1"));
    assert_eq!(itself.backup, None);
}

#[test]
fn mandatory_requests_wait_for_room_in_the_queue() {
    let ram = ram();
    let requests = requests(&ram);
    let asking: Vec<_> = (0..=WAITING_MAX)
        .map(|_| {
            let handle = requests.handle();
            thread::spawn(move || handle.resources().map(drop))
        })
        .collect();
    // The request in excess is refused: the queue is full.
    while !asking.iter().any(thread::JoinHandle::is_finished) {
        thread::yield_now();
    }
    let handle = requests.handle();
    let start = Instant::now();
    // As after a snapshot: the machine stays quiesced until this request is carried out.
    let unquiesced = thread::spawn(move || handle.ask_surely(unquiesce));
    let mut went_on = false;
    while !went_on {
        assert!(start.elapsed() < LIMIT && !unquiesced.is_finished());
        for request in requests.take() {
            // When dropped, the other requests fail with `Ended`.
            if let Request::Perform { answer, .. } = request {
                answer.send(Ok(())).unwrap();
                went_on = true;
            }
        }
    }
    unquiesced.join().unwrap().unwrap().unwrap();
    for thread in asking {
        let _ = thread.join().unwrap();
    }
    // It does not wait for a dropped machine.
    let handle = requests.handle();
    drop(requests);
    let gone = handle.ask_surely(unquiesce);
    assert!(matches!(gone, Err(RequestError::Ended)));
}

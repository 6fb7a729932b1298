//! Changes are reported as events.

use std::time::Duration;

use lab::netdevsim::Netdevsim;
use vdpa_mgmt::devlink::{Devlink, Event, Events, Handle, HealthState, Notice};

use super::support::printed;
use super::tool::{devlink, handle};

const LIMIT: Duration = Duration::from_secs(10);

/// The next event that `pick` selects.
#[track_caller]
fn wait<T>(events: &mut Events, pick: impl Fn(Event) -> Option<T>) -> T {
    loop {
        match events.next(Some(LIMIT)).unwrap() {
            Some(Notice::Event(event)) => {
                if let Some(found) = pick(event) {
                    return found;
                }
            }
            Some(Notice::Lost) => panic!("events were lost"),
            None => panic!("the event does not come"),
        }
    }
}

fn state(events: &mut Events, handle: &Handle) -> HealthState {
    wait(events, |event| match event {
        Event::Health(one) if one.handle == *handle && one.name == "dummy" => Some(one.state),
        _ => None,
    })
}

#[test]
fn a_failure_and_its_recovery() {
    let nic = Netdevsim::add(95, 1).unwrap();
    let name = nic.handle();
    let handle = handle(&nic);
    let line = format!("health set {name} reporter dummy auto_recover false");
    printed(&devlink(&line));
    let mut events = Events::open().unwrap();
    assert_eq!(events.next(Some(Duration::ZERO)).unwrap(), None);
    nic.break_health("pulled").unwrap();
    assert_eq!(state(&mut events, &handle), HealthState::Error);
    let connection = Devlink::open().unwrap();
    let dummy = || {
        let reporters = connection.health_reporters().unwrap().into_iter();
        let mut found = reporters.filter(|one| one.handle == handle && one.name == "dummy");
        found.next().unwrap()
    };
    let broken = dummy();
    assert_eq!((broken.state, broken.error_count), (HealthState::Error, 1));
    assert!(broken.dump_time.is_some(), "{broken:?}");
    connection.recover(&handle, None, "dummy").unwrap();
    assert_eq!(state(&mut events, &handle), HealthState::Healthy);
    let mended = dummy();
    assert_eq!(
        (mended.state, mended.recover_count),
        (HealthState::Healthy, 1)
    );
}

#[test]
fn ports_and_instances_are_added_and_removed() {
    let nic = Netdevsim::add(96, 1).unwrap();
    let handle = handle(&nic);
    let mut events = Events::open().unwrap();
    printed(&devlink(&format!(
        "dev eswitch set {handle} mode switchdev"
    )));
    nic.set_virtual_functions(1).unwrap();
    let port = handle.port(128);
    wait(&mut events, |event| match event {
        Event::Port(one) if one.handle == port => Some(()),
        _ => None,
    });
    nic.set_virtual_functions(0).unwrap();
    wait(&mut events, |event| {
        (event == Event::PortGone(port.clone())).then_some(())
    });
    drop(nic);
    wait(&mut events, |event| {
        (event == Event::InstanceGone(handle.clone())).then_some(())
    });
}

#[test]
fn overflowed_events_are_reported_as_lost() {
    let nic = Netdevsim::add(97, 4).unwrap();
    let mut events = Events::open().unwrap();
    // More than the 208 KiB of a socket hold.
    for _ in 0..60 {
        printed(&devlink(&format!("dev reload {}", nic.handle())));
    }
    let mut read = 0;
    let lost = loop {
        match events.next(Some(Duration::from_millis(100))).unwrap() {
            Some(Notice::Lost) => break true,
            Some(Notice::Event(_)) => read += 1,
            None => break false,
        }
        assert!(read < 100_000);
    };
    assert!(lost, "{read} events, none of them lost");
    // Events continue after that.
    while events
        .next(Some(Duration::from_millis(100)))
        .unwrap()
        .is_some()
    {}
    drop(nic);
    wait(&mut events, |event| {
        matches!(event, Event::InstanceGone(_)).then_some(())
    });
}

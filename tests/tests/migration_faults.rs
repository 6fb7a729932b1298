//! Links that fail during a migration, at every message and in each direction, between real
//! processes on vdpa_sim. Before GO the guest stays where it is, with its network. After GO the
//! operator resolves where it is. It never runs twice.
//!
//! A writer in the guest checks every page of its own before it writes the page again. The tests
//! compare frames with the devices' counts.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod moving;

use lab::guest::{BellhopArguments, Guest};
use lab::messages::messages;
use lab::sim::{SimDevice, require_lab};
use lab::traffic::check_traffic;
use moving::faults::{Fault, FaultyLink, Kind};
use moving::{Host, NOTICE, move_guest};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// No zero bytes: the simulator compares addresses like C strings.
const MAC: &str = "52:54:5e:11:5a:01";

/// Migrates the guest over a link with this fault; returns the source's status and the destination.
#[track_caller]
fn attempt(guest: &mut Guest, hosts: &[Host; 2], kind: Kind, fault: Fault) -> (Value, Guest) {
    let waiting = hosts[1].wait();
    let link = FaultyLink::to(&hosts[1], kind, fault);
    hosts[0].send_to(&link.endpoint(), json!({ "connections": 1 }));
    let status = hosts[0].ended(guest);
    println!("{kind:?} {fault:?}: {status}");
    link.end();
    (status, waiting)
}

/// The destination's status of the migration, once it has ended there.
fn there(hosts: &[Host; 2]) -> Value {
    let started = std::time::Instant::now();
    loop {
        let status = hosts[1].client().get("/v1/vm/migration").unwrap();
        if status["phase"] == "Indeterminate" || status["phase"] == "Moved" {
            return status;
        }
        assert!(started.elapsed() < NOTICE, "{status}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

#[track_caller]
fn resolve(host: &Host, place: &str) {
    let body = json!({ "resolve": place });
    host.client()
        .done("PATCH", "/v1/vm/migration", Some(&body))
        .unwrap();
}

#[test]
fn a_link_that_fails_at_any_message_leaves_one_guest() {
    require_lab().unwrap();
    let devices = [
        SimDevice::net("fault1", MAC, 1500).unwrap(),
        SimDevice::net("fault2", MAC, 1500).unwrap(),
    ];
    let hosts = [
        Host::new("fault1", devices[0].path()),
        Host::new("fault2", devices[1].path()),
    ];
    let mut guest = hosts[0].boot(BellhopArguments::small().unwrap().memory("128M"));
    let said = messages(&mut guest).unwrap();
    guest.command("write-on 4 50").unwrap();
    for (kind, fault) in [
        (Kind::Hello, Fault::CutInside),
        (Kind::Accept, Fault::CutBefore),
        (Kind::Pages, Fault::CutInside),
        (Kind::Pages, Fault::Damaged),
        (Kind::RoundEnd, Fault::CutBehind),
        (Kind::State, Fault::Damaged),
        (Kind::StateEnd, Fault::CutBefore),
        // The source sends what it received instead, so the destination knows that it must not
        // resume.
        (Kind::Ready, Fault::Damaged),
    ] {
        let (status, waiting) = attempt(&mut guest, &hosts, kind, fault);
        assert_eq!(status["phase"], "Stayed", "{status}");
        assert_eq!(hosts[0].client().get("/v1/vm").unwrap()["state"], "Running");
        check_traffic(&mut guest, &devices[0]);
        drop(waiting);
    }
    // The destination could run: it stays paused until the operator reports that the guest is not
    // there.
    let (status, mut waiting) = attempt(&mut guest, &hosts, Kind::Ready, Fault::CutBefore);
    assert_eq!(status["phase"], "Stayed", "{status}");
    check_traffic(&mut guest, &devices[0]);
    let other = there(&hosts);
    assert_eq!(other["phase"], "Indeterminate", "{other}");
    resolve(&hosts[1], "There");
    waiting.wait_exit(NOTICE).unwrap();
    // The source cannot know whether GO arrived: no guest runs until the operator decides.
    for fault in [Fault::CutInside, Fault::Damaged] {
        let (status, mut waiting) = attempt(&mut guest, &hosts, Kind::Go, fault);
        assert_eq!(status["phase"], "Indeterminate", "{status}");
        let other = there(&hosts);
        assert_eq!(other["phase"], "Indeterminate", "{other}");
        resolve(&hosts[1], "There");
        waiting.wait_exit(NOTICE).unwrap();
        resolve(&hosts[0], "Here");
        check_traffic(&mut guest, &devices[0]);
    }
    // The guest runs at the destination, and only the source does not know.
    let (status, mut waiting) = attempt(&mut guest, &hosts, Kind::Go, Fault::CutBehind);
    assert_eq!(status["phase"], "Indeterminate", "{status}");
    let runs = there(&hosts);
    assert_eq!(runs["phase"], "Moved", "{runs}");
    resolve(&hosts[0], "There");
    let exit = guest.wait_exit(NOTICE).unwrap();
    assert_eq!(exit.code(), Some(7), "{exit}");
    waiting.comes_from(guest).unwrap();
    check_traffic(&mut waiting, &devices[1]);

    // After all that, the guest can still migrate.
    let (mut guest, _) = move_guest(waiting, &hosts[1], &hosts[0]);
    check_traffic(&mut guest, &devices[0]);

    // The source receives SIGTERM before the location is resolved: its exit code says that it does
    // not know either.
    let (status, mut waiting) = attempt(&mut guest, &hosts, Kind::Go, Fault::CutInside);
    assert_eq!(status["phase"], "Indeterminate", "{status}");
    let other = there(&hosts);
    assert_eq!(other["phase"], "Indeterminate", "{other}");
    terminate(&guest);
    let exit = guest.wait_exit(NOTICE).unwrap();
    assert_eq!(exit.code(), Some(8), "{exit}: {}", guest.console());
    resolve(&hosts[1], "Here");
    waiting.comes_from(guest).unwrap();
    check_traffic(&mut waiting, &devices[1]);
    let found = waiting.command("write-off").unwrap();
    assert_eq!(found["wrong"], 0, "{found}");
    assert_eq!(messages(&mut waiting).unwrap(), said);
    assert!(waiting.power_off().unwrap().success());
}

#[track_caller]
fn terminate(guest: &Guest) {
    let pid = guest.pid().try_into().ok().and_then(Pid::from_raw);
    kill_process(pid.unwrap(), Signal::TERM).unwrap();
}

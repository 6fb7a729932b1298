//! `bellhop probe` on the lab NIC: it finds each deliberate fault, and none where there is none.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[path = "rings_netdev/command.rs"]
mod command;

use std::sync::atomic::AtomicBool;

use command::{json, outcome, rules};
use lab::labnic::{self, Labnic};
use lab::sim::SimDevice;
use lab::threads::StopOnDrop;

const A: &str = "02:00:5e:00:53:01";
const B: &str = "02:00:5e:00:53:02";

fn add(labnic: &Labnic, name: &str, mac: &str) -> SimDevice {
    labnic.add(name, &["mac", mac, "max_vqp", "2"]).unwrap()
}

#[test]
fn a_good_device_has_no_fault() {
    for parameters in [
        &[][..],
        &[("set_map", "0"), ("event_idx", "0")],
        &[("ring_state", "used")],
        &[("completion", "delayed"), ("completion_ms", "1")],
    ] {
        let labnic = Labnic::load(parameters).unwrap();
        let device = add(&labnic, "a", A);
        let report = json(device.path(), &["--conformance"], 0);
        let none: [&str; 0] = [];
        assert_eq!(rules(&report, "fail"), none, "{parameters:?} {report:#}");
        assert_eq!(rules(&report, "skipped"), none, "{parameters:?} {report:#}");
    }
    assert_eq!(labnic::trouble().unwrap(), Vec::<String>::new());
}

#[test]
fn checks_of_unoffered_features_are_skipped() {
    let parameters = [
        ("ring_state", "none"),
        ("iotlb_persist", "0"),
        ("doorbell", "0"),
        ("resume", "0"),
        ("address_spaces", "1"),
        ("mq", "0"),
    ];
    let labnic = Labnic::load(&parameters).unwrap();
    let device = labnic.add("a", &["mac", A]).unwrap();
    let report = json(device.path(), &["--conformance"], 0);
    let skipped = rules(&report, "skipped");
    for rule in [
        "config.queue_pairs",
        "groups.running",
        "memory.persist",
        "suspend.base",
        "suspend.base_round_trip",
        "suspend.resume",
        "doorbell.store",
    ] {
        assert!(skipped.iter().any(|one| one == rule), "{rule} {report:#}");
    }
    let report = json(device.path(), &[], 0);
    assert_eq!(outcome(&report, "doorbell"), "not_offered");
    assert_eq!(outcome(&report, "suspend"), "ok");
    assert_eq!(outcome(&report, "ring state"), "not_offered");
    assert_eq!(outcome(&report, "resume"), "not_offered");
}

#[test]
fn every_fault_is_found() {
    for (fault, found) in [
        (
            "wrong_base",
            &["suspend.base", "suspend.base_round_trip"][..],
        ),
        ("silent_map", &["memory.reach", "memory.unbatched"]),
        ("large_config", &["config.size"]),
        ("suspend_runs_on", &["suspend.stops"]),
        ("used_id", &["completion.used_id"]),
        ("used_length", &["completion.used_length"]),
        ("lost_call", &["completion.interrupt"]),
    ] {
        for set_map in ["1", "0"] {
            let labnic = Labnic::load(&[("faults", fault), ("set_map", set_map)]).unwrap();
            let device = add(&labnic, "a", A);
            let report = json(device.path(), &["--conformance"], 1);
            assert_eq!(rules(&report, "fail"), found, "{fault} {report:#}");
        }
    }
    assert_eq!(labnic::trouble().unwrap(), Vec::<String>::new());
}

#[test]
fn a_probe_survives_every_fault() {
    for (fault, check) in [
        ("wrong_base", "ring state"),
        ("silent_map", "start"),
        ("used_id", "traffic"),
        ("used_length", "traffic"),
        ("lost_call", "interrupt"),
    ] {
        let labnic = Labnic::load(&[("faults", fault)]).unwrap();
        let device = labnic.add("a", &["mac", A]).unwrap();
        // A device that does not reach memory fails at its first frame.
        let check = if fault == "silent_map" {
            "traffic"
        } else {
            check
        };
        let report = json(device.path(), &[], 1);
        assert_eq!(outcome(&report, check), "failed", "{fault} {report:#}");
    }
    assert_eq!(labnic::trouble().unwrap(), Vec::<String>::new());
}

#[test]
fn a_switch_is_no_loopback_and_a_peer_echoes() {
    let labnic = Labnic::load(&[]).unwrap();
    let (one, other) = (add(&labnic, "a", A), add(&labnic, "b", B));
    let report = json(one.path(), &[], 0);
    assert_eq!(outcome(&report, "traffic"), "inconclusive");
    assert_eq!(outcome(&report, "doorbell"), "ok");
    let report = json(one.path(), &["--peer", B], 1);
    assert_eq!(outcome(&report, "traffic"), "failed");
    let stop = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| command::echo(other.path(), &stop));
        // Also when there is no report: the scope waits for its threads.
        let _stop = StopOnDrop(&stop);
        let report = json(one.path(), &["--peer", B, "--seconds", "20"], 0);
        assert_eq!(outcome(&report, "traffic"), "ok", "{report:#}");
    });
    labnic::set_link(&one, false).unwrap();
    let report = json(one.path(), &[], 0);
    assert_eq!(report["identity"]["network"]["link"], false);
}

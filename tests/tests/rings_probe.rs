//! `bellhop probe` on the simulator.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[path = "rings_netdev/command.rs"]
mod command;

use command::{json, outcome, probe, rules};
use lab::sim::{SimDevice, require_lab};
use vdpa::device::Device;

/// Without a zero byte: the simulator compares addresses as C strings.
const MAC: &str = "02:5e:10:53:11:01";

fn net() -> SimDevice {
    require_lab().unwrap();
    SimDevice::net("probe", MAC, 1500).unwrap()
}

#[test]
fn the_simulator_is_as_it_is() {
    let net = net();
    let report = json(net.path(), &[], 0);
    let identity = &report["identity"];
    assert_eq!(identity["place"]["name"], net.name());
    assert!(identity["place"]["parent"].is_null());
    assert_eq!(identity["network"]["mac"][1], 0x5e);
    assert_eq!(identity["network"]["mtu"], 1500);
    assert_eq!(identity["groups"], 2);
    for (check, wanted) in [
        ("start", "ok"),
        ("traffic", "ok"),
        ("doorbell", "not_offered"),
        ("interrupt", "ok"),
        ("suspend", "ok"),
        ("ring state", "ok"),
        ("resume", "ok"),
    ] {
        assert_eq!(outcome(&report, check), wanted, "{check}: {report:#}");
    }
    let output = probe(net.path(), &[]);
    let table = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{table}");
    for word in [
        MAC,
        net.name(),
        "ACCESS_PLATFORM: the VMM",
        "SUSPEND",
        "1000 frames",
    ] {
        assert!(table.contains(word), "no {word:?} in:\n{table}");
    }
    assert!(output.stderr.is_empty());
}

#[test]
fn the_simulator_conforms() {
    let net = net();
    let report = json(net.path(), &["--conformance"], 0);
    assert_eq!(rules(&report, "fail"), Vec::<String>::new(), "{report:#}");
    let skipped = rules(&report, "skipped");
    assert_eq!(
        skipped,
        ["config.queue_pairs", "doorbell.store"],
        "{report:#}"
    );
    let output = probe(net.path(), &["--conformance"]);
    let table = String::from_utf8_lossy(&output.stdout);
    assert!(table.contains(" 0 failed"), "{table}");
}

#[test]
fn unprobeable_devices_are_reported() {
    let net = net();
    let refused = |path: &std::path::Path, words: &[&str]| {
        for arguments in [&[][..], &["--conformance"]] {
            let output = probe(path, arguments);
            let message = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(1), "{message}");
            assert!(output.stdout.is_empty());
            for word in words {
                assert!(message.contains(word), "no {word:?} in {message}");
            }
        }
    };
    let holder = Device::open(net.path()).unwrap();
    let own = format!("PID {}", std::process::id());
    refused(net.path(), &["in use by", &own]);
    drop(holder);
    refused("/dev/vhost-vdpa-none".as_ref(), &["bellhop dev add"]);
    refused("/dev/null".as_ref(), &["not a vhost-vdpa device"]);
    for arguments in [
        &["--seconds", "0"][..],
        &["--peer", "01:00:00:00:00:00"],
        &["--peer", "02:00:00:00:00:01", "--conformance"],
    ] {
        assert_eq!(probe(net.path(), arguments).status.code(), Some(2));
    }
}

#[test]
fn a_disk_is_described() {
    require_lab().unwrap();
    let block = SimDevice::block("probe-blk").unwrap();
    let report = json(block.path(), &[], 0);
    assert_eq!(report["identity"]["device_id"], 2);
    assert_eq!(outcome(&report, "start"), "inconclusive");
    let report = json(block.path(), &["--conformance"], 0);
    assert_eq!(rules(&report, "fail"), Vec::<String>::new(), "{report:#}");
}

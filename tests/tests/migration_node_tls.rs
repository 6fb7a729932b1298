//! Two node daemons pair the migration of a Linux guest over TLS, in both directions, on vdpa_sim.
//! Its memory, its traffic and its NIC are unchanged. A daemon with an insufficient token gets an
//! error.
//!
//! Both are on one host and connect to 127.0.0.1 as two hosts would: with certificate, token, and a
//! TCP port for the guest.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod tls_files;

use lab::guest::Guest;
use lab::node::{Node, small, until};
use lab::traffic::{flood_off, flood_on};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tls_files::{ADDRESS, Files, free_port};

/// No zero bytes: the simulator compares addresses like C strings.
const MAC: &str = "52:54:5e:11:5d:01";

/// Not the default, so that a lost setting shows.
const MTU: u64 = 1400;

/// How long the guest may be silent; it is emulated twice.
const SILENCE: Duration = Duration::from_secs(120);

/// The console of a running VM, and its process.
#[track_caller]
fn running(node: &Node, name: &str) -> (PathBuf, u32) {
    let vm = node.await_phase(name, "Running").unwrap();
    let console = vm["status"]["console"]["socket"].as_str().unwrap();
    (
        console.into(),
        u32::try_from(vm["status"]["pid"].as_u64().unwrap()).unwrap(),
    )
}

/// Checks that the guest's frames return to it, and that its NIC is the same.
#[track_caller]
fn check(guest: &mut Guest) {
    let answer = guest
        .command_within("frames 100 590 16 eth0", SILENCE)
        .unwrap();
    for (name, wanted) in [("rx", 100), ("corrupt", 0), ("lost", 0)] {
        assert_eq!(answer[name], wanted, "{name}: {answer}");
    }
    let info = guest.command("info").unwrap();
    let nic = &info["nics"][0];
    assert_eq!(
        (&nic["mac"], &nic["mtu"]),
        (&json!(MAC), &json!(MTU)),
        "{info}"
    );
}

/// Migrates a VM under load and attaches to it at the destination.
#[track_caller]
fn moves(mut guest: Guest, from: (&Node, &str), to: (&Node, &str), request: &Value) -> Guest {
    guest.command("write-on 24 50").unwrap();
    // To itself, through the device, with a window of frames in flight.
    flood_on(&mut guest, "eth0", MAC);
    let path = format!("/v1/vms/{}/migration", from.1);
    let sent = from.0.api.ask("POST", &path, Some(request)).unwrap();
    assert_eq!(sent.status, 202, "{}", sent.body);
    let (console, pid) = running(to.0, to.1);
    let mut there = Guest::attach_arrived(&console, pid, SILENCE).unwrap();
    until("nothing is left of it where it was", || {
        from.0.vm(from.1).unwrap().is_none() && from.0.processes().is_empty()
    })
    .unwrap();
    flood_off(&mut there);
    let written = there.command("write-off").unwrap();
    assert_eq!(written["wrong"], 0, "{written}");
    check(&mut there);
    there
}

#[test]
fn a_linux_guest_moves_between_two_daemons_over_tls_and_back() {
    lab::sim::require_lab().unwrap();
    let files = Files::new();
    let ports = [free_port(), free_port()];
    let here = files.node("tls-a", ports[0]);
    let there = files.node("tls-b", ports[1]);
    let nic = json!({ "id": "nic", "from": "vdpasim_net", "mac": MAC, "mtu": MTU });
    let body = small(&json!([nic])).unwrap();
    here.api.done("PUT", "/v1/vms/web", Some(&body)).unwrap();
    let (console, pid) = running(&here, "web");
    let mut guest = Guest::attach(&console, pid, SILENCE).unwrap();
    check(&mut guest);
    let empty = there.traces().unwrap();

    // Two VMs of one name would have devices of one name on this one host.
    let to = |port: u16, name: &str, dry_run: bool| {
        let destination = format!("https://{ADDRESS}:{port}");
        // On a busy host the switch takes longer than the default allows.
        json!({ "send": {
            "destination": destination, "name": name, "dry_run": dry_run, "downtime_ms": 3000,
        } })
    };
    files.write("token", "of-an-operator");
    let path = "/v1/vms/web/migration";
    let refused = here
        .api
        .ask("POST", path, Some(&to(ports[1], "web2", false)));
    let refused = refused.unwrap();
    assert!((400..500).contains(&refused.status), "{}", refused.body);
    assert!(
        refused.body.to_string().contains("admin"),
        "{}",
        refused.body
    );
    there.same(&empty, "after a refusal").unwrap();
    files.write("token", "of-an-admin");

    let asked = here
        .api
        .ask("POST", path, Some(&to(ports[1], "web2", true)));
    let asked = asked.unwrap();
    assert_eq!(asked.body["movable"], true, "{}", asked.body);
    there.same(&empty, "after it was only asked").unwrap();

    let guest = moves(
        guest,
        (&here, "web"),
        (&there, "web2"),
        &to(ports[1], "web2", false),
    );
    let guest = moves(
        guest,
        (&there, "web2"),
        (&here, "web"),
        &to(ports[0], "web", false),
    );
    there
        .same_but_descriptors(&empty, "after it went back")
        .unwrap();
    drop(guest);
    here.api
        .done("DELETE", "/v1/vms/web?force=true", None)
        .unwrap();
    assert!(!Path::new("/sys/bus/vdpa/devices/web.nic").exists());
}

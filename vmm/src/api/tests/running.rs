//! Requests to a running VM, and to the NICs of a VM before boot.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{CONFIG, Inside};
use crate::api::WATCHERS_MAX;
use crate::config::VmConfig;
use crate::machine::fake_machine::{FakeMachine, nic_config};
use crate::machine::{End, EndReason};

impl Inside {
    /// The server with a started VM.
    pub(super) fn running() -> Self {
        let mut config: VmConfig = serde_json::from_str(CONFIG).unwrap();
        config.vdpa.push(nic_config());
        let mut inside = Self::new(Some(config));
        let machine = FakeMachine::new();
        let request = inside.starts().wait(&inside.stop).unwrap().unwrap();
        let config = request.origin().config().unwrap().clone();
        request.started(config, machine.handle());
        inside.machine = Some(machine);
        inside
    }

    fn get(&self, path: &str) -> Value {
        let (status, body) = self.ask("GET", path, "");
        assert_eq!(status, 200, "{path}: {body}");
        body
    }
}

#[test]
fn a_running_machine_is_steered() {
    let inside = Inside::running();
    let vm = inside.get("/v1/vm");
    assert_eq!((&vm["state"], &vm["boots"]), (&json!("Running"), &json!(1)));
    assert_eq!(vm["nics"][0]["id"], "nic");
    inside.refused("PUT", "/v1/vm", CONFIG, (409, "wrong_state"));
    for (wanted, state) in [
        ("Paused", "Paused"),
        ("Paused", "Paused"),
        ("Running", "Running"),
    ] {
        inside.done("PATCH", "/v1/vm", &json!({ "state": wanted }).to_string());
        assert_eq!(inside.get("/v1/vm")["state"], state);
    }
    inside.done("POST", "/v1/vm/power-button", "");
    inside.done("POST", "/v1/vm/reset", "");
    assert_eq!(inside.get("/v1/vm")["boots"], 2);
    let answer = inside.refused("POST", "/v1/vm/nmi", "", (500, "host_failed"));
    assert!(
        answer["message"]
            .as_str()
            .unwrap()
            .contains("KVM_SIGNAL_MSI"),
        "{answer}"
    );
    inside.done("PATCH", "/v1/vm", r#"{"state": "Stopped"}"#);
    assert!(inside.stop.eventfd().read().is_ok());
}

#[test]
fn before_boot_there_is_nothing_to_steer() {
    let inside = Inside::new(None);
    for what in ["power-button", "reset", "nmi", "nics/nic/announce"] {
        let answer = inside.refused("POST", &format!("/v1/vm/{what}"), "", (409, "wrong_state"));
        assert!(
            answer["message"].as_str().unwrap().contains("not started"),
            "{answer}"
        );
    }
    assert!(
        inside
            .get("/v1/metrics")
            .as_str()
            .unwrap()
            .contains("state=\"NotStarted\"} 1")
    );
    inside.refused("GET", "/v1/vm/nics", "", (409, "no_configuration"));
    inside.refused(
        "PUT",
        "/v1/vm/nics/a",
        r#"{"path": "/a"}"#,
        (409, "no_configuration"),
    );
}

#[test]
fn nics_are_configured_before_boot() {
    let inside = Inside::new(None);
    inside.done(
        "PUT",
        "/v1/vm",
        r#"{"kernel": "k", "disks": [{"path": "d"}]}"#,
    );
    let put = |id: &str, body: &str| inside.ask("PUT", &format!("/v1/vm/nics/{id}"), body).0;
    assert_eq!(put("a", r#"{"path": "/dev/vhost-vdpa-0"}"#), 201);
    assert_eq!(put("a", r#"{"path": "/dev/vhost-vdpa-1", "id": "a"}"#), 200);
    inside.refused(
        "PUT",
        "/v1/vm/nics/a",
        r#"{"path": "/b", "id": "b"}"#,
        (422, "invalid_body"),
    );
    inside.refused(
        "PUT",
        "/v1/vm/nics/disk0",
        r#"{"path": "/b"}"#,
        (409, "id_in_use"),
    );
    inside.refused(
        "PUT",
        "/v1/vm/nics/a",
        r#"{"path": "/b", "speed": 1}"#,
        (422, "invalid_body"),
    );
    for name in ["%20", "a%2fb", &"x".repeat(65)] {
        inside.refused(
            "GET",
            &format!("/v1/vm/nics/{name}"),
            "",
            (400, "bad_parameter"),
        );
    }
    let change =
        r#"{"mac": "52:54:00:12:34:56", "doorbell": "off", "stall_kick": true, "backup": "/b"}"#;
    let (status, nic) = inside.ask("PATCH", "/v1/vm/nics/a", change);
    assert_eq!((status, &nic["mac"]), (200, &json!("52:54:00:12:34:56")));
    assert_eq!(
        (&nic["path"], &nic["doorbell"]),
        (&json!("/dev/vhost-vdpa-1"), &json!("off"))
    );
    assert_eq!(
        (&nic["stall_kick"], &nic["backup"]),
        (&json!(true), &json!("/b"))
    );
    assert_eq!(inside.get("/v1/vm/nics/a"), nic);
    let none = r#"{"backup": null}"#;
    let (_, nic) = inside.ask("PATCH", "/v1/vm/nics/a", none);
    // Absent members do not change.
    assert_eq!(
        (&nic["stall_kick"], &nic["backup"]),
        (&json!(true), &json!(null))
    );
    // A device cannot be its own backup.
    for own in [
        r#"{"backup": "/dev/vhost-vdpa-1"}"#,
        r#"{"path": "/c", "backup": "/c"}"#,
    ] {
        inside.refused("PATCH", "/v1/vm/nics/a", own, (422, "unusable"));
    }
    assert_eq!(inside.get("/v1/vm/nics/a"), nic);
    assert_eq!(inside.get("/v1/vm/nics")["items"][0]["state"], "Configured");
    assert_eq!(
        inside.get("/v1/vm/config")["vdpa"][0]["mac"],
        "52:54:00:12:34:56"
    );
    inside.refused("PATCH", "/v1/vm/nics/b", "{}", (404, "no_such_device"));
    inside.refused(
        "PATCH",
        "/v1/vm/nics/a",
        r#"{"id": "b"}"#,
        (422, "invalid_body"),
    );
    inside.done("DELETE", "/v1/vm/nics/a", "");
    inside.refused("DELETE", "/v1/vm/nics/a", "", (404, "no_such_device"));
    inside.refused("GET", "/v1/vm/nics/a", "", (404, "no_such_device"));
    assert_eq!(inside.get("/v1/vm/disks")["items"][0]["id"], "disk0");
}

#[test]
fn nics_of_a_running_machine_are_its_own() {
    let inside = Inside::running();
    let nic = inside.get("/v1/vm/nics/nic");
    assert_eq!(nic["device"]["queues"][0]["kick"], "Doorbell", "{nic}");
    assert_eq!(nic["device"]["features_negotiated"], json!(["VERSION_1"]));
    let watch = json!({
        "state": "Stuck", "in_flight": 7, "posted_per_s": 0, "completed_per_s": 0,
        "stuck_for_s": 6, "stall_kicks": 1, "posted": 0, "completed": 41,
    });
    assert_eq!(nic["device"]["queues"][0]["watch"], watch, "{nic}");
    assert_eq!(
        inside.get("/v1/vm/config")["vdpa"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
    let same = r#"{"path": "/dev/vhost-vdpa-7", "doorbell": "off"}"#;
    assert_eq!(inside.ask("PUT", "/v1/vm/nics/nic", same).0, 200);
    let other = r#"{"path": "/dev/vhost-vdpa-8"}"#;
    inside.refused("PUT", "/v1/vm/nics/nic", other, (409, "id_in_use"));
    let answer = inside.refused(
        "PUT",
        "/v1/vm/nics/new",
        r#"{"path": "/nonexistent"}"#,
        (422, "unusable"),
    );
    assert!(
        answer["causes"].to_string().contains("No such file"),
        "{answer}"
    );
    // A plugged NIC can change its device, and nothing else.
    for more in ["{}", r#"{"path": "/dev/vhost-vdpa-8", "stall_kick": true}"#] {
        inside.refused("PATCH", "/v1/vm/nics/nic", more, (409, "wrong_state"));
    }
    let same = r#"{"path": "/dev/vhost-vdpa-7"}"#;
    let (status, nic) = inside.ask("PATCH", "/v1/vm/nics/nic", same);
    assert_eq!((status, &nic["path"]), (200, &json!("/dev/vhost-vdpa-7")));
    // And its backup device; null removes that.
    let backup = r#"{"backup": "/dev/vhost-vdpa-8"}"#;
    let (status, nic) = inside.ask("PATCH", "/v1/vm/nics/nic", backup);
    assert_eq!((status, &nic["backup"]), (200, &json!("/dev/vhost-vdpa-8")));
    assert_eq!(nic["last_failover"], json!(null));
    assert_eq!(inside.get("/v1/vm/nics/nic")["backup"], nic["backup"]);
    let none = r#"{"backup": null}"#;
    let (status, nic) = inside.ask("PATCH", "/v1/vm/nics/nic", none);
    assert_eq!((status, &nic["backup"]), (200, &json!(null)));
    let own = r#"{"path": "/dev/vhost-vdpa-8", "backup": "/dev/vhost-vdpa-8"}"#;
    inside.refused("PATCH", "/v1/vm/nics/nic", own, (422, "unusable"));
    inside.refused("PATCH", "/v1/vm/nics/disk", backup, (409, "not_a_nic"));
    inside.refused("PATCH", "/v1/vm/nics/no", none, (404, "no_such_device"));
    let missing = r#"{"path": "/nonexistent"}"#;
    let answer = inside.refused("PATCH", "/v1/vm/nics/nic", missing, (422, "unusable"));
    assert!(
        answer["causes"].to_string().contains("No such file"),
        "{answer}"
    );
    inside.refused("PATCH", "/v1/vm/nics/none", same, (404, "no_such_device"));
    inside.refused("PATCH", "/v1/vm/nics/disk", same, (409, "not_a_nic"));
    inside.refused("GET", "/v1/vm/nics/rng", "", (404, "no_such_device"));
    inside.refused("DELETE", "/v1/vm/nics/rng", "", (409, "not_a_nic"));
    inside.refused("DELETE", "/v1/vm/nics/none", "", (404, "no_such_device"));
    inside.done("POST", "/v1/vm/nics/nic/announce", "");
    inside.refused(
        "POST",
        "/v1/vm/nics/rng/announce",
        "",
        (409, "cannot_announce"),
    );
    let (status, nic) = inside.ask("DELETE", "/v1/vm/nics/nic", "");
    assert_eq!((status, &nic["state"]), (202, &json!("UnplugRequested")));
    assert_eq!(
        inside.get("/v1/vm/nics")["items"][0]["state"],
        "UnplugRequested"
    );
}

#[test]
fn disks_are_configured_before_boot() {
    let inside = Inside::new(None);
    inside.done(
        "PUT",
        "/v1/vm",
        r#"{"kernel": "k", "disks": [{"path": "a"}, {"path": "b"}], "vdpa": [{"path": "/dev/n"}]}"#,
    );
    let named = |index: usize| {
        let disk = &inside.get("/v1/vm/disks")["items"][index];
        (disk["id"].clone(), disk["path"].clone())
    };
    assert_eq!(named(1), (json!("disk1"), json!("b")));
    assert_eq!(inside.get("/v1/vm/disks/disk1")["state"], "Configured");
    // A disk keeps its name when an earlier one is removed.
    inside.done("DELETE", "/v1/vm/disks/disk0", "");
    assert_eq!(named(0), (json!("disk1"), json!("b")));
    let put = |id: &str, body: &str| inside.ask("PUT", &format!("/v1/vm/disks/{id}"), body).0;
    assert_eq!(put("new", r#"{"path": "c", "readonly": true}"#), 201);
    assert_eq!(put("new", r#"{"path": "d", "id": "new"}"#), 200);
    assert_eq!(named(1), (json!("new"), json!("d")));
    let change = r#"{"readonly": true}"#;
    let (status, disk) = inside.ask("PATCH", "/v1/vm/disks/new", change);
    assert_eq!((status, &disk["readonly"]), (200, &json!(true)));
    assert_eq!(inside.get("/v1/vm/disks/new"), disk);
    for (method, path, body, expected) in [
        (
            "PUT",
            "new",
            r#"{"path": "d", "id": "x"}"#,
            (422, "invalid_body"),
        ),
        (
            "PUT",
            "new",
            r#"{"path": "d", "size": 1}"#,
            (422, "invalid_body"),
        ),
        ("PUT", "new", r#"{}"#, (422, "invalid_body")),
        ("PUT", "n", r#"{"path": "d"}"#, (409, "id_in_use")),
        ("PUT", "a%2fb", r#"{"path": "d"}"#, (400, "bad_parameter")),
        ("PATCH", "new", r#"{"id": "x"}"#, (422, "invalid_body")),
        ("PATCH", "disk0", "{}", (404, "no_such_device")),
        ("DELETE", "disk0", "", (404, "no_such_device")),
        ("GET", "n", "", (404, "no_such_device")),
    ] {
        inside.refused(method, &format!("/v1/vm/disks/{path}"), body, expected);
    }
    let config = inside.get("/v1/vm/config");
    assert_eq!(config["vdpa"][0]["id"], "n");
    inside.done("PUT", "/v1/vm", &config.to_string());
}

#[test]
fn disks_of_a_running_machine_are_its_own() {
    let inside = Inside::running();
    let disk = inside.get("/v1/vm/disks/disk");
    assert_eq!(disk["state"], "Plugged", "{disk}");
    assert_eq!(inside.get("/v1/vm")["disks"][0]["id"], "disk");
    let config = inside.get("/v1/vm/config");
    assert_eq!(config["disks"][0]["path"], "/nonexistent.img");
    let same = r#"{"path": "/nonexistent.img", "readonly": true}"#;
    assert_eq!(inside.ask("PUT", "/v1/vm/disks/disk", same).0, 200);
    for (method, path, body, expected) in [
        ("PUT", "disk", r#"{"path": "/b"}"#, (409, "id_in_use")),
        ("PUT", "nic", r#"{"path": "/b"}"#, (409, "id_in_use")),
        (
            "PUT",
            "new",
            r#"{"path": "/nonexistent"}"#,
            (422, "unusable"),
        ),
        ("PUT", "new", r#"{"path": "/dev/null"}"#, (422, "unusable")),
        ("PUT", "new", r#"{"path": "/"}"#, (422, "unusable")),
        ("PATCH", "disk", "{}", (409, "wrong_state")),
        ("GET", "nic", "", (404, "no_such_device")),
        ("DELETE", "nic", "", (409, "not_a_disk")),
        ("DELETE", "rng", "", (409, "not_a_disk")),
        ("DELETE", "none", "", (404, "no_such_device")),
    ] {
        inside.refused(method, &format!("/v1/vm/disks/{path}"), body, expected);
    }
    inside.refused("DELETE", "/v1/vm/nics/disk", "", (409, "not_a_nic"));
    let (status, disk) = inside.ask("DELETE", "/v1/vm/disks/disk", "");
    assert_eq!((status, &disk["state"]), (202, &json!("UnplugRequested")));
    assert_eq!(
        inside.get("/v1/vm/disks")["items"][0]["state"],
        "UnplugRequested"
    );
    assert_eq!(inside.get("/v1/vm/nics")["items"][0]["state"], "Plugged");
}

#[test]
fn functions_are_configured_before_boot() {
    let inside = Inside::new(None);
    let config = r#"{"kernel": "k", "vfio": [{"host": "0000:03:10.1"}], "vdpa": [{"path": "/n"}]}"#;
    inside.done("PUT", "/v1/vm", config);
    let first = inside.get("/v1/vm/vfio")["items"][0].clone();
    assert_eq!(first["id"], "0000:03:10.1", "{first}");
    assert_eq!(first["path"], "/sys/bus/pci/devices/0000:03:10.1");
    assert_eq!(
        (&first["state"], &first["function"]),
        (&json!("Configured"), &Value::Null)
    );
    assert_eq!(inside.get("/v1/vm/vfio/0000:03:10.1"), first);
    let put = |id: &str, body: &str| inside.ask("PUT", &format!("/v1/vm/vfio/{id}"), body).0;
    assert_eq!(put("new", r#"{"host": "0000:03:10.2"}"#), 201);
    assert_eq!(put("new", r#"{"path": "/sys/a", "allow_pf": true}"#), 200);
    for (method, path, body, expected) in [
        (
            "PUT",
            "new",
            r#"{"host": "0000:03:10.2", "id": "x"}"#,
            (422, "invalid_body"),
        ),
        (
            "PUT",
            "new",
            r#"{"host": "03:10.2"}"#,
            (422, "invalid_body"),
        ),
        ("PUT", "new", "{}", (422, "invalid_body")),
        (
            "PUT",
            "n",
            r#"{"host": "0000:03:10.2"}"#,
            (409, "id_in_use"),
        ),
        ("DELETE", "n", "", (404, "no_such_device")),
        ("GET", "n", "", (404, "no_such_device")),
    ] {
        inside.refused(method, &format!("/v1/vm/vfio/{path}"), body, expected);
    }
    inside.refused(
        "PUT",
        "/v1/vm/nics/new",
        r#"{"path": "/d"}"#,
        (409, "id_in_use"),
    );
    inside.done("DELETE", "/v1/vm/vfio/0000:03:10.1", "");
    let config = inside.get("/v1/vm/config");
    assert_eq!(
        config["vfio"],
        json!([{"path": "/sys/a", "id": "new", "allow_pf": true}])
    );
}

#[test]
fn functions_of_a_running_machine_are_its_own() {
    let inside = Inside::running();
    let function = inside.get("/v1/vm/vfio/vf");
    assert_eq!(function["state"], "Plugged", "{function}");
    assert_eq!(function["function"]["driver"], "vfio-pci");
    assert_eq!(function["function"]["connected_vectors"], 2);
    assert_eq!(inside.get("/v1/vm/vfio")["items"], json!([function]));
    assert_eq!(inside.get("/v1/vm")["vfio"][0]["id"], "vf");
    let config = inside.get("/v1/vm/config");
    assert_eq!(
        config["vfio"],
        json!([{"host": "0000:03:10.1", "id": "vf"}])
    );
    let same = r#"{"host": "0000:03:10.1"}"#;
    assert_eq!(inside.ask("PUT", "/v1/vm/vfio/vf", same).0, 200);
    for (method, path, body, expected) in [
        (
            "PUT",
            "vf",
            r#"{"host": "0000:03:10.2"}"#,
            (409, "id_in_use"),
        ),
        ("PUT", "nic", same, (409, "id_in_use")),
        ("GET", "nic", "", (404, "no_such_device")),
        ("DELETE", "nic", "", (409, "not_a_vfio_device")),
        ("DELETE", "none", "", (404, "no_such_device")),
    ] {
        inside.refused(method, &format!("/v1/vm/vfio/{path}"), body, expected);
    }
    inside.refused("DELETE", "/v1/vm/disks/vf", "", (409, "not_a_disk"));
    let metrics = inside.get("/v1/metrics");
    let metrics = metrics.as_str().unwrap();
    for line in [
        "bellhop_vfio_plugged{function=\"vf\"} 1",
        "bellhop_vfio_vectors{function=\"vf\"} 2",
        "bellhop_vfio_mapped_bytes{function=\"vf\"} 16384",
        "bellhop_vfio_failed{function=\"vf\"} 0",
        "bellhop_vfio_total{function=\"vf\",what=\"trapped_reads\"} 11",
        "bellhop_vfio_total{function=\"vf\",what=\"errors\"} 17",
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
    let (status, function) = inside.ask("DELETE", "/v1/vm/vfio/vf", "");
    assert_eq!(
        (status, &function["state"]),
        (202, &json!("UnplugRequested"))
    );
    let listed = inside.get("/v1/vm/vfio");
    assert_eq!(listed["items"][0]["state"], "UnplugRequested");
}

#[test]
fn an_ended_machine_reports_its_end() {
    let mut inside = Inside::running();
    assert_eq!(inside.get("/v1/vm")["end"], Value::Null);
    inside.machine = None;
    let vm = inside.get("/v1/vm");
    assert_eq!((&vm["state"], &vm["api"]), (&json!("Stopped"), &json!(1)));
    assert_eq!(vm["end"]["reason"], "Stopped");
    assert!(
        vm["end"]["detail"].as_str().unwrap().contains("signal"),
        "{vm}"
    );
    inside.refused("POST", "/v1/vm/reset", "", (409, "ended"));
    inside.refused("GET", "/v1/metrics", "", (409, "ended"));
    inside.refused("PATCH", "/v1/vm", r#"{"state": "Paused"}"#, (409, "ended"));
    // The watch does not wait for a change that cannot come.
    let generation = &inside.get("/v1/vm")["generation"];
    let started = Instant::now();
    inside.get(&format!("/v1/vm/watch?since={generation}&timeout_s=60"));
    assert!(started.elapsed() < Duration::from_secs(30));
}

#[test]
fn a_watcher_receives_the_reason_of_the_end() {
    for (reason, word) in [
        (EndReason::PoweredOff, "PoweredOff"),
        (EndReason::Indeterminate, "Indeterminate"),
        (EndReason::Crashed, "Crashed"),
        (EndReason::Failed, "Failed"),
    ] {
        let mut inside = Inside::running();
        let generation = inside.get("/v1/vm")["generation"].as_u64().unwrap();
        let machine = inside.machine.take().unwrap();
        machine.will_end(End {
            reason,
            detail: "x".to_owned(),
        });
        let end = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            drop(machine);
        });
        // The first answer with Stopped contains it.
        let last = inside.get(&format!("/v1/vm/watch?since={generation}&timeout_s=60"));
        assert_eq!(last["state"], "Stopped");
        assert_eq!(last["end"], json!({ "reason": word, "detail": "x" }));
        end.join().unwrap();
        assert_eq!(inside.get("/v1/vm")["end"], last["end"]);
    }
}

#[test]
fn the_requester_of_an_end_is_reported() {
    let mut inside = Inside::running();
    inside.done("PATCH", "/v1/vm", r#"{"state": "Stopped"}"#);
    inside.machine = None;
    let detail = inside.get("/v1/vm")["end"]["detail"].clone();
    assert!(
        detail.as_str().unwrap().contains("a client of the API"),
        "{detail}"
    );
}

#[test]
fn a_watcher_waits_for_a_change() {
    let inside = Inside::running();
    let now = inside.get("/v1/vm");
    let generation = now["generation"].as_u64().unwrap();
    assert_eq!(inside.get("/v1/vm/watch"), now);
    assert_eq!(inside.get("/v1/vm/watch?since=0"), now);
    let started = Instant::now();
    let same = inside.get(&format!("/v1/vm/watch?since={generation}&timeout_s=1"));
    assert_eq!(same, now);
    assert!(started.elapsed() >= Duration::from_secs(1));
    let machine = inside.machine.as_ref().unwrap().handle().clone();
    let pause = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        machine.pause().unwrap();
    });
    let changed = inside.get(&format!("/v1/vm/watch?since={generation}&timeout_s=60"));
    assert_eq!(changed["state"], "Paused");
    assert_eq!(changed["generation"], generation + 1);
    pause.join().unwrap();
    for (query, code) in [
        ("since=x", "bad_parameter"),
        ("since=1&timeout_s=61", "bad_parameter"),
        ("since=-1", "bad_parameter"),
        ("since=1&since=2", "bad_parameter"),
        ("until=1", "unknown_parameter"),
    ] {
        let path = format!("/v1/vm/watch?{query}");
        inside.refused("GET", &path, "", (400, code));
    }
}

#[test]
fn a_watcher_sees_alarms() {
    let inside = Inside::running();
    let now = inside.get("/v1/vm");
    assert_eq!(now["alarms"], json!([]));
    // The fake VM has such a NIC then.
    inside.done("POST", "/v1/vm/nics/nic/announce", "");
    let path = format!("/v1/vm/watch?since={}&timeout_s=60", now["generation"]);
    let changed = inside.get(&path);
    let alarm = json!({ "device": "nic", "queue": 3, "alarm": "Stuck" });
    assert_eq!(changed["alarms"], json!([alarm]));
    assert_ne!(changed["generation"], now["generation"]);
}

#[test]
fn the_guests_iommu_has_counters_and_its_last_refusal() {
    let inside = Inside::running();
    let iommu = inside.get("/v1/vm/iommu");
    assert_eq!(
        (&iommu["mappings"], &iommu["refused"]),
        (&json!(5), &json!(1))
    );
    assert_eq!(iommu["last_refusal"]["device"], "nic");
    assert_eq!(iommu["last_refusal"]["iova"], 0x4000);
}

#[test]
fn watchers_leave_room_for_others() {
    let inside = Inside::running();
    let generation = inside.get("/v1/vm")["generation"].as_u64().unwrap();
    let path = format!("/v1/vm/watch?since={generation}&timeout_s=60");
    let waiting: Vec<_> = (0..WATCHERS_MAX)
        .map(|_| {
            let request = axum::http::Request::get(&path).body(axum::body::Body::empty());
            let router = inside.router.clone();
            inside
                .runtime
                .spawn(tower::ServiceExt::oneshot(router, request.unwrap()))
        })
        .collect();
    // The runtime runs only during a wait.
    let run = || {
        inside
            .runtime
            .block_on(async { tokio::time::sleep(Duration::from_millis(200)).await })
    };
    run();
    let zero = format!("/v1/vm/watch?since={generation}&timeout_s=0");
    inside.refused("GET", &zero, "", (503, "too_many_watchers"));
    inside.get("/v1/vm");
    waiting.iter().for_each(tokio::task::JoinHandle::abort);
    run();
    inside.get(&zero);
}

#[test]
fn metrics_are_prometheus_text() {
    let inside = Inside::running();
    let text = inside.get("/v1/metrics");
    let text = text.as_str().unwrap();
    for line in [
        "bellhop_vm_state{state=\"Running\"} 1",
        "bellhop_vm_boots_total 1",
        "bellhop_nic_plugged{nic=\"nic\"} 1",
        "bellhop_kvm_total{counter=\"exits\"} 42",
        "bellhop_kvm_held{what=\"memory_slots\"} 3",
        "bellhop_console_lost_bytes_total{to=\"log\"} 7",
        "bellhop_iommu_mappings 5",
        "bellhop_iommu_total{what=\"maps\"} 9",
        "bellhop_device_driver_ok{device=\"nic\"} 1",
        "bellhop_device_queues{device=\"nic\",kick=\"doorbell\"} 1",
        "bellhop_queue_in_flight{device=\"nic\",queue=\"0\"} 7",
        "bellhop_queue_posted_total{device=\"nic\",queue=\"0\"} 0",
        "bellhop_queue_completed_total{device=\"nic\",queue=\"0\"} 41",
        "bellhop_queue_stuck_seconds{device=\"nic\",queue=\"0\"} 6",
        "bellhop_queue_alarm{device=\"nic\",queue=\"0\"} 1",
        "bellhop_queue_stall_kicks_total{device=\"nic\",queue=\"0\"} 1",
    ] {
        assert!(text.lines().any(|one| one == line), "{line}\n{text}");
    }
    // Each family is announced before its samples, once.
    let mut families = std::collections::BTreeSet::new();
    let mut current = "";
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            current = rest.split(' ').next().unwrap();
            assert!(families.insert(current), "{current} twice");
        } else if !line.starts_with('#') {
            let (name, value) = line.rsplit_once(' ').unwrap();
            assert_eq!(name.split('{').next().unwrap(), current);
            value.parse::<u64>().unwrap();
        }
    }
}

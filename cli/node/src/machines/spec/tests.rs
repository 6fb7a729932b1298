#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeMap;

use serde_json::json;
use vdpa_mgmt::nic::NicRequest;

use super::*;

fn spec(value: Value) -> Result<VmSpec, String> {
    vmm::http::body::parse(value.to_string().as_bytes()).map_err(|error| error.to_string())
}

fn vm(name: &str) -> VmName {
    name.parse().unwrap()
}

#[test]
fn names_are_checked() {
    for good in ["a", "0", "web-1", &"a".repeat(63)] {
        assert!(good.parse::<VmName>().is_ok(), "{good}");
    }
    let long = "a".repeat(64);
    for bad in [
        "", "-a", "A", "a.b", "a/b", "..", "a b", "a\n", "ä", "a_b", &long,
    ] {
        assert!(bad.parse::<VmName>().is_err(), "{bad}");
    }
    for bad in ["", ".", "..", "a/b", "a b", &"a".repeat(65)] {
        assert!(bad.parse::<NicId>().is_err(), "{bad}");
    }
}

#[test]
fn specs_are_read_back() {
    let written = json!({
        "kernel": "/k", "cpus": 2, "memory": "1G", "disks": [{ "path": "/d" }],
        "nics": [
            { "id": "net0", "from": "pci/0000:01:00.0", "kind": "vf", "bridge": "br0", "vlan": 100,
              "mac": "52:54:00:12:34:56", "mtu": 9000, "queue_pairs": 4, "max_tx_rate": 100 },
            { "id": "net1", "path": "/dev/vhost-vdpa-3", "doorbell": "off" },
            { "id": "net2", "device": "vdpa0", "backup": { "path": "/dev/vhost-vdpa-4" } },
        ],
        "restart": "Always", "state": "Stopped",
    });
    let read = spec(written.clone()).unwrap();
    let again: VmSpec = serde_json::from_value(serde_json::to_value(&read).unwrap()).unwrap();
    assert_eq!(again, read);
    let shown = serde_json::to_value(&read).unwrap();
    for key in ["nics", "restart", "state", "cpus", "kernel"] {
        assert_eq!(shown[key], written[key]);
    }
    assert!(shown.get("vdpa").is_none());
    assert_eq!(
        (read.state, read.restart),
        (Desired::Stopped, Restart::Always)
    );
    let request = read.nics()[0].request(&vm("web")).unwrap();
    assert_eq!(request.name, "web.net0");
    assert_eq!(request.owner.as_deref(), Some("node:web/net0"));
    let connectivity = request.connectivity.unwrap();
    assert_eq!(connectivity.bridge.as_deref(), Some("br0"));
    assert_eq!(connectivity.mtu, Some(9000));
    assert!(read.nics()[1].request(&vm("web")).is_none());
    let minimal = spec(json!({ "kernel": "/k" })).unwrap();
    assert_eq!(
        (minimal.state, minimal.restart, minimal.nics().len()),
        (Desired::Running, Restart::OnFailure, 0)
    );
}

#[test]
fn disks_keep_their_names_when_others_are_plugged_and_unplugged() {
    let all = spec(json!({ "kernel": "/k", "disks": [{ "path": "/a" }, { "path": "/b" }] }));
    let all = all.unwrap();
    let id = |text: &str| text.parse::<DeviceId>().unwrap();
    let less = all.without_disk(&id("disk0"));
    assert!(less.disk(&id("disk0")).is_none());
    let left = less.disk(&id("disk1")).unwrap();
    assert_eq!(left.path, PathBuf::from("/b"));
    let more = less.with_disk("path=/a,id=disk0".parse().unwrap());
    more.check(&vm("web")).unwrap();
    assert_eq!(more.disk(&id("disk0")), all.disk(&id("disk0")));
    // A client that omits the names means the same VM.
    let named = json!({ "kernel": "/k",
        "disks": [{ "path": "/a", "id": "disk0" }, { "path": "/b", "id": "disk1" }] });
    assert_eq!(spec(named).unwrap(), all);
}

#[test]
fn mistakes_are_named() {
    let nic = |nic: Value| json!({ "kernel": "/k", "nics": [nic] });
    for (wrong, words) in [
        (json!({ "kernel": "/k", "vdpa": [] }), "give `nics`"),
        (
            json!({ "kernel": "/k", "vcpus": 2 }),
            "unknown field `vcpus`, expected one of `",
        ),
        (json!({ "kernel": "/k", "cpus": 0 }), "cpus: 0 vCPUs"),
        (
            json!({ "kernel": "/k", "disks": [{ "path": "/d" }, { "pth": 1 }] }),
            "disks[1].pth",
        ),
        (json!({ "kernel": "/k", "restart": "Often" }), "restart: "),
        (json!({ "kernl": 1 }), "`nics`, `restart`"),
        (json!({}), "missing field `kernel`"),
        (json!([]), "invalid type"),
        (nic(json!({ "id": "a" })), "0 of from, path and device"),
        (
            nic(json!({ "id": "a", "from": "b", "path": "/c" })),
            "2 of from",
        ),
        (nic(json!({ "id": "a/b", "from": "b" })), "nics[0]"),
        (
            nic(json!({ "id": "a", "from": "b", "x": 1 })),
            "unknown field `x`",
        ),
        (
            nic(json!({ "id": "a", "path": "/b", "vlan": 1 })),
            "a has vlan, which needs a created device",
        ),
        (
            nic(json!({ "id": "a", "path": "/b", "port": "eth1" })),
            "a has port, which needs a created device",
        ),
        (
            nic(json!({ "id": "a", "from": "software", "port": "eth1" })),
            "a: name both `port` and `queue`",
        ),
        (
            nic(json!({ "id": "a", "from": "software", "port": "../x", "queue": 0 })),
            "is not a name for an interface",
        ),
        (
            nic(json!({ "id": "a", "path": "/b", "poll": 30 })),
            "a has poll, which needs a created device",
        ),
        (
            nic(json!({ "id": "a", "path": "/b", "device_features": 47 })),
            "a has device_features, which needs a created device",
        ),
        (
            nic(json!({ "id": "a", "from": "b", "device_features": "0x" })),
            "nics[0].device_features: \"0x\" is not a mask",
        ),
        (
            nic(json!({ "id": "a", "from": "b", "poll": 30 })),
            "a: devices of b do not poll: leave `poll` out",
        ),
        (
            nic(json!({ "id": "a", "from": "software", "poll": 0 })),
            "give 1 to 100",
        ),
        (
            nic(json!({ "id": "a", "from": "software", "poll": 101 })),
            "give 1 to 100",
        ),
        (
            nic(json!({ "id": "a", "from": "software", "poll": 256 })),
            "nics[0].poll",
        ),
        (
            nic(json!({ "id": "a", "from": "b", "backup": {} })),
            "backup has 0 of from, path and device",
        ),
        (
            nic(json!({ "id": "a", "from": "b", "backup": { "from": "b", "path": "/c" } })),
            "backup has 2 of from",
        ),
        (
            nic(json!({ "id": "a", "from": "b", "backup": { "x": "b" } })),
            "unknown field `x`",
        ),
        (
            nic(json!({ "id": "a", "path": "/b", "backup": { "from": "c" } })),
            "a has backup.from, which needs a created device",
        ),
        (
            nic(json!({ "id": "a", "path": "/b", "backup": { "path": "/b" } })),
            "backup is the NIC's own device",
        ),
        (nic(json!({ "id": "a", "from": "b", "vlan": 4095 })), "VLAN"),
        (nic(json!({ "id": "a", "from": "b", "mtu": 67 })), "mtu 67"),
        (
            nic(json!({ "id": "a", "from": "b", "queue_pairs": 0 })),
            "max_vqp 0",
        ),
        (
            nic(json!({ "id": "a", "from": "b", "max_tx_rate": 1, "min_tx_rate": 2 })),
            "a: ",
        ),
        (
            json!({ "kernel": "/k",
                    "nics": [{ "id": "a", "from": "b" }, { "id": "a", "from": "c" }] }),
            "two NICs have the name a",
        ),
    ] {
        let error = spec(wrong.clone()).unwrap_err();
        assert!(error.contains(words), "{wrong}: {error}");
    }
    let long = "n".repeat(60);
    let error = spec(nic(json!({ "id": long, "from": "b" })))
        .unwrap()
        .check(&vm("web"))
        .unwrap_err();
    assert!(error.to_string().contains("shorten one"), "{error}");
    let disks = |ids: &[&str]| {
        let disk = |id: &&str| json!({ "path": "/d", "id": id });
        let disks: Vec<_> = ids.iter().map(disk).collect();
        json!({ "kernel": "/k", "disks": disks, "nics": [{ "id": "net0", "from": "b" }] })
    };
    for (wrong, words) in [
        (disks(&["a", "b", "a"]), "has the id a"),
        (disks(&["net0"]), "has the id net0"),
        (disks(&["rng"]), "has the id rng"),
        (disks(&["iommu"]), "has the id iommu"),
        (disks(&["a", "a/b"]), "disks[1].id: "),
        (disks(&[""]), "1 to 20 letters"),
        (disks(&["a".repeat(21).as_str()]), "1 to 20 letters"),
    ] {
        let error = spec(wrong).unwrap().check(&vm("web")).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    }
    for relative in [
        json!({ "kernel": "k" }),
        json!({ "kernel": "/k", "initramfs": "i" }),
        json!({ "kernel": "/k", "disks": [{ "path": "d" }] }),
        nic(json!({ "id": "a", "path": "d" })),
        nic(json!({ "id": "a", "from": "b", "backup": { "path": "d" } })),
    ] {
        let error = spec(relative).unwrap().check(&vm("web")).unwrap_err();
        assert!(error.to_string().contains("absolute path"), "{error}");
    }
}

#[test]
fn settings_of_a_device_here_are_requested_at_the_destination() {
    let spec: VmSpec =
        serde_json::from_value(json!({ "kernel": "/k", "state": "Stopped", "nics": [
        { "id": "a", "from": "vdpasim_net", "kind": "vf", "virtual_functions": 4, "mtu": 9000 },
        { "id": "b", "path": "/dev/vhost-vdpa-0", "backup": { "device": "spare" } },
    ] }))
        .unwrap();
    let device = |mac, pairs| NetConfig {
        mac: Some(mac),
        status: None,
        max_vq_pairs: Some(pairs),
        mtu: Some(1500),
    };
    let mac = [0x52, 0x54, 0, 1, 2, 3];
    let same = spec
        .elsewhere(None, &BTreeMap::new(), |_| Some(device(mac, 1)))
        .unwrap();
    let nics = serde_json::to_value(&same).unwrap();
    assert_eq!(nics["state"], "Running");
    assert_eq!(
        nics["nics"],
        json!([
            { "id": "a", "from": "vdpasim_net", "kind": "vf", "virtual_functions": 4, "mtu": 9000,
              "mac": "52:54:00:01:02:03" },
            { "id": "b", "path": "/dev/vhost-vdpa-0", "backup": { "device": "spare" } },
        ])
    );
    let other = spec.elsewhere(Some("enp1s0"), &BTreeMap::new(), |_| {
        Some(device([0; 6], 4))
    });
    let nics = serde_json::to_value(other.unwrap()).unwrap();
    assert_eq!(
        nics["nics"],
        json!([
            { "id": "a", "from": "enp1s0", "mtu": 9000, "queue_pairs": 4 },
            { "id": "b", "from": "enp1s0", "queue_pairs": 4, "backup": { "from": "enp1s0" } },
        ])
    );
}

#[test]
fn hardware_has_no_settings_of_software() {
    let nic = json!({ "id": "a", "from": "software", "port": "eth1", "queue": 3, "poll": 30,
                      "device_features": "0x2f", "backup": { "from": "enp1s0" } });
    let spec = spec(json!({ "kernel": "/k", "nics": [nic] })).unwrap();
    let vm = vm("web");
    let of = |request: NicRequest| {
        let queue = request.port.map(|port| port.queue);
        (request.poll_percent, queue, request.device_features)
    };
    let (own, none) = ((Some(30), Some(3), Some(0x2f)), (None, None, None));
    assert_eq!(of(spec.nics()[0].request(&vm).unwrap()), own);
    let backup = spec.nics()[0].backup_request(&vm, None).unwrap();
    assert_eq!(of(backup), none);
    for (from, wanted) in [(None, own), (Some("software"), own), (Some("enp1s0"), none)] {
        let there = spec.elsewhere(from, &BTreeMap::new(), |_| None).unwrap();
        let request = there.nics()[0].request(&vm).unwrap();
        assert_eq!(of(request), wanted, "{from:?}");
    }
}

#[test]
fn features_of_hardware_are_requested_elsewhere() {
    let nic = json!({ "id": "a", "from": "eth0", "device_features": 47 });
    let spec = spec(json!({ "kernel": "/k", "nics": [nic] })).unwrap();
    for from in ["eth1", "software"] {
        let there = spec.elsewhere(Some(from), &BTreeMap::new(), |_| None);
        let request = there.unwrap().nics()[0].request(&vm("web")).unwrap();
        assert_eq!(request.device_features, Some(47), "{from}");
    }
}

#[test]
fn a_backup_is_created_like_the_nics_own_device() {
    let one = |nic: Value| -> NicSpec { serde_json::from_value(nic).unwrap() };
    let nic = one(json!({
        "id": "a", "from": "pci/0000:01:00.0", "kind": "vf", "bridge": "br0", "vlan": 7,
        "mtu": 9000, "max_tx_rate": 100, "stall_kick": true,
        "backup": { "from": "pci/0000:02:00.0" },
    }));
    let vm = vm("web");
    let own = NetConfig {
        mac: Some([0x52, 0x54, 0, 1, 2, 3]),
        status: None,
        max_vq_pairs: Some(4),
        mtu: Some(9000),
    };
    let made = nic.request(&vm).unwrap();
    let backup = nic.backup_request(&vm, Some(&own)).unwrap();
    assert_eq!(backup.name, "web.a~");
    assert_eq!(
        backup,
        NicRequest {
            name: backup.name.clone(),
            from: "pci/0000:02:00.0".to_owned(),
            mac: own.mac,
            max_vqp: own.max_vq_pairs,
            ..made
        }
    );
    // Requested settings have precedence.
    let own = NetConfig {
        mtu: Some(1500),
        ..own
    };
    assert_eq!(nic.backup_request(&vm, Some(&own)).unwrap().mtu, Some(9000));
    let there = nic.on_backup(&vm).unwrap();
    assert_eq!(
        there.source(),
        &NicSource::There(ExistingDevice::Name("web.a~".to_owned()))
    );
    assert_eq!(
        serde_json::to_value(&there).unwrap(),
        json!({ "id": "a", "device": "web.a~", "stall_kick": true })
    );
    assert!(there.on_backup(&vm).is_none());
    // A created backup is dropped, an existing one stays, and no device is its own backup.
    let to = |path: &str| ExistingDevice::Path(path.into());
    assert!(nic.moved_to(to("/dev/x")).backup().is_none());
    let nic = one(json!({ "id": "a", "from": "b", "backup": { "path": "/dev/x" } }));
    assert!(nic.backup_request(&vm, None).is_none());
    assert!(nic.moved_to(to("/dev/x")).backup().is_none());
    let moved = nic.moved_to(to("/dev/y"));
    assert_eq!(moved.backup(), Some(&NicSource::There(to("/dev/x"))));
    let again: NicSpec = serde_json::from_value(serde_json::to_value(&moved).unwrap()).unwrap();
    assert_eq!(again, moved);
    // The name of its backup must fit, too.
    let long = one(json!({ "id": "n".repeat(59), "from": "b" }));
    let spec = |nic| VmSpec {
        nics: vec![nic],
        ..spec(json!({ "kernel": "/k" })).unwrap()
    };
    assert!(spec(long).check(&vm).is_ok());
    let long = one(json!({ "id": "n".repeat(59), "from": "b", "backup": { "from": "b" } }));
    assert!(spec(long).check(&vm).is_err());
}

#[test]
fn a_device_behind_the_iommu_brings_one_that_its_process_keeps() {
    let iommu = |nic: Value, iommu: Value| {
        let value = json!({ "kernel": "/k", "nics": [nic], "iommu": iommu });
        spec(value).unwrap().fixed().iommu
    };
    let plain = json!({ "id": "net0", "from": "b" });
    let behind = json!({ "id": "net0", "from": "b", "iommu": true });
    assert_eq!(iommu(plain.clone(), Value::Null), None);
    assert_eq!(
        iommu(behind.clone(), Value::Null),
        Some(IommuConfig::default())
    );
    for nic in [plain, behind] {
        let own = iommu(nic, json!({ "boot_bypass": false })).unwrap();
        assert!(!own.boot_bypass);
    }
    for (behind, needs) in [(false, None), (true, Some(IommuConfig::default()))] {
        let value = json!({ "kernel": "/k", "disks": [{ "path": "/d", "iommu": behind }] });
        assert_eq!(spec(value).unwrap().fixed().iommu, needs);
    }
}

#[test]
fn functions_are_named_by_their_address_and_given_others_elsewhere() {
    let with = |vfio: Value| spec(json!({ "kernel": "/k", "vfio": vfio })).unwrap();
    let written = json!([{ "host": "0000:03:10.1" }, { "host": "0000:03:10.2", "id": "fast" }]);
    let read = with(written.clone());
    read.check(&vm("web")).unwrap();
    let shown = serde_json::to_value(&read).unwrap();
    assert_eq!(shown["vfio"], written);
    let addresses: Vec<String> = read.functions().map(|one| one.to_string()).collect();
    assert_eq!(addresses, ["0000:03:10.1", "0000:03:10.2"]);
    let elsewhere = |name: &str, address: &str| {
        let there = BTreeMap::from([(name.to_owned(), address.to_owned())]);
        read.elsewhere(None, &there, |_| None)
    };
    let moved = serde_json::to_value(elsewhere("fast", "0000:81:00.3").unwrap()).unwrap();
    // Each keeps its name if a client gives it another address.
    let there = json!([
        { "host": "0000:03:10.1", "id": "0000:03:10.1" },
        { "host": "0000:81:00.3", "id": "fast" },
    ]);
    assert_eq!(moved["vfio"], there);
    let moved = elsewhere("0000:03:10.1", "0000:81:00.3").unwrap();
    assert_eq!(moved.machine().vfio[0].name(), "0000:03:10.1");
    for (name, address, word) in [
        ("slow", "0000:81:00.3", "no function slow"),
        ("fast", "81:00", "fast"),
        ("fast", "../x", "fast"),
        ("fast", "0000:81:00.3,allow_pf=on", "fast"),
    ] {
        let error = elsewhere(name, address).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
    for (vfio, words) in [
        (
            json!([{ "path": "/sys/devices/x" }]),
            "vfio[0]: give `host`",
        ),
        (
            json!([{ "host": "0000:03:10.1", "id": "a/b" }]),
            "vfio[0].id",
        ),
        (
            json!([{ "host": "0000:03:10.1", "id": "rng" }]),
            "the id rng",
        ),
        (
            json!([{ "host": "0000:03:10.1" }, { "host": "0000:03:10.1" }]),
            "the id 0000:03:10.1",
        ),
    ] {
        let error = with(vfio).check(&vm("web")).unwrap_err().to_string();
        assert!(error.contains(words), "{words}: {error}");
    }
}

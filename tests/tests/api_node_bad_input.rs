//! Input of hostile and broken clients to the node daemon. They send requests generated from its
//! description, slow requests, names that are paths, and one device for two machines. Meanwhile the
//! daemon answers other clients. Afterwards nothing is left behind.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod any_request;

use any_request::Trial;
use lab::node::{Node, until};
use lab::openapi::exchange::{Request, ask, receive};
use lab::openapi::judge::NO_NODE;
use lab::openapi::known::Known;
use lab::sim::SimDevice;
use serde_json::{Value, json};
use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// No zero bytes: the simulator compares addresses as if they were strings.
const MAC: &str = "52:54:5e:11:5a:01";
const OTHER_MAC: &str = "52:54:5e:11:5a:02";
const SPARE_MAC: &str = "52:54:5e:11:5a:03";
/// Longer than a head or a body may take.
const SLOW: Duration = Duration::from_secs(40);

fn made(node: &Node, name: &str, nics: &Value) -> Value {
    let spec = node.tiny(nics).unwrap();
    node.api
        .done("PUT", &format!("/v1/vms/{name}"), Some(&spec))
        .unwrap();
    node.await_phase(name, "Running").unwrap()
}

fn nic(mac: &str) -> Value {
    json!([{ "id": "net0", "from": "vdpasim_net", "mac": mac }])
}

/// What is there to be named. The machine `kept` is not among it, nor its device.
fn known(node: &Node, spare: &SimDevice) -> Known {
    let tiny = node.tiny(&json!([])).unwrap();
    Known::default()
        .with("VmSpec.kernel", tiny["spec"]["kernel"].clone())
        .with("VmSpec.kernel", "/nonexistent")
        .with("VmSpec.initramfs", "/nonexistent")
        .with("VmSpec.memory", "32M")
        .with("VmSpec.cpu_affinity", json!([[0]]))
        .with("VmSpec.disks", json!([]))
        .with("VmSpec.nics", json!([{ "id": "n", "path": spare.path() }]))
        .with(
            "VmSpec.nics",
            json!([{ "id": "n", "device": spare.name() }]),
        )
        .with("VmSpec.nics", nic(OTHER_MAC))
        // Otherwise no machine would be made.
        .with("VmBody.generation", Value::Null)
        .with("NicSpec.*", json!({ "id": "any", "from": "vdpasim_net" }))
        .with("NicSpec.*", json!({ "id": "any", "device": spare.name() }))
        .with(
            "NicSpec.*",
            json!({ "id": "any", "from": "vdpasim_net", "backup": { "path": spare.path() } }),
        )
        .with("NicSpec.backup", json!({ "from": "vdpasim_net" }))
        .with("NicSpec.backup", json!({ "device": spare.name() }))
        .with(
            "NicSpec.*",
            json!({
                "id": "any", "from": "vdpasim_net", "kind": "auto", "mac": OTHER_MAC,
                "mtu": 1500, "doorbell": "auto"
            }),
        )
        .with("SendToNode.destination", NO_NODE)
        .with("SendToNode.from", "vdpasim_net")
        .with(
            "HostNicSpec.*",
            json!({ "name": "any", "from": "vdpasim_net" }),
        )
        .with(
            "HostNicSpec.*",
            json!({
                "name": "any", "from": "vdpasim_net", "kind": "auto", "mac": OTHER_MAC, "mtu": 1500,
            }),
        )
        // One that is never made: its kernel is not there.
        .with(
            "ReceiveFromNode.vm",
            json!({ "spec": { "kernel": "/nonexistent" } }),
        )
        .with("DiskConfig.path", "/nonexistent")
        // The daemon takes functions by address, not by path. No host has this one.
        .with(
            "VfioConfig.*",
            json!({ "host": "0000:ff:1f.7", "id": "any" }),
        )
        .with("DiskConfig.bps", "1M")
        .with("mgmtdev", "vdpasim_net")
        .with("VdpaDeviceSpec.mgmtdev", "vdpasim_net")
        .with("VdpaDeviceSpec.mac", OTHER_MAC)
        .with("VdpaDeviceSpec.mtu", 1500)
        .with("VdpaDeviceSpec.max_vqp", 1)
        .with("VdpaDeviceChange.mac", OTHER_MAC)
        .with("name", "any")
        .with("name", "none")
        .with("id", "any")
        .with("id", "none")
        .with("since", 0)
        .with("timeout_s", 0)
}

#[test]
fn any_requests() {
    let mut node = Node::start("any").unwrap();
    let spare = SimDevice::net("spare", SPARE_MAC, 1500).unwrap();
    let kept = made(&node, "kept", &nic(MAC));
    let trial = Trial::new(&node.api, node.pid(), &known(&node, &spare), 0x5eed_0004);
    let clean = |request: &Request| {
        // What the request made is not to be in the next one's way.
        if matches!(request.method.as_str(), "PUT" | "POST") {
            let vms = node.api.get("/v1/vms").unwrap();
            for vm in vms["items"].as_array().unwrap() {
                let name = vm["name"].as_str().unwrap();
                if name != "kept" {
                    let path = format!("/v1/vms/{name}?force=true");
                    let answer = node.api.ask("DELETE", &path, None).unwrap();
                    // A VM whose creation fails meanwhile is gone already.
                    assert!(matches!(answer.status, 200..300 | 404), "{}", answer.body);
                }
            }
            let _ = node.api.ask("DELETE", "/v1/vdpa-devices/any", None);
            let nics = node.api.get("/v1/nics").unwrap();
            for (name, nic) in nics["nic"].as_object().unwrap() {
                if nic["owner"].is_null() {
                    let path = format!("/v1/nics/{name}");
                    node.api.done("DELETE", &path, None).unwrap();
                }
            }
            node.api.done("DELETE", "/v1/cordon", None).unwrap();
        }
    };
    trial.run(|_| true, clean);
    let now = node.vm("kept").unwrap().unwrap();
    assert_eq!(
        (&now["status"]["pid"], &now["status"]["phase"]),
        (&kept["status"]["pid"], &kept["status"]["phase"]),
        "{now:#}"
    );
    assert_eq!(now["status"]["nic_devices"], kept["status"]["nic_devices"]);
    assert_eq!(now["spec"], kept["spec"]);
    assert!(spare.path().exists());
    node.api
        .done("DELETE", "/v1/vms/kept?force=true", None)
        .unwrap();
    assert!(node.lives());
    assert_eq!(node.processes().len(), 0);
}

#[test]
fn one_device_is_not_given_to_two_machines() {
    let node = Node::start("two").unwrap();
    let spare = SimDevice::net("spare", SPARE_MAC, 1500).unwrap();
    let by_path = json!([{ "id": "a", "path": spare.path() }]);
    let by_name = json!([{ "id": "b", "device": spare.name() }]);
    let link = node.directory().join("link");
    std::os::unix::fs::symlink(spare.path(), &link).unwrap();
    let by_link = json!([{ "id": "c", "path": link }]);
    made(&node, "first", &by_path);
    for nics in [&by_path, &by_name, &by_link] {
        for state in ["Running", "Stopped"] {
            let mut spec = node.tiny(nics).unwrap();
            spec["spec"]["state"] = json!(state);
            let answer = node.api.ask("PUT", "/v1/vms/second", Some(&spec)).unwrap();
            assert_eq!(answer.status, 409, "{nics}: {}", answer.body);
            assert!(answer.body.to_string().contains("first"), "{}", answer.body);
            assert_eq!(node.vm("second").unwrap(), None);
        }
    }
    let twice = json!([{ "id": "a", "path": spare.path() }, { "id": "b", "device": spare.name() }]);
    let answer = node
        .api
        .ask("PUT", "/v1/vms/second", Some(&node.tiny(&twice).unwrap()))
        .unwrap();
    assert!((400..500).contains(&answer.status), "{}", answer.body);
    // Two at once: one of them has it.
    node.api
        .done("DELETE", "/v1/vms/first?force=true", None)
        .unwrap();
    for _ in 0..4 {
        let spec = node.tiny(&by_name).unwrap().to_string();
        let answers: Vec<u16> = std::thread::scope(|scope| {
            let asked: Vec<_> = (0..4)
                .map(|number| {
                    let request = Request::new("PUT", format!("/v1/vms/racer-{number}"))
                        .with_body(spec.clone());
                    let socket = node.api.socket();
                    scope.spawn(move || ask(socket, &request).unwrap().unwrap().status)
                })
                .collect();
            asked.into_iter().map(|one| one.join().unwrap()).collect()
        });
        let made = answers.iter().filter(|status| **status == 201).count();
        let refused = answers.iter().filter(|status| **status == 409).count();
        assert_eq!((made, refused), (1, 3), "{answers:?}");
        let all = node.api.get("/v1/vms").unwrap()["items"].take();
        assert_eq!(all.as_array().unwrap().len(), 1, "{all:#}");
        let name = all[0]["name"].as_str().unwrap();
        node.api
            .done("DELETE", &format!("/v1/vms/{name}?force=true"), None)
            .unwrap();
    }
}

#[test]
fn names_that_are_paths_reach_no_file() {
    let node = Node::start("names").unwrap();
    let spec = node.tiny(&json!([])).unwrap();
    node.api.done("PUT", "/v1/vms/a", Some(&spec)).unwrap();
    node.api
        .done("DELETE", "/v1/vms/a?force=true", None)
        .unwrap();
    let before = node.traces().unwrap();
    let canary = node.directory().join("canary");
    std::fs::write(&canary, "here").unwrap();
    for name in [
        "..",
        ".",
        "%2e%2e",
        "..%2f..%2fcanary",
        "%2fetc",
        "a%2f..%2fb",
        "a%00",
        "%00",
        "A",
        "-a",
        "a_b",
        "a.b",
        "a%20b",
        "%0a",
        "%c3%a9",
        "%ff",
        "~",
        "*",
    ] {
        for (method, body) in [("PUT", Some(&spec)), ("GET", None), ("DELETE", None)] {
            for rest in ["", "/state", "/nics/n", "/power-button"] {
                let mut request = Request::new(method, format!("/v1/vms/{name}{rest}"));
                if let Some(body) = body {
                    request = request.with_body(body.to_string());
                }
                let answer = ask(node.api.socket(), &request).unwrap().unwrap();
                let status = answer.status;
                assert!(
                    (400..500).contains(&status),
                    "{method} {name}{rest}: {status}"
                );
            }
        }
    }
    assert_eq!(std::fs::read_to_string(&canary).unwrap(), "here");
    node.same(&before, "after names that are paths").unwrap();
}

/// Parts of requests that are not supported, to the daemon and, through it, to the process of a VM.
#[test]
fn unsupported_requests_are_refused_and_change_nothing() {
    let node = Node::start("ignored").unwrap();
    let kept = made(&node, "kept", &json!([]));
    let ask = |request: &Request| {
        let answer = ask(node.api.socket(), request).unwrap().unwrap();
        let code = answer.json()["code"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        (answer.status, code)
    };
    let refusal = |status: u16, code: &str| (status, code.to_owned());
    for target in [
        "/v1/vms?phases=Running",
        "/v1/vms/kept?x",
        "/v1/vms/kept/metrics?x=1",
        "/v1/vms/kept/migration?x=1",
        "/v1/vms/kept/watch?since=0&timeout=0",
    ] {
        let found = ask(&Request::new("GET", target));
        assert_eq!(found, refusal(400, "unknown_parameter"), "{target}");
    }
    for (header, value, status, code) in [
        ("if-match", "\"1\"", 412, "unsupported_condition"),
        ("origin", "https://example.org", 403, "browser_refused"),
        (
            "content-type",
            "text/plain",
            415,
            "unsupported_content_type",
        ),
    ] {
        let request = Request::new("POST", "/v1/vms/kept/reset").with_body("{}");
        let found = ask(&request.with_header(header, value));
        assert_eq!(found, refusal(status, code), "{header}");
    }
    let watch = Request::new("GET", "/v1/vms/kept/watch?since=0&timeout_s=0");
    assert_eq!(ask(&watch), refusal(200, ""));
    let now = node.vm("kept").unwrap().unwrap();
    assert_eq!(
        (&now["status"]["pid"], &now["status"]["phase"]),
        (&kept["status"]["pid"], &kept["status"]["phase"])
    );
}

/// Clients that send a byte now and then, in the head and in the body. They are fewer than the
/// limit of connections.
#[test]
fn slow_clients_delay_no_others_and_are_disconnected() {
    let node = Node::start("slow").unwrap();
    let before = node.traces().unwrap();
    let socket = node.api.socket();
    let head = b"PUT /v1/vms/slow HTTP/1.1\r\nhost: lab\r\n".as_slice();
    let body = b"content-type: application/json\r\ncontent-length: 1000\r\n\r\n{".as_slice();
    let whole = [head, body].concat();
    let mut slow: Vec<(bool, UnixStream)> = Vec::new();
    for number in 0..40 {
        let has_head = number % 2 == 0;
        let mut stream = UnixStream::connect(socket).unwrap();
        let first = if has_head { &whole } else { head };
        stream.write_all(first).unwrap();
        stream.set_read_timeout(Some(SLOW)).unwrap();
        slow.push((has_head, stream));
    }
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(14) {
        for (has_head, stream) in &mut slow {
            let byte: &[u8] = if *has_head { b" " } else { b"x" };
            // It may have been sent away by now.
            let _ = stream.write_all(byte);
        }
        let asked = Instant::now();
        node.api.get("/v1/vms").unwrap();
        println!("another client was answered in {:?}", asked.elapsed());
        std::thread::sleep(Duration::from_secs(1));
    }
    for (has_head, stream) in slow {
        let answer = receive(&stream, "PUT").unwrap();
        match answer {
            Some(answer) => assert_eq!(answer.status, 408, "{answer:?}"),
            None => assert!(!has_head, "a slow body without an answer"),
        }
    }
    assert_eq!(node.vm("slow").unwrap(), None);
    until("all connections are closed", || {
        node.traces().unwrap().descriptors == before.descriptors
    })
    .unwrap();
}

//! Only a request to replace a VM of the node daemon replaces it. Creation with an existing name,
//! replacements that fail, and writers that have not read the newest spec change nothing.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

use lab::node::{Node, PATIENCE};
use lab::openapi::exchange::{self, Answer, Request};
use lab::sim::SimDevice;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// No zero bytes: the simulator compares addresses as if they were strings.
const MAC: &str = "52:54:5e:11:59:01";
const OTHER_MAC: &str = "52:54:5e:11:59:02";
const SPARE_MAC: &str = "52:54:5e:11:59:03";
/// More lines than a request has: a request that never ends is a failure of its own.
const LINES_MAX: usize = 200;

/// A NIC that is created on the simulator.
fn nic(id: &str, mac: &str) -> Value {
    json!({ "id": id, "from": "vdpasim_net", "mac": mac, "mtu": 1500 })
}

/// A request about the VM `web`.
fn ask(node: &Node, method: &str, headers: &[(&str, &str)], body: Option<&Value>) -> Answer {
    let mut request = Request::new(method, "/v1/vms/web");
    for (name, value) in headers {
        request = request.with_header(name, *value);
    }
    if let Some(body) = body {
        let json = "application/json";
        request = request
            .with_header("content-type", json)
            .with_body(body.to_string());
    }
    let answer = exchange::ask(node.api.socket(), &request);
    answer.unwrap().unwrap()
}

/// Status and code of a refusal.
fn refusal(answer: &Answer) -> (u16, String) {
    let code = answer.json()["code"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    (answer.status, code)
}

fn refused(status: u16, code: &str) -> (u16, String) {
    (status, code.to_owned())
}

/// A guest of a few instructions, which does not run.
fn stopped(node: &Node, nics: &Value) -> Value {
    let mut spec = node.tiny(nics).unwrap();
    spec["spec"]["state"] = json!("Stopped");
    spec
}

/// The address of the device that was created for the VM's NIC.
fn mac_of_nic(node: &Node) -> Value {
    let device = node.api.get("/v1/vdpa-devices/web.net0").unwrap();
    device["config"]["web.net0"]["mac"].clone()
}

/// The stream of events from now on.
fn follow(node: &Node) -> UnixStream {
    let mut stream = UnixStream::connect(node.api.socket()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let request = b"GET /v1/events HTTP/1.1\r\nhost: lab\r\n\r\n";
    stream.write_all(request).unwrap();
    read_until(&mut stream, "id: ");
    stream
}

/// Reads the stream until it has these words.
#[track_caller]
fn read_until(stream: &mut UnixStream, words: &str) {
    let start = Instant::now();
    let (mut text, mut buffer) = (String::new(), [0; 4096]);
    while !text.contains(words) {
        let count = stream.read(&mut buffer).unwrap();
        assert!(count > 0 && start.elapsed() < PATIENCE, "{words}: {text}");
        text.push_str(&String::from_utf8_lossy(&buffer[..count]));
    }
}

#[test]
fn a_request_that_creates_leaves_the_stopped_vm_that_has_the_name() {
    let node = Node::start("exists").unwrap();
    let before = node.traces().unwrap();
    let create: &[(&str, &str)] = &[("if-none-match", "*")];
    let spec = stopped(&node, &json!([nic("net0", MAC)]));
    let made = ask(&node, "PUT", create, Some(&spec));
    assert_eq!(made.status, 201, "{}", made.json());
    assert_eq!(made.header("etag"), Some("\"g1\""));
    let vm = node.api.get("/v1/vms/web").unwrap();
    let (mut larger, mut broken) = (spec.clone(), spec.clone());
    larger["spec"]["memory"] = json!("64M");
    broken["spec"]["kernel"] = json!("/nonexistent");
    for other in [&spec, &larger, &broken] {
        let answer = ask(&node, "PUT", create, Some(other));
        assert_eq!(refusal(&answer), refused(412, "vm_exists"));
        assert_eq!(node.api.get("/v1/vms/web").unwrap(), vm);
        assert!(Path::new("/sys/bus/vdpa/devices/web.net0").exists());
    }
    // Without a condition the same again changes nothing.
    let again = ask(&node, "PUT", &[], Some(&spec));
    assert_eq!(again.status, 200, "{}", again.json());
    assert_eq!(node.api.get("/v1/vms/web").unwrap(), vm);
    node.api.done("DELETE", "/v1/vms/web", None).unwrap();
    node.same(&before, "it is deleted").unwrap();
}

#[test]
fn a_replacement_that_fails_leaves_the_stopped_vm_with_its_nics() {
    // Before the daemon: a device in use cannot be deleted, also if a test fails.
    let spare = SimDevice::net("spare", SPARE_MAC, 1500).unwrap();
    let node = Node::start("keep").unwrap();
    let before = node.traces().unwrap();
    let spec = stopped(&node, &json!([nic("net0", MAC)]));
    node.api.done("PUT", "/v1/vms/web", Some(&spec)).unwrap();
    let vm = node.api.get("/v1/vms/web").unwrap();

    // What shows before anything is touched.
    let other = stopped(&node, &json!([nic("net0", OTHER_MAC)]));
    let with = |field: &str, value: Value| {
        let mut other = other.clone();
        other["spec"][field] = value;
        other
    };
    let no_kernel = std::env::temp_dir().join("lab-no-kernel");
    std::fs::write(&no_kernel, "text").unwrap();
    let own = nic("net0", OTHER_MAC);
    for (other, words) in [
        (with("kernel", json!("/nonexistent")), "No such file"),
        (with("kernel", json!(no_kernel)), "not a kernel"),
        (with("initramfs", json!("/nonexistent")), "No such file"),
        (
            with("disks", json!([{ "path": "/nonexistent" }])),
            "No such file",
        ),
        (
            with("nics", json!([own, { "id": "b", "from": "nowhere0" }])),
            "nowhere0",
        ),
        (
            with("nics", json!([own, { "id": "b", "device": "nothing" }])),
            "nothing",
        ),
        (
            with("nics", json!([own, { "id": "b", "path": "/dev/null" }])),
            "/dev/null",
        ),
    ] {
        let answer = ask(&node, "PUT", &[], Some(&other));
        let body = answer.json();
        assert_eq!(answer.status, 422, "{other}: {body}");
        assert!(body.to_string().contains(words), "{body}");
        assert_eq!(node.api.get("/v1/vms/web").unwrap(), vm);
        assert_eq!(mac_of_nic(&node), MAC);
    }

    // What shows only when the new VM is started: another process has its second device.
    let held = File::options().read(true).write(true).open(spare.path());
    let held = held.unwrap();
    let mut late = other.clone();
    late["spec"]["state"] = json!("Running");
    late["spec"]["nics"] = json!([own, { "id": "b", "path": spare.path() }]);
    let answer = ask(&node, "PUT", &[], Some(&late));
    assert_eq!(answer.status, 422, "{}", answer.json());
    let now = node.api.get("/v1/vms/web").unwrap();
    for field in ["phase", "last_end", "pid"] {
        assert_eq!(now["status"][field], vm["status"][field], "{now:#}");
    }
    let devices = &now["status"]["nic_devices"];
    assert_eq!(devices[0]["vdpa_device"], "web.net0", "{now:#}");
    assert_eq!(devices[1], Value::Null, "{now:#}");
    assert_eq!(mac_of_nic(&node), MAC);
    assert_eq!(now["spec"], vm["spec"]);
    drop(held);
    let run = json!({ "state": "Running" });
    node.api
        .done("PUT", "/v1/vms/web/state", Some(&run))
        .unwrap();
    node.await_phase("web", "Running").unwrap();
    node.api
        .done("DELETE", "/v1/vms/web?force=true", None)
        .unwrap();
    node.same(&before, "it is deleted").unwrap();
}

#[test]
fn a_writer_that_has_not_seen_the_newest_spec_is_refused() {
    let mut node = Node::start("writers").unwrap();
    let before = node.traces().unwrap();
    let mut events = follow(&node);
    let spec = stopped(&node, &json!([nic("net0", MAC)]));
    let mut larger = spec.clone();
    larger["spec"]["memory"] = json!("64M");

    // To be replaced there must be one.
    for condition in ["*", "\"g1\""] {
        let answer = ask(&node, "PUT", &[("if-match", condition)], Some(&spec));
        assert_eq!(refusal(&answer), refused(412, "no_such_vm"));
    }
    assert_eq!(node.api.get("/v1/vms").unwrap()["items"], json!([]));
    node.api.done("PUT", "/v1/vms/web", Some(&spec)).unwrap();
    read_until(&mut events, "\"change\":\"created\"");
    let replaced = ask(&node, "PUT", &[("if-match", "\"g1\"")], Some(&larger));
    assert_eq!(replaced.status, 200, "{}", replaced.json());
    assert_eq!(replaced.header("etag"), Some("\"g2\""));
    assert_eq!(replaced.json()["generation"], 2);
    read_until(&mut events, "\"change\":\"replaced\"");
    drop(events);
    let newest = replaced.json()["spec"].clone();

    let run = json!({ "state": "Running" });
    let always = json!({ "spec": { "restart": "Always" } });
    let writes = [
        ("PUT", Some(&spec)),
        ("PATCH", Some(&always)),
        ("DELETE", None),
    ];
    let refuses = |node: &Node, header: (&str, &str), expected: (u16, &str)| {
        for (method, body) in writes {
            let answer = ask(node, method, &[header], body);
            let found = refusal(&answer);
            assert_eq!(
                found,
                refused(expected.0, expected.1),
                "{method} {header:?}"
            );
            let now = ask(node, "GET", &[], None);
            assert_eq!(now.header("etag"), Some("\"g2\""), "{method} {header:?}");
            assert_eq!(now.json()["status"]["phase"], "Stopped", "{}", now.json());
        }
    };
    let stale = ask(&node, "PUT", &[("if-match", "\"g1\"")], Some(&spec)).json();
    let message = stale["message"].as_str().unwrap();
    assert!(
        message.contains("g1") && message.contains("g2"),
        "{message}"
    );
    for kill in [true, false] {
        for value in ["\"g1\"", "\"g3\"", "\"nonsense\"", "W/\"g2\""] {
            refuses(&node, ("if-match", value), (412, "generation_conflict"));
        }
        if kill {
            node.kill();
        } else {
            assert!(node.terminate());
        }
        node.start_again().unwrap();
    }
    for value in ["g2", "\"g2", "", "2"] {
        refuses(&node, ("if-match", value), (400, "bad_parameter"));
    }
    refuses(&node, ("if-none-match", "*"), (412, "vm_exists"));
    refuses(&node, ("if-none-match", "\"g2\""), (400, "bad_parameter"));
    let kept = ask(&node, "GET", &[], None);
    assert_eq!(kept.header("etag"), Some("\"g2\""));
    assert_eq!(kept.json()["spec"], newest);

    // The generation in the body is a condition, too. What was read can be sent back.
    let mut stale = kept.json();
    stale["generation"] = json!(1);
    let stale = ask(&node, "PUT", &[], Some(&stale));
    assert_eq!(refusal(&stale), refused(412, "generation_conflict"));
    let same = ask(&node, "PUT", &[], Some(&kept.json()));
    assert_eq!((same.status, same.header("etag")), (200, Some("\"g2\"")));
    let mut renamed = kept.json();
    renamed["name"] = json!("db");
    let renamed = ask(&node, "PUT", &[], Some(&renamed));
    assert_eq!(refusal(&renamed), refused(422, "invalid_body"));

    // One that has seen it writes, and a NIC more is a change, too.
    let start = Request::new("PUT", "/v1/vms/web/state")
        .with_header("content-type", "application/json")
        .with_header("if-match", "\"g1\", \"g2\"")
        .with_body(run.to_string());
    let started = exchange::ask(node.api.socket(), &start);
    let started = started.unwrap().unwrap();
    assert_eq!(started.status, 200, "{}", started.json());
    assert_eq!(started.header("etag"), Some("\"g3\""));
    node.await_phase("web", "Running").unwrap();
    let second = nic("net1", OTHER_MAC);
    let added = node
        .api
        .done("PUT", "/v1/vms/web/nics/net1", Some(&second))
        .unwrap();
    assert_eq!(added["generation"], 4, "{added:#}");
    let stop = json!({ "state": "Stopped", "mode": "hard" });
    node.api
        .done("PUT", "/v1/vms/web/state", Some(&stop))
        .unwrap();
    let deleted = ask(&node, "DELETE", &[("if-match", "*")], None);
    assert_eq!(deleted.status, 204, "{}", deleted.json());
    node.same_but_descriptors(&before, "it is deleted").unwrap();
}

/// Replaces the VM; the daemon is killed before the line of its log behind these. Whether it came
/// so far.
fn killed_while_it_replaces(node: &mut Node, lines: usize, other: &Value) -> bool {
    let socket = node.api.socket().to_path_buf();
    let request = Request::new("PUT", "/v1/vms/web")
        .with_header("content-type", "application/json")
        .with_body(other.to_string());
    node.hold_after(lines);
    std::thread::scope(|scope| {
        let client = scope.spawn(|| exchange::ask(&socket, &request).ok().flatten());
        let start = Instant::now();
        while !client.is_finished() && !node.is_held() {
            let said = node.said();
            assert!(
                start.elapsed() < PATIENCE,
                "neither held nor answered\n{said}"
            );
            std::thread::sleep(Duration::from_millis(2));
        }
        let came = !client.is_finished();
        if came {
            node.kill();
        }
        node.resume();
        let answer = client.join().unwrap();
        assert!(came || answer.is_some_and(|answer| answer.status == 200));
        came
    })
}

#[test]
fn a_daemon_killed_at_each_line_of_a_replacement_leaves_one_of_the_two() {
    let mut node = Node::start("kill-replacing").unwrap();
    let spec = stopped(&node, &json!([nic("net0", MAC)]));
    let other = node.tiny(&json!([nic("net0", OTHER_MAC)])).unwrap();
    let before = node.traces().unwrap();
    let (mut lines, mut former) = (0, 0);
    loop {
        assert!(
            lines < LINES_MAX,
            "a request without an end\n{}",
            node.said()
        );
        node.api.done("PUT", "/v1/vms/web", Some(&spec)).unwrap();
        let came = killed_while_it_replaces(&mut node, lines, &other);
        if came {
            node.start_again().unwrap();
        }
        let vm = node.vm("web").unwrap().unwrap();
        if vm["spec"]["state"] == "Stopped" {
            former += 1;
            assert_eq!(vm["status"]["phase"], "Stopped", "{lines}: {vm:#}");
            assert_eq!(mac_of_nic(&node), MAC, "{lines}: {vm:#}");
        } else {
            node.await_phase("web", "Running").unwrap();
            assert_eq!(mac_of_nic(&node), OTHER_MAC, "{lines}: {vm:#}");
        }
        node.api
            .done("DELETE", "/v1/vms/web?force=true", None)
            .unwrap();
        node.same_but_descriptors(&before, "it is deleted").unwrap();
        if !came {
            break;
        }
        lines += 1;
    }
    println!("{lines} lines, {former} times the former VM");
    assert!(lines >= 8 && former > 0, "{lines} lines\n{}", node.said());
}

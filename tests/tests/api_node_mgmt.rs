//! The node daemon's endpoints about devices, on the kernel's simulator. They return the same as
//! the commands, their changes appear in the kernel, and `/v1/events` reports them.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

use lab::api::Client;
use lab::sim::{SimDevice, require_lab, vdpa};
use serde_json::{Value, json};
use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const MAC: &str = "52:54:5e:11:58:01";
const OTHER_MAC: &str = "52:54:5e:11:58:02";
const PATIENCE: Duration = Duration::from_secs(30);

/// A daemon of its own, with its own directories.
struct Daemon {
    child: Child,
    directory: PathBuf,
    api: Client,
}

impl Daemon {
    fn start(name: &str) -> Self {
        let directory = std::env::temp_dir().join(format!("node-mgmt-{name}"));
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir(&directory).unwrap();
        let child = Command::new(program())
            .args(["--log-level", "info", "serve", "--state-dir"])
            .arg(directory.join("state"))
            .arg("--runtime-dir")
            .arg(directory.join("run"))
            .spawn()
            .unwrap();
        let api = Client::new(&directory.join("run/node.socket"));
        let daemon = Self {
            child,
            directory,
            api,
        };
        daemon.until("it serves", || daemon.api.get("/v1/version").is_ok());
        daemon
    }

    fn until(&self, what: &str, is_so: impl Fn() -> bool) {
        let end = Instant::now() + PATIENCE;
        while !is_so() {
            assert!(Instant::now() < end, "not within {PATIENCE:?}: {what}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Everything that the stream of events says from now on.
    fn follow(&self) -> Arc<Mutex<String>> {
        let mut stream = UnixStream::connect(self.api.socket()).unwrap();
        stream
            .write_all(b"GET /v1/events HTTP/1.1\r\nhost: lab\r\n\r\n")
            .unwrap();
        let heard = Arc::new(Mutex::new(String::new()));
        let into = heard.clone();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = stream.read(&mut buffer) {
                let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
                into.lock().unwrap().push_str(&text);
            }
        });
        self.until("the stream begins", || {
            heard.lock().unwrap().contains("\nid: ")
        });
        heard
    }

    fn status(&self, method: &str, path: &str, body: Option<&Value>) -> (u16, Value) {
        let answer = self.api.ask(method, path, body).unwrap();
        (answer.status, answer.body)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// The program under test.
fn program() -> PathBuf {
    std::env::var_os("BELLHOP").unwrap().into()
}

/// What a command prints with -j.
fn printed(arguments: &[&str]) -> Value {
    let output = Command::new(program()).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn exists(name: &str) -> bool {
    let devices: Value = serde_json::from_slice(&vdpa(&["-j", "dev", "show"]).unwrap()).unwrap();
    !devices["dev"][name].is_null()
}

/// No functions, ports or NICs here: mgmt_sriov_topology and api_labnic_end_to_end have those.
#[test]
fn endpoints_return_the_same_as_commands() {
    require_lab().unwrap();
    let daemon = Daemon::start("same");
    let device = SimDevice::net("same0", MAC, 1500).unwrap();
    for (path, arguments) in [
        ("/v1/mgmtdevs", &["mgmtdev", "show", "-j"][..]),
        ("/v1/vdpa-devices", &["dev", "show", "-j"]),
        ("/v1/functions", &["vf", "show", "-j"]),
        ("/v1/nics", &["nic", "list", "-j"]),
        ("/v1/topology", &["topology", "-j"]),
    ] {
        let found = daemon.api.get(path).unwrap();
        assert_eq!(found, printed(arguments), "{path}");
        assert!(found.is_object(), "{path}: {found}");
    }
    let one = daemon.api.get("/v1/vdpa-devices/lab-same0").unwrap();
    assert_eq!(
        one["dev"],
        printed(&["dev", "show", "lab-same0", "-j"])["dev"]
    );
    assert_eq!(
        one["config"],
        printed(&["dev", "config", "show", "lab-same0", "-j"])["config"]
    );
    drop(device);
    let gone = daemon.status("GET", "/v1/vdpa-devices/lab-same0", None);
    assert_eq!(
        (gone.0, &gone.1["code"]),
        (404, &json!("not_found")),
        "{}",
        gone.1
    );
}

#[test]
fn a_host_without_devlink_has_no_ports() {
    require_lab().unwrap();
    let daemon = Daemon::start("ports");
    let (status, ports) = daemon.status("GET", "/v1/ports", None);
    assert_eq!((status, &ports["port"]), (200, &json!({})), "{ports}");
    for path in ["/v1/ports/pci/0000:06:00.0", "/v1/ports/pci/0000:06:00.0/1"] {
        let (status, body) = daemon.status("GET", path, None);
        assert!(status == 404 || status == 409, "{path}: {status} {body}");
    }
    for path in ["/v1/ports/pci/0000:06:00.0/x", "/v1/ports/a%2Fb/c"] {
        assert_eq!(daemon.status("GET", path, None).0, 400, "{path}");
    }
    for (path, wanted) in [
        ("/v1/functions/0000:ff:1f.7", 404),
        ("/v1/functions/eth0", 400),
        ("/v1/topology?function=0000:ff:1f.7", 404),
        ("/v1/topology?function=x", 400),
        ("/v1/topology?colour=red", 400),
    ] {
        let (status, body) = daemon.status("GET", path, None);
        assert_eq!(status, wanted, "{path}: {body}");
    }
}

#[test]
fn a_device_is_created_changed_and_deleted() {
    require_lab().unwrap();
    let daemon = Daemon::start("life");
    let heard = daemon.follow();
    let path = "/v1/vdpa-devices/life0";
    let spec = json!({"mgmtdev": "vdpasim_net", "mac": MAC, "mtu": 1500});
    let (status, body) = daemon.status("PUT", path, Some(&spec));
    assert_eq!(status, 201, "{body}");
    assert_eq!(body["config"]["life0"]["mac"], MAC);
    assert!(exists("life0"));
    // The same again changes nothing, another one is refused.
    assert_eq!(daemon.status("PUT", path, Some(&spec)).0, 200);
    let other = json!({"mgmtdev": "vdpasim_net", "mac": OTHER_MAC});
    let (status, body) = daemon.status("PUT", path, Some(&other));
    assert_eq!((status, &body["code"]), (409, &json!("differs")), "{body}");
    assert!(body["message"].as_str().unwrap().contains(MAC), "{body}");

    let change = json!({"mac": OTHER_MAC});
    let (status, body) = daemon.status("PATCH", path, Some(&change));
    assert_eq!(status, 200, "{body}");
    assert_eq!(body["config"]["life0"]["mac"], OTHER_MAC);

    // While a process has it open, the daemon refuses to delete it.
    let file = fs::File::open(lab::sim::device_file("life0").unwrap()).unwrap();
    let (status, body) = daemon.status("DELETE", path, None);
    assert_eq!((status, &body["code"]), (409, &json!("in_use")), "{body}");
    drop(file);
    assert_eq!(daemon.status("DELETE", path, None).0, 204);
    assert!(!exists("life0"));
    assert_eq!(daemon.status("DELETE", path, None).0, 404);
    assert_eq!(daemon.status("PATCH", path, Some(&change)).0, 404);

    for change in ["created", "added", "bound", "changed", "deleted", "removed"] {
        daemon.until(change, || {
            let heard = heard.lock().unwrap().clone();
            let mut events = heard.lines().filter_map(|line| line.strip_prefix("data: "));
            events.any(|event| {
                let event: Value = serde_json::from_str(event).unwrap();
                event["subject"] == path && event["change"] == change
            })
        });
    }
}

#[test]
fn impossible_devices_are_refused_with_the_reason() {
    require_lab().unwrap();
    let daemon = Daemon::start("bad");
    let put = |name: &str, body: Value| {
        let path = format!("/v1/vdpa-devices/{name}");
        let (status, answer) = daemon.status("PUT", &path, Some(&body));
        assert!(answer["message"].is_string() || status < 300, "{answer}");
        (
            status,
            answer["code"].as_str().unwrap_or_default().to_owned(),
        )
    };
    let is = |found: (u16, String), status: u16, code: &str| {
        assert_eq!((found.0, found.1.as_str()), (status, code));
    };
    is(put("a", json!({"mgmtdev": "none"})), 422, "unusable");
    is(
        put("a", json!({"mgmtdev": "vdpasim_net", "max_vqp": 2})),
        422,
        "unusable",
    );
    is(
        put("a", json!({"mgmtdev": "vdpasim_net", "mtu": 1})),
        422,
        "unusable",
    );
    is(
        put("a", json!({"mgmtdev": "vdpasim_net", "vlan": 1})),
        422,
        "invalid_body",
    );
    is(
        put(
            "a",
            json!({"mgmtdev": "vdpasim_net", "mac": "01:00:00:00:00:00"}),
        ),
        422,
        "invalid_body",
    );
    is(
        put("a%2F..%2Fb", json!({"mgmtdev": "vdpasim_net"})),
        400,
        "bad_parameter",
    );
    is(
        put(&"x".repeat(64), json!({"mgmtdev": "vdpasim_net"})),
        422,
        "unusable",
    );
    assert!(!exists("a"));
    // Many at once: one makes it, for the others it is there.
    let statuses: Vec<u16> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..12)
            .map(|_| scope.spawn(|| put("many0", json!({"mgmtdev": "vdpasim_net", "mac": MAC})).0))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    assert_eq!(
        statuses.iter().filter(|&&status| status == 201).count(),
        1,
        "{statuses:?}"
    );
    assert!(
        statuses.iter().all(|status| [200, 201].contains(status)),
        "{statuses:?}"
    );
    daemon
        .api
        .done("DELETE", "/v1/vdpa-devices/many0", None)
        .unwrap();
}

#[test]
fn a_nic_of_the_host_is_created_and_deleted_but_not_one_of_a_vm() {
    require_lab().unwrap();
    let daemon = Daemon::start("nic");
    let spec = json!({"name": "host0", "from": "vdpasim_net", "mac": MAC, "mtu": 1500});
    let (status, made) = daemon.status("POST", "/v1/nics", Some(&spec));
    assert_eq!(status, 201, "{made}");
    let nic = &made["nic"]["host0"];
    assert_eq!((&nic["mac"], &nic["state"]), (&json!(MAC), &json!("made")));
    let path = nic["path"].as_str().unwrap();
    assert!(path.starts_with("/dev/vhost-vdpa-"), "{made}");
    assert!(exists("host0"));
    assert_eq!(daemon.api.get("/v1/nics/host0").unwrap(), made);
    let (status, body) = daemon.status("POST", "/v1/nics", Some(&spec));
    let taken = json!("name_taken");
    assert_eq!((status, &body["code"]), (409, &taken), "{body}");

    let kernel = lab::tiny::write_kernel(&std::env::temp_dir()).unwrap();
    let vm = json!({"spec": {"kernel": kernel, "memory": "32M", "state": "Stopped",
        "nics": [{"id": "net0", "from": "vdpasim_net", "mac": OTHER_MAC}]}});
    daemon.api.done("PUT", "/v1/vms/web", Some(&vm)).unwrap();
    let (status, body) = daemon.status("DELETE", "/v1/nics/web.net0", None);
    assert_eq!((status, &body["code"]), (409, &json!("in_use")), "{body}");
    assert!(exists("web.net0"));
    daemon.api.done("DELETE", "/v1/vms/web", None).unwrap();

    // An open device stays.
    let file = fs::File::open(path).unwrap();
    let (status, body) = daemon.status("DELETE", "/v1/nics/host0", None);
    assert_eq!((status, &body["code"]), (409, &json!("in_use")), "{body}");
    drop(file);
    assert_eq!(daemon.status("DELETE", "/v1/nics/host0", None).0, 204);
    assert!(!exists("host0"));
    assert_eq!(daemon.status("DELETE", "/v1/nics/host0", None).0, 404);
    let report = daemon.api.get("/v1/doctor").unwrap();
    let findings = report["findings"].as_array().unwrap();
    assert!(findings.iter().any(|one| one["group"] == "kvm"), "{report}");
}

//! Tests: the JSON of each command is that of `shapes.json`.
//!
//! ```text
//!   a line of LINES ──> the command ──socket──> a fake daemon with fixed records ─┐
//!   fixed records of this host ──> the listing of the command ────────────────────┴─> shapes.json
//! ```
//! JSON is stable: a changed member of a record changes the file.
//! `BELLHOP_WRITE_SHAPES=1 cargo test -p bellhop --lib json_shapes` writes it. Another test finds
//! commands without JSON here.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;

use bellhop_api::machine::{DiskInfo, MigrationStatus, MigrationTrial, NicInfo, VfioInfo};
use bellhop_api::node::{Event, Operation, Plan, Snapshot, Version, Vm, VmChanges};
use bellhop_common::client::fake;
use bellhop_common::listing::captured;
use bellhop_common::management::{dev, mgmtdev, port};
use bellhop_diagnostics::doctor::{Finding, Line, Report, State};
use clap::{Command, CommandFactory as _, Parser as _};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use vdpa_mgmt::devlink::{Flavour, Handle, PciNumbers, Port};
use vdpa_mgmt::{ClassConfig, DeviceConfig, MgmtDevice, NetConfig, VdpaDevice, VendorStats};

/// The copy in the repository.
const COPY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/json_shapes/shapes.json");

/// A file that describes a VM, seen from the directory of this crate.
const FILE: &str = "src/json_shapes/web.toml";

/// Commands to the fake daemon. All are confirmed: a test may have a terminal.
const LINES: &[&str] = &[
    "config check src/json_shapes/web.toml",
    "events",
    "node cordon",
    "node shutdown-guests",
    "node uncordon",
    "operation cancel 18",
    "operation list",
    "operation show 18",
    "operation wait 18",
    "snapshot delete -y before",
    "snapshot list",
    "version",
    "vm apply -f src/json_shapes/web.toml",
    "vm compat web --to https://node2:8443",
    "vm create -f src/json_shapes/web.toml",
    "vm create -f src/json_shapes/web.toml --dry-run",
    "vm delete -y web",
    "vm diff -f src/json_shapes/web.toml",
    "vm disk add web path=/d,id=disk1",
    "vm disk list web",
    "vm disk remove -y web disk0",
    "vm vfio add web host=0000:03:10.1,id=vf",
    "vm vfio list web",
    "vm vfio remove -y web vf",
    "vm list",
    "vm migrate web --to https://node2:8443",
    "vm migrate web --to https://node2:8443 --detach",
    "vm migration cancel web",
    "vm migration resolve -y web here",
    "vm migration show web",
    "vm migration watch web",
    "vm nic add web id=net1,from=eth0",
    "vm nic list web",
    "vm nic remove -y web net0",
    "vm nic swap web net0 --device nic1",
    "vm nmi web",
    "vm pause web",
    "vm replace -y -f src/json_shapes/web.toml",
    "vm reset -y web",
    "vm restore web before",
    "vm resume web",
    "vm set web memory=2G",
    "vm show web",
    "vm snapshot web /var/lib/snapshots/web",
    "vm start web",
    "vm stats web",
    "vm stop web",
    "vm upgrade web --program /usr/bin/bellhop",
    "vm wait web --for running",
];

/// Commands without a result in JSON.
const NO_JSON: &[&str] = &[
    "completions",
    "man",
    "run",
    "serve",
    "top",
    "vm console",
    "vm logs",
];

/// Commands whose JSON other tests compare, and why not here.
const ELSEWHERE: &[(&str, &str)] = &[
    ("bind", "needs a device; tests/tests/api_node_mgmt.rs"),
    (
        "config schema",
        "the schema of the API: cli/node/openapi.json",
    ),
    ("dev add", "needs the kernel; as `dev show`"),
    ("dev del", "needs the kernel; as `vm delete`"),
    ("dev set", "needs the kernel; as `dev show`"),
    (
        "nic create",
        "needs the kernel; tests/tests/api_node_mgmt.rs compares it with the API",
    ),
    ("nic delete", "needs the kernel; as `vm delete`"),
    (
        "nic list",
        "needs the kernel; tests/tests/api_node_mgmt.rs compares it with the API",
    ),
    (
        "nic show",
        "needs the kernel; tests/tests/api_node_mgmt.rs compares it with the API",
    ),
    (
        "node drain",
        "as `vm migrate`; cli/src/commands/node/drain.rs",
    ),
    ("pki", "writes certificates; cli/src/commands/pki.rs"),
    ("port add", "needs the kernel; as `port show`"),
    ("port del", "needs the kernel; as `vm delete`"),
    ("port function", "needs the kernel; as `port show`"),
    ("probe", "needs a device; tests of `vdpa`"),
    (
        "report",
        "writes a file; cli/diagnostics/src/report/tests.rs",
    ),
    ("remote", "of the user's file; cli/src/commands/remote.rs"),
    ("swnic", "needs the kernel; tests/tests/vdpa_swnic.rs"),
    ("token", "of the node's file; cli/src/commands/token.rs"),
    (
        "topology",
        "needs the kernel; tests/tests/mgmt_sriov_topology.rs compares it with the API",
    ),
    (
        "vf",
        "needs the kernel; tests/tests/mgmt_sriov_topology.rs compares it with the API",
    ),
    ("vm edit", "needs an editor; as `vm set`"),
];

/// A record as the daemon writes it, so that its members have their current names.
fn record<T: Serialize + DeserializeOwned>(value: Value) -> Value {
    let record: T = serde_json::from_value(value).unwrap();
    serde_json::to_value(record).unwrap()
}

fn vm() -> Value {
    record::<Vm>(fake::vm(&json!({
        "generation": 7, "labels": {"tier": "web"}, "annotations": {"note": "a VM"},
        "spec": {
            "cmdline": "console=ttyS0", "disks": [], "ring_watch": 5,
            "nics": [{"id": "net0", "from": "eth0", "mac": "52:54:00:12:34:56"}],
        },
        "status": {
            "pending": ["/spec/memory/size"], "uptime_s": 11_520, "version": "0.1.0", "api": 1,
            "restarts": 1, "last_end": {"reason": "Crashed", "detail": "triple fault"},
            "nic_devices": [{"id": "net0", "vdpa_device": "web.net0",
                "character_device": "/dev/vhost-vdpa-0", "backup_device": "/dev/vhost-vdpa-1"}],
        },
    })))
}

fn device() -> Value {
    json!({"status": 15, "driver_ok": true, "broken": false, "features_offered": [],
        "queues": [{"index": 0, "size": 256, "max_size": 256, "enabled": true, "kick": "Doorbell",
            "watch": {"state": "Moving", "in_flight": 3, "posted_per_s": 10, "completed_per_s": 11,
                "stuck_for_s": 0, "stall_kicks": 1, "posted": 100, "completed": 97}}]})
}

fn nic() -> Value {
    record::<NicInfo>(
        json!({"id": "net0", "state": "Plugged", "path": "/dev/vhost-vdpa-0",
        "address": "00:04.0", "doorbell": "auto", "device": device()}),
    )
}

fn disk(id: &str) -> Value {
    record::<DiskInfo>(
        json!({"id": id, "state": "Plugged", "path": "/d", "readonly": false,
        "address": "00:05.0", "device": device()}),
    )
}

fn function() -> Value {
    record::<VfioInfo>(json!({"id": "vf", "state": "Plugged", "allow_pf": false,
        "path": "/sys/bus/pci/devices/0000:03:10.1", "standby": null, "address": "00:06.0",
        "function": null}))
}

fn migration() -> Value {
    record::<MigrationStatus>(json!({
        "direction": "Send", "peer": "https://node2:8443", "phase": "Moved", "rounds": 3,
        "elapsed_ms": 1500, "ram_bytes": 1 << 30, "sent_bytes": 64 << 20, "pages": 100,
        "zero_pages": 900, "left_bytes": 0, "bytes_per_second": 50 << 20,
        "dirty_bytes_per_second": 3 << 20, "throttle_percent": 20, "forecast_downtime_ms": 400,
        "downtime_ms": 12.5, "downtime_parts_ms": {"stop": 1.5, "memory": 8.0},
    }))
}

fn operation(id: &str) -> Value {
    let (kind, result) = match id {
        "17" => (
            "upgrade",
            json!({"upgrade": {"before": "0.1.0", "after": "0.2.0", "downtime_ms": 93.5}}),
        ),
        "18" => ("migration", json!({"migration": migration()})),
        _ => (
            "snapshot",
            json!({"snapshot": {"path": "/s", "memory_bytes": 4096, "paused_ms": 12}}),
        ),
    };
    record::<Operation>(json!({
        "id": id, "kind": kind, "target": "web", "phase": "done", "created_ms": 1, "ended_ms": 2,
        "progress": {"done": 1, "total": 2, "unit": "bytes"}, "requested_by": "uid 0",
        "request_id": "r", "result": result,
    }))
}

fn trial() -> Value {
    record::<MigrationTrial>(json!({
        "destination": "https://node2:8443", "movable": true, "obstacles": [],
        "ram_bytes": 1 << 30, "data_bytes": 1 << 20, "downtime_min_ms": 20, "downtime_max_ms": 300,
    }))
}

/// The answer of the fake daemon: the status, and the body.
fn answer(request: &str, body: &str) -> (u16, Value) {
    let found = match request {
        "GET /v1/version" => record::<Version>(
            json!({"version": "0.1.0", "api": 1, "pid": 7, "socket": "/run/bellhop/node.socket"}),
        ),
        "GET /v1/events" => {
            let event = record::<Event>(json!({"generation": 8, "time_ms": 1_795_297_500_123_u64,
                "subject": "/v1/vms/web", "change": "created"}));
            return (200, format!("id: 8\ndata: {event}\n\n").into());
        }
        "GET /v1/vms" => json!({"items": [vm()]}),
        "GET /v1/vms/web"
        | "PUT /v1/vms/web"
        | "PUT /v1/vms/web/state"
        | "PUT /v1/vms/web/nics/net1"
        | "PATCH /v1/vms/web/nics/net0" => vm(),
        "GET /v1/snapshots" => json!({"items": [record::<Snapshot>(json!({"name": "before",
            "vm": "web", "created_ms": 1, "bytes": 4096, "format": 3, "path": "/s/before"}))]}),
        "GET /v1/snapshots/before/spec" => {
            json!({"labels": {}, "annotations": {}, "spec": {"kernel": "/boot/vmlinuz"}})
        }
        "PATCH /v1/vms/web" => record::<VmChanges>(json!({"vm": vm(), "changes": [
            {"field": "/spec/memory/size", "from": "1G", "to": "2G", "applied": "next_start"}]})),
        "GET /v1/vms/web/nics/net0" => nic(),
        "GET /v1/vms/web/disks" => json!({"items": [disk("disk0")]}),
        "PUT /v1/vms/web/disks/disk1" => disk("disk1"),
        "GET /v1/vms/web/vfio" => json!({"items": [function()]}),
        "PUT /v1/vms/web/vfio/vf" => function(),
        "GET /v1/vms/web/migration" => migration(),
        "POST /v1/vms/web/migration" if body.contains("\"dry_run\":true") => trial(),
        "POST /v1/vms/web/migration" => operation("18"),
        "POST /v1/vms/web/plan" => record::<Plan>(json!({"steps": ["create the directories"]})),
        "POST /v1/vms/web/snapshot" => operation("19"),
        "POST /v1/vms/web/upgrade" => operation("17"),
        "GET /v1/operations" => json!({"items": [operation("18")]}),
        _ => match request.rsplit_once('/') {
            Some(("GET /v1/operations", id)) => operation(id),
            _ if request.starts_with("GET ") => {
                return (404, json!({"code": "no_such_path", "message": request}));
            }
            _ => return (204, Value::Null),
        },
    };
    (200, found)
}

/// Answers one request of a connection.
fn serve(mut connection: UnixStream) {
    let mut reader = BufReader::new(connection.try_clone().unwrap());
    let mut head = Vec::new();
    let mut lines = reader.by_ref().lines().map(Result::unwrap);
    head.extend(lines.by_ref().take_while(|line| !line.is_empty()));
    let length = head.iter().find_map(|line| {
        let (name, value) = line.split_once(": ")?;
        let is_length = name.eq_ignore_ascii_case("content-length");
        is_length.then(|| value.parse().unwrap())
    });
    let mut body = vec![0; length.unwrap_or(0)];
    reader.read_exact(&mut body).unwrap();
    let request = head[0].trim_end_matches(" HTTP/1.1").split('?').next();
    let (status, body) = answer(request.unwrap(), &String::from_utf8(body).unwrap());
    let (kind, body) = match body {
        Value::Null => ("text/plain", String::new()),
        Value::String(events) => ("text/event-stream", events),
        body => ("application/json", body.to_string()),
    };
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status} x\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\
         connection: close\r\n\r\n"
    );
    connection.write_all((head + &body).as_bytes()).unwrap();
}

/// The socket of a fake daemon, which serves until the process ends.
fn daemon() -> PathBuf {
    let socket = std::env::temp_dir().join(format!("bellhop-shapes-{}", std::process::id()));
    let _ = std::fs::remove_file(&socket);
    let listener = UnixListener::bind(&socket).unwrap();
    thread::spawn(move || {
        for connection in listener.incoming().flatten() {
            thread::spawn(move || serve(connection));
        }
    });
    socket
}

/// The JSON of a command: its value, or a list if it prints several.
fn printed(line: &str, socket: &Path) -> Value {
    let words = std::iter::once("bellhop").chain(line.split(' '));
    let mut words: Vec<String> = words.map(str::to_owned).collect();
    words.extend(["-o".to_owned(), "json".to_owned()]);
    if !line.starts_with("config ") {
        words.extend(["--node".to_owned(), socket.to_str().unwrap().to_owned()]);
    }
    let arguments = crate::Arguments::try_parse_from(words).unwrap();
    let (text, done) = captured(|| {
        arguments
            .command
            .execute(arguments.format, crate::Arguments::command)
    });
    if let Err(error) = done {
        panic!("{line}: {error}");
    }
    let values = serde_json::Deserializer::from_str(&text).into_iter();
    let mut values = values.collect::<Result<Vec<Value>, _>>().unwrap();
    assert!(!values.is_empty(), "{line} prints nothing");
    if values.len() == 1 {
        return values.remove(0);
    }
    values.into()
}

/// Results about this host, from fixed records.
fn of_host() -> [(&'static str, Value); 6] {
    let mgmtdevs = [MgmtDevice {
        name: "pci/0000:01:00.1".parse().unwrap(),
        supported_classes: 2,
        max_supported_vqs: Some(3),
        supported_features: Some(1 << 5 | 1 << 60),
    }];
    let device = VdpaDevice {
        name: "nic0".to_owned(),
        mgmtdev: "vdpasim_net".parse().unwrap(),
        device_id: 1,
        vendor_id: Some(0),
        max_vqs: Some(3),
        max_vq_size: Some(256),
        min_vq_size: None,
    };
    let net = NetConfig {
        mac: Some([0x52, 0x54, 0, 0, 0, 1]),
        mtu: Some(1500),
        max_vq_pairs: Some(2),
        ..NetConfig::default()
    };
    let config = DeviceConfig {
        name: "nic0".to_owned(),
        class: ClassConfig::Net(net),
        device_id: 1,
        negotiated_features: Some(1 << 5),
        device_features: None,
    };
    let stats = VendorStats {
        name: "nic0".to_owned(),
        device_id: 1,
        negotiated_features: 1 << 5,
        max_vq_pairs: None,
        queue_index: 0,
        counters: vec![("received_desc".to_owned(), 7)],
    };
    let pci = PciNumbers {
        controller: Some(0),
        pfnum: 0,
        external: Some(false),
    };
    let port = Port {
        handle: Handle::new("pci", "0000:06:00.0").unwrap().port(32768),
        port_type: None,
        desired_type: None,
        netdev: None,
        ibdev: None,
        flavour: Some(Flavour::PciSf { pci, sfnum: 88 }),
        splittable: Some(false),
        lanes: None,
        function: None,
    };
    let finding = Finding {
        name: "/dev/kvm".to_owned(),
        state: State::Missing,
        found: "it does not exist".to_owned(),
        remedy: vec!["modprobe kvm".to_owned()],
    };
    let report = Report {
        fit: false,
        findings: vec![Line {
            group: "kvm",
            finding,
        }],
        next: vec!["bellhop doctor".to_owned()],
    };
    let devices = dev::listing(std::slice::from_ref(&device));
    let configs = dev::config_listing(std::slice::from_ref(&config));
    let ports = port::listing(std::slice::from_ref(&port));
    [
        ("dev config show", to_json(&configs)),
        ("dev show", to_json(&devices)),
        ("dev vstats show", to_json(&dev::stats_listing(&stats))),
        ("doctor", to_json(&report)),
        ("mgmtdev show", to_json(&mgmtdev::listing(&mgmtdevs))),
        ("port show", to_json(&ports)),
    ]
}

fn to_json(value: &impl Serialize) -> Value {
    serde_json::to_value(value).unwrap()
}

#[test]
fn the_json_of_each_command_is_as_recorded() {
    assert!(Path::new(FILE).exists(), "run this test with cargo");
    let socket = daemon();
    let lines = LINES
        .iter()
        .map(|line| ((*line).to_owned(), printed(line, &socket)));
    let mut all: BTreeMap<String, Value> = lines.collect();
    all.extend(of_host().map(|(command, value)| (command.to_owned(), value)));
    std::fs::remove_file(&socket).unwrap();
    // It differs with each release.
    let client = all
        .get_mut("version")
        .and_then(|version| version.get_mut("client"));
    *client.unwrap() = json!({"version": "0.1.0", "api": 1});
    if std::env::var_os("BELLHOP_WRITE_SHAPES").is_some() {
        let text = serde_json::to_string_pretty(&all).unwrap() + "\n";
        std::fs::write(COPY, text).unwrap();
    }
    let copy = std::fs::read_to_string(COPY).unwrap();
    let copy: BTreeMap<String, Value> = serde_json::from_str(&copy).unwrap();
    let hint = "if the change is compatible, BELLHOP_WRITE_SHAPES=1 records it";
    for (line, value) in &all {
        assert_eq!(copy.get(line), Some(value), "{line}: {hint}");
    }
    assert_eq!(copy.len(), all.len(), "{hint}");
}

#[test]
fn each_command_that_prints_json_is_recorded() {
    fn leaves(command: &Command, path: &str, found: &mut Vec<String>) {
        let mut is_leaf = true;
        for subcommand in command.get_subcommands().filter(|one| !one.is_hide_set()) {
            is_leaf = false;
            let path = format!("{path} {}", subcommand.get_name());
            leaves(subcommand, path.trim_start(), found);
        }
        if is_leaf {
            found.push(path.to_owned());
        }
    }
    let mut all = Vec::new();
    leaves(&crate::Arguments::command(), "", &mut all);
    let host = of_host();
    let known: Vec<&str> = [LINES, NO_JSON]
        .concat()
        .into_iter()
        .chain(ELSEWHERE.iter().map(|one| one.0))
        .chain(host.iter().map(|one| one.0))
        .collect();
    let is_below = |line: &str, path: &str| format!("{line} ").starts_with(&format!("{path} "));
    for path in &all {
        let is_known = |known: &&str| is_below(known, path) || is_below(path, known);
        assert!(known.iter().any(is_known), "{path} has no JSON in LINES");
    }
    for known in known {
        let exists = |path: &String| is_below(known, path) || is_below(path, known);
        assert!(all.iter().any(exists), "there is no command {known}");
    }
}

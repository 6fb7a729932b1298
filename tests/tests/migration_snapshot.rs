//! Saves a guest into a directory and resumes it from there, on another vDPA device, without any
//! visible change.
//!
//! A writer in the guest checks every page of its own before it writes the page again. The tests
//! compare frames with the devices' counts.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

use lab::api::Client;
use lab::guest::{BellhopArguments, Guest};
use lab::messages::messages;
use lab::sim::{SimDevice, require_lab};
use lab::small_file_system::SmallFileSystem;
use lab::temp_path::TempPath;
use lab::traffic::{Frames, exchange_counted};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// No zero bytes: the simulator compares addresses like C strings.
const MAC: &str = "52:54:5e:11:57:01";

/// How long a guest may take to notice a change; it is emulated twice.
const NOTICE: Duration = Duration::from_secs(30);

/// Memory that the guest's writer writes, in MiB.
const WRITTEN_MIB: u64 = 24;

fn start(device: &SimDevice, socket: &TempPath) -> (Guest, Client) {
    let arguments = BellhopArguments::small()
        .unwrap()
        .memory("128M")
        .argument("--vdpa", &nic(device))
        .argument("--api-socket", socket.text());
    (
        Guest::start(&arguments).unwrap(),
        Client::new(socket.path()),
    )
}

fn nic(device: &SimDevice) -> String {
    format!("id=nic,path={}", device.path().display())
}

/// `bellhop run` from a snapshot, with its NIC on `device`.
fn restore_command(snapshot: &TempPath, device: &SimDevice, socket: &TempPath) -> Command {
    let mut command = Command::new(std::env::var_os("BELLHOP").unwrap());
    command
        .args(["run", "--restore", snapshot.text()])
        .args(BellhopArguments::small().unwrap().allow_boot_files())
        .args(["--vdpa", &nic(device)])
        .args(["--api-socket", socket.text()]);
    command
}

fn snapshot(client: &Client, to: &TempPath) -> Value {
    let body = json!({ "path": to.text() });
    let answer = client.ask("POST", "/v1/vm/snapshot", Some(&body)).unwrap();
    assert_eq!(answer.status, 201, "{}", answer.body);
    answer.body
}

#[track_caller]
fn check_traffic(guest: &mut Guest, device: &SimDevice) {
    let frames = Frames {
        count: 200,
        size: 590,
        window: 16,
    };
    exchange_counted(guest, "eth0", device, &[frames]).unwrap();
}

#[track_caller]
fn write_on(guest: &mut Guest) {
    guest
        .command(&format!("write-on {WRITTEN_MIB} 50"))
        .unwrap();
}

/// Checks that every page of the writer is as it was left.
#[track_caller]
fn check_writer(guest: &mut Guest) {
    let found = guest.command("write-off").unwrap();
    assert_eq!(found["wrong"], 0, "{found}");
    assert!(found["written"].as_u64().unwrap() > 100, "{found}");
}

fn uptime(guest: &mut Guest) -> u64 {
    guest.command("info").unwrap()["uptime_ms"]
        .as_u64()
        .unwrap()
}

#[test]
fn a_guest_continues_from_its_snapshot_and_so_does_the_saved_one() {
    require_lab().unwrap();
    let first = SimDevice::net("snap1", MAC, 1500).unwrap();
    let second = SimDevice::net("snap2", MAC, 1500).unwrap();
    let (socket, other_socket) = (TempPath::new("snap.socket"), TempPath::new("snap2.socket"));
    let saved = TempPath::new("snapshot");
    let (mut guest, client) = start(&first, &socket);
    check_traffic(&mut guest, &first);
    let said = messages(&mut guest).unwrap();
    write_on(&mut guest);
    let before = uptime(&mut guest);
    let info = snapshot(&client, &saved);
    println!("{info}");
    // The saved guest continues, with its traffic.
    assert_eq!(client.get("/v1/vm").unwrap()["state"], "Running");
    check_traffic(&mut guest, &first);
    check_writer(&mut guest);

    // Twice from the same snapshot, which can be used again; the first guest runs beside it.
    for _ in 0..2 {
        let started = Instant::now();
        let command = restore_command(&saved, &second, &other_socket);
        let mut restored = Guest::start_restored(command, NOTICE).unwrap();
        println!("restored, and answers, after {:?}", started.elapsed());
        let now = uptime(&mut restored);
        assert!(now >= before, "{before} {now}");
        check_traffic(&mut restored, &second);
        check_writer(&mut restored);
        assert_eq!(messages(&mut restored).unwrap(), said);
        assert!(restored.power_off().unwrap().success());
    }
    check_traffic(&mut guest, &first);
    assert_eq!(messages(&mut guest).unwrap(), said);
    assert!(guest.power_off().unwrap().success());
}

#[test]
fn a_paused_machine_is_saved_and_restored_paused() {
    require_lab().unwrap();
    let device = SimDevice::net("snap1", MAC, 1500).unwrap();
    let (socket, saved) = (TempPath::new("snap.socket"), TempPath::new("snapshot"));
    let (mut guest, client) = start(&device, &socket);
    client
        .done("PATCH", "/v1/vm", Some(&json!({ "state": "Paused" })))
        .unwrap();
    snapshot(&client, &saved);
    assert_eq!(client.get("/v1/vm").unwrap()["state"], "Paused");
    client
        .done("PATCH", "/v1/vm", Some(&json!({ "state": "Stopped" })))
        .unwrap();
    assert!(guest.wait_exit(NOTICE).unwrap().success());

    let bellhop = std::env::var_os("BELLHOP").unwrap();
    let mut waits = Command::new(bellhop)
        .args(["run", "--api-socket", socket.text()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let started = Instant::now();
    while client.get("/v1/vm").is_err() {
        assert!(started.elapsed() < NOTICE, "no API");
        std::thread::sleep(Duration::from_millis(20));
    }
    // A snapshot opens no file or device that its client does not name.
    let arguments = BellhopArguments::small().unwrap();
    let (kernel, ramdisk) = (arguments.kernel_image(), arguments.ramdisk());
    let files = [kernel, ramdisk, device.path()];
    for left_out in files {
        let allowed: Vec<_> = files.into_iter().filter(|file| *file != left_out).collect();
        let body = json!({ "path": saved.text(), "allow_paths": allowed });
        let refused = client.ask("PUT", "/v1/vm/restore", Some(&body)).unwrap();
        let named = refused.body.to_string();
        let named = named.contains(left_out.to_str().unwrap());
        assert!(refused.status == 422 && named, "{}", refused.body);
    }
    let body = json!({ "path": saved.text(), "allow_paths": files, "paused": true });
    client.done("PUT", "/v1/vm/restore", Some(&body)).unwrap();
    let vm = client.get("/v1/vm").unwrap();
    assert_eq!(
        (&vm["state"], &vm["nics"][0]["id"]),
        (&json!("Paused"), &json!("nic"))
    );
    let refused = client.ask("PUT", "/v1/vm/restore", Some(&body)).unwrap();
    assert_eq!(refused.status, 409, "{}", refused.body);
    client
        .done("PATCH", "/v1/vm", Some(&json!({ "state": "Running" })))
        .unwrap();
    // Its init sleeps or works: both cost exits.
    let exits = |client: &Client| {
        let metrics = client.get("/v1/metrics").unwrap();
        let text = metrics.as_str().unwrap().to_owned();
        let line = text
            .lines()
            .find(|line| line.starts_with("bellhop_kvm_total{counter=\"exits\"}"));
        line.unwrap()
            .rsplit(' ')
            .next()
            .unwrap()
            .parse::<u64>()
            .unwrap()
    };
    let before = exits(&client);
    let started = Instant::now();
    while exits(&client) == before {
        assert!(started.elapsed() < NOTICE, "the guest does nothing");
        std::thread::sleep(Duration::from_millis(100));
    }
    client
        .done("PATCH", "/v1/vm", Some(&json!({ "state": "Stopped" })))
        .unwrap();
    assert!(waits.wait().unwrap().success());
}

#[test]
fn a_snapshot_that_fails_leaves_nothing_and_the_guest_continues() {
    require_lab().unwrap();
    let device = SimDevice::net("snap1", MAC, 1500).unwrap();
    let (socket, taken) = (TempPath::new("snap.socket"), TempPath::new("taken"));
    let small = SmallFileSystem::mount().unwrap();
    let (mut guest, client) = start(&device, &socket);
    let said = messages(&mut guest).unwrap();
    write_on(&mut guest);
    fs::create_dir(taken.path()).unwrap();
    fs::write(taken.path().join("a file"), "x").unwrap();
    let beyond = small.path().join("snapshot");
    for (path, status, words) in [
        (Path::new("relative"), 422, "absolute"),
        (Path::new("/nonexistent/here"), 422, "/nonexistent"),
        (taken.path(), 422, "exists"),
        (&beyond, 500, "No space left"),
    ] {
        let body = json!({ "path": path });
        let answer = client.ask("POST", "/v1/vm/snapshot", Some(&body)).unwrap();
        let text = answer.body.to_string();
        assert!(
            answer.status == status && text.contains(words),
            "{path:?}: {} {text}",
            answer.status
        );
        assert_eq!(client.get("/v1/vm").unwrap()["state"], "Running");
        check_traffic(&mut guest, &device);
    }
    let left: Vec<_> = fs::read_dir(small.path()).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    check_writer(&mut guest);
    assert_eq!(messages(&mut guest).unwrap(), said);
    assert!(guest.power_off().unwrap().success());
}

#[test]
fn incomplete_snapshots_are_refused() {
    require_lab().unwrap();
    let device = SimDevice::net("snap1", MAC, 1500).unwrap();
    let (socket, saved) = (TempPath::new("snap.socket"), TempPath::new("snapshot"));
    let (guest, client) = start(&device, &socket);
    snapshot(&client, &saved);
    assert!(guest.power_off().unwrap().success());

    let refused = |what: &str, words: &str| {
        let output = restore_command(&saved, &device, &socket)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{what}: {text}");
        assert!(
            text.contains(words) && !text.contains("panicked"),
            "{what}: {text}"
        );
        assert!(!socket.path().exists(), "{what}");
    };
    let state = saved.path().join("state");
    let good = fs::read(&state).unwrap();
    fs::write(&state, &good[..good.len() / 2]).unwrap();
    refused("half a state", "snapshot");
    let mut changed = good.clone();
    let middle = changed.len() / 2;
    changed[middle] ^= 0x40;
    fs::write(&state, &changed).unwrap();
    refused("a changed state", "checksum");
    fs::write(&state, "something else").unwrap();
    refused("no state", "snapshot");
    fs::write(&state, &good).unwrap();

    let memory = saved.path().join("memory");
    let len = fs::metadata(&memory).unwrap().len();
    let file = fs::File::options().write(true).open(&memory).unwrap();
    file.set_len(len + 4096).unwrap();
    refused("memory that is too long", "memory");
    file.set_len(len).unwrap();
    // A page of data is now different.
    let bytes = fs::read(&memory).unwrap();
    let at = bytes.iter().position(|byte| *byte != 0).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[bytes[at] ^ 1], u64::try_from(at).unwrap())
        .unwrap();
    refused("changed memory", "checksum");
    std::os::unix::fs::FileExt::write_all_at(&file, &[bytes[at]], u64::try_from(at).unwrap())
        .unwrap();

    // A NIC other than its own.
    let output = Command::new(std::env::var_os("BELLHOP").unwrap())
        .args(["run", "--restore", saved.text(), "--vdpa"])
        .arg(format!("id=other,path={}", device.path().display()))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && text.contains("other"), "{text}");

    // All damage is undone: the snapshot is still valid.
    let command = restore_command(&saved, &device, &socket);
    let mut restored = Guest::start_restored(command, NOTICE).unwrap();
    check_traffic(&mut restored, &device);
    assert!(restored.power_off().unwrap().success());
}

//! Another `bellhop` program continues a running machine in the same process: its guest, its memory
//! and its traffic are unchanged.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod live;

use lab::api::Client;
use lab::guest::{BellhopArguments, Guest};
use lab::messages::messages;
use lab::sim::{SimDevice, require_lab};
use lab::traffic::{assert_flood_returned, check_traffic, flood_off, flood_on};
use live::{ask_upgrade, wait_upgrade};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// No zero bytes: the simulator compares addresses like C strings.
const MAC: &str = "52:54:5e:11:58:01";

/// Upgrades of one machine, one after the other. The first ones run under a flood, the others under
/// frames at an even pace, whose gaps are measured.
const UPGRADES: u64 = 20;
const FLOODED: u64 = 10;

/// Paced frames per second.
const RATE: u32 = 1000;

/// The largest difference between two clock readings, in microseconds.
const TOLERANCE_US: f64 = 1000.0;

/// A file in the temporary directory. Dropping it removes the file.
struct Temporary(PathBuf);

impl Temporary {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("lab-{name}-{}", std::process::id()));
        let _ = fs::remove_file(&path);
        Self(path)
    }

    fn program(name: &str, content: &[u8]) -> Self {
        let this = Self::new(name);
        fs::write(&this.0, content).unwrap();
        fs::set_permissions(&this.0, fs::Permissions::from_mode(0o755)).unwrap();
        this
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn bellhop() -> PathBuf {
    std::env::var_os("BELLHOP").unwrap().into()
}

fn start(device: &SimDevice, socket: &Temporary, filters: &str) -> (Guest, Client) {
    let arguments = BellhopArguments::small()
        .unwrap()
        .memory("128M")
        .argument(
            "--vdpa",
            &format!("id=nic,path={}", device.path().display()),
        )
        .argument("--api-socket", socket.0.to_str().unwrap())
        .argument("--seccomp", filters);
    (Guest::start(&arguments).unwrap(), Client::new(&socket.0))
}

/// The file that the machine's process executes.
fn program_of(guest: &Guest) -> PathBuf {
    fs::read_link(format!("/proc/{}/exe", guest.pid())).unwrap()
}

/// Checks that an upgrade fails with `wrong` in its reason, and that the machine runs with its
/// traffic.
#[track_caller]
fn continues_as_before(guest: &mut Guest, client: &Client, device: &SimDevice, wrong: &str) {
    let vm = wait_upgrade(guest, client, |vm| vm["upgrade_error"].is_string());
    let error = vm["upgrade_error"].as_str().unwrap();
    assert!(error.contains(wrong), "{vm}");
    assert_eq!(
        (&vm["upgrades"], &vm["state"]),
        (&json!(0), &json!("Running")),
        "{vm}"
    );
    check_traffic(guest, device);
}

/// The number of system call filters of each thread, by its name. Every thread has some.
#[track_caller]
fn filters_of(guest: &Guest) -> BTreeMap<String, u32> {
    let mut filters = BTreeMap::new();
    for task in fs::read_dir(format!("/proc/{}/task", guest.pid())).unwrap() {
        // A thread may end meanwhile.
        let Ok(status) = fs::read_to_string(task.unwrap().path().join("status")) else {
            continue;
        };
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap().trim().to_owned()
        };
        let name = field("Name:");
        // Threads of the kernel.
        if name.starts_with("kvm-") || name.starts_with("iou-") {
            continue;
        }
        assert_eq!(field("Seccomp:"), "2", "{name}");
        filters.insert(name, field("Seccomp_filters:").parse().unwrap());
    }
    filters
}

#[test]
fn one_program_after_the_other_continues_a_guest_under_load() {
    require_lab().unwrap();
    let device = SimDevice::net("upgrade", MAC, 1500).unwrap();
    let socket = Temporary::new("upgrade.socket");
    let other = Temporary::program("bellhop-other", &fs::read(bellhop()).unwrap());
    let (mut guest, client) = start(&device, &socket, "on");
    let before = client.get("/v1/vm").unwrap();
    let said = messages(&mut guest).unwrap();
    guest.command("write-on 16 50").unwrap();
    let clock = |guest: &mut Guest| guest.command("now").unwrap()["now_us"].clone();
    let mut upgrades = Vec::new();
    // To itself, through the device.
    flood_on(&mut guest, "eth0", MAC);
    for upgrade in 1..=UPGRADES {
        if upgrade == FLOODED + 1 {
            flood_off(&mut guest);
            guest.command(&format!("paced-on {RATE} 300")).unwrap();
        }
        let begin = clock(&mut guest);
        let program = if upgrade % 2 == 1 {
            &other.0
        } else {
            &bellhop()
        };
        ask_upgrade(&client, program);
        let vm = wait_upgrade(&guest, &client, |vm| vm["upgrades"] == upgrade);
        assert_eq!(vm["upgrade_error"], Value::Null, "{vm}");
        let claimed_ms = vm["upgrade_downtime_ms"].as_f64().unwrap();
        println!("it stood still for {claimed_ms} ms");
        assert!(claimed_ms > 0.0, "{vm}");
        if upgrade > FLOODED {
            upgrades.push((begin, clock(&mut guest), claimed_ms));
        }
        assert_eq!(
            (&vm["state"], &vm["pid"]),
            (&json!("Running"), &before["pid"])
        );
        assert_eq!(&program_of(&guest), program);
    }
    assert_flood_returned(&guest.command("paced-off").unwrap());
    for (begin, end, claimed_ms) in upgrades {
        let line = format!("paced-gaps {begin} {end}");
        let gaps = guest.command(&line).unwrap();
        // The guest's clock counts the downtime, in which no frame arrives.
        let longest_us = gaps["touching_us"].as_f64().unwrap();
        assert!(
            claimed_ms * 1000.0 <= longest_us + TOLERANCE_US,
            "claimed {claimed_ms} ms: {gaps}"
        );
    }
    let found = guest.command("write-off").unwrap();
    println!("{found}");
    assert_eq!(found["wrong"], 0, "{found}");
    check_traffic(&mut guest, &device);
    assert_eq!(messages(&mut guest).unwrap(), said);
    assert!(guest.power_off().unwrap().success());
}

#[test]
fn each_thread_has_its_filter_before_and_after_an_upgrade() {
    require_lab().unwrap();
    let device = SimDevice::net("upgrade", MAC, 1500).unwrap();
    let socket = Temporary::new("upgrade.socket");
    let other = Temporary::program("bellhop-other", &fs::read(bellhop()).unwrap());
    let (mut guest, client) = start(&device, &socket, "on");
    let check = |guest: &Guest| {
        let filters = filters_of(guest);
        println!("{filters:?}");
        // The filter of the vmm thread, and one per error of calls that fail; then their own.
        assert_eq!((filters["vcpu0"], filters["api"]), (4, 4), "{filters:?}");
        let fewest = filters.values().min();
        assert_eq!(fewest, Some(&3), "{filters:?}");
    };
    check(&guest);
    ask_upgrade(&client, &other.0);
    wait_upgrade(&guest, &client, |vm| vm["upgrades"] == 1);
    check(&guest);
    check_traffic(&mut guest, &device);
    assert!(guest.power_off().unwrap().success());
}

/// How many descriptors of io_urings a machine has.
fn rings(guest: &Guest) -> usize {
    let links = fs::read_dir(format!("/proc/{}/fd", guest.pid())).unwrap();
    let links = links.filter_map(|link| fs::read_link(link.unwrap().path()).ok());
    let ring = Path::new("anon_inode:[io_uring]");
    links.filter(|link| link == ring).count()
}

/// No program under the filters can create a ring.
#[test]
fn the_rings_of_disks_go_to_another_program_and_back() {
    require_lab().unwrap();
    let device = SimDevice::net("upgrade", MAC, 1500).unwrap();
    let socket = Temporary::new("upgrade.socket");
    let other = Temporary::program("bellhop-other", &fs::read(bellhop()).unwrap());
    let images = ["image", "image-more"].map(|name| Temporary::program(name, &[0; 1 << 20]));
    let (mut guest, client) = start(&device, &socket, "on");
    assert_eq!(rings(&guest), 4);
    let plug = |name: &str, image: &Temporary| {
        let body = json!({ "path": image.0 });
        let path = format!("/v1/vm/disks/{name}");
        let answer = client.ask("PUT", &path, Some(&body)).unwrap();
        assert_eq!(answer.status, 201, "{}", answer.body);
    };
    plug("first", &images[0]);
    // That of a disk has two descriptors.
    assert_eq!(rings(&guest), 5);
    let executable = program_of(&guest);
    ask_upgrade(&client, Path::new(env!("CARGO_BIN_EXE_lab-unable")));
    continues_as_before(&mut guest, &client, &device, "/nonexistent");
    assert_eq!((rings(&guest), program_of(&guest)), (5, executable));
    ask_upgrade(&client, &other.0);
    wait_upgrade(&guest, &client, |vm| vm["upgrades"] == 1);
    assert_eq!((rings(&guest), program_of(&guest)), (5, other.0.clone()));
    plug("more", &images[1]);
    assert_eq!(rings(&guest), 6);
    check_traffic(&mut guest, &device);
    assert!(guest.power_off().unwrap().success());
}

#[test]
fn a_program_that_cannot_continue_leaves_the_machine_to_the_present_one() {
    require_lab().unwrap();
    let device = SimDevice::net("upgrade", MAC, 1500).unwrap();
    let socket = Temporary::new("upgrade.socket");
    // The scripts need a dynamic linker, which no filter allows.
    let (mut guest, client) = start(&device, &socket, "off");
    guest.command("write-on 16 50").unwrap();
    let executable = program_of(&guest);

    // Refused before the guest stops.
    let rubbish = Temporary::program("rubbish", b"#!/bin/sh\necho hello\n");
    let no_program = Temporary::program("no-program", b"nothing");
    for (program, words) in [
        (Path::new("bellhop"), "absolute"),
        (Path::new("/nonexistent"), "cannot execute"),
        (&no_program.0, "cannot execute"),
        (&rubbish.0, "is it Bellhop"),
    ] {
        let body = json!({ "program": program });
        let answer = client.ask("POST", "/v1/vm/upgrade", Some(&body)).unwrap();
        let text = answer.body.to_string();
        assert!(
            answer.status == 422 && text.contains(words),
            "{program:?}: {text}"
        );
    }
    check_traffic(&mut guest, &device);

    // The program claims to read every version, and then fails after it has received the machine.
    for (name, words, wrong) in [
        ("no-such-flag", "run --no-such-flag", "no-such-flag"),
        (
            "no-such-socket",
            "run --api-socket /nonexistent/socket",
            "/nonexistent",
        ),
    ] {
        let script = format!(
            "#!/bin/sh\n[ \"$1\" = state-versions ] && exec {program} state-versions\nexec \
             {program} {words}\n",
            program = bellhop().display()
        );
        let failing = Temporary::program(name, script.as_bytes());
        ask_upgrade(&client, &failing.0);
        continues_as_before(&mut guest, &client, &device, wrong);
        assert_eq!(program_of(&guest), executable);
    }

    // The file is gone at the time of the exec: the machine never left.
    let vanishing = Temporary::program("vanishing", &fs::read(bellhop()).unwrap());
    ask_upgrade(&client, &vanishing.0);
    fs::remove_file(&vanishing.0).unwrap();
    continues_as_before(&mut guest, &client, &device, "No such file");
    assert_eq!(program_of(&guest), executable);

    let found = guest.command("write-off").unwrap();
    assert_eq!(found["wrong"], 0, "{found}");
    assert!(guest.power_off().unwrap().success());
}

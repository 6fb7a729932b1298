//! Saves a guest whose device can neither suspend nor begin in the middle of a ring (vp_vdpa). The
//! device is reset at a point where relays know what is in flight, and continues with shadow rings.
//! So does the next function that takes the guest.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

use lab::api::Client;
use lab::guest::{BellhopArguments, Guest};
use lab::messages::messages;
use lab::sriov::{SriovNic, VfDevice};
use lab::temp_path::TempPath;
use serde_json::{Value, json};
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

/// How long a resumed guest may take to answer; it is emulated twice.
const NOTICE: Duration = Duration::from_secs(30);

/// Small, because each save writes all of it.
const MEMORY: &str = "128M";

/// Frames of the flood that are in flight at once.
const WINDOW: u64 = 16;

fn nic(device: &VfDevice<'_>) -> String {
    format!("id=nic,path={}", device.path().display())
}

fn snapshot(client: &Client, to: &TempPath) -> Value {
    to.clear();
    let body = json!({ "path": to.text() });
    let answer = client.ask("POST", "/v1/vm/snapshot", Some(&body)).unwrap();
    assert_eq!(answer.status, 201, "{}", answer.body);
    assert_eq!(client.get("/v1/vm").unwrap()["state"], "Running");
    answer.body
}

/// Sends checked frames to the peer, which sends them back.
#[track_caller]
fn check_traffic(guest: &mut Guest, mac: &str) {
    const COUNT: u64 = 200;
    let line = format!("frames {COUNT} 590 {WINDOW} eth0 to {mac}");
    let answer = guest.command(&line).unwrap();
    lab::traffic::all_returned(&answer, COUNT).unwrap();
}

/// Checks for threads of the guest's VMM that poll relays: there is one while its device is
/// shadowed.
#[track_caller]
fn is_shadowed(guest: &Guest, wanted: bool) {
    let polls = || {
        let tasks = fs::read_dir(format!("/proc/{}/task", guest.pid())).unwrap();
        tasks
            .map_while(Result::ok)
            .filter_map(|task| fs::read_to_string(task.path().join("comm")).ok())
            .any(|name| name.trim() == "relay")
    };
    let begin = Instant::now();
    // A thread that ended is still listed for a moment.
    while polls() != wanted {
        assert!(begin.elapsed() < NOTICE, "shadowed: {}", !wanted);
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_guest_on_vp_vdpa_is_saved_and_continues_here_and_on_another_function() {
    let functions = SriovNic::enable(3).unwrap();
    let [first, peers, second] =
        [0, 1, 2].map(|index| VfDevice::add(functions.vf(index).unwrap()).unwrap());
    let mac = peers.function().mac();
    let (socket, saved) = (TempPath::new("snap.socket"), TempPath::new("snapshot"));
    let arguments = BellhopArguments::small()
        .unwrap()
        .memory(MEMORY)
        .argument("--vdpa", &nic(&first))
        .argument("--api-socket", socket.text());
    let mut guest = Guest::start(&arguments).unwrap();
    let client = Client::new(socket.path());
    let arguments = BellhopArguments::small()
        .unwrap()
        .memory(MEMORY)
        .vdpa(peers.path());
    let mut peer = Guest::start(&arguments).unwrap();
    peer.command("echo-on").unwrap();
    let check_traffic = |guest: &mut Guest| check_traffic(guest, &mac);
    check_traffic(&mut guest);
    is_shadowed(&guest, false);
    let said = messages(&mut guest).unwrap();
    // From a direct device and from a shadowed one, with frames in flight.
    for round in 0..3 {
        guest.command("write-on 24 50").unwrap();
        let line = format!("flood-on 300 {WINDOW} eth0 to {mac}");
        guest.command(&line).unwrap();
        println!("{}", snapshot(&client, &saved));
        let flooded = guest.command("flood-off").unwrap();
        println!("{flooded}");
        for wrong in ["corrupt", "duplicate"] {
            assert_eq!(flooded[wrong], 0, "{wrong}: {flooded}");
        }
        assert!(flooded["rx"].as_u64() > Some(0), "{flooded}");
        // The device is reset once: frames in flight are lost, and so are those that the guest
        // sends in their place.
        assert!(flooded["lost"].as_u64() <= Some(2 * WINDOW), "{flooded}");
        check_traffic(&mut guest);
        let written = guest.command("write-off").unwrap();
        assert_eq!(written["wrong"], 0, "{written}");
        is_shadowed(&guest, true);
        if round == 1 {
            guest.command("rebind-flooded 1 0").unwrap();
            is_shadowed(&guest, false);
            check_traffic(&mut guest);
        }
    }
    guest.command("write-on 24 50").unwrap();
    snapshot(&client, &saved);
    assert_eq!(messages(&mut guest).unwrap(), said);
    // The guest's address must be on the switch only once.
    drop(guest);

    // On another function with its own address, and on the first.
    for device in [&second, &first] {
        let mut command = Command::new(std::env::var_os("BELLHOP").unwrap());
        command
            .args(["run", "--restore", saved.text()])
            .args(BellhopArguments::small().unwrap().allow_boot_files())
            .args(["--vdpa", &nic(device)])
            .args(["--api-socket", socket.text()]);
        let mut restored = Guest::start_restored(command, NOTICE).unwrap();
        is_shadowed(&restored, true);
        check_traffic(&mut restored);
        let written = restored.command("write-off").unwrap();
        assert_eq!(written["wrong"], 0, "{written}");
        assert_eq!(messages(&mut restored).unwrap(), said);
        // The driver's reset lets the device work directly again.
        restored.command("rebind-flooded 1 0").unwrap();
        is_shadowed(&restored, false);
        check_traffic(&mut restored);
        assert!(restored.power_off().unwrap().success());
    }
    let echoed = peer.command("echo-off").unwrap();
    assert_eq!(echoed["corrupt"], 0, "{echoed}");
    assert!(peer.power_off().unwrap().success());
}

//! `bellhop swnic --port`: NICs without hardware at queues of ports, which are the ends of a cable.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[path = "swnic/bridge.rs"]
mod bridge;
#[path = "swnic/cable.rs"]
mod cable;

use std::process::Command;
use std::time::{Duration, Instant};

use bridge::{Bridge, ip};
use cable::{Cable, ENDS};
use lab::guest::{BellhopArguments, Guest};
use lab::swnic::{self, Swnic};
use lab::traffic::{Frames, exchange_between, exchange_both_ways, flood_on};
use rustix::process::{Signal, kill_process};
use serde_json::Value;

/// VIRTIO_NET_F_CSUM, GUEST_CSUM, GUEST_TSO4 and HOST_TSO4.
const OFFLOADS: [usize; 4] = [0, 1, 7, 11];
const MACS: [&str; 2] = ["52:54:00:5e:57:01", "52:54:00:5e:57:02"];
const LIMIT: Duration = Duration::from_secs(20);

fn bellhop(words: &[&str]) -> (bool, String) {
    let mut command = Command::new(std::env::var_os("BELLHOP").unwrap());
    let output = command.args(words).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(text).unwrap())
}

/// All settings of a port that the kernel shows.
fn settings(port: &str) -> Value {
    let output = Command::new("ip")
        .args(["-j", "-d", "link", "show", port])
        .output();
    let mut all: Value = serde_json::from_slice(&output.unwrap().stdout).unwrap();
    all[0].take()
}

fn has_program(port: &str) -> bool {
    settings(port).get("xdp").is_some()
}

fn await_no_program(port: &str) {
    let begin = Instant::now();
    while has_program(port) {
        assert!(begin.elapsed() < LIMIT, "{}", settings(port));
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn words(end: usize) -> [&'static str; 6] {
    ["--port", ENDS[end], "--queue", "0", "--mac", MACS[end]]
}

fn start(nic: &Swnic) -> Guest {
    let arguments = BellhopArguments::small().unwrap().memory("128M");
    let guest = Guest::start(&arguments.vdpa(nic.path())).unwrap();
    assert_eq!(guest.ready()["problems"], serde_json::json!([]));
    guest
}

#[track_caller]
fn refused(name: &str, words: &[&str]) -> String {
    let output = swnic::command(name, words).unwrap().output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{text}");
    text
}

#[test]
fn guests_at_both_ends_of_a_cable_exchange_frames_while_processes_are_killed() {
    let _cable = Cable::add();
    let before = ENDS.map(settings);
    let split = [&words(0)[..], &["--split"]].concat();
    let nics = [
        Swnic::start("lab-sw0", &split).unwrap(),
        Swnic::start("lab-sw1", &words(1)).unwrap(),
    ];
    assert!(ENDS.into_iter().all(has_program));
    let [mut guest, mut peer] = nics.each_ref().map(start);
    let ready = guest.ready();
    let features = ready["nics"][0]["features"].as_str().unwrap().as_bytes();
    assert!(OFFLOADS.iter().all(|&bit| features[bit] == b'0'), "{ready}");
    assert_eq!(ready["nics"][0]["mtu"], 1500, "{ready}");
    for (count, size, window) in [(300, 60, 32), (300, 1514, 16)] {
        let frames = Frames {
            count,
            size,
            window,
        };
        exchange_between(&mut guest, &mut peer, MACS[1], frames).unwrap();
    }
    exchange_both_ways(&mut guest, &mut peer, MACS).unwrap();

    nics[0].worker_is_confined().unwrap();

    peer.command("echo-on").unwrap();
    flood_on(&mut guest, "eth0", MACS[1]);
    for _ in 0..5 {
        for nic in &nics {
            let [_, worker] = nic.processes().unwrap();
            kill_process(worker, Signal::KILL).unwrap();
            nic.await_other_worker(worker).unwrap();
            // Frames pass before the next one is killed.
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    let answer = guest.command_within("flood-off", 6 * LIMIT).unwrap();
    println!("{answer}");
    let count = |what: &str| answer[what].as_u64().unwrap();
    assert_eq!((count("corrupt"), count("duplicate")), (0, 0), "{answer}");
    // Frames in the socket of a killed worker are lost: at most the window, and once more if the
    // next worker is late.
    let kills = 10;
    assert!(count("lost") <= kills * 2 * 64, "{answer}");
    assert!(count("rx") > 20, "{answer}");
    peer.command("echo-off").unwrap();
    exchange_both_ways(&mut guest, &mut peer, MACS).unwrap();

    // The process that has the program at the port, too.
    for nic in &nics {
        let [server, worker] = nic.processes().unwrap();
        kill_process(server, Signal::KILL).unwrap();
        nic.await_other_worker(worker).unwrap();
    }
    exchange_both_ways(&mut guest, &mut peer, MACS).unwrap();
    for guest in [guest, peer] {
        assert_eq!(guest.power_off().unwrap().code(), Some(0));
    }
    for nic in nics {
        nic.signal(Signal::TERM).unwrap();
        let (status, text) = nic.end().unwrap();
        assert!(status.success(), "{text}");
    }
    ENDS.into_iter().for_each(await_no_program);
    assert_eq!(ENDS.map(settings), before);
}

#[test]
fn a_guest_at_a_port_reaches_one_on_a_bridge() {
    let _cable = Cable::add();
    let bridge = Bridge::add("lab-swbr");
    ip(&format!("link set {} master {}", ENDS[1], bridge.0));
    let [mac, other] = MACS;
    let at_port = format!("port={},queue=0,mac={mac}", ENDS[0]);
    let on_bridge = format!("bridge={},mac={other},mtu=1500", bridge.0);
    let [mut guest, mut peer] = [at_port, on_bridge].map(|nic| {
        let arguments = BellhopArguments::small().unwrap().memory("128M");
        Guest::start(&arguments.argument("--nic", &nic)).unwrap()
    });
    assert!(has_program(ENDS[0]));
    let begin = Instant::now();
    // BR_STATE_FORWARDING
    let state = format!("/sys/class/net/{}/brport/state", ENDS[1]);
    while std::fs::read_to_string(&state).unwrap().trim() != "3" {
        assert!(begin.elapsed() < LIMIT);
        std::thread::sleep(Duration::from_millis(20));
    }
    exchange_both_ways(&mut guest, &mut peer, MACS).unwrap();
    for guest in [guest, peer] {
        assert_eq!(guest.power_off().unwrap().code(), Some(0));
    }
    await_no_program(ENDS[0]);
    assert_eq!(bellhop(&["nic", "list"]).1, "");
}

#[test]
fn no_program_stays_after_the_processes_are_killed() {
    let _cable = Cable::add();
    let nic = Swnic::start("lab-sw0", &words(0)).unwrap();
    let [server, _] = nic.processes().unwrap();
    nic.signal(Signal::KILL).unwrap();
    assert!(!nic.end().unwrap().0.success());
    assert!(has_program(ENDS[0]));
    // The kernel does not wait long for the process that is gone.
    std::fs::write("/sys/class/vduse/lab-sw0/msg_timeout", "1").unwrap();
    kill_process(server, Signal::KILL).unwrap();
    await_no_program(ENDS[0]);
    assert_eq!(
        bellhop(&["nic", "delete", "lab-sw0"]),
        (true, String::new())
    );

    // In the background.
    let connect = format!("port={},queue=1", ENDS[0]);
    let create = [
        "nic",
        "create",
        "lab-sw0",
        "--from",
        "software",
        "--connect",
        &connect,
    ];
    let (created, text) = bellhop(&create);
    assert!(created && text.contains("/dev/vhost-vdpa-"), "{text}");
    let (_, listed) = bellhop(&["nic", "list", "-j"]);
    let listed: Value = serde_json::from_str(&listed).unwrap();
    let shown = &listed["nic"]["lab-sw0"];
    assert_eq!(
        (&shown["port"], &shown["queue"]),
        (&ENDS[0].into(), &1.into()),
        "{shown}"
    );
    assert!(has_program(ENDS[0]));
    assert_eq!(
        bellhop(&["nic", "delete", "lab-sw0"]),
        (true, String::new())
    );
    await_no_program(ENDS[0]);
}

#[test]
fn errors_name_the_cause_and_the_remedy() {
    let _cable = Cable::add();
    let before = ENDS.map(settings);
    let at = |port, queue| ["--port", port, "--queue", queue];
    for (words, cause) in [
        (at("lab-none", "0"), "there is no such interface; `ip link`"),
        (
            at(ENDS[0], "2"),
            "it has no rx queue 2; `ethtool -l lab-xa`",
        ),
    ] {
        let text = refused("lab-sw0", &words);
        assert!(text.contains(cause), "{text}");
    }
    for (word, value, cause) in [
        ("--mtu", "9000", "an MTU of 9000 is more than 3822"),
        (
            "--queue-pairs",
            "2",
            "has one queue pair, not 2: leave the queue pairs out",
        ),
    ] {
        let text = refused("lab-sw0", &[&at(ENDS[0], "0")[..], &[word, value]].concat());
        assert!(text.contains(cause), "{text}");
    }
    let first = Swnic::start("lab-sw0", &words(0)).unwrap();
    let text = refused("lab-sw1", &words(0));
    assert!(
        text.contains("it has an XDP program already, of another NIC"),
        "{text}"
    );
    drop(first);
    ENDS.into_iter().for_each(await_no_program);
    assert_eq!(ENDS.map(settings), before);
}

//! From a NIC in switchdev mode to devices on its subfunctions, connected by a bridge, and back.

use std::fs::OpenOptions;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lab::guest::{BellhopArguments, Guest};
use lab::labnic::sf::{NIC, devlink_json, set_eswitch_mode};
use lab::labnic::trouble;
use serde_json::Value;
use vdpa::netdev::{Netdev, Options};
use vdpa_mgmt::nic::{NicRequest, Phase};

use super::bridge::{BRIDGE, Host, UPLINK, bridge_is_up, run};
use super::faults::{be_killed, each_death_is_undone, each_end_is_undone, moments};
use super::host::{NAMES, Traces, made, record};
use super::support::{bellhop, complaint, printed};
use super::traffic::{Flow, both_ways, frame, start};

const MACS: [[u8; 6]; 3] = [
    [2, 0, 0x5e, 0, 0x53, 0x11],
    [2, 0, 0x5e, 0, 0x53, 0x12],
    [2, 0, 0x5e, 0, 0x53, 0x13],
];
const BROADCAST: [u8; 6] = [0xff; 6];
/// Long after a frame would have arrived.
const QUIET: Duration = Duration::from_millis(500);
const PATIENCE: Duration = Duration::from_secs(20);

/// All phases of a NIC on a subfunction.
const PHASES: [Phase; 10] = [
    Phase::Check,
    Phase::AddPort,
    Phase::ConfigurePort,
    Phase::ActivatePort,
    Phase::AwaitSubfunction,
    Phase::EnableVnet,
    Phase::AwaitMgmtDevice,
    Phase::AddDevice,
    Phase::AwaitCharacterDevice,
    Phase::Connect,
];

fn text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

fn arguments<'a>(name: &'a str, mac: &'a str, connect: &'a str) -> [&'a str; 8] {
    [
        "--from",
        UPLINK,
        "--name",
        name,
        "--mac",
        mac,
        "--connect",
        connect,
    ]
}

/// Creates a NIC in a VLAN.
fn make(number: usize, vlan: u16) -> std::path::PathBuf {
    let connect = format!("bridge={BRIDGE},vlan={vlan}");
    made(&arguments(NAMES[number], &text(MACS[number]), &connect))
}

/// How many broadcast frames of another device arrive until no more come.
fn heard(from: (&mut Netdev, [u8; 6]), at: &mut Netdev) -> u32 {
    let transmit = &mut from.0.driver.pairs[0].transmit;
    let mut out = Vec::new();
    for number in 0..20 {
        frame(&mut out, BROADCAST, from.1, 1, number, 60);
        assert!(transmit.send(&out).unwrap());
    }
    transmit.flush().unwrap();
    let begin = Instant::now();
    while transmit.queue().outstanding() > 0 {
        transmit.reap().unwrap();
        assert!(begin.elapsed() < PATIENCE, "buffers do not come back");
        std::thread::yield_now();
    }
    let receive = &mut at.driver.pairs[0].receive;
    let (mut copy, mut count, mut last) = (vec![0; 2048], 0, Instant::now());
    while last.elapsed() < QUIET {
        let taken = receive.poll(64, |frame| {
            let length = frame.copy_to(&mut copy).unwrap().len();
            if length > 14 && copy[6..14] == [&from.1[..], &[0x88, 0xb5]].concat() {
                count += 1;
                last = Instant::now();
            }
        });
        taken.unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    count
}

#[test]
fn nics_of_one_vlan_reach_each_other_and_no_others() {
    let _host = Host::new();
    let before = Traces::find();
    let paths = [make(0, 100), make(1, 100), make(2, 200)];
    let options = Options::default();
    let [mut a, mut b, mut c] = paths.each_ref().map(|path| start(path, &options));
    both_ways(&Flow::new(MACS[0], MACS[1]), &mut a, &mut b);
    assert_eq!(heard((&mut a, MACS[0]), &mut b), 20);
    assert_eq!(heard((&mut a, MACS[0]), &mut c), 0);
    assert_eq!(heard((&mut c, MACS[2]), &mut a), 0);

    // A change by another tool takes effect, and the removal still works.
    let told: Value = serde_json::from_str(&printed(&bellhop(&["nic", "list", "-j"]))).unwrap();
    let of = |name: &str, key: &str| told["nic"][name][key].as_str().unwrap().to_owned();
    assert_eq!(of(NAMES[2], "state"), "made");
    assert_eq!(of(NAMES[2], "mac"), text(MACS[2]));
    assert_eq!(told["nic"][NAMES[2]]["sfnum"], 3);
    let representor = of(NAMES[2], "representor");
    let ports = devlink_json(&["port", "show", &of(NAMES[2], "port")]).unwrap();
    assert_eq!(
        ports["port"][of(NAMES[2], "port")]["netdev"],
        representor.as_str()
    );
    run(&format!(
        "bridge vlan add dev {representor} vid 100 pvid untagged"
    ));
    assert_eq!(heard((&mut a, MACS[0]), &mut c), 20);

    // The device is held: nothing is changed.
    let pid = format!("PID {}", std::process::id());
    let with = Traces::find();
    complaint(&bellhop(&["nic", "remove", NAMES[2]]), &["in use by", &pid]);
    with.assert_same("after a refusal");
    drop((a, b, c));
    for name in NAMES {
        printed(&bellhop(&["nic", "remove", name]));
    }
    before.assert_same("after removal");
    assert_eq!(trouble().unwrap(), Vec::<String>::new());
}

/// Sends each frame back to its sender until dropped.
struct Echo {
    stop: Arc<AtomicBool>,
    count: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Echo {
    fn start(path: &Path, own: [u8; 6]) -> Self {
        let netdev = start(path, &Options::default());
        let (stop, count) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicU64::new(0)),
        );
        let (until, counted) = (Arc::clone(&stop), Arc::clone(&count));
        let thread = std::thread::spawn(move || {
            // The whole device: the queues alone would leave the device behind, closed.
            let mut netdev = netdev;
            let mut copy = vec![0; 16384];
            while !until.load(Ordering::Relaxed) {
                let pair = &mut netdev.driver.pairs[0];
                let mut back: Vec<Vec<u8>> = Vec::new();
                let taken = pair.receive.poll(64, |frame| {
                    let mut frame = frame.copy_to(&mut copy).unwrap().to_vec();
                    let (to, rest) = frame.split_at_mut(6);
                    if to == own {
                        to.swap_with_slice(&mut rest[..6]);
                        back.push(frame);
                    }
                });
                taken.unwrap();
                pair.transmit.reap().unwrap();
                for frame in &back {
                    while !pair.transmit.send(frame).unwrap() {
                        pair.transmit.flush().unwrap();
                        pair.transmit.reap().unwrap();
                    }
                    counted.fetch_add(1, Ordering::Relaxed);
                }
                pair.transmit.flush().unwrap();
                if back.is_empty() {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        });
        Self {
            stop,
            count,
            thread: Some(thread),
        }
    }

    fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(JoinHandle::join);
        if !matches!(ended, Some(Ok(()))) && !std::thread::panicking() {
            panic!("the echo has failed");
        }
    }
}

fn guest(path: &Path) -> Guest {
    let arguments = BellhopArguments::small()
        .unwrap()
        .memory("128M")
        .argument("--vdpa", &format!("path={}", path.display()))
        .silence(Duration::from_secs(120));
    Guest::start(&arguments).unwrap()
}

#[test]
fn a_guest_reaches_its_peer_through_the_bridge() {
    let _host = Host::new();
    let before = Traces::find();
    let [guests, peers] = [make(0, 100), make(1, 100)];
    let echo = Echo::start(&peers, MACS[1]);
    let mut guest = guest(&guests);
    let frames = format!("frames 200 256 16 eth0 to {}", text(MACS[1]));
    let said = guest.command(&frames).unwrap();
    let count = echo.count();
    for (name, wanted) in [("tx", 200), ("rx", 200), ("corrupt", 0), ("lost", 0)] {
        let seen = || format!("{}{}", run("ip -s link"), run("bridge fdb"));
        assert_eq!(
            said[name],
            wanted,
            "{name}: {said}; {count} echoed; {}",
            seen()
        );
    }
    assert!(count >= 200, "{count}");

    // The VM has the device open.
    complaint(
        &bellhop(&["nic", "remove", NAMES[0]]),
        &["in use by", "PID"],
    );

    // Nothing arrives in another VLAN, and frames arrive again in the first one. The test sends one
    // window at most: the guest waits for each lost frame.
    drop(echo);
    printed(&bellhop(&["nic", "remove", NAMES[1]]));
    let peers = make(1, 200);
    let echo = Echo::start(&peers, MACS[1]);
    let frames = format!("frames 16 256 16 eth0 to {}", text(MACS[1]));
    let said = guest.command(&frames).unwrap();
    assert_eq!(
        (&said["tx"], &said["rx"]),
        (&16.into(), &0.into()),
        "{said}"
    );
    assert_eq!(echo.count(), 0);
    let told: Value = serde_json::from_str(&printed(&bellhop(&["nic", "list", "-j"]))).unwrap();
    let representor = told["nic"][NAMES[1]]["representor"].as_str().unwrap();
    run(&format!(
        "bridge vlan add dev {representor} vid 100 pvid untagged"
    ));
    let said = guest.command(&frames).unwrap();
    assert_eq!(
        (&said["rx"], &said["lost"]),
        (&16.into(), &0.into()),
        "{said}"
    );
    drop(echo);
    printed(&bellhop(&["nic", "remove", NAMES[1]]));

    assert!(guest.power_off().unwrap().success());
    printed(&bellhop(&["nic", "remove", NAMES[0]]));
    before.assert_same("after removal");
    assert_eq!(trouble().unwrap(), Vec::<String>::new());
}

fn request(from: &str) -> NicRequest {
    NicRequest {
        mac: Some(MACS[0]),
        connectivity: Some(format!("bridge={BRIDGE},vlan=100").parse().unwrap()),
        ..NicRequest::new(NAMES[0], from)
    }
}

#[test]
fn any_failure_leaves_the_host_as_before() {
    let _host = Host::new();
    let before = Traces::find();
    each_end_is_undone(&request(NIC), &moments(&PHASES), &before);
    assert_eq!(trouble().unwrap(), Vec::<String>::new());
}

#[test]
#[ignore = "another test runs it in a process of its own"]
fn dies_at_a_moment() {
    be_killed(request, &moments(&PHASES));
}

#[test]
fn steps_of_a_killed_process_are_undone() {
    let _host = Host::new();
    let before = Traces::find();
    let test = "subfunctions::dies_at_a_moment";
    each_death_is_undone(test, NIC, &moments(&PHASES), &before);
    assert_eq!(trouble().unwrap(), Vec::<String>::new());
}

#[test]
fn impossible_requests_are_refused_and_change_nothing() {
    let _host = Host::new();
    let before = Traces::find();
    let mac = text(MACS[0]);
    let make = |words: &[&str]| {
        let common = [
            "nic", "make", "--from", NIC, "--name", NAMES[0], "--mac", &mac,
        ];
        bellhop(&[common.as_slice(), words].concat())
    };
    let connect = |how: &str| make(&["--connect", how]);
    let plan = printed(&make(&["--dry-run"]));
    assert!(plan.contains("add the port of a subfunction"), "{plan}");
    complaint(
        &connect("bridge=lab-none"),
        &["ip link add lab-none type bridge"],
    );
    complaint(
        &connect(&format!("bridge={UPLINK}")),
        &["is not a Linux bridge"],
    );
    complaint(&connect("vlan=100"), &["bridge=NAME"]);
    complaint(&make(&["--kind", "vf"]), &["has no virtual functions"]);
    complaint(&make(&["--vfs", "2"]), &["has no virtual functions"]);
    complaint(&make(&["--max-vqp", "30000"]), &["add the vDPA device"]);
    run(&format!(
        "ip link set {BRIDGE} type bridge vlan_filtering 0"
    ));
    complaint(
        &connect(&format!("bridge={BRIDGE},vlan=7")),
        &["vlan_filtering 1"],
    );
    run(&format!(
        "ip link set {BRIDGE} type bridge vlan_filtering 1"
    ));
    run(&format!("ip link set {BRIDGE} down"));
    complaint(&connect(&format!("bridge={BRIDGE}")), &["is down"]);
    run(&format!("ip link set {BRIDGE} up"));
    bridge_is_up();
    before.assert_same("after refusals");

    // Rates are set, and disappear with the port.
    let path = made(&[
        "--from",
        NIC,
        "--kind",
        "sf",
        "--name",
        NAMES[0],
        "--max-tx-rate",
        "1000",
        "--min-tx-rate",
        "100",
    ]);
    let shown: Value = serde_json::from_str(&printed(&bellhop(&["nic", "list", "-j"]))).unwrap();
    let port = shown["nic"][NAMES[0]]["port"].as_str().unwrap();
    let rate = devlink_json(&["port", "function", "rate", "show", port]).unwrap();
    assert_eq!(rate["rate"][port]["tx_max"], 125_000_000);
    assert_eq!(rate["rate"][port]["tx_share"], 12_500_000);
    assert!(record(NAMES[0]).exists());

    // While a process has it open, it is neither deleted nor half deleted.
    let open = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    complaint(&bellhop(&["nic", "remove", NAMES[0]]), &["in use by"]);
    drop(open);
    // A part of it was deleted by hand.
    printed(&bellhop(&["dev", "del", NAMES[0]]));
    let list = printed(&bellhop(&["nic", "list"]));
    assert!(list.contains("exists false"), "{list}");
    printed(&bellhop(&["nic", "remove", NAMES[0]]));
    before.assert_same("after a removal by halves");

    // The mode is not changed.
    set_eswitch_mode("legacy").unwrap();
    complaint(
        &make(&[]),
        &["devlink dev eswitch set platform/labnic.0 mode switchdev"],
    );
    // The old management device creates devices itself.
    made(&[
        "--from", "labnic", "--name", NAMES[0], "--mac", &mac, "--mtu", "1500",
    ]);
    printed(&bellhop(&["nic", "remove", NAMES[0]]));
    let on = ["nic", "make", "--from", "labnic", "--name", NAMES[0]];
    let sf = [on.as_slice(), &["--kind", "sf"]].concat();
    complaint(&bellhop(&sf), &["has no subfunctions"]);
    let connect = [on.as_slice(), &["--connect", "bridge=br0"]].concat();
    complaint(&bellhop(&connect), &["no connection to set"]);
    assert_eq!(trouble().unwrap(), Vec::<String>::new());
}

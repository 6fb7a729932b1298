//! `bellhop swnic`: NICs without hardware on one bridge, for guests with their stock driver.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[path = "swnic/bridge.rs"]
mod bridge;
#[allow(dead_code, reason = "other tests use more of it")]
mod live;

use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bridge::{Bridge, ip};
use lab::api::Client;
use lab::guest::{BellhopArguments, Guest};
use lab::swnic::{self, Swnic};
use lab::traffic::{Frames, exchange_between, flood_on};
use rustix::process::{Pid, Signal, kill_process};

/// VIRTIO_F_RING_PACKED and VIRTIO_NET_F_MRG_RXBUF.
const RING_PACKED: usize = 34;
const MRG_RXBUF: usize = 15;

const LIMIT: Duration = Duration::from_secs(20);

/// The error of `bellhop swnic` that cannot start.
#[track_caller]
fn refused(name: &str, words: &[&str]) -> String {
    let output = swnic::command(name, words).unwrap().output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{text}");
    text
}

/// All that a NIC of this name leaves behind.
fn remains(name: &str) -> Vec<PathBuf> {
    ["/dev/vduse", "/sys/bus/vdpa/devices", "/sys/class/net"]
        .map(|directory| Path::new(directory).join(name))
        .into_iter()
        .filter(|path| path.exists())
        .collect()
}

fn start(nic: &Swnic, processors: u32) -> Guest {
    let arguments = BellhopArguments::small().unwrap().memory("128M");
    let guest = Guest::start(&arguments.processors(processors).vdpa(nic.path())).unwrap();
    assert_eq!(guest.ready()["problems"], serde_json::json!([]));
    guest
}

/// Ends a flood with at most so many lost frames, and none twice.
#[track_caller]
fn end_flood(guest: &mut Guest, lost: u64) {
    let answer = guest.command_within("flood-off", 6 * LIMIT).unwrap();
    println!("{answer}");
    let count = |what: &str| answer[what].as_u64().unwrap();
    assert_eq!((count("corrupt"), count("duplicate")), (0, 0), "{answer}");
    assert!(count("lost") <= lost, "{answer}");
    assert!(count("rx") > 100, "{answer}");
}

fn negotiated(guest: &Guest, bit: usize) -> bool {
    let features = guest.ready()["nics"][0]["features"].as_str().unwrap();
    features.as_bytes()[bit] == b'1'
}

#[test]
fn guests_on_one_bridge_exchange_frames_by_split_and_packed_rings() {
    let bridge = Bridge::add("lab-swbr");
    let macs = ["52:54:00:5e:53:01", "52:54:00:5e:53:02"];
    let on = |mac| ["--bridge", bridge.0, "--mac", mac, "--mtu", "9000"];
    let split = Swnic::start("lab-sw0", &[&on(macs[0])[..], &["--split"]].concat()).unwrap();
    // The guest uses the pairs that its VMM offers.
    let words = [&on(macs[1])[..], &["--queue-pairs", "2"]].concat();
    let packed = Swnic::start("lab-sw1", &words).unwrap();
    assert!(Path::new("/sys/class/net/lab-swbr/brif/lab-sw1").exists());

    let mut guests = [start(&split, 1), start(&packed, 2)];
    assert!(!negotiated(&guests[0], RING_PACKED) && negotiated(&guests[1], RING_PACKED));
    assert!(guests.iter().all(|guest| negotiated(guest, MRG_RXBUF)));
    let [first, second] = &mut guests;
    assert_eq!(first.command("link").unwrap()["nics"][0]["mac"], macs[0]);
    // From the shortest to one of several buffers.
    for (count, size, window) in [(300, 60, 32), (100, 1514, 16), (50, 9014, 8)] {
        let frames = Frames {
            count,
            size,
            window,
        };
        exchange_between(first, second, macs[1], frames).unwrap();
    }
    // The driver resets and starts the NIC while frames arrive: ten come back after it.
    let flood = format!("flood 120 256 to {} until 10 at 500", macs[0]);
    second.listen(&flood).unwrap();
    let rebind = format!("rebind 1 to {}", macs[1]);
    let rebound = first.command_within(&rebind, 6 * LIMIT).unwrap();
    let flooded = second.answer(&flood, 6 * LIMIT).unwrap();
    assert_eq!(
        (&rebound["lost"], &rebound["corrupt"]),
        (&0.into(), &0.into())
    );
    assert_eq!(flooded["corrupt"], 0, "{flooded}");

    // A NIC in use stays until its user ends.
    split.signal(Signal::TERM).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    // The command keeps the NIC running until its user ends.
    let [server, worker] = split.processes().unwrap();
    kill_process(server, Signal::KILL).unwrap();
    split.await_other_worker(worker).unwrap();
    let frames = Frames {
        count: 100,
        size: 256,
        window: 8,
    };
    let [first, second] = &mut guests;
    exchange_between(first, second, macs[1], frames).unwrap();
    for guest in guests {
        assert_eq!(guest.power_off().unwrap().code(), Some(0));
    }
    let (status, text) = split.end().unwrap();
    assert!(status.success() && text.contains("in use by"), "{text}");
    assert_eq!(remains("lab-sw0"), Vec::<PathBuf>::new());
    packed.signal(Signal::INT).unwrap();
    let (status, text) = packed.end().unwrap();
    assert!(status.success() && text.is_empty(), "{text}");
    assert_eq!(remains("lab-sw1"), Vec::<PathBuf>::new());
    assert!(!Path::new("/sys/class/net/lab-swbr/brif/lab-sw1").exists());
}

#[test]
fn a_guest_moves_between_nics_without_hardware() {
    let bridge = Bridge::add("lab-swbr");
    let macs = ["52:54:00:5e:53:01", "52:54:00:5e:53:02"];
    let words = |mac| ["--bridge", bridge.0, "--mac", mac, "--split"];
    let nics = ["lab-sw0", "lab-sw1"].map(|name| Swnic::start(name, &words(macs[0])).unwrap());
    let other = Swnic::start("lab-sw2", &words(macs[1])).unwrap();
    let socket = std::env::temp_dir().join("lab-swnic.socket");
    let arguments = BellhopArguments::small().unwrap().memory("128M");
    let nic = format!("path={},id=nic", nics[0].path().display());
    let arguments = arguments.argument("--vdpa", &nic);
    let arguments = arguments.argument("--api-socket", socket.to_str().unwrap());
    let mut guest = Guest::start(&arguments).unwrap();
    let mut peer = start(&other, 1);
    let client = Client::new(&socket);
    for nic in [&nics[1], &nics[0], &nics[1]] {
        live::swap_nic(&client, nic.path());
        let frames = Frames {
            count: 200,
            size: 300,
            window: 8,
        };
        exchange_between(&mut guest, &mut peer, macs[1], frames).unwrap();
    }
    for guest in [guest, peer] {
        assert_eq!(guest.power_off().unwrap().code(), Some(0));
    }
    for nic in nics.into_iter().chain([other]) {
        nic.signal(Signal::TERM).unwrap();
        assert!(nic.end().unwrap().0.success());
    }
}

#[test]
fn a_vm_gets_a_nic_of_its_own_on_a_bridge() {
    let bridge = Bridge::add("lab-swbr");
    let mac = "52:54:00:5e:53:01";
    let other = Swnic::start("lab-sw0", &["--bridge", bridge.0, "--mac", mac]).unwrap();
    let mut peer = start(&other, 1);
    let arguments = BellhopArguments::small().unwrap().memory("128M");
    let nic = format!("bridge={},id=net0,queue_pairs=2", bridge.0);
    let arguments = arguments.processors(2).argument("--nic", &nic);
    let mut guest = Guest::start(&arguments).unwrap();
    let ready = guest.ready();
    assert_eq!(ready["nics"][0]["tx_queues"], 2, "{ready}");
    let own = format!("run{}n0", guest.pid());
    assert_eq!(remains(&own).len(), 3);
    let said = guest.console();
    let wanted = "NIC net0: from=software, because no port of lab-swbr is a NIC";
    assert!(said.contains(wanted), "{said}");
    let mut topology = Command::new(std::env::var_os("BELLHOP").unwrap());
    let output = topology.arg("topology").output().unwrap().stdout;
    let drawn = String::from_utf8(output).unwrap();
    let mut lines = drawn.lines();
    let tap = lines.find(|line| line.contains(&format!("tap {own}: ")));
    let is_port = tap.is_some_and(|line| line.ends_with(" master lab-swbr"));
    assert!(is_port, "{drawn}");
    let frames = Frames {
        count: 200,
        size: 300,
        window: 8,
    };
    exchange_between(&mut guest, &mut peer, mac, frames).unwrap();
    // The process that serves the NIC is replaced if it is killed, and continued if it is stopped.
    let [server, worker] = swnic::processes(&own).unwrap();
    kill_process(server, Signal::KILL).unwrap();
    swnic::await_other_worker(&own, worker).unwrap();
    exchange_between(&mut guest, &mut peer, mac, frames).unwrap();
    let [server, worker] = swnic::processes(&own).unwrap();
    kill_process(server, Signal::STOP).unwrap();
    // It cannot start another one while it is stopped.
    kill_process(worker, Signal::KILL).unwrap();
    swnic::await_other_worker(&own, worker).unwrap();
    exchange_between(&mut guest, &mut peer, mac, frames).unwrap();
    let said = guest.console();
    assert!(said.contains("repaired the NIC"), "{said}");
    for guest in [guest, peer] {
        assert_eq!(guest.power_off().unwrap().code(), Some(0));
    }
    assert_eq!(remains(&own), Vec::<PathBuf>::new());
}

/// Kills the chosen process of each NIC so many times, and waits for another worker each time.
/// Returns the number of kills.
fn kill_each(nics: [&Swnic; 2], times: u64, chosen: fn([Pid; 2]) -> Pid) -> u64 {
    for _ in 0..times {
        for nic in nics {
            let [server, worker] = nic.processes().unwrap();
            kill_process(chosen([server, worker]), Signal::KILL).unwrap();
            nic.await_other_worker(worker).unwrap();
            // Frames pass before the next one is killed.
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    2 * times
}

/// Deletes the tap of a NIC on the bridge `lab-swbr`, and waits until there is another one. The
/// bridge may be down first.
#[track_caller]
fn delete_tap(nic: &Swnic, is_down: bool) {
    let [_, worker] = nic.processes().unwrap();
    if is_down {
        ip("link set lab-swbr down");
    }
    ip(&format!("link del {}", nic.name()));
    nic.await_other_worker(worker).unwrap();
    let port = format!("/sys/class/net/lab-swbr/brif/{}", nic.name());
    if is_down {
        std::thread::sleep(Duration::from_secs(2));
        assert!(!Path::new(&port).exists());
        ip("link set lab-swbr up");
    }
    let begin = Instant::now();
    while !Path::new(&port).exists() {
        assert!(begin.elapsed() < LIMIT, "{}", nic.log().unwrap());
        std::thread::sleep(Duration::from_millis(20));
    }
    let log = nic.log().unwrap();
    assert!(log.contains("the tap of the NIC was deleted"), "{log}");
}

#[test]
fn guests_do_not_notice_that_the_processes_of_their_nics_are_killed() {
    let bridge = Bridge::add("lab-swbr");
    let macs = ["52:54:00:5e:53:01", "52:54:00:5e:53:02"];
    let on = |mac| ["--bridge", bridge.0, "--mac", mac];
    let words = [&on(macs[0])[..], &["--split", "--queue-pairs", "2"]].concat();
    let split = Swnic::start("lab-sw0", &words).unwrap();
    let packed = Swnic::start("lab-sw1", &on(macs[1])).unwrap();
    // While no driver runs, the worker does not use the tap.
    for nic in [&split, &packed] {
        delete_tap(nic, false);
    }
    let mut guest = start(&split, 1);
    let mut peer = start(&packed, 1);

    let [_, worker] = split.processes().unwrap();
    split.worker_is_confined().unwrap();
    let root = std::fs::read_dir(format!("/proc/{worker}/root")).unwrap();
    assert_eq!(root.count(), 0);

    peer.command("echo-on").unwrap();
    flood_on(&mut guest, "eth0", macs[1]);
    let mut kills = kill_each([&split, &packed], 10, |[_, worker]| worker);
    // One that is stopped is replaced, too.
    let [_, worker] = packed.processes().unwrap();
    kill_process(worker, Signal::STOP).unwrap();
    packed.await_other_worker(worker).unwrap();
    kills += 1;
    // A killed worker loses at most one frame of each of its queues.
    end_flood(&mut guest, 2 * kills);

    // The process that starts workers is replaced, too. It loses the frames in its tap, and those
    // that the guests send until another one has the tap: at most the window twice.
    flood_on(&mut guest, "eth0", macs[1]);
    let kills = kill_each([&split, &packed], 3, |[server, _]| server);
    // The guest sends again after two seconds of silence.
    std::thread::sleep(Duration::from_secs(4));
    end_flood(&mut guest, kills * 2 * 64);
    peer.command("echo-off").unwrap();

    // A tap that others delete is created and connected again, also if the bridge is down first.
    for (nic, is_down) in [(&split, false), (&packed, true)] {
        delete_tap(nic, is_down);
    }
    // The bridge learns the carrier of a new port within a second.
    std::thread::sleep(Duration::from_secs(2));
    let frames = Frames {
        count: 200,
        size: 300,
        window: 8,
    };
    exchange_between(&mut guest, &mut peer, macs[1], frames).unwrap();
    for guest in [guest, peer] {
        assert_eq!(guest.power_off().unwrap().code(), Some(0));
    }
}

/// UDP from many ports of the bridge to a guest, which needs no IP address.
struct Flows {
    sockets: Vec<UdpSocket>,
    neighbour: String,
}

impl Flows {
    fn new(bridge: &Bridge, mac: &str) -> Self {
        let [own, guest] = ["10.53.0.1", "10.53.0.2"];
        ip(&format!("addr add {own}/24 dev {}", bridge.0));
        let sockets = (0..64).map(|_| {
            let socket = UdpSocket::bind((own, 0)).unwrap();
            socket.connect((guest, 9)).unwrap();
            socket
        });
        Self {
            sockets: sockets.collect(),
            neighbour: format!("{guest} lladdr {mac} nud permanent dev {}", bridge.0),
        }
    }

    /// Sends some datagrams of each flow. Returns their number.
    fn send(&self) -> u64 {
        const ROUNDS: u64 = 8;
        // A new port changes the address of the bridge, which deletes its neighbours.
        ip(&format!("neigh replace {}", self.neighbour));
        for _ in 0..ROUNDS {
            for socket in &self.sockets {
                socket.send(b"flow").unwrap();
            }
            // The guest takes them before the queue of the tap is full.
            std::thread::sleep(Duration::from_millis(50));
        }
        ROUNDS * u64::try_from(self.sockets.len()).unwrap()
    }
}

/// Checks that all frames of all flows arrive, and that each of the NIC's threads moves some.
#[track_caller]
fn assert_flows_arrive(nic: &Swnic, guest: &mut Guest, flows: &Flows) {
    let mut received = || {
        let link = guest.command("link").unwrap();
        link["nics"][0]["rx_packets"].as_u64().unwrap()
    };
    let (times, before, begin) = (nic.pair_times().unwrap(), received(), Instant::now());
    let sent = flows.send();
    while received() < before + sent {
        assert!(begin.elapsed() < LIMIT, "{} of {sent}", received() - before);
        std::thread::sleep(Duration::from_millis(20));
    }
    let after = nic.pair_times().unwrap();
    let moved: Vec<Duration> = after
        .iter()
        .zip(times)
        .map(|(now, old)| *now - old)
        .collect();
    println!("{moved:?}");
    assert!(moved.iter().all(|time| !time.is_zero()));
}

/// Number of queues of the tap `lab-sw0` that get frames.
#[track_caller]
fn attached_queues() -> usize {
    let queues = std::fs::read_dir("/sys/class/net/lab-sw0/queues").unwrap();
    let names = queues.map(|queue| queue.unwrap().file_name());
    let received = |name: &std::ffi::OsString| name.to_string_lossy().starts_with("rx-");
    names.filter(received).count()
}

#[test]
fn each_queue_pair_has_a_thread_that_moves_its_flows() {
    let bridge = Bridge::add("lab-swbr");
    let macs = ["52:54:00:5e:53:01", "52:54:00:5e:53:02"];
    let on = |mac| ["--bridge", bridge.0, "--mac", mac];
    let flows = Flows::new(&bridge, macs[0]);
    let of_peer = Swnic::start("lab-sw1", &on(macs[1])).unwrap();
    let mut peer = start(&of_peer, 1);
    peer.command("echo-on").unwrap();
    for (pairs, processors, options) in [
        (2, 2, &["--split"][..]),
        (4, 4, &["--poll", "30"]),
        // Linux fills the receive queues of all pairs.
        (3, 1, &[]),
    ] {
        let number = pairs.to_string();
        let words = [&on(macs[0])[..], &["--queue-pairs", &number], options].concat();
        let nic = Swnic::start("lab-sw0", &words).unwrap();
        let mut guest = start(&nic, processors);
        assert_eq!(nic.pair_times().unwrap().len(), pairs);
        assert_eq!(attached_queues(), pairs);
        assert_flows_arrive(&nic, &mut guest, &flows);

        // Workers end under traffic of all pairs in both directions.
        flood_on(&mut guest, "eth0", macs[1]);
        let signals = [Signal::KILL, Signal::STOP, Signal::KILL];
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let begin = Instant::now();
                while !is_over.load(Ordering::Relaxed) && begin.elapsed() < LIMIT {
                    flows.send();
                }
            });
            for signal in signals {
                std::thread::sleep(Duration::from_millis(300));
                let [_, worker] = nic.processes().unwrap();
                kill_process(worker, signal).unwrap();
                nic.await_other_worker(worker).unwrap();
            }
            is_over.store(true, Ordering::Relaxed);
        });
        let answer = guest.command_within("flood-off", 6 * LIMIT).unwrap();
        println!("{answer}");
        let count = |what: &str| answer[what].as_u64().unwrap();
        // Each thread may have had a frame of each direction in its hands.
        let most = u64::try_from(signals.len() * pairs).unwrap();
        assert!(count("rx") > 0 && count("corrupt") == 0, "{answer}");
        assert!(
            count("lost") <= most && count("duplicate") <= most,
            "{answer}"
        );
        assert_flows_arrive(&nic, &mut guest, &flows);
        // The next driver begins without queues, and gets them again.
        guest.command("rebind-flooded 1 0").unwrap();
        assert_flows_arrive(&nic, &mut guest, &flows);
        assert_eq!(guest.power_off().unwrap().code(), Some(0));
        // The end of the guest resets the NIC.
        assert_eq!(attached_queues(), 1);
    }
    assert_eq!(peer.power_off().unwrap().code(), Some(0));
}

#[test]
fn the_processes_of_a_broken_device_end_and_the_error_names_the_remedy() {
    let bridge = Bridge::add("lab-swbr");
    let words = ["--bridge", bridge.0];
    let nic = Swnic::start("lab-sw0", &words).unwrap();
    std::fs::write("/sys/class/vduse/lab-sw0/msg_timeout", "1").unwrap();
    let [server, worker] = nic.processes().unwrap();
    nic.signal(Signal::STOP).unwrap();
    for process in [server, worker] {
        kill_process(process, Signal::STOP).unwrap();
    }
    // A user resets the NIC when it opens and closes it. Its message has no answer.
    let _ = std::fs::File::options()
        .read(true)
        .write(true)
        .open(nic.path());

    // The worker does not wait for messages of a device that has none.
    let begin = Instant::now();
    let runs = |process| {
        let status = std::fs::read_to_string(format!("/proc/{process}/status"));
        status.is_ok_and(|status| !status.contains("State:\tZ"))
    };
    for process in [worker, server] {
        kill_process(process, Signal::CONT).unwrap();
        while runs(process) {
            assert!(begin.elapsed() < LIMIT, "{}", nic.log().unwrap());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    // Another process cannot repair the device.
    let wanted = "declared the VDUSE device broken";
    assert!(nic.log().unwrap().contains(wanted));
    nic.signal(Signal::CONT).unwrap();
    std::thread::sleep(Duration::from_secs(2));
    nic.signal(Signal::TERM).unwrap();
    let (status, text) = nic.end().unwrap();
    assert!(status.success(), "{text}");
    let reported = text.matches("cannot repair the NIC").count();
    assert!(reported == 1 && text.contains(wanted), "{text}");
    assert_eq!(remains("lab-sw0"), Vec::<PathBuf>::new());
    Swnic::start("lab-sw0", &words).unwrap();
}

#[test]
fn several_queue_pairs_need_a_tap_with_several_queues() {
    let _bridge = Bridge::add("lab-swbr");
    ip("tuntap add lab-tap0 mode tap");
    ip("tuntap add lab-tap1 mode tap multi_queue");
    let words = |tap, pairs| ["--tap", tap, "--queue-pairs", pairs];
    let text = refused("lab-sw0", &words("lab-tap0", "2"));
    assert!(text.contains("mode tap multi_queue"), "{text}");
    let text = refused("lab-sw0", &words("lab-tap1", "1"));
    assert!(text.contains("a tap with several queues"), "{text}");
    let nics = [("lab-sw0", "lab-tap0", "1"), ("lab-sw1", "lab-tap1", "2")]
        .map(|(name, tap, pairs)| Swnic::start(name, &words(tap, pairs)).unwrap());
    for nic in nics {
        nic.signal(Signal::TERM).unwrap();
        assert!(nic.end().unwrap().0.success());
    }
    ip("link del lab-tap0");
    ip("link del lab-tap1");
}

/// Runs `bellhop nic` with these words.
#[track_caller]
fn nic(words: &str) {
    let mut command = Command::new(std::env::var_os("BELLHOP").unwrap());
    let output = command.arg("nic").args(words.split(' ')).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{words}: {text}");
}

#[test]
fn the_command_ends_when_another_one_deletes_its_nic() {
    let bridge = Bridge::add("lab-swbr");
    let words = ["--bridge", bridge.0];
    let deleted = Swnic::start("lab-sw0", &words).unwrap();
    nic("delete lab-sw0");
    let wanted = "another process has deleted the NIC";
    let (status, text) = deleted.end().unwrap();
    assert!(status.success() && text.contains(wanted), "{text}");
    assert_eq!(remains("lab-sw0"), Vec::<PathBuf>::new());

    // Another NIC of the same name stays.
    let replaced = Swnic::start("lab-sw0", &words).unwrap();
    replaced.signal(Signal::STOP).unwrap();
    nic("delete lab-sw0");
    nic("create lab-sw0 --from software --connect bridge=lab-swbr");
    replaced.signal(Signal::TERM).unwrap();
    replaced.signal(Signal::CONT).unwrap();
    let (status, text) = replaced.end().unwrap();
    assert!(status.success() && text.contains(wanted), "{text}");
    assert_eq!(remains("lab-sw0").len(), 3);
    nic("delete lab-sw0");

    // Another process was killed while it deleted the NIC.
    let incomplete = Swnic::start("lab-sw0", &words).unwrap();
    let record = "/run/bellhop/nics/lab-sw0.json";
    let text = std::fs::read_to_string(record).unwrap();
    std::fs::write(record, text.replace("\"made\"", "\"removing\"")).unwrap();
    std::fs::write("/sys/class/vduse/lab-sw0/msg_timeout", "1").unwrap();
    let [server, _] = incomplete.processes().unwrap();
    kill_process(server, Signal::KILL).unwrap();
    let (status, text) = incomplete.end().unwrap();
    let wanted = "`bellhop nic delete lab-sw0` deletes the rest";
    assert!(!status.success() && text.contains(wanted), "{text}");
    nic("delete lab-sw0");
    assert_eq!(remains("lab-sw0"), Vec::<PathBuf>::new());
}

#[test]
fn a_tap_of_others_stays() {
    let bridge = Bridge::add("lab-swbr");
    let own = Swnic::start("lab-sw0", &["--bridge", bridge.0]).unwrap();
    std::fs::write("/sys/class/vduse/lab-sw0/msg_timeout", "1").unwrap();
    let [server, _] = own.processes().unwrap();
    own.signal(Signal::STOP).unwrap();
    kill_process(server, Signal::KILL).unwrap();
    ip("link del lab-sw0");
    for words in ["tuntap add lab-sw0 mode tap", "link add lab-sw0 type dummy"] {
        ip(words);
        own.signal(Signal::CONT).unwrap();
        // The command does not use it either.
        std::thread::sleep(Duration::from_secs(3));
        own.processes().unwrap_err();
        own.signal(Signal::STOP).unwrap();
        if words.contains("tap") {
            ip("link del lab-sw0");
        }
    }
    own.signal(Signal::KILL).unwrap();
    let (_, text) = own.end().unwrap();
    let reported = text.matches("lab-sw0 is not the NIC's tap").count();
    assert_eq!(reported, 1, "{text}");
    nic("delete lab-sw0");
    assert_eq!(remains("lab-sw0"), [Path::new("/sys/class/net/lab-sw0")]);
    ip("link del lab-sw0");
}

#[test]
fn a_nic_stays_after_its_command_is_killed_and_names_are_not_shared() {
    let bridge = Bridge::add("lab-swbr");
    let words = ["--bridge", bridge.0];
    let first = Swnic::start("lab-sw0", &words).unwrap();
    let text = refused("lab-sw0", &words);
    assert!(text.contains("there is a NIC lab-sw0 already"), "{text}");
    let device = std::fs::File::options()
        .read(true)
        .write(true)
        .open(first.path())
        .unwrap();
    first.signal(Signal::KILL).unwrap();
    assert!(!first.end().unwrap().0.success());
    assert_eq!(remains("lab-sw0").len(), 3);
    let config = Command::new("vdpa")
        .args(["dev", "config", "show", "lab-sw0"])
        .output();
    let config = String::from_utf8(config.unwrap().stdout).unwrap();
    assert!(
        config.contains("mac 52:") && config.contains("mtu 9000"),
        "{config}"
    );

    // A VM still has the device: the error names its process.
    let delete = || {
        let mut command = Command::new(std::env::var_os("BELLHOP").unwrap());
        let output = command.args(["nic", "delete", "lab-sw0"]).output().unwrap();
        (
            output.status.success(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    };
    let (deleted, text) = delete();
    assert!(
        !deleted && text.contains(&std::process::id().to_string()),
        "{text}"
    );
    drop(device);
    // It is deleted also if its processes are stopped.
    for process in swnic::processes("lab-sw0").unwrap() {
        kill_process(process, Signal::STOP).unwrap();
    }
    let begin = Instant::now();
    assert_eq!(delete(), (true, String::new()));
    assert!(begin.elapsed() < LIMIT, "{:?}", begin.elapsed());
    assert_eq!(remains("lab-sw0"), Vec::<PathBuf>::new());

    // A failure names its cause and leaves nothing.
    let text = refused("lab-sw0", &["--bridge", "lab-nobr"]);
    assert!(text.contains("lab-nobr"), "{text}");
    assert_eq!(remains("lab-sw0"), Vec::<PathBuf>::new());
}

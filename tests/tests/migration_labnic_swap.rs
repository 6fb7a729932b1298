//! Hot swap on the lab NIC: event index, doorbells, several queue pairs and buffers in flight. Some
//! devices cannot be suspended, and one fails at the last moment.
//!
//! The guest verifies each returned frame, and its peer on the switch records when frames
//! arrive. The length of a gap is printed, never asserted: this host is emulated twice.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[allow(dead_code, reason = "other tests use more of it")]
mod labnic_peer;
#[allow(dead_code, reason = "other tests use more of it")]
mod swap;

use lab::guest::BellhopArguments;
use lab::labnic::{Labnic, break_down, trouble};
use lab::notice::{Kind, notice};
use lab::sim::SimDevice;
use labnic_peer::Peer;
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};
use swap::Vm;

const MAC: &str = "02:4c:61:62:53:47";
const OTHER_MAC: &str = "02:4c:61:62:53:48";

/// Far longer than any step here takes: a watchdog, not a measurement.
const LIMIT: Duration = Duration::from_secs(240);

/// How many frames of a guest are in flight at once.
const WINDOW: u64 = 16;

/// How many frames must have reached the peer and returned before each change of the device,
/// and after the last one.
const BETWEEN_SWAPS: u64 = 300;

fn small() -> BellhopArguments {
    BellhopArguments::small().unwrap().memory("128M")
}

fn number(answer: &Value, name: &str) -> u64 {
    answer[name].as_u64().unwrap()
}

/// How long swaps interrupted the frames that the peer receives.
struct Gaps {
    /// For each swap, the longest gap between two frames that overlaps the time from request to
    /// answer.
    of_swaps: Vec<Duration>,
    /// The 99th percentile of gaps that overlap no swap.
    steady_p99: Duration,
}

impl Gaps {
    fn new(arrivals: &[(Instant, u64)], swaps: &[(Instant, Instant)]) -> Self {
        let pauses = arrivals.windows(2).map(|pair| (pair[0].0, pair[1].0));
        let meets = |pause: &(Instant, Instant), swap: &(Instant, Instant)| {
            pause.0 <= swap.1 && swap.0 <= pause.1
        };
        let of_swaps = swaps.iter().map(|swap| {
            let during = pauses.clone().filter(|pause| meets(pause, swap));
            let longest = during.map(|(from, to)| to - from).max();
            longest.unwrap_or_default()
        });
        let mut steady: Vec<Duration> = pauses
            .clone()
            .filter(|pause| !swaps.iter().any(|swap| meets(pause, swap)))
            .map(|(from, to)| to - from)
            .collect();
        steady.sort_unstable();
        Self {
            of_swaps: of_swaps.collect(),
            steady_p99: steady
                .get(steady.len() * 99 / 100)
                .copied()
                .unwrap_or_default(),
        }
    }
}

/// Starts verified frames to the peer and back, until `flood-off`.
fn begin_traffic(vm: &mut Vm) {
    let line = format!("flood-on 300 {WINDOW} eth0 to {}", labnic_peer::MAC);
    vm.guest.command(&line).unwrap();
}

/// Waits until the peer sends frames back again, after any result of the last swap.
#[track_caller]
fn wait_traffic(peer: &Peer) {
    let (before, started) = (peer.echoed(), Instant::now());
    while peer.echoed() < before + BETWEEN_SWAPS {
        assert!(started.elapsed() < LIMIT, "{before} {}", peer.echoed());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Swaps the NIC to and fro while it exchanges frames with the peer, from before the first
/// swap until after the last.
fn swaps_under_traffic(vm: &mut Vm, peer: &Peer, devices: [&SimDevice; 2], swaps: usize) {
    let [first, second] = devices;
    peer.arrivals();
    begin_traffic(vm);
    let mut times = Vec::new();
    for round in 0..swaps {
        wait_traffic(peer);
        let asked = Instant::now();
        match round % 2 {
            0 => vm.swap(first, second),
            _ => vm.swap(second, first),
        }
        times.push((asked, Instant::now()));
    }
    wait_traffic(peer);
    let answer = vm.guest.command_within("flood-off", LIMIT).unwrap();
    let gaps = Gaps::new(&peer.arrivals(), &times);
    let longest = gaps.of_swaps.iter().max();
    let said = format!(
        "{answer}\nthe peer's longest pause at a swap: {longest:?} of {:?}; p99 of the \
         others: {:?}\ngaps as the machine saw them: {:?}",
        gaps.of_swaps,
        gaps.steady_p99,
        vm.gaps(),
    );
    notice(Kind::Figure, &said);
    assert!(
        gaps.of_swaps.iter().all(|gap| !gap.is_zero()),
        "a swap without traffic: {said}"
    );
    for what in ["corrupt", "duplicate"] {
        assert_eq!(number(&answer, what), 0, "{what}: {answer}");
    }
    assert!(number(&answer, "rx") > 0, "{answer}");
    // As when a cable is moved to another port: frames in flight to the old one are lost.
    let limit = WINDOW * u64::try_from(swaps).unwrap();
    assert!(number(&answer, "lost") <= limit, "{answer}");
    peer.exchange(&mut vm.guest, 200, 300);
}

/// A kind of device: parameters with their values and defaults, and how often a NIC is swapped
/// between two of them.
struct Making {
    name: &'static str,
    parameters: &'static [(&'static str, &'static str, &'static str)],
    /// An even number: the NIC ends where it began.
    swaps: usize,
}

impl Making {
    fn devices(&self, labnic: &Labnic) -> [SimDevice; 2] {
        for (parameter, value, _) in self.parameters {
            labnic.set(parameter, value).unwrap();
        }
        let devices = [("1", MAC), ("2", OTHER_MAC)].map(|(number, mac)| {
            let name = format!("{}{number}", self.name);
            labnic.add(&name, &["mac", mac]).unwrap()
        });
        for (parameter, _, default) in self.parameters {
            labnic.set(parameter, default).unwrap();
        }
        devices
    }
}

/// With 32 buffers in flight, the ring of 256 would be empty after eight swaps if they stayed with
/// the old device. The device with the fewest features comes first: the others also offer what a
/// driver negotiated there.
const MAKINGS: [Making; 4] = [
    Making {
        name: "late",
        parameters: &[
            ("iotlb_persist", "0", "1"),
            ("set_map", "0", "1"),
            ("address_spaces", "1", "3"),
            ("cvq_group", "0", "1"),
            ("desc_group", "0", "1"),
            ("completion", "delayed", "immediate"),
            ("completion_ms", "5", "20"),
        ],
        swaps: 4,
    },
    Making {
        name: "avail",
        parameters: &[("ring_state", "avail", "avail"), ("rx_prefetch", "32", "0")],
        swaps: 10,
    },
    Making {
        name: "used",
        parameters: &[("ring_state", "used", "avail"), ("rx_prefetch", "32", "0")],
        swaps: 10,
    },
    Making {
        name: "full",
        parameters: &[],
        swaps: 4,
    },
];

/// Swaps a NIC to and fro between two devices of one kind; then its driver restarts.
#[track_caller]
fn to_and_fro(vm: &mut Vm, peer: &Peer, devices: &[SimDevice; 2], swaps: usize, kick: &str) {
    let [first, second] = devices;
    swaps_under_traffic(vm, peer, [first, second], swaps);
    let nic = vm.nic();
    assert_eq!(nic["path"], json!(first.path()), "{nic}");
    assert_eq!(nic["device"]["queues"][1]["kick"], kick, "{nic}");
    vm.guest.command("rebind-flooded 1 0").unwrap();
    peer.exchange(&mut vm.guest, 50, 256);
}

/// One guest, whose NIC also moves from one kind to the next. Doorbells, event indices and receive
/// buffers in flight follow it. Devices that forget their maps or complete late are swapped too.
#[test]
fn a_nic_moves_between_devices_of_each_making() {
    let labnic = Labnic::load(&[]).unwrap();
    let peer = Peer::start(&labnic);
    let [making, others @ ..] = &MAKINGS;
    let mut devices = making.devices(&labnic);
    let mut vm = Vm::start(small(), "fro", &devices[0], ",doorbell=on");
    peer.exchange(&mut vm.guest, 50, 256);
    to_and_fro(&mut vm, &peer, &devices, making.swaps, "Doorbell");
    for making in others {
        let next = making.devices(&labnic);
        vm.swap(&devices[0], &next[0]);
        peer.exchange(&mut vm.guest, 50, 256);
        devices = next;
        to_and_fro(&mut vm, &peer, &devices, making.swaps, "Doorbell");
    }
    vm.power_off();
    drop(devices);
    assert_eq!(trouble().unwrap(), Vec::<String>::new());
}

/// They are reset. Their guest has eventfds instead of doorbells.
#[test]
fn devices_that_cannot_be_suspended_are_reset() {
    let making = Making {
        name: "reset",
        parameters: &[
            ("suspend", "0", "1"),
            ("resume", "0", "1"),
            ("rx_prefetch", "8", "0"),
        ],
        swaps: 4,
    };
    let labnic = Labnic::load(&[]).unwrap();
    let peer = Peer::start(&labnic);
    let devices = making.devices(&labnic);
    let mut vm = Vm::start(small(), "fro", &devices[0], ",doorbell=off");
    peer.exchange(&mut vm.guest, 50, 256);
    to_and_fro(&mut vm, &peer, &devices, making.swaps, "Eventfd");
    vm.power_off();
    drop(devices);
    assert_eq!(trouble().unwrap(), Vec::<String>::new());
}

/// How often a swap of a device with buffers out of order must be refused, and the most attempts.
/// If the guest stops for a while, as it does on a busy machine, the device has no such buffers.
const REFUSED: u32 = 5;
const SWAPS_MAX: u32 = 30;

/// Such a device keeps some of its receive buffers, and the rings do not show which. If another
/// device took the wrong ones, it would write into memory that the guest has reused.
#[test]
fn a_device_that_keeps_buffers_out_of_order_continues_until_it_has_none() {
    let parameters = [("completion", "out_of_order"), ("completion_ms", "5")];
    let labnic = Labnic::load(&parameters).unwrap();
    let peer = Peer::start(&labnic);
    let first = labnic.add("first", &["mac", MAC]).unwrap();
    let second = labnic.add("second", &["mac", OTHER_MAC]).unwrap();
    let mut vm = Vm::start(small(), "order", &first, "");
    peer.exchange(&mut vm.guest, 200, 300);
    // Runs until the last refusal, however long that takes.
    let line = format!("flood-on 300 eth0 to {}", labnic_peer::MAC);
    vm.guest.command(&line).unwrap();
    let (mut here, mut there) = (&first, &second);
    let mut refused = 0;
    for _ in 0..SWAPS_MAX {
        std::thread::sleep(Duration::from_millis(200));
        let body = json!({ "path": there.path() });
        if vm.is_refused(&body, 409, "cannot_hand_over", "unbind and bind") {
            refused += 1
        } else {
            // The driver had not run for so long that all buffers were complete.
            std::mem::swap(&mut here, &mut there)
        }
        if refused == REFUSED {
            break;
        }
    }
    assert_eq!(refused, REFUSED);
    let answer = vm.guest.command_within("flood-off", LIMIT).unwrap();
    println!("{answer}");
    assert!(number(&answer, "tx") > 0, "{answer}");
    // The device was suspended in each attempt and has lost nothing.
    for what in ["lost", "corrupt", "duplicate"] {
        assert_eq!(number(&answer, what), 0, "{what}: {answer}");
    }
    // The remedy that the error names.
    vm.guest.command("rebind-flooded 1 0").unwrap();
    vm.swap(here, there);
    peer.exchange(&mut vm.guest, 200, 300);
    vm.power_off();
    drop((first, second));
    assert_eq!(trouble().unwrap(), Vec::<String>::new());
}

#[test]
fn queue_pairs_and_filters_follow_the_nic() {
    let labnic = Labnic::load(&[]).unwrap();
    let peer = Peer::start(&labnic);
    let add = |name, mac, pairs| labnic.add(name, &["mac", mac, "max_vqp", pairs]).unwrap();
    let (first, second) = (add("first", MAC, "2"), add("second", OTHER_MAC, "2"));
    let larger = add("larger", OTHER_MAC, "4");
    let arguments = small().processors(2);
    let mut vm = Vm::start(arguments, "mq", &first, "");
    vm.guest.command("channels 2 eth0").unwrap();
    peer.exchange(&mut vm.guest, 50, 256);
    let body = json!({ "path": larger.path() });
    vm.refused(&body, 422, "incompatible", "max_vqp");
    swaps_under_traffic(&mut vm, &peer, [&first, &second], 5);
    let nic = vm.nic();
    let queues = nic["device"]["queues"].as_array().unwrap();
    let doorbells = queues.iter().filter(|queue| queue["kick"] == "Doorbell");
    assert_eq!(doorbells.count(), 4, "{nic}");
    // The control queue also continues to work.
    vm.guest.command("channels 1 eth0").unwrap();
    vm.guest.command("channels 2 eth0").unwrap();
    peer.exchange(&mut vm.guest, 50, 256);
    vm.power_off();
}

/// First with a backup device, then without one, then with a missing one.
#[test]
fn a_nic_whose_device_fails_moves_to_its_backup() {
    let labnic = Labnic::load(&[("rx_prefetch", "8")]).unwrap();
    let peer = Peer::start(&labnic);
    let first = labnic.add("first", &["mac", MAC]).unwrap();
    let second = labnic.add("second", &["mac", OTHER_MAC]).unwrap();
    let options = format!(",backup={}", second.path().display());
    let mut vm = Vm::start(small(), "backup", &first, &options);
    peer.exchange(&mut vm.guest, 50, 256);
    begin_traffic(&mut vm);
    wait_traffic(&peer);
    break_down(&first).unwrap();
    let nic = vm.failed_over();
    assert_eq!(nic["last_failover"]["state"], "Done", "{nic}");
    assert_eq!(nic["last_failover"]["from"], json!(first.path()), "{nic}");
    assert_eq!(nic["path"], json!(second.path()), "{nic}");
    assert_eq!(nic["backup"], Value::Null, "{nic}");
    wait_traffic(&peer);
    let answer = vm.guest.command_within("flood-off", LIMIT).unwrap();
    println!("{answer}");
    // Frames in flight in the device are lost or sent again: a frame may come twice.
    assert_eq!(number(&answer, "corrupt"), 0, "{answer}");
    assert!(number(&answer, "rx") > 0, "{answer}");
    assert!(number(&answer, "lost") <= WINDOW, "{answer}");
    let nic = vm.nic();
    // DRIVER_OK, and no DEVICE_NEEDS_RESET.
    assert_eq!(nic["device"]["status"], 15, "{nic}");
    peer.exchange(&mut vm.guest, 50, 256);
    // Its commands reach the other device.
    vm.guest.command(&format!("mac {OTHER_MAC}")).unwrap();
    vm.guest.command(&format!("mac {MAC}")).unwrap();

    // Without a backup, the driver is notified. Then a missing backup is replaced by hand with one
    // that works.
    let told = |vm: &Vm| {
        let begin = Instant::now();
        while vm.nic()["device"]["broken"] != true {
            assert!(begin.elapsed() < LIMIT, "{}", vm.nic());
        }
    };
    break_down(&second).unwrap();
    told(&vm);
    vm.guest.command("rebind-flooded 1 0").unwrap();
    peer.exchange(&mut vm.guest, 50, 256);

    let missing = Path::new("/dev/vhost-vdpa-none");
    vm.set_backup(missing);
    break_down(&second).unwrap();
    told(&vm);
    let nic = vm.failed_over();
    assert_eq!(nic["last_failover"]["state"], "Failed", "{nic}");
    let error = nic["last_failover"]["error"].as_str().unwrap();
    assert!(error.contains("No such file"), "{nic}");
    assert_eq!(nic["path"], json!(second.path()), "{nic}");
    assert_eq!(nic["backup"], json!(missing), "{nic}");
    vm.guest.command("rebind-flooded 1 0").unwrap();
    vm.swap(&second, &first);
    assert_eq!(vm.nic()["last_failover"], Value::Null);
    peer.exchange(&mut vm.guest, 50, 256);
    vm.power_off();
    drop((first, second));
    assert_eq!(trouble().unwrap(), Vec::<String>::new());
}

#[test]
fn the_old_device_continues_if_the_new_one_fails_or_does_not_fit() {
    let labnic = Labnic::load(&[]).unwrap();
    let peer = Peer::start(&labnic);
    let first = labnic.add("first", &["mac", MAC]).unwrap();
    let add = |name, parameter: &str, value, usual| {
        labnic.set(parameter, value).unwrap();
        let device = labnic.add(name, &["mac", OTHER_MAC]).unwrap();
        labnic.set(parameter, usual).unwrap();
        device
    };
    // It accepts all features, and refuses the guest's receive filters when they are replayed.
    let poor = add("poor", "cvq", "poor", "full");
    let forgetful = add("forgetful", "ring_state", "none", "avail");
    let without_index = add("noindex", "event_idx", "0", "1");
    let short = add("short", "queue_size", "128", "256");
    let no_doorbell = add("nobell", "doorbell", "0", "1");
    let mut vm = Vm::start(small(), "fails", &first, "");
    peer.exchange(&mut vm.guest, 50, 256);
    for (device, code, words) in [
        (&poor, "unusable", "the old one continues"),
        (&forgetful, "incompatible", "RING_RESET"),
        (&without_index, "incompatible", "EVENT_IDX"),
        (&short, "incompatible", "takes 128 entries"),
    ] {
        vm.refused(&json!({ "path": device.path() }), 422, code, words);
        peer.exchange(&mut vm.guest, 50, 256);
        assert_eq!(vm.nic()["device"]["queues"][1]["kick"], "Doorbell");
    }
    // The doorbell is not visible to the guest.
    vm.swap(&first, &no_doorbell);
    assert_eq!(vm.nic()["device"]["queues"][1]["kick"], "Eventfd");
    peer.exchange(&mut vm.guest, 50, 256);
    vm.swap(&no_doorbell, &first);
    assert_eq!(vm.nic()["device"]["queues"][1]["kick"], "Doorbell");
    peer.exchange(&mut vm.guest, 50, 256);
    vm.power_off();
}

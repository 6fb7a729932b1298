//! Ring watch: the API's report of queues that hang or only seem to, and the stall kick.
//!
//! The test compares the watch's counts with those of guest and device. Queues hang because the lab
//! NIC holds completions back, loses a kick or never interrupts.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod labnic_peer;

use lab::api::Client;
use lab::guest::{BellhopArguments, Guest};
use lab::labnic::{Labnic, counter, lose_kicks};
use lab::sim::SimDevice;
use lab::traffic::packets;
use labnic_peer::Peer;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const MAC: &str = "02:4c:61:62:53:47";
const HANGING_MACS: [&str; 4] = [
    "02:4c:61:62:53:48",
    "02:4c:61:62:53:49",
    "02:4c:61:62:53:4a",
    "02:4c:61:62:53:4b",
];

/// How long a due event may take; the guest is emulated twice.
const LIMIT: Duration = Duration::from_secs(60);

const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;

/// A NIC of the guest: its name in the API, its device, more options.
type Nic<'a> = (&'a str, &'a SimDevice, &'a str);

/// A guest with NICs and the API of its machine.
struct Watched {
    guest: Guest,
    client: Client,
}

impl Watched {
    fn start(name: &str, nics: &[Nic<'_>], disk: Option<&str>) -> Self {
        let file = format!("lab-watch-{name}-{}.socket", std::process::id());
        let socket = std::env::temp_dir().join(file);
        let mut arguments = BellhopArguments::small()
            .unwrap()
            .memory("128M")
            .argument("--api-socket", socket.to_str().unwrap())
            .argument("--log-level", "info")
            .silence(Duration::from_secs(120));
        for (id, device, options) in nics {
            let nic = format!("path={},id={id}{options}", device.path().display());
            arguments = arguments.argument("--vdpa", &nic);
        }
        if let Some(disk) = disk {
            arguments = arguments.argument("--disk", disk);
        }
        Self {
            guest: Guest::start(&arguments).unwrap(),
            client: Client::new(&socket),
        }
    }

    fn queue(&self, nic: &str, queue: usize) -> Value {
        let path = format!("/v1/vm/nics/{nic}");
        let nic = self.client.get(&path).unwrap();
        nic["device"]["queues"][queue]["watch"].clone()
    }

    /// A sample of the metrics.
    fn metric(&self, name: &str, device: &str, queue: usize) -> u64 {
        let text = self.client.get("/v1/metrics").unwrap();
        let text = text.as_str().unwrap();
        let sample = format!("{name}{{device=\"{device}\",queue=\"{queue}\"}} ");
        let value = text.lines().find_map(|line| line.strip_prefix(&sample));
        value
            .unwrap_or_else(|| panic!("{sample}\n{text}"))
            .parse()
            .unwrap()
    }

    /// Follows the alarms, as a client of the API does, until `is_so` accepts the current ones.
    #[track_caller]
    fn follow_alarms(&self, mut is_so: impl FnMut(&[Value]) -> bool) {
        let start = Instant::now();
        let mut seen = json!(0);
        loop {
            let path = format!("/v1/vm/watch?since={seen}&timeout_s=5");
            let vm = self.client.get(&path).unwrap();
            if is_so(vm["alarms"].as_array().unwrap()) {
                return;
            }
            assert!(start.elapsed() < LIMIT, "{vm:#}");
            seen = vm["generation"].clone();
        }
    }

    /// Waits until exactly these alarms are raised.
    #[track_caller]
    fn wait_alarms(&self, wanted: &[Value]) {
        self.follow_alarms(|alarms| alarms == wanted);
    }

    /// Waits until each of these alarms was raised, at the same time or not.
    #[track_caller]
    fn wait_each_alarm(&self, wanted: &[Value]) {
        let mut missing = wanted.to_vec();
        self.follow_alarms(|alarms| {
            missing.retain(|one| !alarms.contains(one));
            missing.is_empty()
        });
    }

    /// Waits until the guest has sent the frames of its own accord.
    #[track_caller]
    fn wait_quiet(&self, nics: &[&str]) {
        let start = Instant::now();
        let mut quiet = 0;
        while quiet < 3 {
            let queues = nics.iter().map(|nic| self.queue(nic, TRANSMIT));
            let queues: Vec<Value> = queues.collect();
            let still = queues
                .iter()
                .all(|queue| queue["state"] == "Idle" && queue["in_flight"] == 0);
            quiet = if still { quiet + 1 } else { 0 };
            assert!(start.elapsed() < LIMIT, "{queues:?}");
            std::thread::sleep(Duration::from_secs(1));
        }
    }

    /// Sends one frame through the guest's NIC of this number.
    fn send_one(&mut self, number: usize) {
        let line = format!("pace 1 64 0 eth{number}");
        self.guest.command(&line).unwrap();
    }

    /// Makes the guest send frames through a NIC to the peer, which sends them back.
    #[track_caller]
    fn exchange(&mut self, number: usize) {
        let line = format!("frames 50 256 16 eth{number} to {}", labnic_peer::MAC);
        let said = self.guest.command(&line).unwrap();
        for (name, wanted) in [("tx", 50), ("rx", 50), ("corrupt", 0), ("lost", 0)] {
            assert_eq!(said[name], wanted, "eth{number}: {name}: {said}");
        }
    }

    #[track_caller]
    fn power_off(self) {
        assert!(self.guest.power_off().unwrap().success());
    }
}

fn alarm(device: &str, queue: usize, alarm: &str) -> Value {
    json!({ "device": device, "queue": queue, "alarm": alarm })
}

/// Waits for samples: they are a second apart, and the machine has other work.
fn let_samples_come() {
    std::thread::sleep(Duration::from_millis(2500));
}

#[test]
fn counters_match_events_and_idle_queues_raise_no_alarm() {
    let labnic = Labnic::load(&[]).unwrap();
    let peer = Peer::start(&labnic);
    let device = labnic.add("watch", &["mac", MAC]).unwrap();
    let image = std::env::temp_dir().join(format!("lab-watch-{}.img", std::process::id()));
    std::fs::write(&image, vec![0; 1 << 20]).unwrap();
    let disk = format!("path={},id=disk", image.display());
    let mut watched = Watched::start("counts", &[("nic", &device, "")], Some(&disk));
    peer.exchange(&mut watched.guest, 50, 256);

    // Both sides also count frames that the guest sends of its own accord.
    const FRAMES: u64 = 600;
    let completed = |watched: &Watched| {
        let_samples_come();
        [RECEIVE, TRANSMIT]
            .map(|queue| watched.metric("bellhop_queue_completed_total", "nic", queue))
    };
    let (before, device_before) = (completed(&watched), packets(&device).unwrap());
    peer.exchange(&mut watched.guest, FRAMES, 256);
    let (after, device_after) = (completed(&watched), packets(&device).unwrap());
    let by_device = [
        device_after.received - device_before.received,
        device_after.transmitted - device_before.transmitted,
    ];
    let by_watch = [after[0] - before[0], after[1] - before[1]];
    println!("frames by the device {by_device:?}, by the watch {by_watch:?}");
    assert_eq!(by_watch, by_device);
    assert!(by_watch.iter().all(|count| *count >= FRAMES));
    // The guest may send a frame of its own between two reads, but stops soon.
    let started = Instant::now();
    loop {
        let posted = watched.metric("bellhop_queue_posted_total", "nic", TRANSMIT);
        let after = completed(&watched)[TRANSMIT];
        if posted == after {
            break;
        }
        assert!(
            started.elapsed() < LIMIT,
            "posted {posted}, completed {after}"
        );
    }

    // The rate of a paced sender, by the watch and by the guest.
    let line = "pace 600 64 10000 eth0";
    watched.guest.send(line).unwrap();
    let_samples_come();
    let rates = [(); 4].map(|()| {
        std::thread::sleep(Duration::from_secs(1));
        let queue = watched.queue("nic", TRANSMIT);
        assert_eq!(queue["state"], "Moving", "{queue}");
        queue["completed_per_s"].as_u64().unwrap()
    });
    let paced = watched.guest.answer(line, LIMIT).unwrap();
    let sent = paced["tx"].as_u64().unwrap();
    let rate = sent * 1_000_000 / paced["elapsed_us"].as_u64().unwrap();
    println!("frames per second by the watch {rates:?}, by the guest {rate}");
    let mean = rates.iter().sum::<u64>() / 4;
    assert!(
        mean > rate / 2 && mean < rate * 2,
        "{rates:?} against {rate}"
    );

    // The watch also covers disks.
    watched.guest.command("disk-read vda").unwrap();
    let_samples_come();
    assert!(watched.metric("bellhop_queue_completed_total", "disk", 0) > 0);

    // The ring is full of waiting buffers, without an alarm: one would come after 5 s and two
    // samples.
    watched.wait_quiet(&["nic"]);
    let generation = watched.client.get("/v1/vm").unwrap()["generation"].clone();
    let path = format!("/v1/vm/watch?since={generation}&timeout_s=8");
    let vm = watched.client.get(&path).unwrap();
    assert_eq!(
        (&vm["generation"], &vm["alarms"]),
        (&generation, &json!([]))
    );
    let queue = watched.queue("nic", RECEIVE);
    assert_eq!(queue["state"], "Idle", "{queue}");
    assert!(queue["in_flight"].as_u64().unwrap() > 0, "{queue}");
    assert!(!watched.guest.console().contains("queue 1 of nic"));
    watched.power_off();
    std::fs::remove_file(&image).unwrap();
}

/// One guest with four NICs, each of which hangs in its own way at the same time:
///
/// | NIC | what is lost | stall kick | the alarm |
/// |---|---|---|---|
/// | `alone` | a kick | no | stays |
/// | `kick` | a kick | yes | ends with the stall kick |
/// | `bell` | a doorbell | yes | ends with the stall kick |
/// | `held` | nothing: the device completes after 10 s | no | ends with the completion |
#[test]
fn a_queue_that_hangs_is_an_alarm_until_it_continues_or_is_kicked() {
    const ALONE: usize = 0;
    const HELD: usize = 3;
    const NAMES: [&str; 4] = ["alone", "kick", "bell", "held"];
    let labnic = Labnic::load(&[]).unwrap();
    let peer = Peer::start(&labnic);
    let add = |number: usize| {
        let mac = HANGING_MACS[number];
        labnic.add(NAMES[number], &["mac", mac]).unwrap()
    };
    let losing = [0, 1, 2].map(add);
    labnic.set("completion_ms", "10000").unwrap();
    labnic.set("completion", "delayed").unwrap();
    let held = add(HELD);
    let nics = [
        (NAMES[0], &losing[0], ""),
        (NAMES[1], &losing[1], ",doorbell=off,stall_kick=on"),
        (NAMES[2], &losing[2], ",doorbell=on,stall_kick=on"),
        (NAMES[HELD], &held, ""),
    ];
    let mut watched = Watched::start("hang", &nics, None);
    let mut echoed = peer.echoed();
    for number in 0..losing.len() {
        watched.exchange(number);
        assert!(peer.echoed() >= echoed + 50);
        echoed = peer.echoed();
    }
    watched.wait_quiet(&NAMES);
    watched.wait_alarms(&[]);

    // The NIC without `stall_kick` hangs first.
    let sent_before = [0, 1, 2].map(|number| {
        let device = &losing[number];
        let before = packets(device).unwrap().transmitted;
        lose_kicks(device, 1).unwrap();
        watched.send_one(number);
        let left = counter(device, "drop_kicks").unwrap();
        assert_eq!(left, 0, "the kick of {} was lost", NAMES[number]);
        assert_eq!(packets(device).unwrap().transmitted, before);
        before
    });
    let sent = Instant::now();
    watched.send_one(HELD);
    watched.wait_each_alarm(&NAMES.map(|name| alarm(name, TRANSMIT, "Stuck")));
    let queue = watched.queue(NAMES[HELD], TRANSMIT);
    assert_eq!(
        (&queue["state"], &queue["stall_kicks"]),
        (&json!("Stuck"), &json!(0)),
        "{queue}"
    );
    assert!(queue["stuck_for_s"].as_u64().unwrap() >= 5, "{queue}");
    assert!(queue["in_flight"].as_u64().unwrap() >= 1, "{queue}");
    let alarmed = |watched: &Watched, nic| watched.metric("bellhop_queue_alarm", nic, TRANSMIT);
    assert_eq!(alarmed(&watched, NAMES[HELD]), 1);

    // All other queues have recovered. The first one has no `stall_kick`.
    watched.wait_alarms(&[alarm(NAMES[ALONE], TRANSMIT, "Stuck")]);
    let took = sent.elapsed();
    assert!(took >= Duration::from_secs(9), "{took:?}");
    assert_eq!(alarmed(&watched, NAMES[HELD]), 0);
    assert_eq!(alarmed(&watched, NAMES[ALONE]), 1);
    for (number, device) in losing.iter().enumerate() {
        let nic = NAMES[number];
        let stall_kicks = u64::from(number != ALONE);
        assert_eq!(
            watched.queue(nic, TRANSMIT)["stall_kicks"],
            stall_kicks,
            "{nic}"
        );
        let counted = watched.metric("bellhop_queue_stall_kicks_total", nic, TRANSMIT);
        assert_eq!(counted, stall_kicks, "{nic}");
        let transmitted = packets(device).unwrap().transmitted;
        if number == ALONE {
            assert_eq!(transmitted, sent_before[number]);
        } else {
            assert!(transmitted > sent_before[number], "{nic}");
            watched.exchange(number);
        }
    }
    let said = watched.guest.console();
    let says = |words: &str| said.lines().find(|line| line.contains(words)).unwrap();
    assert!(says("queue 1 of held is stuck").contains("WARN"), "{said}");
    assert!(says("queue 1 of held recovered").contains("INFO"), "{said}");
    watched.power_off();
}

#[test]
fn a_lost_interrupt_is_repeated() {
    let labnic = Labnic::load(&[]).unwrap();
    // The peer polls, but must be notified.
    let peer = Peer::start(&labnic);
    labnic.set("faults", "lost_call").unwrap();
    let device = labnic.add("deaf", &["mac", MAC]).unwrap();
    let mut watched = Watched::start("deaf", &[("nic", &device, ",stall_kick=on")], None);
    // The peer learns the guest's address; the guest misses the answer.
    let line = format!("frames 1 64 1 eth0 to {}", labnic_peer::MAC);
    watched.guest.command(&line).unwrap();
    let given = watched.metric("bellhop_queue_posted_total", "nic", RECEIVE);
    peer.flood(true);
    watched.wait_alarms(&[alarm("nic", RECEIVE, "DriverStalled")]);
    let queue = watched.queue("nic", RECEIVE);
    assert_eq!(queue["stall_kicks"], 1, "{queue}");
    // The driver has looked and returned the buffers to the device.
    watched.wait_alarms(&[]);
    peer.flood(false);
    assert!(watched.metric("bellhop_queue_posted_total", "nic", RECEIVE) > given);
    watched.power_off();
}

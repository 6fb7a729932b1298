//! Ring watch: what the API says of queues that hang, or only seem to, and the rescue.
//!
//! What the watch counted is compared with what guest and device counted; queues hang because the
//! lab NIC holds completions back, loses a kick or never interrupts.

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

/// How long something may take that is due; the guest is emulated twice.
const LIMIT: Duration = Duration::from_secs(60);

/// Longer than a queue must hang for an alarm, and the samples around it.
const ALARM_DUE: Duration = Duration::from_secs(10);

const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;

/// A guest with the NIC `nic` and the API of its machine.
struct Watched {
    guest: Guest,
    client: Client,
}

impl Watched {
    fn start(name: &str, device: &SimDevice, options: &str, disk: Option<&str>) -> Self {
        let file = format!("lab-watch-{name}-{}.socket", std::process::id());
        let socket = std::env::temp_dir().join(file);
        let nic = format!("path={},id=nic{options}", device.path().display());
        let mut arguments = BellhopArguments::small()
            .unwrap()
            .argument("--vdpa", &nic)
            .argument("--api-socket", socket.to_str().unwrap())
            .argument("--log-level", "info")
            .silence(Duration::from_secs(120));
        if let Some(disk) = disk {
            arguments = arguments.argument("--disk", disk);
        }
        Self {
            guest: Guest::start(&arguments).unwrap(),
            client: Client::new(&socket),
        }
    }

    fn queue(&self, queue: usize) -> Value {
        let nic = self.client.get("/v1/vm/nics/nic").unwrap();
        nic["device"]["queues"][queue]["watch"].clone()
    }

    fn alarms(&self) -> Value {
        self.client.get("/v1/vm").unwrap()["alarms"].clone()
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

    /// Waits, as a client of the API does, until the alarms are these; how long that took.
    #[track_caller]
    fn wait_alarms(&self, wanted: &Value) -> Duration {
        let start = Instant::now();
        let mut seen = json!(0);
        loop {
            let path = format!("/v1/vm/watch?since={seen}&timeout_s=5");
            let vm = self.client.get(&path).unwrap();
            if vm["alarms"] == *wanted {
                return start.elapsed();
            }
            assert!(start.elapsed() < LIMIT, "{vm} {}", self.queue(TRANSMIT));
            seen = vm["generation"].clone();
        }
    }

    /// Waits until the guest has sent all that it wanted to on its own.
    #[track_caller]
    fn wait_quiet(&self) {
        let start = Instant::now();
        let mut quiet = 0;
        while quiet < 3 {
            let queue = self.queue(TRANSMIT);
            let still = queue["state"] == "Idle" && queue["in_flight"] == 0;
            quiet = if still { quiet + 1 } else { 0 };
            assert!(start.elapsed() < LIMIT, "{queue}");
            std::thread::sleep(Duration::from_secs(1));
        }
    }

    fn send_one(&mut self) {
        self.guest.command("pace 1 64 0 eth0").unwrap();
    }

    #[track_caller]
    fn power_off(self) {
        assert!(self.guest.power_off().unwrap().success());
    }
}

fn alarm(queue: usize, alarm: &str) -> Value {
    json!([{ "device": "nic", "queue": queue, "alarm": alarm }])
}

/// Samples are a second apart, and the machine has other work.
fn let_samples_come() {
    std::thread::sleep(Duration::from_millis(2500));
}

#[test]
fn what_is_counted_is_what_happened_and_idle_queues_are_well() {
    let labnic = Labnic::load(&[]).unwrap();
    let peer = Peer::start(&labnic);
    let device = labnic.add("watch", &["mac", MAC]).unwrap();
    let image = std::env::temp_dir().join(format!("lab-watch-{}.img", std::process::id()));
    std::fs::write(&image, vec![0; 1 << 20]).unwrap();
    let disk = format!("path={},id=disk", image.display());
    let mut watched = Watched::start("counts", &device, "", Some(&disk));
    peer.exchange(&mut watched.guest, 50, 256);

    // Whatever the guest sends on its own, both sides count.
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
    // The guest may send a frame of its own between two questions: soon it does not.
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

    // The rate of a sender that paces itself, by the watch and by the guest.
    let line = "pace 600 64 10000 eth0";
    watched.guest.send(line).unwrap();
    let_samples_come();
    let rates = [(); 4].map(|()| {
        std::thread::sleep(Duration::from_secs(1));
        let queue = watched.queue(TRANSMIT);
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

    // A disk is watched, too.
    watched.guest.command("disk-read vda").unwrap();
    let_samples_come();
    assert!(watched.metric("bellhop_queue_completed_total", "disk", 0) > 0);

    // Full of buffers that wait, and no alarm.
    watched.wait_quiet();
    let generation = watched.client.get("/v1/vm").unwrap()["generation"].clone();
    let path = format!("/v1/vm/watch?since={generation}&timeout_s=15");
    let vm = watched.client.get(&path).unwrap();
    assert_eq!(
        (&vm["generation"], &vm["alarms"]),
        (&generation, &json!([]))
    );
    let queue = watched.queue(RECEIVE);
    assert_eq!(queue["state"], "Idle", "{queue}");
    assert!(queue["in_flight"].as_u64().unwrap() > 0, "{queue}");
    assert!(!watched.guest.console().contains("queue 1 of nic"));
    watched.power_off();
    std::fs::remove_file(&image).unwrap();
}

#[test]
fn a_completion_that_does_not_come_is_an_alarm_until_it_does() {
    let labnic = Labnic::load(&[("completion", "delayed"), ("completion_ms", "10000")]).unwrap();
    let device = labnic.add("held", &["mac", MAC]).unwrap();
    let mut watched = Watched::start("held", &device, "", None);
    watched.wait_quiet();
    watched.wait_alarms(&json!([]));
    watched.send_one();
    let sent = Instant::now();
    let began = watched.wait_alarms(&alarm(TRANSMIT, "Stuck"));
    println!("announced after {began:?}");
    assert!(
        began >= Duration::from_secs(4) && began < ALARM_DUE,
        "{began:?}"
    );
    let queue = watched.queue(TRANSMIT);
    assert_eq!(
        (&queue["state"], &queue["rescues"]),
        (&json!("Stuck"), &json!(0))
    );
    assert!(queue["stuck_for_s"].as_u64().unwrap() >= 5, "{queue}");
    assert!(queue["in_flight"].as_u64().unwrap() >= 1, "{queue}");
    assert_eq!(watched.metric("bellhop_queue_alarm", "nic", TRANSMIT), 1);
    watched.wait_alarms(&json!([]));
    assert!(
        sent.elapsed() >= Duration::from_secs(9),
        "{:?}",
        sent.elapsed()
    );
    assert_eq!(watched.metric("bellhop_queue_alarm", "nic", TRANSMIT), 0);
    let said = watched.guest.console();
    let says = |words: &str| said.lines().find(|line| line.contains(words)).unwrap();
    assert!(says("queue 1 of nic is stuck").contains("WARN"), "{said}");
    assert!(
        says("queue 1 of nic is well again").contains("INFO"),
        "{said}"
    );
    watched.power_off();
}

fn a_kick_is_lost(options: &str, rescued: bool) {
    let labnic = Labnic::load(&[]).unwrap();
    let peer = Peer::start(&labnic);
    let device = labnic.add("lost", &["mac", MAC]).unwrap();
    let mut watched = Watched::start("kick", &device, options, None);
    peer.exchange(&mut watched.guest, 50, 256);
    watched.wait_quiet();
    let sent_before = packets(&device).unwrap().transmitted;
    lose_kicks(&device, 1).unwrap();
    watched.send_one();
    assert_eq!(
        counter(&device, "drop_kicks").unwrap(),
        0,
        "the guest's kick was lost"
    );
    assert_eq!(packets(&device).unwrap().transmitted, sent_before);
    watched.wait_alarms(&alarm(TRANSMIT, "Stuck"));
    if rescued {
        watched.wait_alarms(&json!([]));
        assert_eq!(watched.queue(TRANSMIT)["rescues"], 1);
        assert_eq!(
            watched.metric("bellhop_queue_rescues_total", "nic", TRANSMIT),
            1
        );
        assert!(packets(&device).unwrap().transmitted > sent_before);
        peer.exchange(&mut watched.guest, 50, 256);
    } else {
        // Nobody else helps.
        std::thread::sleep(ALARM_DUE);
        assert_eq!(watched.alarms(), alarm(TRANSMIT, "Stuck"));
        assert_eq!(packets(&device).unwrap().transmitted, sent_before);
        assert_eq!(watched.queue(TRANSMIT)["rescues"], 0);
    }
    watched.power_off();
}

#[test]
fn a_lost_doorbell_is_made_good() {
    a_kick_is_lost(",doorbell=on,rescue=on", true);
}

#[test]
fn a_lost_kick_is_made_good() {
    a_kick_is_lost(",doorbell=off,rescue=on", true);
}

#[test]
fn a_lost_kick_stays_lost_if_nobody_asked_for_a_rescue() {
    a_kick_is_lost("", false);
}

#[test]
fn a_lost_interrupt_is_made_good() {
    let labnic = Labnic::load(&[]).unwrap();
    // It polls, and is to be told.
    let peer = Peer::start(&labnic);
    labnic.set("faults", "lost_call").unwrap();
    let device = labnic.add("deaf", &["mac", MAC]).unwrap();
    let mut watched = Watched::start("deaf", &device, ",rescue=on", None);
    // The neighbour learns the guest's address; the guest hears no answer.
    let line = format!("frames 1 64 1 eth0 to {}", labnic_peer::MAC);
    watched.guest.command(&line).unwrap();
    let given = watched.metric("bellhop_queue_posted_total", "nic", RECEIVE);
    peer.flood(true);
    watched.wait_alarms(&alarm(RECEIVE, "DriverStalled"));
    let queue = watched.queue(RECEIVE);
    assert_eq!(queue["rescues"], 1, "{queue}");
    // The driver has looked and given the device what it had before.
    watched.wait_alarms(&json!([]));
    peer.flood(false);
    assert!(watched.metric("bellhop_queue_posted_total", "nic", RECEIVE) > given);
    watched.power_off();
}

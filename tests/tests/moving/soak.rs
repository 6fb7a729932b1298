//! A guest migrates to and fro between two devices at random moments. Meanwhile its memory is
//! written and its frames go to a peer and back, and the test compares all of it at both ends.
//! `cargo lab soak --moves 200` makes scenarios out of many such moves.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lab::endurance::soak;
use lab::guest::{BellhopArguments, Guest};
use lab::messages::messages;
use lab::notice::{Kind, notice};
use lab::openapi::random::Random;
use lab::soak_run::{InFlight, Move, Run};
use lab::threads::StopOnDrop;
use serde_json::{Value, json};

use super::cpu_load::CpuLoad;
use super::{Host, NOTICE, move_to_waiting_as};

/// Frames in flight at once, where the test bounds the number of lost ones.
const WINDOW: u64 = 16;

/// Frames in flight at once, where the device should have unsent ones when the guest stops. Two
/// windows fit into a ring of 256: the guest may give up one of them when it stops.
const WIDE_WINDOW: u64 = 120;

/// The guest's memory: little, because each move reads all of it at both ends, more than once.
const MEMORY_MIB: u64 = 96;

/// How long a boot may be silent.
const SILENCE: Duration = Duration::from_secs(60);

/// Far longer than any step here takes: a watchdog, not a measurement.
const LIMIT: Duration = Duration::from_secs(100);

/// Rewrites 2 MiB continuously, with 100 µs after each page.
const WRITER: &str = "write-on 2 100";

/// VIRTIO_F_RING_PACKED (virtio 1.3, 6).
const RING_PACKED: usize = 34;

/// Rebinds of the driver in one move.
const REBINDS: u64 = 3;

/// The guest's traffic partner, which sends every frame back.
pub(crate) trait TrafficPeer {
    /// Its address.
    fn mac(&self) -> String;
    /// Sends the guest frames as fast as possible.
    fn flood(&mut self, guest: &str);
    /// Stops the flood; all of the guest's frames in that time must have been intact.
    fn calm(&mut self);
    /// The longest time between two of the guest's frames since the last call, if it records their
    /// times.
    fn longest_gap(&mut self) -> Option<Duration> {
        None
    }
    /// Its observations, where it knows more than the guest. It may send nothing back afterwards.
    fn account(&mut self) -> String {
        String::new()
    }
}

/// The guest's activity during a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    /// Checked frames go to and fro.
    Traffic,
    /// So many frames arrive that the driver has no interrupts; commands go to the control queue
    /// without a pause.
    Flooded,
    /// It sends only commands to the control queue, at the highest possible rate.
    Commands,
    /// Frames to and fro and commands, on a host with CPU load. The threads that serve its rings
    /// are late and find many buffers in flight.
    CpuLoaded,
    /// Its driver is unbound from the device and bound again.
    Rebind,
    /// Its cable is pulled and plugged in, at both hosts.
    Link,
    /// It boots.
    Boot,
}

impl Moment {
    const ALL: [Self; 7] = [
        Self::Traffic,
        Self::Flooded,
        Self::Commands,
        Self::CpuLoaded,
        Self::Rebind,
        Self::Link,
        Self::Boot,
    ];

    /// The longest time before the move, in milliseconds.
    const fn longest(self) -> u64 {
        match self {
            Self::Traffic | Self::Flooded | Self::Commands | Self::CpuLoaded | Self::Link => 500,
            Self::Rebind => 300,
            Self::Boot => 3000,
        }
    }

    /// How many frames to the peer and back are in flight; frames that return are counted.
    const fn window(self) -> Option<u64> {
        match self {
            Self::Commands | Self::Boot => None,
            Self::CpuLoaded => Some(WIDE_WINDOW),
            Self::Traffic | Self::Flooded | Self::Rebind | Self::Link => Some(WINDOW),
        }
    }
}

/// Pulls or plugs the cable of a host's device.
pub(crate) type SetLink<'a> = dyn Fn(usize, bool) + Sync + 'a;

/// The hosts and the peer of a scenario.
pub(crate) struct Scene<'a, N> {
    pub(crate) hosts: [Host; 2],
    pub(crate) traffic_peer: N,
    /// `None` where devices have no cable to pull.
    pub(crate) set_link: Option<&'a SetLink<'a>>,
    /// How many frames in flight a move may lose.
    pub(crate) may_lose: u64,
    /// How often a move resets a device or leaves its port: each time, frames in flight may be
    /// lost.
    pub(crate) resets: u64,
    /// True if the guest can migrate while no frame arrives for it. Without traffic on a queue, the
    /// number of buffers in a device that completes out of order is unknown.
    pub(crate) moves_idle: bool,
    /// True if the guest has packed rings.
    pub(crate) packed: bool,
}

/// Milliseconds below `limit`.
fn pause_below(random: &mut Random, limit: u64) -> Duration {
    Duration::from_millis(random.number() % limit.max(1))
}

/// Reports the moments at which this run does not migrate the guest.
fn report_thinned(moments: &[Moment], run: Run) {
    let moved = |number: usize| {
        (0..usize::try_from(run.moves).unwrap())
            .any(|move_| (run.first + move_) % moments.len() == number)
    };
    let left_out: Vec<Moment> = (0..moments.len())
        .filter(|number| !moved(*number))
        .map(|number| moments[number])
        .collect();
    if !left_out.is_empty() {
        let test = std::thread::current();
        let test = test.name().unwrap_or("a scenario").to_owned();
        notice(
            Kind::Thinned,
            format!("{test}: {} moves, none at {left_out:?}", run.moves),
        );
    }
}

/// Migrates a guest once at each moment of a run: the requested run, else all moments in the full
/// run and `run` in the gate.
pub(crate) fn run_soak<N: TrafficPeer>(scene: Scene<'_, N>, arguments: BellhopArguments, run: Run) {
    let moments: Vec<Moment> = Moment::ALL
        .into_iter()
        .filter(|moment| match moment {
            Moment::Link => scene.set_link.is_some() && scene.moves_idle,
            Moment::Commands => scene.moves_idle,
            _ => true,
        })
        .collect();
    let run = if soak() {
        Run {
            first: 0,
            moves: moments.len().try_into().unwrap(),
        }
    } else {
        run
    };
    let run = run.asked_or().unwrap();
    report_thinned(&moments, run);
    let seed = RandomState::new().hash_one(run.moves);
    let arguments = arguments.memory(&format!("{MEMORY_MIB}M"));
    let mut guest = scene.hosts[0].boot(arguments.silence(SILENCE));
    let mac = guest.ready()["nics"][0]["mac"].as_str().unwrap().to_owned();
    let said = messages(&mut guest).unwrap();
    let mut soak_test = SoakTest {
        scene,
        mac,
        said,
        at: 0,
        random: Random::announced(seed),
    };
    soak_test.check(&mut guest);
    ask(&mut guest, WRITER);
    for number in 0..usize::try_from(run.moves).unwrap() {
        let (there, moved) = soak_test.once(guest, moments[(run.first + number) % moments.len()]);
        guest = there;
        soak_test.check(&mut guest);
        println!("{}", moved.line());
    }
    soak_test.end_writer(&mut guest);
    assert!(guest.power_off().unwrap().success());
}

struct SoakTest<'a, N> {
    scene: Scene<'a, N>,
    /// The guest's address.
    mac: String,
    /// The complaints of its kernel after any boot.
    said: Vec<String>,
    /// The index of the guest's host.
    at: usize,
    /// Chooses the times of moves.
    random: Random,
}

impl<N: TrafficPeer> SoakTest<'_, N> {
    /// Checks that each frame goes there and back, and that the guest is unchanged.
    #[track_caller]
    fn check(&mut self, guest: &mut Guest) {
        let line = format!(
            "frames 100 590 {WINDOW} eth0 to {}",
            self.scene.traffic_peer.mac()
        );
        let answer = self.host().answer(guest.command_within(&line, LIMIT));
        for (name, wanted) in [("rx", 100), ("corrupt", 0), ("lost", 0), ("duplicate", 0)] {
            if answer[name] != wanted {
                let traffic_peer = self.scene.traffic_peer.account();
                let info = guest.command_within("info", LIMIT);
                panic!(
                    "{name}: {answer}\n{}\n{}\nits peer: {traffic_peer}\n{info:?}",
                    guest.console(),
                    self.host().account()
                );
            }
        }
        let info = ask(guest, "info");
        assert_eq!(info["nics"][0]["mac"], *self.mac, "{info}");
        // sysfs: one character for each bit, bit 0 first.
        let features = info["nics"][0]["features"].as_str().unwrap().as_bytes();
        assert_eq!(features[RING_PACKED] == b'1', self.scene.packed, "{info}");
        assert_eq!(messages(guest).unwrap(), self.said);
    }

    /// The guest's host.
    fn host(&self) -> &Host {
        &self.scene.hosts[self.at]
    }

    #[track_caller]
    fn end_writer(&self, guest: &mut Guest) {
        let found = ask(guest, "write-off");
        println!("{found}");
        assert_eq!(found["wrong"], 0, "{found}");
    }

    /// How many frames a move at this moment may lose. `None` where the driver or the cable loses
    /// frames at any time, no frames are sent, or the peer's flood fills the receive rings.
    ///
    /// The guest's clock counts the downtime. After each 2 s without an answer, the guest gives up
    /// the frames in flight and sends as many again. Hence the limit is twice the window, plus one
    /// window for each 2 s of the downtime. Two of the `commands` change the guest's address and
    /// set it back. The device drops the frames that return meanwhile: at most one window.
    fn may_lose(&self, moment: Moment, downtime: Duration, commands: Option<u64>) -> Option<u64> {
        let Scene {
            may_lose, resets, ..
        } = self.scene;
        match moment {
            Moment::Flooded | Moment::Rebind | Moment::Link | Moment::Commands | Moment::Boot => {
                None
            }
            Moment::Traffic => Some(may_lose),
            // Commands change the guest's address. A guest that is its own peer receives no frames
            // while it has the other one: the simulator's filter drops them.
            Moment::CpuLoaded if self.scene.traffic_peer.mac() == self.mac => None,
            Moment::CpuLoaded => {
                let window = moment.window().unwrap_or_default();
                let given_up = downtime.as_secs() / 2;
                let filtered = commands.unwrap_or_default() / 2;
                Some(may_lose + window * (2 * resets + given_up + filtered))
            }
        }
    }

    /// Migrates the guest once at one moment.
    fn once(&mut self, mut guest: Guest, moment: Moment) -> (Guest, Move) {
        let pause = pause_below(&mut self.random, moment.longest());
        let peer = self.scene.traffic_peer.mac();
        self.scene.traffic_peer.longest_gap();
        if let Some(window) = moment.window() {
            let line = format!("flood-on 590 {window} eth0 to {peer}");
            ask(&mut guest, &line);
        }
        let mut commands = None;
        let (mut guest, status) = match moment {
            Moment::Traffic => self.go(guest, pause),
            Moment::Flooded => {
                self.scene.traffic_peer.flood(&self.mac);
                let (guest, status, sent) = self.go_commanding(guest, pause);
                self.scene.traffic_peer.calm();
                commands = sent;
                (guest, status)
            }
            Moment::Commands => {
                self.end_writer(&mut guest);
                let cpu_load = CpuLoad::start();
                let (mut guest, status, sent) = self.go_commanding(guest, pause);
                drop(cpu_load);
                commands = sent;
                ask(&mut guest, WRITER);
                (guest, status)
            }
            Moment::CpuLoaded => {
                let cpu_load = CpuLoad::start();
                let (guest, status, sent) = self.go_commanding(guest, pause);
                drop(cpu_load);
                commands = sent;
                (guest, status)
            }
            Moment::Rebind => {
                let line = format!("rebind {REBINDS} to {peer}");
                self.scene.traffic_peer.flood(&self.mac);
                guest.send(&line).unwrap();
                let (mut guest, status) = self.go(guest, pause);
                let rebound = self.host().answer(guest.answer(&line, LIMIT));
                println!("{rebound}");
                assert_eq!(rebound["rebinds"], REBINDS, "{rebound}");
                assert_eq!(rebound["corrupt"], 0, "{rebound}");
                self.scene.traffic_peer.calm();
                (guest, status)
            }
            Moment::Link => {
                let stop = AtomicBool::new(false);
                let mut random = Random::new(self.random.number());
                let (mut guest, status) = std::thread::scope(|scope| {
                    let set_link = self.scene.set_link.unwrap();
                    let stopped = &stop;
                    scope.spawn(move || {
                        while !stopped.load(Ordering::Relaxed) {
                            for up in [false, true] {
                                [0, 1].into_iter().for_each(|host| set_link(host, up));
                                std::thread::sleep(pause_below(&mut random, 100));
                            }
                        }
                    });
                    let _stop = StopOnDrop(&stop);
                    self.go(guest, pause)
                });
                wait_for_carrier(&mut guest);
                (guest, status)
            }
            Moment::Boot => {
                self.end_writer(&mut guest);
                ask(&mut guest, "reboot");
                let (mut guest, status) = self.go(guest, pause);
                guest.wait_ready(SILENCE).unwrap();
                ask(&mut guest, WRITER);
                (guest, status)
            }
        };
        println!("{moment:?} after {pause:?}: {status}");
        if moment == Moment::Traffic
            && let Some(gap) = self.scene.traffic_peer.longest_gap()
        {
            let claimed = &status["downtime_ms"];
            notice(
                Kind::Figure,
                format!("a move stood still for {claimed} ms; its peer's longest gap: {gap:?}"),
            );
        }
        let mut lost = None;
        if moment.window().is_some() {
            let flooded = guest.command_within("flood-off", LIMIT);
            let flooded = self.host().answer(flooded);
            println!("{flooded}");
            for wrong in ["corrupt", "duplicate"] {
                if flooded[wrong] != 0 {
                    let traffic_peer = self.scene.traffic_peer.account();
                    panic!("{wrong}: {flooded}\nits peer: {traffic_peer}");
                }
            }
            let downtime = status["downtime_ms"].as_f64().unwrap();
            let downtime = Duration::from_secs_f64(downtime / 1000.0);
            if let Some(limit) = self.may_lose(moment, downtime, commands) {
                assert!(flooded["rx"].as_u64() > Some(0), "{flooded}");
                lost = flooded["lost"].as_u64();
                assert!(lost <= Some(limit), "at most {limit}: {flooded}");
            }
        }
        let in_flight = &status["in_flight"];
        let count = |kind: &str| in_flight[kind].as_u64().unwrap().try_into().unwrap();
        let moved = Move {
            moment: format!("{moment:?}"),
            after_ms: pause.as_millis().try_into().unwrap(),
            downtime_ms: status["downtime_ms"].as_f64().unwrap(),
            in_flight: InFlight {
                rx: count("rx"),
                tx: count("tx"),
                cvq: count("cvq"),
            },
            lost,
            commands,
        };
        (guest, moved)
    }

    /// Migrates while the guest sends commands to its control queue; also returns their number.
    fn go_commanding(&mut self, mut guest: Guest, pause: Duration) -> (Guest, Value, Option<u64>) {
        ask(&mut guest, "control-on");
        let (mut guest, status) = self.go(guest, pause);
        let commands = guest.command_within("control-off", LIMIT);
        let commands = self.host().answer(commands);
        println!("{commands}");
        assert_eq!(commands["refused"], 0, "{commands}");
        (guest, status, commands["commands"].as_u64())
    }

    fn go(&mut self, guest: Guest, pause: Duration) -> (Guest, Value) {
        std::thread::sleep(pause);
        let there = 1 - self.at;
        let hosts = &self.scene.hosts;
        // The VMMs also compare every byte of its memory. A page that was written without a mark
        // shows here, and not as a guest that crashes some time later.
        let verified = json!({ "verify_memory": true });
        let waiting = hosts[there].wait_as(|command| {
            command.env("BELLHOP_LOG", "info");
        });
        let (from, to) = (&hosts[self.at], &hosts[there]);
        let (guest, status) = move_to_waiting_as(guest, waiting, from, to, verified);
        memory_was_verified(&guest);
        self.at = there;
        (guest, status)
    }
}

/// Checks that the destination's VMM has compared all memory with the source's digest.
#[track_caller]
fn memory_was_verified(guest: &Guest) {
    let begin = Instant::now();
    let size = format!("bytes={}", MEMORY_MIB << 20);
    loop {
        let said = guest.console();
        let mut lines = said.lines();
        if lines.any(|line| line.contains("memory verified") && line.contains(&size)) {
            return;
        }
        // A separate thread reads the console.
        assert!(begin.elapsed() < NOTICE, "no {size} verified: {said}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Sends the guest a command; returns the answer. A guest that the emulation lost never answers,
/// and each minute of waiting costs the soak.
#[track_caller]
fn ask(guest: &mut Guest, line: &str) -> Value {
    guest.command_within(line, LIMIT).unwrap()
}

#[track_caller]
fn wait_for_carrier(guest: &mut Guest) {
    let begin = Instant::now();
    loop {
        let shown = ask(guest, "link");
        if shown["nics"][0]["carrier"] == 1 {
            return;
        }
        assert!(begin.elapsed() < NOTICE, "{shown}");
    }
}

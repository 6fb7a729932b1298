//! Transitions of relays under full traffic between two lab NICs, across their abilities: every
//! frame arrives once, and no interrupt or kick is lost.
//!
//! ```text
//!   guest a (thread) -- rings --> [relays] -- device a --\
//!                                                         switch of the lab NIC (drops nothing)
//!   guest b (thread) -- rings --> [relays] -- device b --/
//!                                 this thread: change, relay, wait until all flows moved, again
//! ```
//! After each change, both directions of all pairs must make progress before the next change. The
//! spurious kick and interrupt of a change would hide the losses of the previous one.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[path = "rings/mod.rs"]
mod rings;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use lab::endurance;
use lab::labnic::{self, Labnic};
use lab::sim::SimDevice;
use vdpa::ErrorKind;
use vdpa::netdev::Chains;
use vdpa::relay::{Reason, Strategy, choose};
use vdpa::uapi::BackendFeatures;

use self::rings::frame::Mac;
use self::rings::guest::{Account, Flow, Guest, Options};
use self::rings::scene::{self, Loss, Scene};
use self::rings::vmm::{Machine, PATIENCE, Setup, pump};

const A: Mac = [2, 0, 0x5e, 0, 0x53, 1];
const B: Mac = [2, 0, 0x5e, 0, 0x53, 2];
const EVENT_IDX: u64 = 1 << 29;
const ALL: [Strategy; 3] = [Strategy::Direct, Strategy::UsedShadow, Strategy::FullShadow];

/// Transitions over all variants for each of `lab::endurance::cycles()`.
const PER_CYCLE: u32 = 100;

/// The abilities of a pair of devices and of their drivers.
#[derive(Debug, Clone, Copy)]
struct Variant {
    event_idx: bool,
    completion: &'static str,
    ring_state: &'static str,
    apply: &'static str,
    rx_prefetch: u16,
    pairs: u16,
    address_spaces: u16,
    doorbells: bool,
    indirect: bool,
}

const fn variant(
    event_idx: bool,
    completion: &'static str,
    ring_state: &'static str,
    apply: &'static str,
    rx_prefetch: u16,
    rest: (u16, u16, bool, bool),
) -> Variant {
    let (pairs, address_spaces, doorbells, indirect) = rest;
    Variant {
        event_idx,
        completion,
        ring_state,
        apply,
        rx_prefetch,
        pairs,
        address_spaces,
        doorbells,
        indirect,
    }
}

/// Each value of each ability with each value of any other, where they are compatible: a used index
/// as base excludes completion out of order.
const VARIANTS: [Variant; 20] = [
    variant(true, "immediate", "avail", "enable", 0, (1, 3, true, true)),
    variant(
        false,
        "immediate",
        "avail",
        "resume",
        6,
        (1, 1, false, false),
    ),
    variant(true, "immediate", "used", "resume", 6, (2, 1, true, false)),
    variant(false, "immediate", "used", "enable", 0, (2, 3, false, true)),
    variant(true, "delayed", "avail", "resume", 0, (2, 3, false, false)),
    variant(false, "delayed", "avail", "enable", 6, (1, 1, true, true)),
    variant(true, "delayed", "used", "enable", 6, (1, 3, false, true)),
    variant(false, "delayed", "used", "resume", 0, (1, 1, true, false)),
    variant(
        true,
        "out_of_order",
        "avail",
        "enable",
        6,
        (2, 1, false, false),
    ),
    variant(
        false,
        "out_of_order",
        "avail",
        "resume",
        0,
        (2, 3, true, true),
    ),
    variant(
        true,
        "out_of_order",
        "avail",
        "resume",
        6,
        (1, 3, true, false),
    ),
    variant(
        false,
        "out_of_order",
        "avail",
        "enable",
        6,
        (1, 1, false, true),
    ),
    variant(true, "immediate", "avail", "resume", 6, (2, 1, true, true)),
    variant(
        false,
        "immediate",
        "avail",
        "enable",
        6,
        (2, 3, true, false),
    ),
    variant(true, "immediate", "used", "enable", 0, (1, 1, false, true)),
    variant(false, "immediate", "used", "resume", 6, (1, 3, true, true)),
    variant(true, "delayed", "avail", "enable", 6, (2, 1, true, false)),
    variant(false, "delayed", "used", "enable", 6, (2, 1, false, false)),
    variant(
        true,
        "out_of_order",
        "avail",
        "enable",
        0,
        (1, 1, true, true),
    ),
    variant(
        false,
        "out_of_order",
        "avail",
        "resume",
        6,
        (2, 3, false, true),
    ),
];

impl Variant {
    fn load(&self) -> Labnic {
        Labnic::load(&[
            ("completion", self.completion),
            ("completion_ms", "4"),
            ("ring_state", self.ring_state),
            ("apply", self.apply),
            ("rx_prefetch", &self.rx_prefetch.to_string()),
            ("address_spaces", &self.address_spaces.to_string()),
            // Frames wait for buffers without a limit: none is dropped.
            ("credit_wait_ms", "60000"),
        ])
        .unwrap()
    }

    /// True if a device keeps buffers across a suspend and reports them. Other devices give them
    /// back, or have none before there is a frame for them.
    fn reports_held(&self) -> bool {
        self.rx_prefetch > 0 && self.ring_state == "avail"
    }

    fn setup(&self) -> Setup {
        Setup {
            event_idx: self.event_idx,
            indirect: self.indirect,
            control: true,
            doorbells: self.doorbells,
            pairs: self.pairs,
            // Soon past the index wrap.
            start: 65_000,
            without: BackendFeatures::empty(),
        }
    }

    fn options(&self) -> Options {
        Options {
            event_idx: self.event_idx,
            indirect: self.indirect,
            window: u32::MAX,
            frames: u32::MAX,
        }
    }
}

/// The state at the cuts.
#[derive(Debug, Default)]
struct Cuts {
    changes: u32,
    /// Queues that changed, by old and new strategy.
    by_kind: [[u32; 3]; 3],
    /// Receive queues with buffers available; and queues, among those examined, with buffers that
    /// the device held.
    receive_given: u32,
    receive_held: u32,
    /// Transmit queues with uncompleted frames.
    transmit: u32,
    /// Control commands without an answer when the device ran again.
    control: u32,
    /// Queues whose guest had switched interrupts off, or on.
    suppressed: u32,
    listening: u32,
    /// Refused, because a direct device held an unknown number of chains.
    uncounted: u32,
}

impl Cuts {
    fn add(&mut self, other: &Self) {
        self.changes += other.changes;
        self.receive_given += other.receive_given;
        self.receive_held += other.receive_held;
        self.transmit += other.transmit;
        self.control += other.control;
        self.suppressed += other.suppressed;
        self.listening += other.listening;
        self.uncounted += other.uncounted;
        for (sum, other) in self.by_kind.iter_mut().zip(&other.by_kind) {
            for (sum, other) in sum.iter_mut().zip(other) {
                *sum += other;
            }
        }
    }

    fn look(&mut self, machine: &Machine) {
        for port in &machine.ports {
            let outstanding = u32::from(port.view.outstanding() > 0);
            if port.view.queue % 2 == 0 {
                self.receive_given += outstanding;
            } else {
                self.transmit += outstanding;
            }
            let suppressed = port.view.is_suppressed();
            self.suppressed += u32::from(suppressed);
            self.listening += u32::from(!suppressed);
        }
    }
}

/// xorshift32.
struct Random(u32);

impl Random {
    fn below(&mut self, bound: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 17;
        self.0 ^= self.0 << 5;
        self.0 % bound
    }

    fn strategy(&mut self) -> Strategy {
        ALL[usize::try_from(self.below(3)).unwrap()]
    }
}

fn place(strategy: Strategy) -> usize {
    ALL.iter().position(|one| *one == strategy).unwrap()
}

/// Records how many chains direct devices hold while they are suspended.
fn look_at_held(machine: &mut Machine, cuts: &mut Cuts) {
    for (queue, held) in machine.held() {
        let held = u32::from(held.is_some_and(|held| held > 0));
        cuts.receive_held += if queue % 2 == 0 { held } else { 0 };
    }
}

/// Changes one machine once, with anything in flight, to random strategies.
fn cut(machine: &mut Machine, variant: &Variant, random: &mut Random, cuts: &mut Cuts) {
    if random.below(8) == 0 {
        look_at_held(machine, cuts);
    }
    let queues = machine.ports.len();
    let mut targets = Vec::with_capacity(queues);
    for queue in 0..u16::try_from(queues).unwrap() {
        if random.below(4) > 0 {
            targets.push((queue, random.strategy()));
        }
    }
    if targets
        .iter()
        .all(|&(queue, to)| machine.strategy(queue) == to)
    {
        let others = ALL.map(|how| (0, how));
        let different = |&(queue, how): &(u16, Strategy)| machine.strategy(queue) != how;
        targets = others.into_iter().filter(different).take(1).collect();
    }
    let now: Vec<Strategy> = targets
        .iter()
        .map(|&(queue, _)| machine.strategy(queue))
        .collect();
    machine.submit();
    cuts.look(machine);
    let memory = machine.memory();
    match machine.change(&targets, &memory) {
        Ok(()) => {
            for (from, &(queue, to)) in now.into_iter().zip(&targets) {
                assert_eq!(machine.strategy(queue), to);
                cuts.by_kind[place(from)][place(to)] += u32::from(from != to);
            }
            cuts.changes += 1;
        }
        Err(error) if error.kind() == ErrorKind::InFlightUnknown => {
            // This error is valid only where devices hold buffers across a suspend.
            let holds = variant.rx_prefetch > 0 || variant.completion == "out_of_order";
            assert!(holds && variant.ring_state == "avail");
            cuts.uncounted += 1;
            // A used shadow is the way around.
            let targets: Vec<_> = (targets.iter())
                .map(|&(queue, _)| (queue, Strategy::UsedShadow))
                .collect();
            machine.change(&targets, &memory).unwrap();
            cuts.changes += 1;
        }
        Err(error) => panic!("{error:?}"),
    }
    cuts.control += u32::from(machine.is_command_under_way());
    machine.spurious_notify_control();
}

/// The result of a variant.
struct Outcome {
    cuts: Cuts,
    accounts: [Account; 2],
    times: Vec<Duration>,
    skipped_kicks: u32,
}

fn run(variant: &Variant, changes: u32, seed: u32) -> Outcome {
    let labnic = variant.load();
    let text = |mac: Mac| mac.map(|byte| format!("{byte:02x}")).join(":");
    let pairs = variant.pairs.to_string();
    let devices = [("a", A), ("b", B)].map(|(name, mac)| {
        let attributes = ["mac", &text(mac), "max_vqp", &pairs];
        labnic.add(name, &attributes).unwrap()
    });
    let flows: [Vec<Arc<Flow>>; 2] =
        [(); 2].map(|()| (0..variant.pairs).map(|_| Arc::default()).collect());
    let (setup, options) = (variant.setup(), variant.options());
    let mut a = Guest::new(A, B, setup.start, options, &flows[0], &flows[1]);
    let mut b = Guest::new(B, A, setup.start, options, &flows[1], &flows[0]);
    let mut machine_a = Machine::start("a", devices[0].path(), &a, setup);
    let mut machine_b = Machine::start("b", devices[1].path(), &b, setup);
    let (stop, mut random) = (AtomicBool::new(false), Random(seed));
    let mut cuts = Cuts::default();
    let accounts = thread::scope(|scope| {
        let threads = [
            scope.spawn(|| a.exchange(&stop)),
            scope.spawn(|| b.exchange(&stop)),
        ];
        // All are still direct.
        look_at_held(&mut machine_a, &mut cuts);
        while cuts.changes < changes {
            let which = random.below(2);
            let machine = if which == 0 {
                &mut machine_a
            } else {
                &mut machine_b
            };
            cut(machine, variant, &mut random, &mut cuts);
            // Mostly any moment; sometimes long enough for traffic to depend on its own kicks and
            // interrupts.
            let frames = if random.below(16) == 0 {
                200
            } else {
                random.below(16) + 1
            };
            let targets: Vec<(&Arc<Flow>, u32)> = (flows.iter().flatten())
                .map(|flow| (flow, flow.received() + frames))
                .collect();
            let begin = Instant::now();
            let machines = &mut [&mut machine_a, &mut machine_b];
            pump(machines, || {
                targets.iter().all(|(flow, goal)| flow.received() >= *goal)
                    || threads.iter().any(|thread| thread.is_finished())
                    || begin.elapsed() > PATIENCE
            });
            let stalled = threads.iter().any(|thread| thread.is_finished());
            if stalled || begin.elapsed() > PATIENCE {
                eprintln!(
                    "{variant:?}\n{}{}",
                    machine_a.describe(),
                    machine_b.describe()
                );
                panic!(
                    "traffic stopped after change {} of {variant:?}",
                    cuts.changes
                );
            }
            let begin = Instant::now();
            for machine in [&mut machine_a, &mut machine_b] {
                while machine.is_command_under_way() {
                    assert!(
                        begin.elapsed() < PATIENCE,
                        "a control command has no answer"
                    );
                    thread::sleep(Duration::from_micros(100));
                }
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        pump(&mut [&mut machine_a, &mut machine_b], || {
            threads.iter().all(|thread| thread.is_finished())
        });
        threads.map(|thread| {
            thread.join().unwrap_or_else(|_| {
                let (a, b) = (machine_a.describe(), machine_b.describe());
                panic!("after the last change of {variant:?}:\n{a}{b}")
            })
        })
    });
    // The device executed each command once.
    for (machine, device) in [(&machine_a, &devices[0]), (&machine_b, &devices[1])] {
        let stats = device.vstats(u32::from(2 * variant.pairs)).unwrap();
        let find = |name: &str| {
            stats
                .get(name)
                .or_else(|| stats.get(name.replace(' ', "_")))
        };
        let requests = find("cvq requests").and_then(serde_json::Value::as_u64);
        let own = u32::from(variant.pairs > 1);
        assert_eq!(requests, Some(u64::from(machine.commands + own)), "{stats}");
    }
    let ports = machine_a.ports.iter().chain(&machine_b.ports);
    let skipped_kicks = ports.map(|port| port.notifier.counts().1).sum();
    let mut times = std::mem::take(&mut machine_a.times);
    times.append(&mut machine_b.times);
    Outcome {
        cuts,
        accounts,
        times,
        skipped_kicks,
    }
}

fn distribution(mut times: Vec<Duration>) -> String {
    times.sort();
    let at = |part: usize| times[(times.len() - 1) * part / 1000];
    let (median, p90, p99) = (at(500), at(900), at(990));
    format!(
        "median {median:?}, p90 {p90:?}, p99 {p99:?}, longest {:?}",
        at(1000)
    )
}

/// See the module. `cargo lab test --cycles 100` makes 10,000 transitions.
#[test]
fn transitions_under_full_traffic_lose_nothing() {
    let variants = u32::try_from(VARIANTS.len()).unwrap();
    let changes = endurance::cycles().unwrap() * PER_CYCLE / variants;
    let (mut sum, mut times) = (Cuts::default(), Vec::new());
    let (mut frames, mut slept, mut longest) = (0, 0, Duration::ZERO);
    for (seed, variant) in (1..).zip(&VARIANTS) {
        let begin = Instant::now();
        let outcome = run(variant, changes, 0x9e37_79b9_u32.wrapping_mul(seed));
        let Cuts {
            transmit,
            receive_given,
            ..
        } = outcome.cuts;
        let got: u32 = outcome
            .accounts
            .iter()
            .map(|account| account.received)
            .sum();
        println!(
            "{variant:?}: {:?}, {got} frames, {:?}",
            begin.elapsed(),
            outcome.cuts
        );
        assert!(transmit > 0, "no frame was under way at a cut");
        assert!(receive_given > 0, "no buffer was under way at a cut");
        assert!(outcome.skipped_kicks > 0, "no kick was ever spared");
        sum.add(&outcome.cuts);
        times.extend(outcome.times);
        frames += got;
        for account in outcome.accounts {
            slept += account.slept;
            longest = longest.max(account.longest);
        }
    }
    println!(
        "{sum:#?}\n{} transitions, {frames} frames each once, {slept} sleeps until an interrupt, \
         longest time without progress {longest:?}; a change takes: {}",
        sum.changes,
        distribution(times)
    );
    assert_eq!(sum.changes, changes * variants);
    // A single variant may miss these by chance.
    assert!(VARIANTS.iter().any(Variant::reports_held));
    assert!(sum.receive_held > 0, "no device ever held a buffer");
    assert!(sum.suppressed > 0, "interrupts were never off at a cut");
    assert!(sum.control > 0, "no control command was under way at a cut");
    assert!(sum.uncounted > 0, "no device held a buffer at a cut");
    assert!(sum.listening > 0 && slept > 0, "interrupts were never on");
    for (from, row) in ALL.iter().zip(&sum.by_kind) {
        for (to, count) in ALL.iter().zip(row) {
            assert!(from == to || *count > 0, "never from {from} to {to}");
        }
    }
    assert_eq!(labnic::trouble().unwrap(), Vec::<String>::new());
}

/// How often each queue of a device with one pair was kicked.
fn kicks(device: &SimDevice) -> [u64; 2] {
    [0, 1].map(|queue| device.vstats(queue).unwrap()["kicks"].as_u64().unwrap())
}

/// A device may have missed a kick while its ring changed, and an idle guest sends no other.
#[test]
fn each_change_kicks_each_queue() {
    let variant = &VARIANTS[0];
    let labnic = variant.load();
    let mac = A.map(|byte| format!("{byte:02x}")).join(":");
    let device = labnic.add("a", &["mac", &mac]).unwrap();
    let flows: [Arc<Flow>; 2] = Default::default();
    let (setup, options) = (variant.setup(), variant.options());
    let [sent, received] = flows.each_ref().map(std::slice::from_ref);
    let guest = Guest::new(A, B, setup.start, options, sent, received);
    let mut machine = Machine::start("a", device.path(), &guest, setup);
    let memory = machine.memory();
    for to in ALL.into_iter().cycle().skip(1).take(6) {
        let before = kicks(&device);
        machine.change(&machine.all(to), &memory).unwrap();
        let begin = Instant::now();
        while kicks(&device)
            .iter()
            .zip(&before)
            .any(|(now, before)| now == before)
        {
            assert!(begin.elapsed() < PATIENCE, "not kicked after {to}");
            thread::sleep(Duration::from_millis(1));
        }
    }
    // The guest maps the doorbells: the device cannot be deleted before it is gone.
    drop((machine, guest, device));
    assert_eq!(labnic::trouble().unwrap(), Vec::<String>::new());
}

/// That a device has no position shows only in an attempt.
fn no_position(scene: &mut Scene<'_>) {
    for machine in &mut scene.machines {
        let device = machine.device();
        let chosen = choose(device.info(), device.backend_features(), device.features());
        assert_eq!(chosen, (Strategy::UsedShadow, Reason::SuspendsAndResumes));
        let before = machine.strategies();
        let error = machine.change(&[Strategy::UsedShadow]);
        assert!(
            error.to_string().contains("refused to change its rings"),
            "{error:?}"
        );
        assert_eq!(machine.strategies(), before);
    }
    // They continue, whether the change failed before the first ring was touched or after.
    scene.frames(500);
}

/// A device that suspends but reports no position and accepts only 0. It cannot even get a used
/// shadow in place, so it is reset, as vp_vdpa is.
#[test]
fn devices_without_ring_state_are_shadowed_by_a_reset() {
    let rounds = usize::try_from(endurance::cycles().unwrap().div_ceil(10)).unwrap();
    for (event_idx, chains, completion, apply) in [
        (true, Chains::Indirect, "immediate", "enable"),
        (false, Chains::Indirect, "delayed", "resume"),
        (true, Chains::Single, "delayed", "enable"),
        (false, Chains::Single, "immediate", "resume"),
    ] {
        let labnic = Labnic::load(&[
            ("ring_state", "none"),
            ("completion", completion),
            ("completion_ms", "4"),
            ("apply", apply),
            ("rx_prefetch", "6"),
            ("credit_wait_ms", "60000"),
        ])
        .unwrap();
        let [a, b] = [("a", A), ("b", B)].map(|(name, mac)| {
            let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
            labnic.add(name, &["mac", &mac]).unwrap()
        });
        let withhold = if event_idx { 0 } else { EVENT_IDX };
        let devices = [(a.path(), A), (b.path(), B)];
        let options = scene::options(1, withhold, chains);
        scene::play(devices, &options, Loss::AllUnderWay, |scene| {
            no_position(scene);
            scene::shadow_rounds(scene, rounds);
            no_position(scene);
        });
    }
    assert_eq!(labnic::trouble().unwrap(), Vec::<String>::new());
}

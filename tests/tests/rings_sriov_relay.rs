//! Relays on virtual functions behind vp_vdpa, which can neither suspend nor say or
//! take a ring's position: every change is a reset, and rings begin at 0.
//!
//! ```text
//!   driver a (thread) -- rings --> [relays] -- vf0 --\
//!                                                     QEMU, taps, bridge
//!   driver b (thread) -- rings --> [relays] -- vf1 --/
//!
//!            any time                    at the index wrap only
//!   any mix ----------> all shadowed ---------------------------> any mix
//! ```
//! Mediation is among the mixes: it is not what [`choose`] says, for without SUSPEND it can
//! begin at the wrap only, but there it works.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[path = "rings/mod.rs"]
mod rings;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use lab::endurance;
use lab::sriov::{SriovNic, VfDevice};
use vdpa::device::VringBase;
use vdpa::netdev::{Chains, Kick, Options};
use vdpa::relay::{Pause, Reason, Strategy, TransitionError, choose};

use self::rings::frame::Mac;
use self::rings::netdev::{Account, Driver, Face, Flow, RING, Relayed, Window};

use Strategy::{Direct, Mediated, Shadowed};

/// Relays keep no order, which IN_ORDER would promise.
const IN_ORDER: u64 = 1 << 35;
const EVENT_IDX: u64 = 1 << 29;

/// Receive and transmit queue at the wrap, in turns.
const MIXES: [[Strategy; 2]; 6] = [
    [Direct, Direct],
    [Mediated, Direct],
    [Shadowed, Direct],
    [Mediated, Shadowed],
    [Direct, Shadowed],
    [Mediated, Mediated],
];
/// Restarts between two wraps.
const RESTARTS: u32 = 16;
/// For the way to the wrap: 65536 frames.
const PATIENCE: Duration = Duration::from_secs(120);

fn mac(device: &VfDevice<'_>) -> Mac {
    let text = device.function().mac();
    let mut bytes = text.split(':').map(|byte| u8::from_str_radix(byte, 16));
    [(); 6].map(|()| bytes.next().unwrap().unwrap())
}

fn options(pairs: u16, withhold: u64, chains: Chains) -> Options {
    Options {
        pairs,
        ring_size: RING,
        withhold: IN_ORDER | withhold,
        chains,
        // A relay hears no doorbell.
        kick: Kick::Eventfd,
    }
}

/// What there was at the cuts.
#[derive(Debug, Default)]
struct Cuts {
    restarts: u32,
    refused: u32,
    /// Frames that a transmit ring had.
    transmit: u32,
    /// Drivers that had switched interrupts off, or on.
    suppressed: u32,
    listening: u32,
}

/// Two devices with traffic between them.
struct Scene<'a> {
    machines: [Relayed; 2],
    flows: &'a [Vec<Arc<Flow>>; 2],
    faces: &'a [Arc<Face>; 2],
    threads: [ScopedJoinHandle<'a, Account>; 2],
    random: u32,
    cuts: Cuts,
}

impl Scene<'_> {
    fn below(&mut self, bound: u32) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        self.random % bound
    }

    /// Relays until `done`.
    #[track_caller]
    fn pump(&mut self, what: &str, mut done: impl FnMut(&mut [Relayed; 2]) -> bool) {
        let begin = Instant::now();
        while !done(&mut self.machines) {
            let mut pause = Duration::from_millis(1);
            for machine in &mut self.machines {
                match machine.poll() {
                    Pause::None => pause = Duration::ZERO,
                    Pause::AtMost(longest) => pause = pause.min(longest),
                    Pause::Forever => {}
                }
            }
            if pause.is_zero() {
                thread::yield_now();
            } else {
                thread::sleep(pause);
            }
            let over = self.threads.iter().any(ScopedJoinHandle::is_finished);
            assert!(!over, "{what}: a driver gave up; {:?}", self.cuts);
            assert!(begin.elapsed() < PATIENCE, "{what}: {:?}", self.flows);
        }
    }

    /// Relays until so many more frames of each flow came, of which the last ones were
    /// sent after now.
    #[track_caller]
    fn frames(&mut self, count: u32) {
        let goals: Vec<(Arc<Flow>, u32)> = (self.flows.iter().flatten())
            .map(|flow| (Arc::clone(flow), flow.sent() + count))
            .collect();
        self.pump("waiting for frames", |_| {
            goals.iter().all(|(flow, goal)| flow.received() >= *goal)
        });
    }

    #[track_caller]
    fn restart(&mut self, which: usize, targets: &[Strategy]) -> Result<(), TransitionError> {
        for flow in self.flows.iter().flatten() {
            self.cuts.transmit += u32::from(flow.in_ring() > 0);
        }
        for face in self.faces {
            let listening = face.listening.load(Ordering::Relaxed);
            self.cuts.listening += u32::from(listening);
            self.cuts.suppressed += u32::from(!listening);
        }
        let result = self.machines[which].restart(targets);
        if result.is_ok() {
            self.cuts.restarts += 1;
            let machine = &self.machines[which];
            let now = machine.strategies().into_iter();
            let wanted = machine.targets(targets).into_iter().map(|(_, how)| how);
            assert!(now.eq(wanted), "{targets:?}: {:?}", machine.strategies());
        }
        // What the other driver waited for may be lost.
        self.machines[1 - which].interrupt();
        result
    }

    /// Restarts at any moment, all queues shadowed.
    fn shadow_often(&mut self) {
        for _ in 0..RESTARTS {
            let which = usize::try_from(self.below(2)).unwrap();
            self.restart(which, &[Shadowed]).unwrap();
            let frames = match self.below(4) {
                0 => 1000,
                _ => self.below(50) + 1,
            };
            self.frames(frames);
        }
    }

    /// What this parent can't do is refused, and traffic goes on as before.
    fn refusals(&mut self, which: usize) {
        let device = self.machines[which].device();
        let chosen = choose(device.info(), device.backend_features(), device.features());
        assert_eq!(chosen, (Shadowed, Reason::NoSuspend));
        let error = self.machines[which].change(&[Mediated]);
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert!(cause.contains("suspend"), "{cause}");
        for how in [Direct, Mediated] {
            let error = self.restart(which, &[how]).unwrap_err();
            let TransitionError::Base { base, .. } = &error else {
                panic!("{error:?}");
            };
            assert_ne!(*base, VringBase::initial(false));
            assert!(
                error.to_string().contains("hold it at the index wrap"),
                "{error}"
            );
            self.cuts.refused += 1;
            self.frames(100);
        }
    }

    /// On to the wrap, and from there to `mix`.
    fn wrap(&mut self, which: usize, mix: [Strategy; 2]) {
        for machine in 0..2 {
            if self.machines[machine]
                .strategies()
                .iter()
                .any(|&how| how != Shadowed)
            {
                self.restart(machine, &[Shadowed]).unwrap();
            }
        }
        self.machines[which].set().hold_at_wrap();
        self.pump("on to the wrap", |machines| machines[which].set().is_held());
        self.restart(which, &mix).unwrap();
        self.frames(3000);
    }
}

/// Two devices, their drivers, and what `act` does with them; the accounts after that.
fn play(options: &Options, seed: u32, act: impl FnOnce(&mut Scene<'_>)) {
    let nic = SriovNic::enable(2).unwrap();
    let devices = [0, 1].map(|index| VfDevice::add(nic.vf(index).unwrap()).unwrap());
    let flows: [Vec<Arc<Flow>>; 2] =
        [(); 2].map(|()| (0..options.pairs).map(|_| Arc::default()).collect());
    let faces: [Arc<Face>; 2] = Default::default();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let start = |this: usize| {
            let (other, name) = (1 - this, ["a", "b"][this]);
            let path = devices[this].path();
            let (machine, pairs) = Relayed::start(name, path, options, &flows[other]);
            let driver = Driver {
                name,
                mac: mac(&devices[this]),
                peer: mac(&devices[other]),
                pairs,
                outward: flows[this].clone(),
                inward: flows[other].clone(),
                face: Arc::clone(&faces[this]),
                peer_face: Arc::clone(&faces[other]),
            };
            (machine, driver)
        };
        let [(a, driver_a), (b, driver_b)] = [start(0), start(1)];
        let stop = &stop;
        let mut scene = Scene {
            machines: [a, b],
            flows: &flows,
            faces: &faces,
            threads: [driver_a, driver_b].map(|driver| scope.spawn(|| driver.exchange(stop))),
            random: seed,
            cuts: Cuts::default(),
        };
        scene.frames(500);
        act(&mut scene);
        stop.store(true, Ordering::Relaxed);
        let Scene {
            mut machines,
            threads,
            cuts,
            ..
        } = scene;
        while !threads.iter().all(ScopedJoinHandle::is_finished) {
            for machine in &mut machines {
                machine.poll();
            }
        }
        println!("{options:?}: {cuts:?}");
        for (thread, machine) in threads.into_iter().zip(&machines) {
            audit(&thread.join().unwrap(), &machine.windows);
            println!("restarts took {:?}", median(&machine.times));
        }
        assert!(cuts.transmit > 0, "no frame was under way at a cut");
        assert!(cuts.suppressed > 0, "interrupts were never off at a cut");
    });
}

/// Nothing twice; nothing lost but at a reset of the receiver.
fn audit(account: &Account, windows: &[Window]) {
    let frames: u64 = account.by_queue.iter().sum();
    let mut lost = 0;
    for (pair, seen) in account.seen.iter().enumerate() {
        for (number, _) in (0..).zip(seen).filter(|(_, came)| !**came) {
            lost += 1;
            let excused = (windows.iter())
                .any(|window| window.pair == pair && (window.first..window.end).contains(&number));
            assert!(
                excused,
                "frame {number} of pair {pair} is lost; {windows:?}"
            );
        }
    }
    println!(
        "{frames} frames by queues {:?}, {lost} lost at {} resets of the receiver; slept {} times \
         until an interrupt, {} kicks and {} spared, longest wait {:?}",
        account.by_queue,
        windows.len() / account.seen.len(),
        account.slept,
        account.kicks,
        account.kicks_spared,
        account.longest,
    );
    assert_eq!(account.repeated, 0);
    if account.by_queue.len() == 1 {
        assert!(
            lost <= windows.len(),
            "{lost} lost at {} resets",
            windows.len()
        );
    }
    assert!(account.slept > 0 && account.kicks_spared > 0);
}

fn median(times: &[Duration]) -> Option<Duration> {
    let mut times = times.to_vec();
    times.sort();
    times.get(times.len() / 2).copied()
}

/// Through the wrap, `lab::endurance::cycles()` / 3 times for each kind of ring.
fn there_and_back(withhold: u64, chains: Chains, first: usize) {
    let rounds = usize::try_from(endurance::cycles().unwrap().div_ceil(3)).unwrap();
    play(&options(1, withhold, chains), 0x9e37_79b9, |scene| {
        for round in 0..rounds {
            scene.shadow_often();
            let which = round % 2;
            scene.refusals(which);
            scene.wrap(which, MIXES[(first + round) % MIXES.len()]);
        }
        assert_eq!(scene.cuts.refused, 2 * u32::try_from(rounds).unwrap());
        // 68 for each kind of ring with 10 cycles.
        let least = (RESTARTS + 1) * u32::try_from(rounds).unwrap();
        assert!(scene.cuts.restarts >= least, "{:?}", scene.cuts);
        assert!(scene.cuts.listening > 0, "interrupts were never on");
    });
}

#[test]
fn with_event_idx() {
    there_and_back(0, Chains::Indirect, 0);
}

#[test]
fn without_event_idx() {
    there_and_back(EVENT_IDX, Chains::Single, 3);
}

/// Which queue a frame comes by is the switch's choice, so the queues don't meet at the
/// wrap; into the shadow and on they go.
#[test]
fn two_queue_pairs() {
    play(&options(2, 0, Chains::Pair), 0x51ed_270b, |scene| {
        scene.shadow_often();
        scene.shadow_often();
    });
}

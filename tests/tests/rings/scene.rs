//! Two devices that must be reset for each change, their drivers, and the
//! traffic between them.
//!
//! ```text
//!   driver a (thread) -- rings --> [relays] -- device a --\
//!                                                          network
//!   driver b (thread) -- rings --> [relays] -- device b --/
//!
//!            any time
//!   direct ----------> all shadowed, again and again
//! ```
//! Such a device accepts only the base 0, so there is no way back until its driver resets it.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use vdpa::device::VringBase;
use vdpa::netdev::{Chains, Kick, Options};
use vdpa::relay::{Pause, Strategy};

use super::frame::Mac;
use super::netdev::{Account, Driver, Face, Flow, RING, Relayed};

use Strategy::{Direct, FullShadow, UsedShadow};

/// Relays do not keep the order that IN_ORDER promises.
const IN_ORDER: u64 = 1 << 35;

/// Restarts of a round.
const RESTARTS: u32 = 24;
/// Long enough to pass the index wrap: 65536 frames.
const PATIENCE: Duration = Duration::from_secs(120);

/// Which frames in flight to a device may be lost while it is reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Loss {
    /// At most one: the frame that QEMU has read from the tap. The others wait there.
    OneFrame,
    /// Any frames.
    AllUnderWay,
}

/// The drivers' options for their rings.
pub(crate) fn options(pairs: u16, withhold: u64, chains: Chains) -> Options {
    Options {
        pairs,
        ring_size: RING,
        withhold: IN_ORDER | withhold,
        chains,
        // A relay does not notice a doorbell.
        kick: Kick::Eventfd,
    }
}

/// The state at the cuts.
#[derive(Debug, Default)]
struct Cuts {
    restarts: u32,
    refused: u32,
    /// Frames in a transmit ring.
    transmit: u32,
    /// Drivers that had switched interrupts off, or on.
    suppressed: u32,
    listening: u32,
}

/// Two devices with traffic between them.
pub(crate) struct Scene<'a> {
    pub(crate) machines: [Relayed; 2],
    pub(crate) flows: &'a [Vec<Arc<Flow>>; 2],
    faces: &'a [Arc<Face>; 2],
    threads: [ScopedJoinHandle<'a, Account>; 2],
    random: u32,
    cuts: Cuts,
}

impl Scene<'_> {
    pub(crate) fn below(&mut self, bound: u32) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        self.random % bound
    }

    /// Polls the relays until `done`.
    #[track_caller]
    pub(crate) fn pump(&mut self, what: &str, mut done: impl FnMut(&mut [Relayed; 2]) -> bool) {
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

    /// Polls the relays until this many more frames of each flow arrived, the last of them sent
    /// after this call.
    #[track_caller]
    pub(crate) fn frames(&mut self, count: u32) {
        let goals: Vec<(Arc<Flow>, u32)> = (self.flows.iter().flatten())
            .map(|flow| (Arc::clone(flow), flow.sent() + count))
            .collect();
        self.pump("waiting for frames", |_| {
            goals.iter().all(|(flow, goal)| flow.received() >= *goal)
        });
    }

    #[track_caller]
    pub(crate) fn restart(
        &mut self,
        which: usize,
        targets: &[Strategy],
    ) -> Result<(), vdpa::Error> {
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
        // The frames that the other driver waited for may be lost.
        self.machines[1 - which].interrupt();
        result
    }

    /// Restarts repeatedly at any moment, with all queues shadowed.
    pub(crate) fn shadow_often(&mut self) {
        for _ in 0..RESTARTS {
            let which = usize::try_from(self.below(2)).unwrap();
            self.restart(which, &[FullShadow]).unwrap();
            let frames = match self.below(4) {
                0 => 1000,
                _ => self.below(50) + 1,
            };
            self.frames(frames);
        }
    }

    /// Changes that such a device does not support are refused, and traffic continues as before.
    fn refusals(&mut self, which: usize) {
        for how in [Direct, UsedShadow] {
            let error = self.restart(which, &[how]).unwrap_err();
            let text = error.to_string();
            assert!(text.ends_with("shadow it"), "{text}");
            let start = format!("at {}: shadow", VringBase::initial(false));
            assert!(
                text.contains("refuses to begin queue ") && !text.contains(&start),
                "{text}"
            );
            self.cuts.refused += 1;
            self.frames(100);
        }
    }
}

/// Starts drivers for the devices, given by path and address, runs `act` and checks the accounts.
pub(crate) fn play(
    devices: [(&Path, Mac); 2],
    options: &Options,
    loss: Loss,
    act: impl FnOnce(&mut Scene<'_>),
) {
    let flows: [Vec<Arc<Flow>>; 2] =
        [(); 2].map(|()| (0..options.pairs).map(|_| Arc::default()).collect());
    let faces: [Arc<Face>; 2] = Default::default();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let start = |this: usize| {
            let (other, name) = (1 - this, ["a", "b"][this]);
            let (path, mac) = devices[this];
            let (machine, pairs) = Relayed::start(name, path, options, &flows[other]);
            let driver = Driver {
                name,
                mac,
                peer: devices[other].1,
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
            random: 0x9e37_79b9,
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
            audit(&thread.join().unwrap(), machine, loss);
            println!("restarts took {:?}", median(&machine.times));
        }
        assert!(cuts.transmit > 0, "no frame was under way at a cut");
        assert!(cuts.suppressed > 0, "interrupts were never off at a cut");
    });
}

/// Checks that no frame arrived twice, and that frames are lost only at a reset of the receiver.
fn audit(account: &Account, machine: &Relayed, loss: Loss) {
    let (windows, resets) = (&machine.windows, machine.resets);
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
        "{frames} frames by queues {:?}, {lost} lost at {resets} resets of the receiver; slept {} \
         times until an interrupt, {} kicks and {} spared, longest wait {:?}",
        account.by_queue, account.slept, account.kicks, account.kicks_spared, account.longest,
    );
    assert_eq!(account.repeated, 0);
    if loss == Loss::OneFrame {
        assert!(lost <= resets, "{lost} lost at {resets} resets");
    }
    assert!(account.slept > 0 && account.kicks_spared > 0);
}

fn median(times: &[Duration]) -> Option<Duration> {
    let mut times = times.to_vec();
    times.sort();
    times.get(times.len() / 2).copied()
}

/// Shadows repeatedly in `rounds` rounds, and past the index wrap.
pub(crate) fn shadow_rounds(scene: &mut Scene<'_>, rounds: usize) {
    for round in 0..rounds {
        scene.shadow_often();
        scene.refusals(round % 2);
    }
    scene.frames(1 << 16);
    let rounds = u32::try_from(rounds).unwrap();
    assert_eq!(scene.cuts.refused, 2 * rounds);
    assert!(scene.cuts.restarts >= RESTARTS * rounds);
    assert!(scene.cuts.listening > 0, "interrupts were never on");
}

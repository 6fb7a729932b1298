//! Shadows of packed rings on virtual functions behind vp_vdpa, which can neither suspend
//! nor say or take a ring's position: every change is a reset, and rings begin at their
//! start. Where a direct ring stood is told by its own memory.
//!
//! ```text
//!   driver a (thread) -- packed rings --> [relays] -- vf2 --\
//!                                                            QEMU, taps, bridge
//!   driver b (thread) -- packed rings --> [relays] -- vf3 --/
//!
//!           any time              any time                    every second lap
//!   direct ----------> shadowed ----------> shadowed, ... ---------------------> direct
//! ```

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

use lab::rig::FIRST_PACKED_FUNCTION;
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

/// Ways from direct over shadowed back to direct, for each device in turns.
const ROUNDS: usize = 16;
/// Restarts within the shadow on each way.
const RESTARTS: u32 = 2;
/// For the way to the start of the rings: two laps.
const PATIENCE: Duration = Duration::from_secs(60);

fn mac(device: &VfDevice<'_>) -> Mac {
    let text = device.function().mac();
    let mut bytes = text.split(':').map(|byte| u8::from_str_radix(byte, 16));
    [(); 6].map(|()| bytes.next().unwrap().unwrap())
}

fn options(withhold: u64, chains: Chains) -> Options {
    Options {
        pairs: 1,
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
    /// To direct, and to shadowed from direct or from shadowed.
    direct: u32,
    shadowed: u32,
    again: u32,
    /// Cuts of direct rings, and of shadowed ones, at which a transmit ring had frames.
    transmit_direct: u32,
    transmit_shadowed: u32,
    /// Cuts with frames on their way to the device that was reset.
    inward: u32,
    refused: u32,
}

/// Two devices with traffic between them.
struct Scene<'a> {
    machines: [Relayed; 2],
    flows: &'a [Arc<Flow>; 2],
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
        let goals = self.flows.each_ref().map(|flow| flow.sent() + count);
        let flows = self.flows;
        self.pump("waiting for frames", |_| {
            (flows.iter().zip(goals)).all(|(flow, goal)| flow.received() >= goal)
        });
    }

    #[track_caller]
    fn restart(&mut self, which: usize, how: Strategy) -> Result<(), TransitionError> {
        let before = self.machines[which].strategies()[0];
        let transmit = u32::from(self.flows[which].in_ring() > 0);
        let inward = &self.flows[1 - which];
        let under_way = u32::from(inward.sent() > inward.received());
        let result = self.machines[which].restart(&[how]);
        // What the other driver waited for may be lost.
        self.machines[1 - which].interrupt();
        result?;
        let cuts = &mut self.cuts;
        cuts.inward += under_way;
        match (before, how) {
            (_, Direct) => cuts.direct += 1,
            (Direct, _) => cuts.shadowed += 1,
            _ => cuts.again += 1,
        }
        match before {
            Direct => cuts.transmit_direct += transmit,
            _ => cuts.transmit_shadowed += transmit,
        }
        assert_eq!(self.machines[which].strategies(), [how, how]);
        Ok(())
    }

    /// What can't be done is refused, and traffic goes on as before.
    fn refusals(&mut self, which: usize) {
        let device = self.machines[which].device();
        assert!(device.is_packed());
        let chosen = choose(device.info(), device.backend_features(), device.features());
        assert_eq!(chosen, (Shadowed, Reason::NoSuspend));
        let error = self.restart(which, Mediated).unwrap_err();
        assert!(matches!(error, TransitionError::PackedMediated { .. }));
        self.frames(50);
        // Both rings at the start at this moment, by chance: then it is granted.
        if let Err(error) = self.restart(which, Direct) {
            let TransitionError::Base { base, .. } = &error else {
                panic!("{error:?}");
            };
            assert_ne!(*base, VringBase::initial(true));
            assert!(
                error.to_string().contains("hold it at the index wrap"),
                "{error}"
            );
            self.cuts.refused += 1;
        }
        self.frames(50);
    }

    /// Into the shadow, about in it, and back where the device takes the rings over.
    fn there_and_back(&mut self, which: usize) {
        self.restart(which, Shadowed).unwrap();
        for _ in 0..RESTARTS {
            let frames = self.below(200) + 1;
            self.frames(frames);
            self.restart(which, Shadowed).unwrap();
        }
        self.frames(50);
        self.refusals(which);
        self.machines[which].set().hold_at_wrap();
        self.pump("on to the start", |machines| {
            machines[which].set().is_held()
        });
        self.restart(which, Direct).unwrap();
        let frames = self.below(300) + 1;
        self.frames(frames);
    }
}

/// Two devices, their drivers, and what `act` does with them; the accounts after that.
fn play(options: &Options, seed: u32, act: impl FnOnce(&mut Scene<'_>)) {
    let nic = SriovNic::enable(4).unwrap();
    let devices =
        [0, 1].map(|index| VfDevice::add(nic.vf(FIRST_PACKED_FUNCTION + index).unwrap()).unwrap());
    let flows: [Arc<Flow>; 2] = Default::default();
    let faces: [Arc<Face>; 2] = Default::default();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let start = |this: usize| {
            let (other, name) = (1 - this, ["a", "b"][this]);
            let inward = [Arc::clone(&flows[other])];
            let (machine, pairs) = Relayed::start(name, devices[this].path(), options, &inward);
            let driver = Driver {
                name,
                mac: mac(&devices[this]),
                peer: mac(&devices[other]),
                pairs,
                outward: vec![Arc::clone(&flows[this])],
                inward: inward.to_vec(),
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
            threads: [driver_a, driver_b].map(|driver| scope.spawn(|| driver.exchange(stop))),
            random: seed,
            cuts: Cuts::default(),
        };
        scene.frames(200);
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
    });
}

/// Nothing twice; nothing lost but at a reset of the receiver.
fn audit(account: &Account, windows: &[Window]) {
    let mut lost = 0;
    for (number, _) in (0..).zip(&account.seen[0]).filter(|(_, came)| !**came) {
        lost += 1;
        let excused = (windows.iter()).any(|window| (window.first..window.end).contains(&number));
        assert!(excused, "frame {number} is lost; {windows:?}");
    }
    println!(
        "{} frames, {lost} lost at {} resets of the receiver; slept {} times until an interrupt, \
         {} kicks and {} spared, longest wait {:?}",
        account.by_queue[0],
        windows.len(),
        account.slept,
        account.kicks,
        account.kicks_spared,
        account.longest,
    );
    assert_eq!(account.repeated, 0);
    assert!(lost <= windows.len());
    assert!(account.slept > 0 && account.kicks_spared > 0);
}

fn median(times: &[Duration]) -> Option<Duration> {
    let mut times = times.to_vec();
    times.sort();
    times.get(times.len() / 2).copied()
}

fn many_transitions(withhold: u64, chains: Chains) {
    play(&options(withhold, chains), 0x9e37_79b9, |scene| {
        for round in 0..ROUNDS {
            scene.there_and_back(round % 2);
        }
        let cuts = &scene.cuts;
        let rounds = u32::try_from(ROUNDS).unwrap();
        assert!(cuts.direct >= rounds && cuts.shadowed >= rounds, "{cuts:?}");
        assert!(cuts.direct + cuts.shadowed + cuts.again >= 50, "{cuts:?}");
        assert!(cuts.inward > 0, "no frame was on its way: {cuts:?}");
        assert!(cuts.transmit_direct > 0, "no frame was in a ring: {cuts:?}");
        assert!(cuts.transmit_shadowed > 0, "nor shadowed: {cuts:?}");
        assert!(cuts.refused > 0, "{cuts:?}");
    });
}

#[test]
fn one_descriptor_with_event_idx() {
    many_transitions(0, Chains::Single);
}

#[test]
fn indirect_chains_without_event_idx() {
    many_transitions(EVENT_IDX, Chains::Indirect);
}

//! Shadow and the index wrap on a device that can't suspend and refuses a
//! base: two virtual functions (vp_vdpa) behind an IOMMU that talk to each other.
//!
//! ```text
//!   direct, base 0 --reset--> shadowed, base 0 ... --at the wrap: reset--> direct, base 0
//! ```

#[path = "rings/mod.rs"]
mod rings;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use lab::sriov::{SriovNic, VfDevice};
use vdpa::relay::{Strategy, TransitionError};
use vdpa::uapi::BackendFeatures;

use self::rings::frame::Mac;
use self::rings::guest::{Account, Delivery, Flow, Guest, Options, SIZE};
use self::rings::vmm::{Machine, Setup, pump};

/// Frames that a phase has to bring in each direction.
const FRAMES: u32 = 3000;
const LIMIT: Duration = Duration::from_secs(60);

fn setup(event_idx: bool, doorbells: bool, start: u16) -> Setup {
    Setup {
        event_idx,
        indirect: true,
        control: true,
        doorbells,
        pairs: 1,
        start,
        without: BackendFeatures::empty(),
    }
}

fn mac(text: &str) -> Mac {
    let bytes: Vec<u8> = text
        .split(':')
        .map(|byte| u8::from_str_radix(byte, 16).unwrap())
        .collect();
    bytes.try_into().unwrap()
}

/// Two guests on two functions; the first one's rings begin at `start`, shadowed
/// unless that is 0. `work` runs while they talk, with the counts of both directions.
fn talk(
    (event_idx, doorbells): (bool, bool),
    start: u16,
    work: impl FnOnce(&mut [&mut Machine], &[Arc<Flow>; 2], &dyn Fn() -> bool),
) -> [Account; 2] {
    let nic = SriovNic::enable(2).unwrap();
    let devices = [0, 1].map(|index| VfDevice::add(nic.vf(index).unwrap()).unwrap());
    let macs = devices
        .each_ref()
        .map(|device| mac(&device.function().mac()));
    let options = Options {
        event_idx,
        indirect: true,
        delivery: Delivery::LossAndRepeats,
        window: u32::from(SIZE) / 2,
    };
    let [to_b, to_a] = [Arc::<Flow>::default(), Arc::default()];
    let (out, back) = ([Arc::clone(&to_b)], [Arc::clone(&to_a)]);
    let mut a = Guest::new(macs[0], macs[1], start, options, &out, &back);
    let mut b = Guest::new(macs[1], macs[0], 0, options, &back, &out);
    let how = if start == 0 {
        Strategy::Direct
    } else {
        Strategy::Shadowed
    };
    let own = setup(event_idx, doorbells, start);
    let mut machine_a = Machine::bring_up("a", devices[0].path(), &a, own, how);
    let plain = setup(event_idx, doorbells, 0);
    let mut machine_b = Machine::start("b", devices[1].path(), &b, plain);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let threads = [
            scope.spawn(|| a.exchange(&stop)),
            scope.spawn(|| b.exchange(&stop)),
        ];
        let machines = &mut [&mut machine_a, &mut machine_b];
        let ended = || threads.iter().any(|thread| thread.is_finished());
        let end = End(&stop);
        work(machines, &[to_b, to_a], &ended);
        drop(end);
        pump(machines, || {
            threads.iter().all(|thread| thread.is_finished())
        });
        threads.map(|thread| thread.join().unwrap())
    })
}

/// Ends the traffic, also when what drives it panics.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Both directions bring so many frames.
#[track_caller]
fn moves(
    what: &str,
    frames: u32,
    machines: &mut [&mut Machine],
    flows: &[Arc<Flow>; 2],
    ended: &dyn Fn() -> bool,
) {
    let begin = Instant::now();
    let goals = flows.each_ref().map(|flow| flow.received() + frames);
    let there = || {
        flows
            .iter()
            .zip(goals)
            .all(|(flow, goal)| flow.received() >= goal)
    };
    pump(machines, || there() || ended() || begin.elapsed() > LIMIT);
    println!("{what}: {frames} frames each way in {:?}", begin.elapsed());
    if !there() {
        let stands: String = machines[0]
            .ports
            .iter()
            .map(|port| port.view.stands() + "\n")
            .collect();
        panic!("{what}: traffic stopped\n{stands}");
    }
}

/// Direct, reset under traffic into shadow several times; mediation is refused.
#[test]
fn receives_while_shadowed_after_a_reset_under_traffic() {
    for abilities in [(true, true), (false, false)] {
        let accounts = talk(abilities, 0, |machines, flows, ended| {
            moves("direct", FRAMES, machines, flows, ended);
            let memory = machines[0].memory();
            let mediated = machines[0].all(Strategy::Mediated);
            let refused = machines[0].change(&mediated, &*memory).unwrap_err();
            assert!(
                matches!(refused, TransitionError::Device { .. }),
                "{refused:?}"
            );
            for _ in 0..5 {
                let shadowed = machines[0].all(Strategy::Shadowed);
                machines[0].restart(&shadowed, &*memory);
                moves("shadowed", FRAMES, machines, flows, ended);
            }
            println!("resets: {:?}", machines[0].times);
        });
        println!("{abilities:?}: {accounts:?}");
        for account in accounts {
            // A reset loses at most what was on its way, here a window in each direction, and
            // what came while the device was away.
            assert!(account.repeated <= 5 * u32::from(SIZE), "{account:?}");
            assert!(account.received > 5 * FRAMES, "{account:?}");
        }
    }
}

/// Rings near the wrap come up shadowed, are held there, and go on direct from 0.
#[test]
fn goes_direct_at_the_index_wrap() {
    for abilities in [(true, true), (false, false)] {
        let accounts = talk(abilities, 60_000, |machines, flows, ended| {
            moves("shadowed", 1000, machines, flows, ended);
            let memory = machines[0].memory();
            machines[0].hold_at_wrap();
            let begin = Instant::now();
            while !machines[0].is_held() {
                assert!(!ended(), "a guest failed");
                assert!(begin.elapsed() < LIMIT, "never at the wrap");
                let turn = Instant::now();
                pump(machines, || turn.elapsed() > Duration::from_millis(2));
            }
            println!("held after {:?}", begin.elapsed());
            let direct = machines[0].all(Strategy::Direct);
            machines[0].restart(&direct, &*memory);
            moves("direct", FRAMES, machines, flows, ended);
        });
        println!("{abilities:?}: {accounts:?}");
    }
}

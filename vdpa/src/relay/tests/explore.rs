//! All interleavings of relay passes with a guest and a device, on a memory model with store
//! buffers (x86-TSO). There a store becomes visible after later loads, unless a full fence lies
//! between.
//!
//! The relay runs through the same table [`PASS`] as the real one. Guest and device follow virtio
//! 1.3, 2.7.13 and 2.7.14, with fences of their own:
//! ```text
//!   device  given a chain by the guest, when kicked: take it, use it; else ask for kicks,
//!           fence, look again, sleep until a kick
//!   relay   passes, as many as it takes until nothing changes; no help from outside
//!   guest   makes a chain available, fence, kicks if asked to; asks for an interrupt, fence,
//!           looks again, sleeps until an interrupt
//! ```
//! **Rule:** when no actor can move, all chains are back with the guest. A relay polls, so the
//! model includes a pass that begins after everything else came to rest. Such a pass does only the
//! work of a pass: it does not repeat interrupts and kicks that an earlier pass should have sent.
//!
//! Two chains are explored, with event-idx and with flags. Removing either fence, or any other
//! step, is shown to lose a kick or an interrupt.

use std::collections::HashSet;

use crate::relay::used_shadow::{PASS, Step, recheck_kicks};
use crate::ring::split::Suppression;

const CHAINS: u8 = 2;
const SIZE: u16 = 4;

/// The shared variables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
enum Cell {
    /// Avail index.
    Avail,
    /// Private used index, which the device writes.
    PrivateUsed,
    /// `avail_event` or flags of the private ring.
    PrivateWish,
    /// Used index that the guest sees.
    GuestUsed,
    /// `avail_event` or flags that the guest sees.
    GuestWish,
    /// `used_event` or flags of the avail ring.
    DriverWish,
}
const CELLS: usize = 6;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Actor {
    Guest,
    Relay,
    Device,
}
const ACTORS: [Actor; 3] = [Actor::Guest, Actor::Relay, Actor::Device];

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct Buffers([Vec<(u8, u8)>; 3]);

/// The state of the guest's driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Guest {
    Add,
    Fence,
    Kick,
    Look,
    Ask,
    AskFence,
    LookAgain,
    Sleep,
    Done,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Device {
    Look,
    Use,
    Ask,
    AskFence,
    LookAgain,
    Sleep,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    cells: [u8; CELLS],
    buffers: Buffers,
    kicked: bool,
    interrupted: bool,
    guest: Guest,
    added: u8,
    taken: u8,
    device: Device,
    consumed: u8,
    step: usize,
    collected: u8,
    published: u8,
    signalled: u8,
    copied: u8,
    changed: bool,
    /// Nothing has changed since the pass began.
    quiet: bool,
    rested: bool,
}

struct Model {
    pass: Vec<Step>,
    event_idx: bool,
}

impl State {
    fn load(&self, actor: Actor, cell: Cell) -> u8 {
        let own = &self.buffers.0[actor as usize];
        let pending = own.iter().rev().find(|(at, _)| *at == cell as u8);
        pending.map_or(self.cells[cell as usize], |&(_, value)| value)
    }

    fn store(&mut self, actor: Actor, cell: Cell, value: u8) {
        self.buffers.0[actor as usize].push((cell as u8, value));
    }

    /// Any move may be missed by the current pass.
    fn others_moved(&mut self) {
        (self.quiet, self.rested) = (false, false);
    }

    fn drained(&self, actor: Actor) -> bool {
        self.buffers.0[actor as usize].is_empty()
    }
}

impl Model {
    fn begin(&self) -> State {
        State {
            // With flags both sides begin awake: value 0 is "signal me".
            cells: [0; CELLS],
            buffers: Buffers::default(),
            kicked: false,
            interrupted: false,
            guest: Guest::Add,
            added: 0,
            taken: 0,
            device: Device::Look,
            consumed: 0,
            step: 0,
            collected: 0,
            published: 0,
            signalled: 0,
            copied: 0,
            changed: false,
            quiet: true,
            rested: false,
        }
    }

    fn wants(&self, wish: u8, old: u8, new: u8) -> bool {
        let wish = u16::from(wish);
        let wish = if self.event_idx {
            Suppression {
                flags: 0,
                event: wish,
            }
        } else {
            Suppression {
                flags: wish,
                event: 0,
            }
        };
        wish.wants(self.event_idx, u16::from(old), u16::from(new))
    }

    /// All states that follow by one step of one actor, or by one store that becomes visible.
    fn successors(&self, state: &State) -> Vec<State> {
        let mut next = Vec::new();
        for actor in ACTORS {
            if !state.drained(actor) {
                let mut after = state.clone();
                let (cell, value) = after.buffers.0[actor as usize].remove(0);
                after.cells[usize::from(cell)] = value;
                after.others_moved();
                next.push(after);
            }
        }
        next.extend(self.guest(state));
        next.extend(self.device(state));
        next.extend(self.relay(state));
        next
    }

    fn guest(&self, state: &State) -> Option<State> {
        let mut after = state.clone();
        let me = Actor::Guest;
        after.guest = match state.guest {
            Guest::Add => {
                after.added += 1;
                after.store(me, Cell::Avail, after.added);
                Guest::Fence
            }
            Guest::Fence if state.drained(me) => Guest::Kick,
            Guest::Kick => {
                let wish = state.load(me, Cell::GuestWish);
                after.kicked |= self.wants(wish, state.added - 1, state.added);
                Guest::Look
            }
            Guest::Look | Guest::LookAgain => {
                let used = state.load(me, Cell::GuestUsed);
                let found = used != state.taken;
                after.taken = used;
                match (found, state.guest) {
                    _ if after.added < CHAINS && found => Guest::Add,
                    _ if used == CHAINS => Guest::Done,
                    (true, _) => Guest::Look,
                    // A second chain before the first is back, or sleep.
                    (false, Guest::Look) => Guest::Ask,
                    _ if after.added < CHAINS => Guest::Add,
                    _ => Guest::Sleep,
                }
            }
            Guest::Ask => {
                let wish = if self.event_idx { state.taken } else { 0 };
                after.store(me, Cell::DriverWish, wish);
                Guest::AskFence
            }
            Guest::AskFence if state.drained(me) => Guest::LookAgain,
            Guest::Sleep if state.interrupted => {
                after.interrupted = false;
                if !self.event_idx {
                    after.store(me, Cell::DriverWish, 1);
                }
                Guest::Look
            }
            Guest::Fence | Guest::AskFence | Guest::Sleep | Guest::Done => return None,
        };
        after.others_moved();
        Some(after)
    }

    fn device(&self, state: &State) -> Option<State> {
        let mut after = state.clone();
        let me = Actor::Device;
        after.device = match state.device {
            Device::Look | Device::LookAgain => {
                let avail = state.load(me, Cell::Avail);
                match state.device {
                    _ if avail != state.consumed => Device::Use,
                    Device::Look => Device::Ask,
                    _ => Device::Sleep,
                }
            }
            Device::Use => {
                after.consumed += 1;
                after.store(me, Cell::PrivateUsed, after.consumed);
                if !self.event_idx {
                    after.store(me, Cell::PrivateWish, 1);
                }
                Device::Look
            }
            Device::Ask => {
                let wish = if self.event_idx { state.consumed } else { 0 };
                after.store(me, Cell::PrivateWish, wish);
                Device::AskFence
            }
            Device::AskFence if state.drained(me) => Device::LookAgain,
            Device::Sleep if state.kicked => {
                after.kicked = false;
                Device::Look
            }
            Device::AskFence | Device::Sleep => return None,
        };
        after.others_moved();
        Some(after)
    }

    fn relay(&self, state: &State) -> Option<State> {
        if state.rested {
            return None;
        }
        let mut after = state.clone();
        let me = Actor::Relay;
        match self.pass[state.step] {
            Step::Collect => {
                let used = state.load(me, Cell::PrivateUsed);
                after.quiet &= used == state.collected;
                after.collected = used;
            }
            Step::Publish => {
                if state.collected != state.published {
                    after.store(me, Cell::GuestUsed, state.collected);
                    after.published = state.collected;
                }
            }
            Step::Fence => {
                if !state.drained(me) {
                    return None;
                }
            }
            Step::Signal => {
                if state.signalled != state.published {
                    let wish = state.load(me, Cell::DriverWish);
                    after.interrupted |= self.wants(wish, state.signalled, state.published);
                    after.signalled = state.published;
                }
            }
            Step::CopySuppression => {
                let wish = state.load(me, Cell::PrivateWish);
                if wish != state.copied {
                    after.store(me, Cell::GuestWish, wish);
                    (after.copied, after.changed, after.quiet) = (wish, true, false);
                }
            }
            Step::Recheck => {
                if state.changed {
                    let avail = u16::from(state.load(me, Cell::Avail));
                    let wish = u16::from(state.copied);
                    let wish = Suppression {
                        flags: wish,
                        event: wish,
                    };
                    after.kicked |= recheck_kicks(wish, self.event_idx, SIZE, avail);
                    after.changed = false;
                }
            }
        }
        after.step += 1;
        if after.step == self.pass.len() {
            after.step = 0;
            // A pass that found no work rests until another actor moves.
            after.rested = after.quiet && after.drained(me);
            after.quiet = true;
        }
        Some(after)
    }

    /// Explores all states; returns their number and one in which the guest waits forever, if there
    /// is any.
    fn explore(&self) -> (usize, Option<State>) {
        let begin = self.begin();
        let mut seen = HashSet::from([begin.clone()]);
        let mut open = vec![begin];
        while let Some(state) = open.pop() {
            let next = self.successors(&state);
            if next.is_empty() && state.guest != Guest::Done {
                return (seen.len(), Some(state));
            }
            for after in next {
                if seen.insert(after.clone()) {
                    open.push(after);
                }
            }
        }
        (seen.len(), None)
    }
}

fn explore(pass: &[Step], event_idx: bool) -> (usize, Option<State>) {
    let pass = pass.to_vec();
    Model { pass, event_idx }.explore()
}

#[test]
fn no_interleaving_loses_a_kick_or_an_interrupt() {
    for event_idx in [false, true] {
        let (states, stuck) = explore(&PASS, event_idx);
        assert_eq!(stuck, None, "event-idx {event_idx}");
        // Proves that there was an exploration at all.
        assert!(states > 10_000, "{states}");
    }
}

/// All avail indices of small rings, with all events nearby, against a walk back from the index.
#[test]
fn kicks_after_a_change_agree_with_a_walk() {
    for size in [1u16, 2, 4, 8] {
        for avail in 0..=u16::MAX {
            for ahead in 0..=3 * size {
                let event = avail.wrapping_sub(2 * size).wrapping_add(ahead);
                let wish = Suppression { flags: 0, event };
                let passed = (1..=size).any(|by| event.wrapping_add(by) == avail);
                assert_eq!(recheck_kicks(wish, true, size, avail), passed);
            }
        }
    }
}

#[test]
fn without_any_one_step_something_is_lost() {
    for removed in 0..PASS.len() {
        let mut pass = PASS.to_vec();
        let step = pass.remove(removed);
        let lost = [false, true].map(|event_idx| explore(&pass, event_idx).1.is_some());
        assert!(lost[0] || lost[1], "{step:?} at {removed} can be left out");
    }
}

#[test]
fn each_fence_is_needed_with_event_indices_and_with_flags() {
    for fence in [2, 5] {
        assert_eq!(PASS[fence], Step::Fence);
        let mut pass = PASS.to_vec();
        pass.remove(fence);
        for event_idx in [false, true] {
            let (_, stuck) = explore(&pass, event_idx);
            assert!(stuck.is_some(), "fence {fence}, event-idx {event_idx}");
        }
    }
}

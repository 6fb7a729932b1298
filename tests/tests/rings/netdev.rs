//! `vdpa::netdev` as a guest whose rings are relayed: the driver's thread, and the VMM's side of
//! its device, which must be reset for each change.
//!
//! ```text
//!   Driver (thread): NAPI, numbered frames     Relayed (the test's thread): poll, restart
//!     queues of Netdev <---- rings, kick and call eventfds ----> SvqSet, Device
//! ```
//! **Which frames may be lost.** The network is QEMU's: a virtio NIC on a tap. A NIC that is being
//! reset has no receive queue, and QEMU drops the frames that it has read from the tap by then. So
//! frames **to** a NIC may be lost if they were in flight between the reset and the NIC's restart;
//! [`Relayed::windows`] keeps their numbers. Frames **from** a NIC that is reset are neither lost
//! nor repeated. QEMU takes a frame from the ring, writes it to the tap and puts it into the used
//! ring in one step. It does so under the lock that the reset also takes. So the used index shows
//! exactly which frames were sent, and relays give the rest to the device again. With one queue,
//! QEMU has read at most one frame ahead. With several, the tap also drops frames that wait in the
//! queues that a reset switches off.

use std::mem;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vdpa::device::{Device, State};
use vdpa::memory::DeviceMemory;
use vdpa::netdev::{Chains, Driver as NetDriver, Netdev, Options, QueuePair, Virtqueue};
use vdpa::relay::{Pause, Strategy, SvqSet};
use vmm_sys_util::eventfd::EventFd;

use super::frame::{self, HEADER, Mac};
use super::watchdog::{TICK, Watchdog};

/// Frames of one flow that may be in flight: more than a ring of [`RING`] holds, less than a tap.
pub(crate) const WINDOW: u32 = 96;
/// Entries of each ring.
pub(crate) const RING: u16 = 64;
/// Frames received before the queue's peer has its turn.
const BUDGET: usize = 16;
/// After both sides have stopped to send, a frame that has not arrived for this long is lost.
const GIVE_UP: Duration = Duration::from_millis(300);

/// Frames from one guest to the other with the number of a queue pair.
#[derive(Debug, Default)]
pub(crate) struct Flow {
    sent: AtomicU32,
    /// Frames that the sender's device has completed.
    completed: AtomicU32,
    /// One more than the highest number that arrived.
    received: AtomicU32,
    /// The lowest number that has neither arrived nor been written off.
    due: AtomicU32,
    /// Frames before this one are no longer awaited.
    written_off: AtomicU32,
}

impl Flow {
    /// Records an arrival; `seen` already includes it.
    fn came(&self, number: u32, seen: &[bool]) {
        self.received.fetch_max(number + 1, Ordering::Relaxed);
        let due = self.due();
        let rest = seen.get(usize::try_from(due).unwrap()..).unwrap_or(&[]);
        let more = rest.iter().take_while(|came| **came).count();
        let due = due + u32::try_from(more).unwrap();
        self.due.store(due, Ordering::Relaxed);
    }

    pub(crate) fn received(&self) -> u32 {
        self.received.load(Ordering::Relaxed)
    }

    pub(crate) fn sent(&self) -> u32 {
        self.sent.load(Ordering::Relaxed)
    }

    /// All frames before this one arrived or were written off. Through a switch with several
    /// queues, later frames may arrive before it.
    fn due(&self) -> u32 {
        let due = self.due.load(Ordering::Relaxed);
        due.max(self.written_off.load(Ordering::Relaxed))
    }

    /// Frames that were sent and are still awaited.
    fn under_way(&self) -> u32 {
        let written_off = self.written_off.load(Ordering::Relaxed);
        self.sent().saturating_sub(self.received().max(written_off))
    }

    /// Frames in the sender's ring.
    pub(crate) fn in_ring(&self) -> u32 {
        let completed = self.completed.load(Ordering::Relaxed);
        self.sent().saturating_sub(completed)
    }
}

/// The state that the driver's thread shows to others.
#[derive(Debug, Default)]
pub(crate) struct Face {
    /// The driver has enabled interrupts and sleeps, or is about to.
    pub(crate) listening: AtomicBool,
    /// The driver sends no more, and its device has none of its frames.
    drained: AtomicBool,
}

/// A guest's observations.
#[derive(Default)]
pub(crate) struct Account {
    /// By pair: true for each frame that arrived.
    pub(crate) seen: Vec<Vec<bool>>,
    pub(crate) repeated: u32,
    /// Frames of other senders.
    pub(crate) foreign: u32,
    /// How often it slept until an interrupt.
    pub(crate) slept: u32,
    pub(crate) kicks: u64,
    pub(crate) kicks_spared: u64,
    /// By pair: frames that arrived by its receive queue.
    pub(crate) by_queue: Vec<u64>,
    pub(crate) longest: Duration,
}

/// A driver with its flows, for a thread of its own.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) name: &'static str,
    pub(crate) mac: Mac,
    pub(crate) peer: Mac,
    pub(crate) pairs: Vec<QueuePair>,
    pub(crate) outward: Vec<Arc<Flow>>,
    pub(crate) inward: Vec<Arc<Flow>>,
    pub(crate) face: Arc<Face>,
    pub(crate) peer_face: Arc<Face>,
}

impl Driver {
    fn describe(&self) -> String {
        let mut text = self.name.to_owned();
        for pair in &self.pairs {
            for queue in [pair.receive.queue(), pair.transmit.queue()] {
                let (available, used) = queue.positions();
                let index = queue.index();
                text += &format!("; queue {index}: available {available} used {used}");
            }
        }
        let flows = self.outward.iter().chain(&self.inward);
        flows.fold(text, |text, flow| text + &format!("; {flow:?}"))
    }

    fn receive(&mut self, account: &mut Account) -> bool {
        let mut worked = false;
        let mut packet = [0; 2048];
        for (pair, by_queue) in self.pairs.iter_mut().zip(&mut account.by_queue) {
            let (mac, peer, inward) = (self.mac, self.peer, &self.inward);
            let Account {
                seen,
                repeated,
                foreign,
                ..
            } = account;
            let taken = pair.receive.poll(BUDGET, |received| {
                let frame = received.copy_to(&mut packet[HEADER..]).unwrap();
                let len = HEADER + frame.len();
                let Some((of, number)) = frame::pair_and_number(&packet[..len], mac, peer) else {
                    *foreign += 1;
                    return;
                };
                *by_queue += 1;
                let of = usize::from(of);
                let index = usize::try_from(number).unwrap();
                if seen[of].len() <= index {
                    seen[of].resize(index + 1, false);
                }
                *repeated += u32::from(mem::replace(&mut seen[of][index], true));
                inward[of].came(number, &seen[of]);
            });
            worked |= taken.unwrap() > 0;
        }
        worked
    }

    fn send(&mut self, sending: bool) -> bool {
        let mut worked = false;
        for ((pair, tag), flow) in self.pairs.iter_mut().zip(0..).zip(&self.outward) {
            let reaped = u32::try_from(pair.transmit.reap().unwrap()).unwrap();
            let sent = flow.sent();
            let mut room = WINDOW.saturating_sub(flow.under_way());
            let mut next = sent;
            while sending && room > 0 {
                let packet = frame::make(self.peer, self.mac, tag, next);
                if !pair.transmit.send(&packet[HEADER..]).unwrap() {
                    break;
                }
                next += 1;
                room -= 1;
            }
            if next > sent {
                flow.sent.store(next, Ordering::Relaxed);
                pair.transmit.flush().unwrap();
            }
            let out = u32::from(pair.transmit.queue().outstanding());
            flow.completed.store(next - out, Ordering::Relaxed);
            worked |= reaped > 0 || next > sent;
        }
        worked
    }

    /// True if there are frames to send and room for them, in the window and in the ring.
    fn window_opened(&self) -> bool {
        let mut flows = self.outward.iter().zip(&self.pairs);
        flows.any(|(flow, pair)| {
            let free = flow.in_ring() < u32::from(capacity(pair.transmit.queue()));
            free && flow.under_way() < WINDOW
        })
    }

    /// Returns `true` if there is work already.
    fn set_interrupts(&mut self, enabled: bool) -> bool {
        let mut more = false;
        for pair in &mut self.pairs {
            for queue in [pair.receive.queue_mut(), pair.transmit.queue_mut()] {
                if enabled {
                    more |= queue.enable_interrupts().unwrap();
                } else {
                    queue.disable_interrupts().unwrap();
                }
            }
        }
        more
    }

    /// Sleeps until an interrupt arrives; `false` if none arrived for a tick.
    fn sleep(&mut self) -> bool {
        let limit = Timespec::try_from(TICK).unwrap();
        let mut fds: Vec<PollFd<'_>> = (self.pairs.iter())
            .flat_map(|pair| [pair.receive.as_fd(), pair.transmit.as_fd()])
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        if poll(&mut fds, Some(&limit)).unwrap() == 0 {
            return false;
        }
        for pair in &mut self.pairs {
            pair.receive.queue_mut().clear_call().unwrap();
            pair.transmit.queue_mut().clear_call().unwrap();
        }
        true
    }

    /// Sends without pause and receives, until `stop` is set and all frames in flight have arrived.
    ///
    /// # Panics
    /// Something is damaged, or nothing moves for [`super::watchdog::STALL`].
    pub(crate) fn exchange(mut self, stop: &AtomicBool) -> Account {
        let pairs = self.pairs.len();
        let mut account = Account {
            seen: vec![Vec::new(); pairs],
            by_queue: vec![0; pairs],
            ..Account::default()
        };
        let mut watchdog = Watchdog::new();
        self.set_interrupts(false);
        loop {
            let sending = !stop.load(Ordering::Relaxed);
            if self.receive(&mut account) | self.send(sending) {
                watchdog.progress();
                continue;
            }
            self.face.listening.store(true, Ordering::Relaxed);
            if !self.set_interrupts(true) {
                account.slept += 1;
                if !self.wait(stop, &mut watchdog) {
                    account.longest = watchdog.longest();
                    return self.finish(account);
                }
            }
            self.face.listening.store(false, Ordering::Relaxed);
            self.set_interrupts(false);
        }
    }

    /// Waits for an interrupt without looking at a ring; `false` at the end of the exchange.
    fn wait(&mut self, stop: &AtomicBool, watchdog: &mut Watchdog) -> bool {
        let drained = self.outward.iter().all(|flow| flow.in_ring() == 0);
        while !self.sleep() {
            let idle = watchdog.tick();
            let ending = stop.load(Ordering::Relaxed);
            let stalled = watchdog.is_stalled() && !(ending && drained);
            assert!(!stalled, "nothing moves: {}", self.describe());
            // No interrupt reports that the peer took frames. Frames that arrived meanwhile stay
            // unseen, and do not count as progress.
            if !ending && self.window_opened() && self.send(true) {
                watchdog.progress();
                if self.set_interrupts(true) {
                    return true;
                }
            }
            if ending && drained {
                self.face.drained.store(true, Ordering::Release);
                if self.peer_face.drained.load(Ordering::Acquire) && idle > GIVE_UP {
                    return false;
                }
            }
        }
        true
    }

    fn finish(self, mut account: Account) -> Account {
        for pair in &self.pairs {
            for queue in [pair.receive.queue(), pair.transmit.queue()] {
                account.kicks += queue.counters().kicks;
                account.kicks_spared += queue.counters().kicks_suppressed;
            }
            // A driver of split rings counts each chain in and out, and fails on one that comes
            // back twice. Here all chains have returned.
            assert_eq!(pair.transmit.queue().outstanding(), 0);
            let queue = pair.receive.queue();
            assert_eq!(queue.outstanding(), capacity(queue));
            assert_eq!(pair.receive.queue().counters().malformed, 0);
        }
        account
    }
}

/// Chains that a ring holds.
fn capacity(queue: &Virtqueue) -> u16 {
    match queue.chains() {
        Chains::Pair => queue.size() / 2,
        Chains::Single | Chains::Indirect => queue.size(),
    }
}

/// Numbers of frames to a guest that were in flight while its device was reset.
#[derive(Debug, Clone)]
pub(crate) struct Window {
    pub(crate) pair: usize,
    pub(crate) first: u32,
    pub(crate) end: u32,
}

/// A guest's device with its relays.
#[derive(Debug)]
pub(crate) struct Relayed {
    name: &'static str,
    device: Device,
    set: SvqSet,
    driver: NetDriver,
    memory: DeviceMemory,
    calls: Vec<Arc<EventFd>>,
    inward: Vec<Arc<Flow>>,
    pub(crate) windows: Vec<Window>,
    /// How often the device was reset: twice for a restart that was refused.
    pub(crate) resets: usize,
    /// How long each restart took.
    pub(crate) times: Vec<Duration>,
}

impl Relayed {
    /// Starts a device with its queues direct; returns the queues too.
    pub(crate) fn start(
        name: &'static str,
        path: &Path,
        options: &Options,
        inward: &[Arc<Flow>],
    ) -> (Self, Vec<QueuePair>) {
        let (device, iotlb) = Device::open(path).unwrap().own().unwrap();
        let mut netdev = Netdev::start(device, iotlb, options).unwrap();
        let memory = netdev.driver.guest_memory().unwrap();
        let set = netdev.relay_set(&memory).unwrap();
        let Netdev { device, mut driver } = netdev;
        let pairs = mem::take(&mut driver.pairs);
        let calls = (pairs.iter())
            .map(|pair| Arc::clone(pair.receive.queue().call_event()))
            .collect();
        let relayed = Self {
            name,
            device,
            set,
            driver,
            memory: memory.into(),
            calls,
            inward: inward.to_vec(),
            windows: Vec::new(),
            resets: 0,
            times: Vec::new(),
        };
        (relayed, pairs)
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn set(&mut self) -> &mut SvqSet {
        &mut self.set
    }

    pub(crate) fn strategies(&self) -> Vec<Strategy> {
        (0..).map_while(|queue| self.set.strategy(queue)).collect()
    }

    /// Assigns the strategies in `targets` to the queues in turn.
    pub(crate) fn targets(&self, targets: &[Strategy]) -> Vec<(u16, Strategy)> {
        (0..)
            .zip(targets.iter().cycle().copied())
            .take(2 * self.calls.len())
            .collect()
    }

    /// A change that must fail without a reset. The device continues or, if it is half changed by
    /// then, is reset and continues as before.
    pub(crate) fn change(&mut self, targets: &[Strategy]) -> vdpa::Error {
        let (before, wanted) = (self.strategies(), self.targets(targets));
        let failed = (self.set).change(&mut self.device, &wanted, &self.memory);
        let error = failed.unwrap_err();
        match self.device.state() {
            State::Running => {}
            State::Suspended => {
                let due = self.due();
                self.device.reset().unwrap();
                self.bring_up(&before).unwrap();
                self.count_window(&due);
            }
            gone => panic!("{}: {gone:?}, {error:?}", self.name),
        }
        error
    }

    /// Resets the device and restarts it with changed rings. If that is refused, it restarts as
    /// before, and the error is returned.
    pub(crate) fn restart(&mut self, targets: &[Strategy]) -> Result<(), vdpa::Error> {
        let (before, due) = (self.strategies(), self.due());
        let begin = Instant::now();
        // A device that can suspend first completes the frames that it has sent.
        if self.device.can_suspend() {
            self.device.suspend().unwrap();
        }
        self.device.reset().unwrap();
        let result = match self.bring_up(targets) {
            Ok(()) => {
                self.times.push(begin.elapsed());
                Ok(())
            }
            Err(error) => {
                let again = self.bring_up(&before);
                assert!(again.is_ok(), "{}: {error:?}, then {again:?}", self.name);
                Err(error)
            }
        };
        self.count_window(&due);
        result
    }

    fn bring_up(&mut self, targets: &[Strategy]) -> Result<(), vdpa::Error> {
        self.resets += 1;
        let targets = self.targets(targets);
        let (device, set) = (&mut self.device, &mut self.set);
        let started = (self.driver).start_relayed(device, set, &targets, &self.memory);
        if let Err(error) = &started {
            let state = self.device.state();
            assert_eq!(state, State::Owned, "{}: {error:?}", self.name);
        }
        started
    }

    fn due(&self) -> Vec<u32> {
        self.inward.iter().map(|flow| flow.due()).collect()
    }

    /// The device runs again: frames in flight since `due` are no longer awaited.
    fn count_window(&mut self, due: &[u32]) {
        for ((pair, &first), flow) in (0..).zip(due).zip(&self.inward) {
            let end = flow.sent();
            self.windows.push(Window { pair, first, end });
            flow.written_off.store(end, Ordering::Relaxed);
        }
    }

    /// Sends spurious interrupts: a driver may then send again instead of waiting for lost frames.
    pub(crate) fn interrupt(&self) {
        for call in &self.calls {
            call.write(1).unwrap();
        }
    }

    /// One poll of the relays.
    pub(crate) fn poll(&mut self) -> Pause {
        match self.set.poll(&self.memory) {
            Ok(progress) => progress.pause,
            Err(failed) => panic!("{}: {failed:?}", self.name),
        }
    }
}

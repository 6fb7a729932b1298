//! A guest's network driver: 1 to 4 queue pairs of split rings in guest memory, and a watchdog. As
//! with NAPI, interrupts are off while there is work.
//!
//! ```text
//!             work                         interrupts on, look again: nothing
//!   polling <------> polling (NAPI)  --------------------------------------> asleep
//!      ^               interrupts off                                          |
//!      +---------------------- call eventfd of any queue ----------------------+
//!                              no progress for STALL: the test fails
//!
//!   0x00_0000 rings, 64 KiB per queue (descriptors, +0x4000 avail, +0x8000 used)
//!   0x10_0000 receive buffers, 4 KiB each    0x40_0000 transmit buffers
//! ```
//! It looks at no ring until an interrupt arrives, so a lost interrupt is a stall. It kicks only
//! when the device wants a kick, so a lost kick is a stall too.

use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use vdpa::device::VringAddresses;
use vdpa::doorbell::Doorbell;
use vdpa::iova::DeviceAddress;
use vdpa::memory::GuestMemory;
use vdpa::relay::RelayedQueue;
use vdpa::ring::split::GuestRing;
use vm_memory::{Bytes, FileOffset, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use super::frame::{self, Mac};
use super::watchdog::{STALL, TICK, Watchdog};

/// Entries of each ring.
pub(crate) const SIZE: u16 = 64;
/// Guest RAM.
pub(crate) const RAM: u64 = 8 << 20;
/// Receive buffers: a page each, of which the driver posts 2 KiB.
pub(crate) const RECEIVE_BUFFERS: u64 = 0x10_0000;
const TRANSMIT_BUFFERS: u64 = 0x40_0000;
pub(crate) const BUFFER: u64 = 4096;
const GIVEN: u32 = 2048;
/// The second half of a transmit buffer holds its indirect table.
const TABLE: u64 = 2048;
/// Frames received before the queue's peer has its turn.
const BUDGET: u32 = 16;
const VIRTQ_DESC_F_WRITE: u16 = 2;
const VIRTQ_DESC_F_NEXT: u16 = 1;
const VIRTQ_DESC_F_INDIRECT: u16 = 4;

/// Guest RAM backed by a memfd.
pub(crate) fn memory() -> Arc<GuestMemory> {
    let file = File::from(memfd_create(c"lab-guest", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(RAM).unwrap();
    let size = usize::try_from(RAM).unwrap();
    let region = (GuestAddress(0), size, Some(FileOffset::new(file, 0)));
    Arc::new(GuestMemory::from_ranges_with_files([region]).unwrap())
}

/// The target of a queue's kicks. While the device does not read the guest's ring, the VMM
/// withdraws the doorbell, as it would remove a memory slot. When [`Notifier::withdraw`] returns,
/// no store is in flight.
#[derive(Debug)]
pub(crate) struct Notifier {
    queue: u16,
    eventfd: Arc<EventFd>,
    doorbell: Mutex<Option<Doorbell>>,
    kicks: AtomicU32,
    skipped: AtomicU32,
}

impl Notifier {
    fn kick(&self) {
        self.kicks.fetch_add(1, Ordering::Relaxed);
        match &*self.doorbell.lock().unwrap() {
            Some(doorbell) => doorbell.ring(self.queue),
            None => self.eventfd.write(1).unwrap(),
        }
    }

    pub(crate) fn grant(&self, doorbell: Doorbell) {
        *self.doorbell.lock().unwrap() = Some(doorbell);
    }

    pub(crate) fn withdraw(&self) -> Option<Doorbell> {
        self.doorbell.lock().unwrap().take()
    }

    /// The number of kicks, and of kicks that the device suppressed.
    pub(crate) fn counts(&self) -> (u32, u32) {
        let load = |count: &AtomicU32| count.load(Ordering::Relaxed);
        (load(&self.kicks), load(&self.skipped))
    }
}

/// A split ring as any observer sees it in guest memory.
#[derive(Debug, Clone)]
pub(crate) struct View {
    memory: Arc<GuestMemory>,
    pub(crate) queue: u16,
    addresses: VringAddresses,
    event_idx: bool,
}

impl View {
    fn load(&self, address: u64) -> u16 {
        let address = GuestAddress(address);
        self.memory.load(address, Ordering::SeqCst).unwrap()
    }

    fn store(&self, address: u64, value: u16) {
        let address = GuestAddress(address);
        self.memory.store(value, address, Ordering::SeqCst).unwrap();
    }

    pub(crate) fn avail(&self) -> u16 {
        self.load(self.addresses.driver.0 + 2)
    }

    pub(crate) fn used(&self) -> u16 {
        self.load(self.addresses.device.0 + 2)
    }

    /// Chains that the guest made available and that were not used yet.
    pub(crate) fn outstanding(&self) -> u16 {
        self.avail().wrapping_sub(self.used())
    }

    fn used_event(&self) -> u64 {
        self.addresses.driver.0 + 4 + 2 * u64::from(SIZE)
    }

    fn avail_event(&self) -> u64 {
        self.addresses.device.0 + 4 + 8 * u64::from(SIZE)
    }

    /// True if the next used chain would not interrupt the guest.
    pub(crate) fn is_suppressed(&self) -> bool {
        if self.event_idx {
            // The event index is already passed.
            self.load(self.used_event()) != self.used()
        } else {
            self.load(self.addresses.driver.0) & 1 != 0
        }
    }

    /// Formats all indices and suppression fields.
    pub(crate) fn describe(&self) -> String {
        format!(
            "queue {}: avail {} used {} avail.flags {} used_event {} used.flags {} avail_event {}",
            self.queue,
            self.avail(),
            self.used(),
            self.load(self.addresses.driver.0),
            self.load(self.used_event()),
            self.load(self.addresses.device.0),
            self.load(self.avail_event()),
        )
    }
}

/// A ring of the driver.
#[derive(Debug)]
pub(crate) struct Ring {
    pub(crate) view: View,
    pub(crate) notifier: Arc<Notifier>,
    pub(crate) call: Arc<EventFd>,
    indirect: bool,
    avail: u16,
    used: u16,
    /// The avail index at the last kick decision.
    notified: u16,
    /// By descriptor: true if the device has it.
    given: Vec<bool>,
}

impl Ring {
    fn new(memory: &Arc<GuestMemory>, queue: u16, start: u16, options: Options) -> Self {
        let base = 0x1_0000 * u64::from(queue);
        let event = || Arc::new(vdpa::eventfd::new().unwrap());
        let view = View {
            memory: Arc::clone(memory),
            queue,
            addresses: VringAddresses {
                descriptor: DeviceAddress(base),
                driver: DeviceAddress(base + 0x4000),
                device: DeviceAddress(base + 0x8000),
            },
            event_idx: options.event_idx,
        };
        view.store((view.addresses.driver + 2).0, start);
        view.store((view.addresses.device + 2).0, start);
        view.store(view.used_event(), start);
        view.store(view.avail_event(), start);
        Self {
            view,
            notifier: Arc::new(Notifier {
                queue,
                eventfd: event(),
                doorbell: Mutex::new(None),
                kicks: AtomicU32::new(0),
                skipped: AtomicU32::new(0),
            }),
            call: event(),
            indirect: options.indirect,
            avail: start,
            used: start,
            notified: start,
            given: vec![false; usize::from(SIZE)],
        }
    }

    /// The ring for the VMM.
    pub(crate) fn relayed(&self) -> RelayedQueue {
        let memory = Arc::clone(&self.view.memory);
        RelayedQueue {
            index: self.view.queue,
            ring: GuestRing::new(memory, SIZE, self.view.addresses, self.indirect)
                .unwrap()
                .into(),
            kick: Arc::clone(&self.notifier.eventfd),
            call: Arc::clone(&self.call),
        }
    }

    fn write(&self, at: u64, address: u64, len: u32, flags: u16, next: u16) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        let memory = &self.view.memory;
        memory.write_slice(&bytes, GuestAddress(at)).unwrap();
    }

    /// Makes a buffer available; [`Ring::notify`] afterwards.
    fn add(&mut self, descriptor: u16, address: u64, len: u32, flags: u16) {
        let given = &mut self.given[usize::from(descriptor)];
        assert!(!*given, "descriptor {descriptor} is not free");
        *given = true;
        let at = self.view.addresses.descriptor + 16 * u64::from(descriptor);
        self.write(at.0, address, len, flags, 0);
        let slot = u64::from(self.avail % SIZE);
        let driver = self.view.addresses.driver;
        self.view.store((driver + 4 + 2 * slot).0, descriptor);
        self.avail = self.avail.wrapping_add(1);
        self.view.store((driver + 2).0, self.avail);
    }

    /// Like [`Ring::add`], in two pieces that an indirect table at `table` names.
    fn add_indirect(&mut self, descriptor: u16, table: u64, address: u64, len: u32) {
        let header = u32::try_from(frame::HEADER).unwrap();
        self.write(table, address, header, VIRTQ_DESC_F_NEXT, 1);
        let rest = address + u64::from(header);
        self.write(table + 16, rest, len - header, 0, 0);
        self.add(descriptor, table, 32, VIRTQ_DESC_F_INDIRECT);
    }

    /// Kicks if the device wants a notification of the buffers added since the last call.
    fn notify(&mut self) {
        if self.notified == self.avail {
            return;
        }
        fence(Ordering::SeqCst);
        let wanted = if self.view.event_idx {
            let event = self.view.load(self.view.avail_event());
            let moved = self.avail.wrapping_sub(self.notified);
            self.avail.wrapping_sub(event).wrapping_sub(1) < moved
        } else {
            self.view.load(self.view.addresses.device.0) & 1 == 0
        };
        self.notified = self.avail;
        if wanted {
            self.notifier.kick();
        } else {
            self.notifier.skipped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The next used descriptor and the bytes written.
    fn take(&mut self) -> Option<(u16, u32)> {
        if self.view.used() == self.used {
            return None;
        }
        let at = self.view.addresses.device + 4 + 8 * u64::from(self.used % SIZE);
        let mut element = [0; 8];
        let memory = &self.view.memory;
        memory.read_slice(&mut element, GuestAddress(at.0)).unwrap();
        self.used = self.used.wrapping_add(1);
        let id = u32::from_le_bytes(element[..4].try_into().unwrap());
        let len = u32::from_le_bytes(element[4..].try_into().unwrap());
        let descriptor = u16::try_from(id).unwrap();
        let given = self.given.get_mut(usize::from(descriptor));
        assert!(
            given.is_some_and(std::mem::take),
            "chain {id} was used and not given; {}",
            self.describe()
        );
        Some((descriptor, len))
    }

    fn set_interrupts(&self, enabled: bool) {
        if self.view.event_idx {
            let behind = self.used.wrapping_sub(u16::from(!enabled));
            self.view.store(self.view.used_event(), behind);
        } else {
            let flag = u16::from(!enabled);
            self.view.store(self.view.addresses.driver.0, flag);
        }
        fence(Ordering::SeqCst);
    }

    fn describe(&self) -> String {
        let driver = format!("driver at avail {} used {}", self.avail, self.used);
        format!("{}, {driver}", self.view.describe())
    }
}

/// Frames in one direction on one queue pair.
#[derive(Debug, Default)]
pub(crate) struct Flow {
    pub(crate) sent: AtomicU32,
    pub(crate) received: AtomicU32,
    done: AtomicBool,
}

impl Flow {
    pub(crate) fn received(&self) -> u32 {
        self.received.load(Ordering::Relaxed)
    }
}

/// The driver's options for its rings.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Options {
    pub(crate) event_idx: bool,
    /// Every second frame in an indirect table.
    pub(crate) indirect: bool,
    /// Frames of one flow that may be in flight. A simulator that loops back drops frames beyond
    /// the size of the receive ring.
    pub(crate) window: u32,
    /// The total number of frames of each flow.
    pub(crate) frames: u32,
}

/// A guest's observations.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Account {
    pub(crate) received: u32,
    /// How often it slept until an interrupt.
    pub(crate) slept: u32,
    /// The longest time without a frame or a completion.
    pub(crate) longest: Duration,
}

#[derive(Debug)]
struct Pair {
    receive: Ring,
    transmit: Ring,
    free: Vec<u16>,
    outward: Arc<Flow>,
    inward: Arc<Flow>,
    /// The next number to send, and the next one expected.
    send: u32,
    expect: u32,
}

/// Called for each frame before the driver looks at it, with the queue and the buffer's address.
pub(crate) type Witness = Arc<dyn Fn(u16, u64) + Send + Sync>;

/// The driver with all its pairs.
pub(crate) struct Guest {
    pub(crate) memory: Arc<GuestMemory>,
    mac: Mac,
    peer: Mac,
    pairs: Vec<Pair>,
    options: Options,
    account: Account,
    pub(crate) witness: Option<Witness>,
}

impl Guest {
    /// Creates a driver whose rings begin at `start`, with all receive buffers posted. `outward`
    /// and `inward` have a flow per queue pair; a guest that talks to itself has the same for both.
    pub(crate) fn new(
        mac: Mac,
        peer: Mac,
        start: u16,
        options: Options,
        outward: &[Arc<Flow>],
        inward: &[Arc<Flow>],
    ) -> Self {
        let memory = memory();
        let pairs = (0..)
            .zip(outward.iter().zip(inward))
            .map(|(pair, (outward, inward))| {
                let mut receive = Ring::new(&memory, 2 * pair, start, options);
                for descriptor in 0..SIZE {
                    let address = receive_buffer(pair, descriptor);
                    receive.add(descriptor, address, GIVEN, VIRTQ_DESC_F_WRITE);
                }
                Pair {
                    receive,
                    transmit: Ring::new(&memory, 2 * pair + 1, start, options),
                    free: (0..SIZE).collect(),
                    outward: Arc::clone(outward),
                    inward: Arc::clone(inward),
                    send: 0,
                    expect: 0,
                }
            })
            .collect();
        Self {
            memory,
            mac,
            peer,
            pairs,
            options,
            account: Account::default(),
            witness: None,
        }
    }

    /// All rings, by queue index.
    pub(crate) fn rings(&self) -> impl Iterator<Item = &Ring> {
        self.pairs
            .iter()
            .flat_map(|pair| [&pair.receive, &pair.transmit])
    }

    fn describe(&self) -> String {
        self.rings()
            .map(Ring::describe)
            .chain(self.pairs.iter().map(|pair| {
                let (sent, expected) = (pair.send, pair.expect);
                format!("sent {sent}, frame {expected} is due")
            }))
            .collect::<Vec<_>>()
            .join("\n")
    }

    /// Receives at most the budget.
    fn receive(&mut self, pair: u16) -> bool {
        let this = &mut self.pairs[usize::from(pair)];
        let mut worked = false;
        for _ in 0..BUDGET {
            let Some((descriptor, len)) = this.receive.take() else {
                break;
            };
            worked = true;
            let address = receive_buffer(pair, descriptor);
            if let Some(witness) = &self.witness {
                witness(2 * pair, address);
            }
            let mut packet = vec![0; usize::try_from(len).unwrap()];
            let memory = &this.receive.view.memory;
            memory
                .read_slice(&mut packet, GuestAddress(address))
                .unwrap();
            this.receive
                .add(descriptor, address, GIVEN, VIRTQ_DESC_F_WRITE);
            let found = frame::number(&packet, self.mac, self.peer, pair);
            let number = found.unwrap_or_else(|| panic!("a foreign frame: {packet:02x?}"));
            // One queue and one path keep the order, so a number that is missing or repeated shows
            // here.
            assert_eq!(number, this.expect, "pair {pair}: missing or repeated");
            this.expect = number + 1;
            self.account.received += 1;
            this.inward.received.store(this.expect, Ordering::Relaxed);
        }
        this.receive.notify();
        worked
    }

    /// Takes transmitted buffers back.
    fn clean(&mut self, pair: u16) -> bool {
        let this = &mut self.pairs[usize::from(pair)];
        let before = this.free.len();
        while let Some((descriptor, _)) = this.transmit.take() {
            this.free.push(descriptor);
        }
        this.free.len() > before
    }

    /// Sends as many frames as the ring and the window have room for.
    fn send(&mut self, pair: u16) -> bool {
        let (mac, peer, options) = (self.mac, self.peer, self.options);
        let this = &mut self.pairs[usize::from(pair)];
        let before = this.send;
        loop {
            let under_way = this.send - this.outward.received();
            if under_way >= options.window || this.send >= options.frames {
                break;
            }
            let Some(descriptor) = this.free.pop() else {
                break;
            };
            let packet = frame::make(peer, mac, pair, this.send);
            let address = transmit_buffer(pair, descriptor);
            let memory = &this.transmit.view.memory;
            memory.write_slice(&packet, GuestAddress(address)).unwrap();
            let len = u32::try_from(packet.len()).unwrap();
            if options.indirect && this.send % 2 == 1 {
                let table = address + TABLE;
                this.transmit.add_indirect(descriptor, table, address, len);
            } else {
                this.transmit.add(descriptor, address, len, 0);
            }
            this.send += 1;
            this.outward.sent.store(this.send, Ordering::Relaxed);
        }
        this.transmit.notify();
        this.send > before
    }

    /// True if all frames of the other side have arrived, and all sent frames are completed.
    fn is_done(&self) -> bool {
        self.pairs.iter().all(|pair| {
            let complete = pair.free.len() == usize::from(SIZE);
            let finished = pair.inward.done.load(Ordering::Acquire);
            complete && finished && pair.expect == pair.inward.sent.load(Ordering::Relaxed)
        })
    }

    fn set_interrupts(&self, enabled: bool) {
        for pair in &self.pairs {
            pair.receive.set_interrupts(enabled);
            pair.transmit.set_interrupts(enabled);
        }
    }

    fn turn(&mut self, sending: bool) -> bool {
        let mut worked = false;
        for pair in 0..u16::try_from(self.pairs.len()).unwrap() {
            worked |= self.receive(pair);
            worked |= self.clean(pair);
            worked |= sending && self.send(pair);
        }
        worked
    }

    /// Sends without pause and receives, until `stop` is set and all frames in flight have arrived.
    ///
    /// # Panics
    /// Something is lost, doubled or damaged, or nothing moves for [`super::watchdog::STALL`].
    pub(crate) fn exchange(&mut self, stop: &AtomicBool) -> Account {
        self.set_interrupts(false);
        let mut watchdog = Watchdog::new();
        loop {
            let sending = !stop.load(Ordering::Relaxed);
            if !sending {
                for pair in &self.pairs {
                    pair.outward.done.store(true, Ordering::Release);
                }
            }
            if self.turn(sending) {
                watchdog.progress();
                continue;
            }
            if !sending && self.is_done() {
                self.account.longest = watchdog.longest();
                return self.account;
            }
            self.set_interrupts(true);
            if self.turn(sending) {
                watchdog.progress();
            } else {
                self.sleep(stop, &mut watchdog);
            }
            self.set_interrupts(false);
        }
    }

    /// Looks at no ring until an interrupt arrives. Only the end comes without an interrupt.
    fn sleep(&mut self, stop: &AtomicBool, watchdog: &mut Watchdog) {
        self.account.slept += 1;
        while !wait(self.rings().map(|ring| &*ring.call), TICK) {
            watchdog.tick();
            assert!(
                !watchdog.is_stalled(),
                "nothing moves for {STALL:?}:\n{}",
                self.describe()
            );
            if stop.load(Ordering::Relaxed) {
                return;
            }
        }
    }
}

pub(crate) fn receive_buffer(pair: u16, descriptor: u16) -> u64 {
    RECEIVE_BUFFERS + BUFFER * (u64::from(SIZE) * u64::from(pair) + u64::from(descriptor))
}

fn transmit_buffer(pair: u16, descriptor: u16) -> u64 {
    TRANSMIT_BUFFERS + BUFFER * (u64::from(SIZE) * u64::from(pair) + u64::from(descriptor))
}

/// Waits at most `limit` until one of the eventfds is signalled, and reads the signals; `false` if
/// none was.
fn wait<'a>(events: impl Iterator<Item = &'a EventFd>, limit: Duration) -> bool {
    use std::os::fd::{AsRawFd, BorrowedFd};
    let events: Vec<&EventFd> = events.collect();
    let mut fds: Vec<PollFd<'_>> = events
        .iter()
        .map(|event| {
            // SAFETY: needed because EventFd has no `AsFd`. The descriptor is open as long as
            // `event` is borrowed, and so for longer than `fds` is used.
            let fd = unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) };
            PollFd::from_borrowed_fd(fd, PollFlags::IN)
        })
        .collect();
    let limit = Timespec::try_from(limit).unwrap();
    if poll(&mut fds, Some(&limit)).unwrap() == 0 {
        // A signal that arrives just now is for the next call.
        return false;
    }
    for event in events {
        let _ = event.read();
    }
    true
}

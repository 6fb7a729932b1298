//! A guest's network driver on split rings in guest memory: it sends numbered
//! frames to itself, switches interrupts off while it has work (as NAPI does),
//! and says which index stood where when nothing moves.
//!
//! ```text
//!   0x0_0000  receive ring    0x1_0000  transmit ring   (descriptors, +0x4000 avail, +0x8000 used)
//!   0x10_0000 receive buffers, 4 KiB each               0x20_0000 transmit buffers
//! ```

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use vdpa::device::VringAddresses;
use vdpa::memory::GuestMemory;
use vdpa::relay::RelayedQueue;
use vdpa::ring::guest::GuestRing;
use vm_memory::{Bytes, FileOffset, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

pub(crate) const RECEIVE: u16 = 0;
pub(crate) const TRANSMIT: u16 = 1;
pub(crate) const SIZE: u16 = 64;
pub(crate) const RAM: u64 = 4 << 20;
const RECEIVE_BUFFERS: u64 = 0x10_0000;
const TRANSMIT_BUFFERS: u64 = 0x20_0000;
const BUFFER: u64 = 4096;
/// `struct virtio_net_hdr_v1`.
const HEADER: usize = 12;
const FRAME: usize = 200;
/// Frames under way at once.
const WINDOW: u32 = 32;
/// So long may nothing come: an emulated processor under load.
const STALL: Duration = Duration::from_secs(5);

/// Guest RAM.
pub(crate) fn memory() -> Arc<GuestMemory> {
    let file = File::from(memfd_create(c"lab-guest", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(RAM).unwrap();
    let size = usize::try_from(RAM).unwrap();
    let region = (GuestAddress(0), size, Some(FileOffset::new(file, 0)));
    Arc::new(GuestMemory::from_ranges_with_files([region]).unwrap())
}

/// One ring.
pub(crate) struct Ring {
    memory: Arc<GuestMemory>,
    index: u16,
    addresses: VringAddresses,
    pub(crate) kick: Arc<EventFd>,
    pub(crate) call: Arc<EventFd>,
    avail: u16,
    used: u16,
}

impl Ring {
    fn new(memory: &Arc<GuestMemory>, index: u16, start: u16) -> Self {
        let base = 0x1_0000 * u64::from(index);
        let event = || Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        let ring = Self {
            memory: Arc::clone(memory),
            index,
            addresses: VringAddresses {
                descriptor: base,
                driver: base + 0x4000,
                device: base + 0x8000,
            },
            kick: event(),
            call: event(),
            avail: start,
            used: start,
        };
        ring.store(ring.addresses.driver + 2, start);
        ring.store(ring.addresses.device + 2, start);
        ring
    }

    pub(crate) fn queue(&self) -> RelayedQueue {
        let memory = Arc::clone(&self.memory);
        RelayedQueue {
            index: self.index,
            ring: GuestRing::new(memory, SIZE, self.addresses, false)
                .unwrap()
                .into(),
            kick: Arc::clone(&self.kick),
            call: Arc::clone(&self.call),
        }
    }

    fn load(&self, address: u64) -> u16 {
        self.memory
            .load(GuestAddress(address), Ordering::SeqCst)
            .unwrap()
    }

    fn store(&self, address: u64, value: u16) {
        self.memory
            .store(value, GuestAddress(address), Ordering::SeqCst)
            .unwrap();
    }

    /// Makes one buffer available under a descriptor of that number.
    fn add(&mut self, descriptor: u16, address: u64, len: u32, writable: bool) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12] = if writable { 2 } else { 0 };
        let at = self.addresses.descriptor + 16 * u64::from(descriptor);
        self.memory.write_slice(&bytes, GuestAddress(at)).unwrap();
        let slot = u64::from(self.avail % SIZE);
        self.store(self.addresses.driver + 4 + 2 * slot, descriptor);
        self.avail = self.avail.wrapping_add(1);
        self.store(self.addresses.driver + 2, self.avail);
        fence(Ordering::SeqCst);
        if self.load(self.addresses.device) & 1 == 0 {
            self.kick.write(1).unwrap();
        }
    }

    fn take(&mut self) -> Option<(u16, u32)> {
        if self.load(self.addresses.device + 2) == self.used {
            return None;
        }
        let at = self.addresses.device + 4 + 8 * u64::from(self.used % SIZE);
        let mut element = [0; 8];
        self.memory
            .read_slice(&mut element, GuestAddress(at))
            .unwrap();
        self.used = self.used.wrapping_add(1);
        let id = u32::from_le_bytes(element[..4].try_into().unwrap());
        let len = u32::from_le_bytes(element[4..].try_into().unwrap());
        Some((u16::try_from(id).unwrap(), len))
    }

    fn set_interrupts(&self, enabled: bool) {
        self.store(self.addresses.driver, u16::from(!enabled));
        fence(Ordering::SeqCst);
    }

    fn stands(&self) -> String {
        format!(
            "queue {}: avail {} used {} (seen {}) flags {} / {}",
            self.index,
            self.avail,
            self.load(self.addresses.device + 2),
            self.used,
            self.load(self.addresses.driver),
            self.load(self.addresses.device),
        )
    }
}

/// Driver and what it counts.
pub(crate) struct Driver {
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) receive: Ring,
    pub(crate) transmit: Ring,
    mac: [u8; 6],
    free: Vec<u16>,
    sent: u32,
    received: u32,
    /// Times that the driver slept until an interrupt.
    pub(crate) slept: u32,
}

impl Driver {
    /// Both rings begin at `start`; all receive buffers are given.
    pub(crate) fn new(mac: [u8; 6], start: u16) -> Self {
        let memory = memory();
        let mut receive = Ring::new(&memory, RECEIVE, start);
        for descriptor in 0..SIZE {
            let address = RECEIVE_BUFFERS + BUFFER * u64::from(descriptor);
            receive.add(descriptor, address, 2048, true);
        }
        Self {
            transmit: Ring::new(&memory, TRANSMIT, start),
            receive,
            memory,
            mac,
            free: (0..SIZE).collect(),
            sent: 0,
            received: 0,
            slept: 0,
        }
    }

    fn packet(&self, number: u32) -> Vec<u8> {
        let mut packet = vec![0; HEADER];
        packet.extend_from_slice(&self.mac);
        packet.extend_from_slice(&[2, 0x5e, 0x10, 0x53, 0x11, 0xee, 0x88, 0xb5]);
        packet.extend_from_slice(&number.to_be_bytes());
        let mut state = u64::from(number) << 8 | 0x9e37_79b9_7f4a_7c15;
        while packet.len() < HEADER + FRAME {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            packet.extend_from_slice(&state.to_le_bytes()[..1]);
        }
        packet
    }

    fn send(&mut self) -> bool {
        while let Some((descriptor, _)) = self.transmit.take() {
            self.free.push(descriptor);
        }
        let Some(descriptor) = self.free.pop() else {
            return false;
        };
        let packet = self.packet(self.sent);
        let address = TRANSMIT_BUFFERS + BUFFER * u64::from(descriptor);
        self.memory
            .write_slice(&packet, GuestAddress(address))
            .unwrap();
        let len = u32::try_from(packet.len()).unwrap();
        self.transmit.add(descriptor, address, len, false);
        self.sent += 1;
        true
    }

    fn receive_one(&mut self) -> bool {
        let Some((descriptor, len)) = self.receive.take() else {
            return false;
        };
        let address = RECEIVE_BUFFERS + BUFFER * u64::from(descriptor);
        let mut packet = vec![0; usize::try_from(len).unwrap()];
        self.memory
            .read_slice(&mut packet, GuestAddress(address))
            .unwrap();
        // One queue and one path: the order is kept, so a number that is
        // missing or comes twice shows here.
        let expected = self.packet(self.received);
        assert_eq!(
            packet[HEADER..],
            expected[HEADER..],
            "frame {}",
            self.received
        );
        self.received += 1;
        self.receive.add(descriptor, address, 2048, true);
        true
    }

    /// Sends frames and gets each back once, until `count` have come or `stop`
    /// says so; `moved` counts them for others.
    pub(crate) fn exchange(&mut self, count: u32, stop: &AtomicBool, moved: &AtomicU32) {
        let last = self.received + count;
        self.transmit.set_interrupts(false);
        self.receive.set_interrupts(false);
        let mut progress = Instant::now();
        while self.received < last {
            if stop.load(Ordering::Relaxed) && self.received == self.sent {
                return;
            }
            let more = !stop.load(Ordering::Relaxed);
            while more && self.sent < last && self.sent < self.received + WINDOW && self.send() {}
            if self.receive_one() {
                moved.fetch_add(1, Ordering::Relaxed);
                progress = Instant::now();
                continue;
            }
            // Nothing to do: interrupts on, look again, sleep.
            self.receive.set_interrupts(true);
            if self.receive_one() {
                moved.fetch_add(1, Ordering::Relaxed);
                progress = Instant::now();
            } else {
                self.slept += 1;
                wait(&self.receive.call, STALL);
                assert!(
                    progress.elapsed() < STALL,
                    "no frame in {STALL:?}; sent {} received {}; {}; {}",
                    self.sent,
                    self.received,
                    self.receive.stands(),
                    self.transmit.stands(),
                );
            }
            self.receive.set_interrupts(false);
        }
    }

    /// The receive buffers' pages: address and content.
    pub(crate) fn receive_pages(&self) -> Vec<(u64, Vec<u8>)> {
        (0..u64::from(SIZE))
            .map(|page| {
                let address = RECEIVE_BUFFERS + BUFFER * page;
                let mut content = vec![0; 4096];
                self.memory
                    .read_slice(&mut content, GuestAddress(address))
                    .unwrap();
                (address, content)
            })
            .collect()
    }
}

/// Waits until an eventfd is signalled, at most `limit`, and takes the signal.
pub(crate) fn wait(event: &EventFd, limit: Duration) {
    use std::os::fd::{AsRawFd, BorrowedFd};
    // SAFETY: EventFd has no `AsFd`. The descriptor is open for as long as
    // `event` is borrowed, and so for longer than `fd` is used.
    let fd = unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) };
    let limit = Timespec::try_from(limit).unwrap();
    let _ = poll(
        &mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)],
        Some(&limit),
    );
    let _ = event.read();
}

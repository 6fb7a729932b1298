//! A guest's network driver: split rings in guest memory, written by hand, so that a test can also
//! write what no driver would.
//!
//! ```text
//!   region 1, at 0:      rings, from 64 KiB on; one queue each 64 KiB
//!   region 2, at 4 GiB:  buffers
//! ```

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use devices::virtio::backend::{Activation, Queue, QueueAddresses};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use vdpa::iova::DeviceAddress;
use vdpa::memory::GuestMemory;
use vm_memory::{ByteValued, Bytes, FileOffset, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use super::frames::Loopback;
use super::nic::{PATIENCE, RECEIVE, TRANSMIT};

/// Bytes of each region.
pub(crate) const REGION: u64 = 4 << 20;
/// The start of the second region.
pub(crate) const HIGH: u64 = 4 << 30;
/// Above the most memory that this machine could have.
pub(crate) const RAM_END: u64 = 8 << 30;
/// Room for the buffers of one queue.
const AREA: u64 = 0x10_0000;
const SIZE: u16 = 16;
const BUFFER: u32 = 4096;

const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// Waits until an eventfd is signalled and reads the signal; `false` if it was not.
pub(crate) fn wait(event: &EventFd, limit: Duration) -> bool {
    use std::os::fd::{AsRawFd, BorrowedFd};
    // SAFETY: EventFd has no `AsFd`. The descriptor is open for as long as `event` is borrowed, and
    // so for longer than the result is used.
    let fd = unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) };
    readable(&[fd.as_fd()], limit)[0] && event.read().is_ok()
}

/// Reports which of the descriptors can be read, after at most `limit`.
pub(crate) fn readable(fds: &[std::os::fd::BorrowedFd<'_>], limit: Duration) -> Vec<bool> {
    let mut polled: Vec<PollFd<'_>> = fds
        .iter()
        .map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN))
        .collect();
    let limit = Timespec::try_from(limit).unwrap();
    poll(&mut polled, Some(&limit)).unwrap();
    polled
        .iter()
        .map(|fd| fd.revents().contains(PollFlags::IN))
        .collect()
}

/// Guest memory as the machine creates it, in two regions with a hole between.
pub(crate) fn memory() -> Arc<GuestMemory> {
    let size = usize::try_from(REGION).unwrap();
    let file = || {
        let file = File::from(memfd_create(c"lab-guest", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(REGION).unwrap();
        Some(FileOffset::new(file, 0))
    };
    let regions = [
        (GuestAddress(0), size, file()),
        (GuestAddress(HIGH), size, file()),
    ];
    Arc::new(GuestMemory::from_ranges_with_files(regions).unwrap())
}

/// One descriptor: address, length and whether the device writes.
pub(crate) type Buffer = (u64, u32, bool);

/// One split ring of the guest.
pub(crate) struct Ring {
    memory: Arc<GuestMemory>,
    index: u16,
    pub(crate) addresses: QueueAddresses,
    pub(crate) kick: Arc<EventFd>,
    pub(crate) call: Arc<EventFd>,
    /// What the driver adds to a guest-physical address for the device.
    pub(crate) shift: u64,
    next: u16,
    available: u16,
    used: u16,
}

impl Ring {
    pub(crate) fn new(memory: &Arc<GuestMemory>, index: u16) -> Self {
        let start = 0x1_0000 * (u64::from(index) + 1);
        let event = || Arc::new(vdpa::eventfd::new().unwrap());
        Self {
            memory: Arc::clone(memory),
            index,
            addresses: QueueAddresses {
                size: SIZE,
                descriptor: DeviceAddress(start),
                driver: DeviceAddress(start + 0x4000),
                device: DeviceAddress(start + 0x8000),
            },
            kick: event(),
            call: event(),
            shift: 0,
            next: 0,
            available: 0,
            used: 0,
        }
    }

    /// Zeroes the rings, as a driver does after a reset; the eventfds stay.
    pub(crate) fn clear(&mut self) {
        let zeroes = [0; 0x1_0000];
        let start = GuestAddress(self.addresses.descriptor.0);
        self.memory.write_slice(&zeroes, start).unwrap();
        (self.next, self.available, self.used) = (0, 0, 0);
        // No event from before may be pending.
        let _ = (self.kick.read(), self.call.read());
    }

    pub(crate) fn queue(&self) -> Queue {
        Queue {
            index: self.index,
            addresses: QueueAddresses {
                size: self.addresses.size,
                descriptor: self.addresses.descriptor + self.shift,
                driver: self.addresses.driver + self.shift,
                device: self.addresses.device + self.shift,
            },
            kick: Arc::clone(&self.kick),
            call: Some(Arc::clone(&self.call)),
        }
    }

    fn write<T: ByteValued>(&self, address: u64, value: T) {
        self.memory.write_obj(value, GuestAddress(address)).unwrap();
    }

    fn read<T: ByteValued>(&self, address: u64) -> T {
        self.memory.read_obj(GuestAddress(address)).unwrap()
    }

    /// Makes a chain available and kicks; returns the head. At most `SIZE` descriptors may be in
    /// flight at once; the caller ensures that.
    pub(crate) fn add(&mut self, chain: &[Buffer]) -> u16 {
        let head = self.next;
        for (position, &(address, len, writable)) in chain.iter().enumerate() {
            let at = self.addresses.descriptor + 16 * u64::from(self.next);
            self.next = (self.next + 1) % SIZE;
            let more = position + 1 < chain.len();
            let flags = if writable { WRITE } else { 0 } | if more { NEXT } else { 0 };
            self.write(at.0, address + self.shift);
            self.write(at.0 + 8, len);
            self.write(at.0 + 12, flags);
            self.write(at.0 + 14, self.next);
        }
        let slot = u64::from(self.available % SIZE);
        self.write(self.addresses.driver.0 + 4 + 2 * slot, head);
        self.available = self.available.wrapping_add(1);
        self.publish(self.available);
        head
    }

    /// Writes any avail index and kicks.
    pub(crate) fn publish(&mut self, available: u16) {
        let address = GuestAddress(self.addresses.driver.0 + 2);
        let release = std::sync::atomic::Ordering::SeqCst;
        self.memory.store(available, address, release).unwrap();
        self.kick.write(1).unwrap();
    }

    /// Head and written length of the next used chain.
    pub(crate) fn take(&mut self) -> Option<(u32, u32)> {
        let address = GuestAddress(self.addresses.device.0 + 2);
        let acquire = std::sync::atomic::Ordering::Acquire;
        let index: u16 = self.memory.load(address, acquire).unwrap();
        if index == self.used {
            return None;
        }
        let at = self.addresses.device + 4 + 8 * u64::from(self.used % SIZE);
        self.used = self.used.wrapping_add(1);
        Some((self.read(at.0), self.read(at.0 + 4)))
    }
}

/// The guest's network driver: a receive and a transmit queue.
pub(crate) struct GuestNic {
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) receive: Ring,
    pub(crate) transmit: Ring,
    sent: u64,
    under_way: u16,
}

impl GuestNic {
    pub(crate) fn new(memory: &Arc<GuestMemory>) -> Self {
        let mut nic = Self {
            memory: Arc::clone(memory),
            receive: Ring::new(memory, RECEIVE),
            transmit: Ring::new(memory, TRANSMIT),
            sent: 0,
            under_way: 0,
        };
        nic.restart();
        nic
    }

    /// Restarts both queues, as after a reset of the device.
    pub(crate) fn restart(&mut self) {
        self.receive.clear();
        self.transmit.clear();
        (self.sent, self.under_way) = (0, 0);
        for slot in 0..SIZE {
            let buffer = HIGH + u64::from(slot) * u64::from(BUFFER);
            self.receive.add(&[(buffer, BUFFER, true)]);
        }
    }

    pub(crate) fn activation(&self, features: u64) -> Activation {
        Activation {
            features,
            queues: vec![self.receive.queue(), self.transmit.queue()],
        }
    }

    fn reap(&mut self) {
        while let Some((_, written)) = self.transmit.take() {
            assert_eq!(written, 0);
            self.under_way -= 1;
        }
    }
}

impl Loopback for GuestNic {
    fn send(&mut self, packet: &[u8]) {
        self.reap();
        while self.under_way == SIZE {
            assert!(wait(&self.transmit.call, PATIENCE), "nothing is sent");
            self.reap();
        }
        let buffer = HIGH + AREA + self.sent % u64::from(SIZE) * u64::from(BUFFER);
        self.memory
            .write_slice(packet, GuestAddress(buffer))
            .unwrap();
        let len = u32::try_from(packet.len()).unwrap();
        self.transmit.add(&[(buffer, len, false)]);
        self.sent += 1;
        self.under_way += 1;
    }

    fn receive(&mut self) -> Option<Vec<u8>> {
        loop {
            if let Some((head, written)) = self.receive.take() {
                // The ring is always full, so descriptors come around in order, and each always has
                // the same buffer.
                let buffer = HIGH + u64::from(head) * u64::from(BUFFER);
                let mut packet = vec![0; usize::try_from(written).unwrap()];
                self.memory
                    .read_slice(&mut packet, GuestAddress(buffer))
                    .unwrap();
                assert_eq!(
                    self.receive.add(&[(buffer, BUFFER, true)]),
                    u16::try_from(head).unwrap()
                );
                return Some(packet);
            }
            if !wait(&self.receive.call, PATIENCE) {
                return None;
            }
        }
    }
}

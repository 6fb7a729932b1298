//! A model of a guest driver for tests: it builds split rings in guest memory
//! and can write anything there.

use std::fs::File;
use std::sync::Arc;

use vdpa::iova::DeviceAddress;
use vdpa::memory::GuestMemory;
use vm_memory::bitmap::Bitmap;
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::eventfd::EventFd;

use super::super::backend::{Activation, Queue, QueueAddresses, SharedMemory};

/// VIRTQ_DESC_F_NEXT, VIRTQ_DESC_F_WRITE, VIRTQ_DESC_F_INDIRECT (virtio 1.3, 2.7.5).
pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;

pub(crate) const RAM: usize = 1 << 20;
/// The address of the tests' buffers, above the rings.
pub(crate) const BUFFERS: u64 = 0x10000;

/// Creates guest memory like the machine does: a memfd, mapped shared, in two regions that are
/// adjacent in guest-physical space but not in this process.
pub(crate) fn memory() -> SharedMemory {
    let half = RAM / 2;
    let file = |name: &str| {
        let fd = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let file = File::from(fd);
        file.set_len(half as u64).unwrap();
        Some(FileOffset::new(file, 0))
    };
    Arc::new(
        GuestMemory::from_ranges_with_files([
            (GuestAddress(0), half, file("low")),
            (GuestAddress(half as u64), half, file("high")),
        ])
        .unwrap(),
    )
}

/// One buffer of a chain.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Buffer {
    pub(crate) address: u64,
    pub(crate) len: u32,
    pub(crate) writable: bool,
}

pub(crate) fn readable(address: u64, len: u32) -> Buffer {
    Buffer {
        address,
        len,
        writable: false,
    }
}

pub(crate) fn writable(address: u64, len: u32) -> Buffer {
    Buffer {
        address,
        len,
        writable: true,
    }
}

pub(crate) struct Driver {
    pub(crate) memory: SharedMemory,
    pub(crate) addresses: QueueAddresses,
    pub(crate) kick: Arc<EventFd>,
    pub(crate) call: Arc<EventFd>,
    next_descriptor: u16,
    avail: u16,
    used: u16,
}

impl Driver {
    pub(crate) fn new(memory: &SharedMemory, size: u16) -> Self {
        Self {
            memory: Arc::clone(memory),
            addresses: QueueAddresses {
                size,
                descriptor: DeviceAddress(0x1000),
                driver: DeviceAddress(0x4000),
                device: DeviceAddress(0x6000),
            },
            // Blocking on purpose: the backend has to make it non-blocking.
            kick: Arc::new(vdpa::eventfd::new().unwrap()),
            call: Arc::new(vdpa::eventfd::new().unwrap()),
            next_descriptor: 0,
            avail: 0,
            used: 0,
        }
    }

    pub(crate) fn queue(&self) -> Queue {
        Queue {
            index: 0,
            addresses: self.addresses,
            kick: Arc::clone(&self.kick),
            call: Some(Arc::clone(&self.call)),
        }
    }

    pub(crate) fn activation(&self, features: u64) -> Activation {
        Activation {
            features,
            queues: vec![self.queue()],
        }
    }

    pub(crate) fn write<T: vm_memory::ByteValued>(&self, address: u64, value: T) {
        self.memory.write_obj(value, GuestAddress(address)).unwrap();
    }

    pub(crate) fn read<T: vm_memory::ByteValued>(&self, address: u64) -> T {
        self.memory.read_obj(GuestAddress(address)).unwrap()
    }

    pub(crate) fn fill(&self, address: u64, data: &[u8]) {
        self.memory
            .write_slice(data, GuestAddress(address))
            .unwrap();
    }

    pub(crate) fn bytes(&self, address: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.memory
            .read_slice(&mut data, GuestAddress(address))
            .unwrap();
        data
    }

    /// Writes one raw descriptor at `index` of a table.
    pub(crate) fn descriptor(
        &self,
        table: u64,
        index: u16,
        (address, len, flags, next): (u64, u32, u16, u16),
    ) {
        let at = table + 16 * u64::from(index);
        self.write(at, address);
        self.write(at + 8, len);
        self.write(at + 12, flags);
        self.write(at + 14, next);
    }

    /// Makes the descriptor at `head` available.
    pub(crate) fn publish(&mut self, head: u16) {
        let slot = u64::from(self.avail % self.addresses.size);
        self.write((self.addresses.driver + 4 + 2 * slot).0, head);
        self.avail = self.avail.wrapping_add(1);
        self.write((self.addresses.driver + 2).0, self.avail);
    }

    /// Sets the avail index to any value.
    pub(crate) fn set_avail_index(&mut self, index: u16) {
        self.avail = index;
        self.write((self.addresses.driver + 2).0, index);
    }

    /// Adds a chain of these buffers and kicks; returns its head.
    pub(crate) fn add(&mut self, buffers: &[Buffer]) -> u16 {
        let size = self.addresses.size;
        let head = self.next_descriptor;
        for (position, buffer) in buffers.iter().enumerate() {
            let index = self.next_descriptor;
            self.next_descriptor = (index + 1) % size;
            let mut flags = if buffer.writable { WRITE } else { 0 };
            if position + 1 < buffers.len() {
                flags |= NEXT;
            }
            self.descriptor(
                self.addresses.descriptor.0,
                index,
                (buffer.address, buffer.len, flags, self.next_descriptor),
            );
        }
        self.publish(head);
        self.kick.write(1).unwrap();
        head
    }

    /// Takes the next used element: head and length.
    pub(crate) fn take_used(&mut self) -> Option<(u32, u32)> {
        let index: u16 = self.read((self.addresses.device + 2).0);
        if index == self.used {
            return None;
        }
        let at = self.addresses.device + 4 + 8 * u64::from(self.used % self.addresses.size);
        self.used = self.used.wrapping_add(1);
        Some((self.read(at.0), self.read((at + 4).0)))
    }

    /// Whether an interrupt came since the last call.
    pub(crate) fn interrupted(&self) -> bool {
        self.call.read().is_ok()
    }

    /// Whether the page at `address` is marked dirty.
    pub(crate) fn dirty(&self, address: u64) -> bool {
        let (region, offset) = self.memory.to_region_addr(GuestAddress(address)).unwrap();
        region.bitmap().dirty_at(offset.0.try_into().unwrap())
    }

    /// Clears all dirty marks.
    pub(crate) fn clean(&self) {
        for region in self.memory.iter() {
            (**region).bitmap().reset();
        }
    }
}

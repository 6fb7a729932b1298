//! A network driver in this process, as applications with VFIO have one. It chooses the addresses
//! at which the device reaches this process's memory; the guest's IOMMU translates them.
//!
//! ```text
//!   frames … vfio ──> Driver ──> rings in one buffer, frames in 64 pieces of 2 MiB
//!                        │           └─ mapped by VFIO (group) at addresses that it chooses
//!                        └─> registers, doorbells (function)
//! ```
//! It polls: the device has no interrupt. It accepts no offload, so a frame has an empty header.

mod function;
mod group;

use crate::frames::{self, Link, Plan, Sent};
use crate::network::Address;
use crate::notify;
use function::Function;
use group::Group;
use lab::error::{Error, Result, report};
use lab::files;
use rustix::event::PollFlags;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use vdpa::iova::DeviceAddress;
use vdpa::memory::{DmaRegion as _, SharedBuffer};
use vdpa::ring::{Direction, DriverQueue, Piece, RingFeatures, RingFormat, RingLayout};
use vm_memory::{MmapRegion, VolatileMemory as _};

/// The name of this NIC in commands.
pub(crate) const NIC: &str = "vfio";

/// The queues of the first pair.
const RECEIVE: u16 = 0;
const TRANSMIT: u16 = 1;

/// Most entries of a ring. Each entry is a buffer.
const ENTRIES: u16 = 256;

/// Bytes of a frame's header (virtio 1.3, 5.1.6), and the same as a number of the ring.
const HEADER: [u8; 12] = [0; 12];
const HEADER_LEN: u32 = 12;

/// Pieces of memory for frames, and the bytes of each: one large page.
const PIECES: u16 = 64;
const PIECE: u64 = 2 << 20;

/// The device's addresses. All are above the guest's memory, and the pieces are not adjacent.
const FIRST_PIECE: u64 = 0x1_0000_0000;
const PIECE_STRIDE: u64 = 16 * PIECE;
const RINGS: u64 = 0x40_0000_0000;

/// Bytes between two buffers of a piece.
const BUFFER_STRIDE: u64 = PIECE * PIECES as u64 / (2 * ENTRIES as u64);

/// Where a buffer begins: so that a frame of more than 84 bytes crosses a page.
const BUFFER_START: u64 = 4000;

/// The kernel refuses a device whose IOMMU does not translate interrupts. Virtio has no such IOMMU.
const UNSAFE_INTERRUPTS: &str = "/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts";

const LARGE_PAGES: &str = "/proc/sys/vm/nr_hugepages";

static DRIVER: Mutex<Option<Driver>> = Mutex::new(None);

fn driver() -> MutexGuard<'static, Option<Driver>> {
    DRIVER.lock().unwrap_or_else(PoisonError::into_inner)
}

fn off() -> Error {
    Error::Usage("there is no `vfio-on` before this command".into())
}

fn ring_failed(error: vdpa::Error) -> Error {
    Error::invalid("a ring", report(&error))
}

/// `vfio-on`: takes the NIC from the kernel's driver and starts its device with this one.
pub(crate) fn start(nic: &str) -> Result<Value> {
    let mut driver = driver();
    if driver.is_some() {
        return Err(Error::Usage("a NIC is in use already".into()));
    }
    let path = notify::function(nic)?;
    let frame_max = frames::maximum_size(nic)?;
    files::write(Path::new(UNSAFE_INTERRUPTS), "1")?;
    files::write(Path::new(LARGE_PAGES), PIECES.to_string())?;
    group::bind(&path, "vfio-pci")?;
    let started = Driver::start(Group::open(&path)?, frame_max)?;
    let value = json!({
        "entries": started.transmit.ring.size(),
        "mapped": PIECES + 1,
    });
    *driver = Some(started);
    Ok(value)
}

/// `frames` with this NIC.
pub(crate) fn exchange(plan: &Plan) -> Result<Value> {
    let mut driver = driver();
    let driver = driver.as_mut().ok_or_else(off)?;
    let (own, maximum, kicks) = (driver.address, driver.frame_max, driver.kicks);
    let mut value = frames::exchange_over(&mut *driver, own, maximum, plan)?;
    value["kicks"] = (driver.kicks - kicks).into();
    Ok(value)
}

/// `vfio-off`: resets the device and gives it back to the kernel's driver.
pub(crate) fn stop() -> Result<Value> {
    let driver = driver().take().ok_or_else(off)?;
    driver.function.reset()?;
    driver.function.group().unmap(RINGS, driver.rings.size())?;
    for number in 0..PIECES {
        driver
            .function
            .group()
            .unmap(Buffers::iova(number), PIECE)?;
    }
    let path = driver.function.group().function().to_path_buf();
    // The kernel's driver gets the function only after the last descriptor is closed.
    drop(driver);
    group::bind(&path, "\n")?;
    Ok(json!({ "vfio": "off" }))
}

/// The memory of all frames.
struct Buffers(Vec<MmapRegion<()>>);

impl Buffers {
    fn new() -> Result<Self> {
        let size = usize::try_from(PIECE).unwrap_or_default();
        let piece = |_| {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB;
            MmapRegion::build(None, size, access, kind)
                .map_err(|error| Error::invalid("a large page", report(&error)))
        };
        (0..PIECES).map(piece).collect::<Result<_>>().map(Self)
    }

    /// The device's address of a piece. The order is not that of this process's addresses.
    fn iova(piece: u16) -> u64 {
        FIRST_PIECE + u64::from(PIECES - 1 - piece) * PIECE_STRIDE
    }

    /// The piece of a buffer and the offset in it.
    fn place(buffer: u16) -> (u16, u64) {
        let offset = u64::from(buffer / PIECES) * BUFFER_STRIDE + BUFFER_START;
        (buffer % PIECES, offset)
    }

    /// The device's address of a buffer.
    fn iova_of(buffer: u16) -> u64 {
        let (piece, offset) = Self::place(buffer);
        Self::iova(piece) + offset
    }

    /// This process's view of `len` bytes of a buffer, after `skipped` ones.
    fn slice(
        &self,
        buffer: u16,
        skipped: usize,
        len: usize,
    ) -> Result<vm_memory::VolatileSlice<'_>> {
        let (piece, offset) = Self::place(buffer);
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let slice = self
            .0
            .get(usize::from(piece))
            .and_then(|piece| piece.get_slice(start.checked_add(skipped)?, len).ok());
        slice.ok_or_else(|| Error::invalid("a frame", "its buffer is too small"))
    }
}

/// One ring and its buffers.
struct Queue {
    index: u16,
    ring: DriverQueue,
    doorbell: usize,
    /// The buffer of each chain that the device has, by the chain's head.
    buffer_of: Vec<u16>,
    /// Buffers that the device does not have.
    free: Vec<u16>,
}

impl Queue {
    fn new(index: u16, rings: &Arc<SharedBuffer>, layout: RingLayout, offset: u64) -> Result<Self> {
        let (entries, features) = (layout.entries(), RingFeatures::default());
        let ring = DriverQueue::new(Arc::clone(rings), entries, offset, features);
        let mut ring = ring.map_err(ring_failed)?;
        ring.set_interrupts(false).map_err(ring_failed)?;
        Ok(Self {
            index,
            ring,
            doorbell: 0,
            buffer_of: vec![0; usize::from(entries)],
            free: (index * ENTRIES..).take(entries.into()).collect(),
        })
    }

    fn add(&mut self, buffer: u16, len: u32, direction: Direction) -> Result<()> {
        let piece = Piece {
            iova: DeviceAddress(Buffers::iova_of(buffer)),
            len,
            direction,
        };
        let head = self.ring.add(&[piece]).map_err(ring_failed)?;
        if let Some(place) = self.buffer_of.get_mut(usize::from(head)) {
            *place = buffer;
        }
        Ok(())
    }

    /// The next buffer that the device has used, and the bytes that it wrote there.
    fn pop(&mut self) -> Result<Option<(u16, u32)>> {
        let used = self.ring.pop_used().map_err(ring_failed)?;
        Ok(used.and_then(|used| {
            let buffer = self.buffer_of.get(usize::from(used.head))?;
            Some((*buffer, used.written))
        }))
    }
}

/// The driver of one NIC whose device runs.
struct Driver {
    function: Function,
    address: Address,
    /// Bytes of the largest frame.
    frame_max: usize,
    receive: Queue,
    transmit: Queue,
    kicks: u64,
    rings: Arc<SharedBuffer>,
    buffers: Buffers,
}

impl Driver {
    fn start(group: Group, frame_max: usize) -> Result<Self> {
        let buffers = Buffers::new()?;
        for (number, piece) in (0..PIECES).zip(&buffers.0) {
            let host = u64::try_from(piece.as_ptr().addr()).unwrap_or(u64::MAX);
            // SAFETY: `Buffers` accesses its regions as volatile slices.
            unsafe { group.map(host, PIECE, Buffers::iova(number)) }?;
        }
        let function = Function::new(group)?;
        let address = function.negotiate()?;
        let entries = function.entries(RECEIVE)?.min(function.entries(TRANSMIT)?);
        let layout = RingLayout::new(RingFormat::Split, entries.min(ENTRIES));
        let layout = layout.map_err(ring_failed)?;
        let rings = SharedBuffer::new(2 * layout.size(), RINGS).map_err(ring_failed)?;
        let group = function.group();
        // SAFETY: rings are accessed as volatile.
        unsafe { group.map(rings.host_address(), rings.size(), RINGS) }?;
        let rings = Arc::new(rings);
        let mut receive = Queue::new(RECEIVE, &rings, layout, 0)?;
        let mut transmit = Queue::new(TRANSMIT, &rings, layout, layout.size())?;
        for queue in [&mut receive, &mut transmit] {
            queue.doorbell = function.set_queue(queue.index, &queue.ring)?;
        }
        function.set_ready()?;
        let mut driver = Self {
            function,
            address,
            frame_max,
            receive,
            transmit,
            kicks: 0,
            rings,
            buffers,
        };
        while let Some(buffer) = driver.receive.free.pop() {
            driver.offer(buffer)?;
        }
        driver.kick(RECEIVE)?;
        Ok(driver)
    }

    /// Offers a buffer for a frame to the device.
    fn offer(&mut self, buffer: u16) -> Result<()> {
        let len = u32::try_from(HEADER.len() + self.frame_max).unwrap_or(u32::MAX);
        self.receive.add(buffer, len, Direction::DeviceWrites)
    }

    /// Kicks a queue if its device wants a kick.
    fn kick(&mut self, index: u16) -> Result<()> {
        let queue = match index {
            RECEIVE => &mut self.receive,
            _ => &mut self.transmit,
        };
        if queue.ring.needs_kick().map_err(ring_failed)? {
            self.function.kick(index, queue.doorbell)?;
            self.kicks += 1;
        }
        Ok(())
    }
}

impl Link for &mut Driver {
    fn send(&mut self, frame: &[u8]) -> Result<Sent> {
        while let Some((buffer, _)) = self.transmit.pop()? {
            self.transmit.free.push(buffer);
        }
        let Some(buffer) = self.transmit.free.pop() else {
            return Ok(Sent::Full);
        };
        let all = HEADER.len() + frame.len();
        let slice = self.buffers.slice(buffer, 0, all)?;
        slice.copy_from(&[&HEADER, frame].concat());
        let len = u32::try_from(all).unwrap_or(u32::MAX);
        self.transmit.add(buffer, len, Direction::DeviceReads)?;
        self.kick(TRANSMIT)?;
        Ok(Sent::Gone)
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<Option<usize>> {
        let Some((place, written)) = self.receive.pop()? else {
            return Ok(None);
        };
        let len = written.saturating_sub(HEADER_LEN);
        let len = usize::try_from(len).unwrap_or_default().min(buffer.len());
        let slice = self.buffers.slice(place, HEADER.len(), len)?;
        slice.copy_to(buffer);
        // An old frame must not pass for a new one.
        let whole = self
            .buffers
            .slice(place, 0, HEADER.len() + self.frame_max)?;
        whole.copy_from(&vec![0_u8; whole.len()]);
        self.offer(place)?;
        self.kick(RECEIVE)?;
        Ok(Some(len))
    }

    fn wait(&mut self, _what: PollFlags, _limit: Duration) -> Result<()> {
        std::thread::yield_now();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_apart_and_inside_their_pieces() {
        let mut taken: Vec<_> = (0..2 * ENTRIES).map(Buffers::place).collect();
        taken.sort_unstable();
        for pair in taken.windows(2) {
            let ((piece, offset), next) = (pair[0], pair[1]);
            assert!(offset + BUFFER_STRIDE - BUFFER_START <= PIECE);
            assert!(next.0 > piece || next.1 == offset + BUFFER_STRIDE);
        }
        assert_eq!(Buffers::iova(PIECES - 1), FIRST_PIECE);
        // Guest RAM of the tests lies below.
        const { assert!(FIRST_PIECE >= 1 << 32) };
        assert!(Buffers::iova(0) + PIECE <= RINGS);
    }
}

//! A network driver in this process, as applications with VFIO have one. It chooses the addresses
//! at which the device reaches this process's memory; the guest's IOMMU translates them. Without an
//! IOMMU it uses physical addresses.
//!
//! ```text
//!   frames … vfio ──> Driver ──> rings in one buffer, frames in pieces of 2 MiB
//!                        │           └─ mapped by VFIO (group) at addresses that it chooses,
//!                        │              or locked where they are (physical)
//!                        └─> registers, doorbells (function)
//! ```
//! It polls: the device has no interrupt. It accepts no offload, so a frame has an empty header.

mod access;
mod function;
mod group;
pub(crate) mod mover;
mod physical;

use crate::background::Control;
use crate::frames::flood::{self, Flooded};
use crate::frames::{self, Link, Plan, Sent, Totals};
use crate::network::Address;
use crate::notify::{self, PAGE};
use access::Access;
use function::Function;
use lab::error::{Error, Result, report};
use lab::files;
use rustix::event::PollFlags;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::thread;
use std::time::{Duration, Instant};
use vdpa::iova::DeviceAddress;
use vdpa::memory::SharedBuffer;
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

/// Most pieces of memory for frames, and the bytes of each: one large page. The rings have one as
/// well.
pub(crate) const PIECES: u16 = 64;
const PIECE: u64 = 2 << 20;

/// The device's addresses. All are above the guest's memory, and the pieces are not adjacent.
const FIRST_PIECE: u64 = 0x1_0000_0000;
const PIECE_STRIDE: u64 = 16 * PIECE;
const BAR: u64 = 0x8_0000_0000;
const FILL: u64 = 0x10_0000_0000;
const RINGS: u64 = 0x40_0000_0000;

/// Most addresses of `vfio-fill`, and the bytes between two of them.
const FILL_MAX: u64 = 1_000_000;
const FILL_STRIDE: u64 = 2 * PAGE;

/// Where a buffer begins: so that a frame of more than 84 bytes crosses a page.
const BUFFER_START: u64 = 4000;

/// The type of frames that no test reads, "local experimental 2".
const IGNORED_TYPE: [u8; 2] = [0x88, 0xb6];

/// A device that has used nothing for so long has stopped a queue.
const STOPPED: Duration = Duration::from_millis(200);

/// After each change of `vfio-remap`. A vCPU that never halts takes time from the device.
const PAUSE: Duration = Duration::from_millis(1);

/// The kernel refuses a device whose IOMMU does not translate interrupts. Virtio has no such IOMMU.
const UNSAFE_INTERRUPTS: &str = "/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts";

/// VFIO's own limit of mappings. It is below that of the IOMMU.
const MAPPINGS: &str = "/sys/module/vfio_iommu_type1/parameters/dma_entry_limit";

const LARGE_PAGES: &str = "/proc/sys/vm/nr_hugepages";

static DRIVER: Mutex<Option<Driver>> = Mutex::new(None);

/// The driver, unless a flood has it.
fn driver() -> Result<MutexGuard<'static, Option<Driver>>> {
    match DRIVER.try_lock() {
        Ok(driver) => Ok(driver),
        Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => Err(Error::Usage("`flood-on` has the NIC".into())),
    }
}

fn off() -> Error {
    Error::Usage("there is no `vfio-on` before this command".into())
}

fn ring_failed(error: vdpa::Error) -> Error {
    Error::invalid("a ring", report(&error))
}

/// Takes a function from the kernel's driver.
fn open(path: &Path) -> Result<Access> {
    files::write(Path::new(UNSAFE_INTERRUPTS), "1")?;
    files::write(Path::new(MAPPINGS), (2 * FILL_MAX).to_string())?;
    Access::open(path)
}

/// `vfio-on`: takes the NIC from the kernel's driver and starts its device with this one.
pub(crate) fn start(nic: &str, pieces: u16) -> Result<Value> {
    if !(2..=PIECES).contains(&pieces) || !pieces.is_power_of_two() {
        let why = format!("it is not a power of two in 2..={PIECES}");
        return Err(Error::invalid("PIECES", why));
    }
    let mut driver = driver()?;
    if driver.is_some() {
        return Err(Error::Usage("a NIC is in use already".into()));
    }
    let path = notify::function(nic)?;
    let frame_max = frames::maximum_size(nic)?;
    files::write(Path::new(LARGE_PAGES), pieces.to_string())?;
    let started = Driver::start(open(&path)?, frame_max, pieces)?;
    let value = json!({
        "entries": started.transmit.ring.size(),
        "mapped": started.mapped.len(),
        "translated": started.function.access().translates(),
    });
    *driver = Some(started);
    Ok(value)
}

/// `frames` with this NIC.
pub(crate) fn exchange(plan: &Plan) -> Result<Value> {
    let mut driver = driver()?;
    let driver = driver.as_mut().ok_or_else(off)?;
    let (own, maximum, kicks) = (driver.address, driver.frame_max, driver.kicks);
    let mut value = frames::exchange_over(&mut *driver, own, maximum, plan)?;
    value["kicks"] = (driver.kicks - kicks).into();
    Ok(value)
}

/// `flood` with this NIC.
pub(crate) fn flood(duration: Duration, size: usize, flooded: Option<Flooded>) -> Result<Value> {
    let mut driver = driver()?;
    let driver = driver.as_mut().ok_or_else(off)?;
    let limits = (driver.address, driver.frame_max);
    flood::over(driver, limits, NIC, duration, size, flooded)
}

/// Fails unless there is a driver that no flood has.
pub(crate) fn check_on() -> Result<()> {
    driver()?.as_ref().map(drop).ok_or_else(off)
}

/// `flood-on` with this NIC, until its control ends it.
pub(crate) fn exchange_while(plan: &Plan, control: &Control) -> Result<Totals> {
    let mut driver = driver()?;
    let driver = driver.as_mut().ok_or_else(off)?;
    let (own, maximum) = (driver.address, driver.frame_max);
    frames::exchange_while_over(driver, own, maximum, plan, control)
}

/// `vfio-fill`: maps the first page of the rings at further addresses.
pub(crate) fn fill(count: u64) -> Result<Value> {
    if count > FILL_MAX {
        return Err(Error::invalid("N", format!("it is more than {FILL_MAX}")));
    }
    let driver = driver()?;
    let driver = driver.as_ref().ok_or_else(off)?;
    let (group, page) = (driver.function.access().group()?, driver.rings);
    for number in 0..count {
        // SAFETY: rings are accessed as volatile.
        unsafe { group.map(page, PAGE, FILL + number * FILL_STRIDE) }?;
    }
    Ok(json!({ "mapped": count }))
}

/// `vfio-remap`: a hostile driver. Sends frames to an address and receives others, while it unmaps
/// their buffers and the rings one by one, and maps them again. It restarts the device once that
/// gets no further.
pub(crate) fn remap(duration: Duration, to: Address) -> Result<Value> {
    let mut driver = driver()?;
    let mut driver = driver.as_mut().ok_or_else(off)?;
    let mut frame = vec![0; driver.frame_max];
    let mut received = frame.clone();
    let header = [&to[..], &driver.address, &IGNORED_TYPE].concat();
    if let Some(start) = frame.first_chunk_mut::<14>() {
        start.copy_from_slice(&header);
    }
    let begin = Instant::now();
    let mut moved = begin;
    let (mut tx, mut rx, mut changes, mut restarts) = (0_u64, 0_u64, 0_usize, 0_u64);
    while begin.elapsed() < duration {
        while let Sent::Gone = driver.send(&frame)? {
            (tx, moved) = (tx + 1, Instant::now());
        }
        while driver.receive(&mut received)?.is_some() {
            rx += 1;
        }
        driver.map_again(changes)?;
        changes += 1;
        thread::sleep(PAUSE);
        if moved.elapsed() > STOPPED {
            driver.restart()?;
            (restarts, moved) = (restarts + 1, Instant::now());
        }
    }
    Ok(json!({ "tx": tx, "rx": rx, "changes": changes, "restarts": restarts }))
}

/// `vfio-map-bar`: maps a page of another NIC's registers, for a moment.
pub(crate) fn map_bar(nic: &str) -> Result<Value> {
    let driver = driver()?;
    let group = driver.as_ref().ok_or_else(off)?.function.access().group()?;
    let page = notify::first_page(nic)?;
    let host = u64::try_from(page.as_ptr().addr()).unwrap_or(u64::MAX);
    // SAFETY: this process does not access the page.
    unsafe { group.map(host, PAGE, BAR) }?;
    group.unmap(BAR, PAGE)?;
    Ok(json!({ "mapped": nic }))
}

/// `vfio-refused`: a driver that does not accept addresses of an IOMMU.
pub(crate) fn refused(nic: &str) -> Result<Value> {
    let path = notify::function(nic)?;
    let function = Function::new(open(&path)?)?;
    let accepts = function.accepts_without(function::ACCESS_PLATFORM)?;
    function.reset()?;
    drop(function);
    access::bind(&path, "\n")?;
    Ok(json!({ "refused": !accepts }))
}

/// `vfio-off`: resets the device and gives it back to the kernel's driver.
pub(crate) fn stop() -> Result<Value> {
    let driver = driver()?.take().ok_or_else(off)?;
    driver.function.reset()?;
    let access = driver.function.access();
    for iova in &driver.mapped {
        access.unmap(*iova, PIECE)?;
    }
    let path = access.function().to_path_buf();
    // The kernel's driver gets the function only after the last descriptor is closed.
    drop(driver);
    access::bind(&path, "\n")?;
    Ok(json!({ "vfio": "off" }))
}

/// The memory of all frames: a power of two of pieces.
struct Buffers {
    pieces: Vec<MmapRegion<()>>,
    /// The device's addresses of the pieces.
    iovas: Vec<u64>,
}

impl Buffers {
    /// Maps new memory for the device.
    fn new(access: &Access, pieces: u16) -> Result<Self> {
        let size = usize::try_from(PIECE).unwrap_or_default();
        let piece = |_| {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB;
            MmapRegion::build(None, size, access, kind)
                .map_err(|error| Error::invalid("a large page", report(&error)))
        };
        let regions: Vec<_> = (0..pieces).map(piece).collect::<Result<_>>()?;
        let map = |(number, piece): (u16, &MmapRegion<()>)| {
            let host = u64::try_from(piece.as_ptr().addr()).unwrap_or(u64::MAX);
            // SAFETY: `Buffers` accesses its regions as volatile slices. The driver resets the
            // device before it drops them.
            unsafe { access.map(host, PIECE, Self::chosen_iova(number)) }
        };
        let iovas = (0..pieces).zip(&regions).map(map).collect::<Result<_>>()?;
        Ok(Self {
            pieces: regions,
            iovas,
        })
    }

    fn pieces(&self) -> u16 {
        u16::try_from(self.pieces.len()).unwrap_or(PIECES)
    }

    /// The address of a piece behind an IOMMU. The order is not that of this process's addresses.
    fn chosen_iova(piece: u16) -> u64 {
        FIRST_PIECE + u64::from(PIECES - 1 - piece) * PIECE_STRIDE
    }

    /// Bytes between two buffers of a piece.
    fn stride(pieces: u16) -> u64 {
        PIECE * u64::from(pieces) / (2 * u64::from(ENTRIES))
    }

    /// The piece of a buffer and the offset in it, of so many pieces.
    fn place(buffer: u16, pieces: u16) -> (u16, u64) {
        let offset = u64::from(buffer / pieces) * Self::stride(pieces) + BUFFER_START;
        (buffer % pieces, offset)
    }

    /// A buffer, as the ring takes it.
    fn descriptor(&self, buffer: u16, len: usize, direction: Direction) -> Piece {
        let (piece, offset) = Self::place(buffer, self.pieces());
        // There is one for each piece.
        let iova = self.iovas.get(usize::from(piece)).copied();
        Piece {
            iova: DeviceAddress(iova.unwrap_or_default() + offset),
            len: u32::try_from(len).unwrap_or(u32::MAX),
            direction,
        }
    }

    /// This process's view of `len` bytes of a buffer, after `skipped` ones.
    fn slice(
        &self,
        buffer: u16,
        skipped: usize,
        len: usize,
    ) -> Result<vm_memory::VolatileSlice<'_>> {
        let (piece, offset) = Self::place(buffer, self.pieces());
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let slice = self
            .pieces
            .get(usize::from(piece))
            .and_then(|piece| piece.get_slice(start.checked_add(skipped)?, len).ok());
        slice.ok_or_else(|| Error::invalid("a frame", "its buffer is too small"))
    }
}

/// One ring and its buffers.
struct Queue {
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
            ring,
            doorbell: 0,
            buffer_of: vec![0; usize::from(entries)],
            free: (index * ENTRIES..).take(entries.into()).collect(),
        })
    }

    fn add(&mut self, buffer: u16, piece: Piece) -> Result<()> {
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

/// Maps memory for the rings for the device. Returns it and its address in this process.
fn ring_memory(access: &Access) -> Result<(SharedBuffer, u64)> {
    let (mut failed, mut address) = (None, 0);
    let memory = SharedBuffer::placed(PIECE, |host| {
        address = host.first();
        // SAFETY: rings are accessed as volatile. The driver resets the device before it drops
        // them.
        let mapped = unsafe { access.map(address, PIECE, RINGS) };
        mapped.unwrap_or_else(|error| {
            failed = Some(error);
            RINGS
        })
    });
    match failed {
        Some(error) => Err(error),
        None => Ok((memory.map_err(ring_failed)?, address)),
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
    /// The rings, and their address in this process.
    memory: Arc<SharedBuffer>,
    rings: u64,
    buffers: Buffers,
    /// The addresses at which the device reaches a piece of memory.
    mapped: Vec<u64>,
}

impl Driver {
    fn start(access: Access, frame_max: usize, pieces: u16) -> Result<Self> {
        let buffers = Buffers::new(&access, pieces)?;
        let function = Function::new(access)?;
        let (memory, rings) = ring_memory(function.access())?;
        let start = memory.range().first();
        let mapped = buffers.iovas.iter().copied().chain([start]).collect();
        let memory = Arc::new(memory);
        let (address, receive, transmit) = Self::queues(&function, &memory)?;
        let mut driver = Self {
            function,
            address,
            frame_max,
            receive,
            transmit,
            kicks: 0,
            memory,
            rings,
            buffers,
            mapped,
        };
        driver.run()?;
        Ok(driver)
    }

    /// Resets the device, negotiates with it and sets its queues.
    fn queues(function: &Function, memory: &Arc<SharedBuffer>) -> Result<(Address, Queue, Queue)> {
        let address = function.negotiate()?;
        let entries = function.entries(RECEIVE)?.min(function.entries(TRANSMIT)?);
        let layout = RingLayout::new(RingFormat::Split, entries.min(ENTRIES));
        let layout = layout.map_err(ring_failed)?;
        let queue = |index, offset| {
            let mut queue = Queue::new(index, memory, layout, offset)?;
            queue.doorbell = function.set_queue(index, &queue.ring)?;
            Ok::<_, Error>(queue)
        };
        let receive = queue(RECEIVE, 0)?;
        Ok((address, receive, queue(TRANSMIT, layout.size())?))
    }

    /// Starts the device, with all buffers for frames to receive.
    fn run(&mut self) -> Result<()> {
        self.function.set_ready()?;
        while let Some(buffer) = self.receive.free.pop() {
            self.offer(buffer)?;
        }
        self.kick(RECEIVE)
    }

    /// Resets and starts the device with empty rings.
    fn restart(&mut self) -> Result<()> {
        let (_, receive, transmit) = Self::queues(&self.function, &self.memory)?;
        (self.receive, self.transmit) = (receive, transmit);
        self.run()
    }

    /// Unmaps a piece of memory for the device, which may use it, and maps it again. `number`
    /// counts through the pieces of the frames and the rings.
    fn map_again(&self, number: usize) -> Result<()> {
        let group = self.function.access().group()?;
        let at = number % self.mapped.len().max(1);
        let missing = || Error::invalid("a piece", "there is none");
        let iova = *self.mapped.get(at).ok_or_else(missing)?;
        let piece = self.buffers.pieces.get(at);
        let host = piece.map_or(self.rings, |piece| {
            u64::try_from(piece.as_ptr().addr()).unwrap_or(u64::MAX)
        });
        group.unmap(iova, PIECE)?;
        // SAFETY: as in `Buffers::new` and `ring_memory`.
        unsafe { group.map(host, PIECE, iova) }
    }

    /// Offers a buffer for a frame to the device.
    fn offer(&mut self, buffer: u16) -> Result<()> {
        let len = HEADER.len() + self.frame_max;
        let piece = self
            .buffers
            .descriptor(buffer, len, Direction::DeviceWrites);
        self.receive.add(buffer, piece)
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
        let piece = self.buffers.descriptor(buffer, all, Direction::DeviceReads);
        self.transmit.add(buffer, piece)?;
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
        for pieces in [2, 16, PIECES] {
            let place = |buffer| Buffers::place(buffer, pieces);
            let mut taken: Vec<_> = (0..2 * ENTRIES).map(place).collect();
            taken.sort_unstable();
            let stride = Buffers::stride(pieces);
            // A frame of the usual MTU fits.
            assert!(BUFFER_START + 12 + 1514 <= stride);
            for pair in taken.windows(2) {
                let ((piece, offset), next) = (pair[0], pair[1]);
                assert!(offset + stride - BUFFER_START <= PIECE);
                assert!(next.0 > piece || next.1 == offset + stride);
            }
        }
        assert_eq!(Buffers::chosen_iova(PIECES - 1), FIRST_PIECE);
        // Guest RAM of the tests lies below.
        const { assert!(FIRST_PIECE >= 1 << 32) };
        assert!(Buffers::chosen_iova(0) + PIECE <= BAR);
        let ring = RingLayout::new(RingFormat::Split, ENTRIES).unwrap();
        assert!(2 * ring.size() <= PIECE);
        const { assert!(BAR + PAGE <= FILL && FILL + FILL_MAX * FILL_STRIDE <= RINGS) };
    }
}

//! Frames from the tap to the driver's receive queues.
//!
//! ```text
//!   tap ─> frame ─> queue of its flow, of those that the driver has ever filled ─> chains
//! ```
//! A frame is read first and then gets as many chains as it needs. While the driver has too few
//! for it, the frame waits here, and its queue keeps the chains that were taken: `held`. More
//! frames wait in the tap, which drops those beyond its queue.
//!
//! So a queue without chains delays the others. It does so for [`PATIENCE`] only: then its frames
//! are dropped until it has chains again, as a NIC does. A driver that fills only one queue loses
//! none that way.

use std::time::{Duration, Instant};

use vm_memory::{Bytes as _, GuestAddress};

use super::tap::Tap;
use super::{BUDGET, FRAME_MAX, HEADER, flow};
use crate::Error;
use crate::memory::DeviceMemory;
use crate::ring::{DeviceQueue, Direction, Piece};

/// Offset of `num_buffers` in the header.
const NUM_BUFFERS: usize = 10;

/// How long a frame for a queue without chains delays those for other queues.
const PATIENCE: Duration = Duration::from_millis(1);

/// A chain that was taken and not returned.
#[derive(Debug, Default)]
struct Held {
    id: u16,
    pieces: Vec<Piece>,
    /// Bytes that the device may write.
    room: usize,
}

impl Held {
    fn writable(&self) -> impl Iterator<Item = &Piece> {
        let pieces = self.pieces.iter();
        pieces.filter(|piece| piece.direction == Direction::DeviceWrites)
    }
}

/// The state of one receive queue beside its ring.
#[derive(Debug, Default)]
struct Lane {
    /// The first `count` are held; the others keep their memory.
    held: Vec<Held>,
    count: usize,
    /// Entries of the ring.
    size: usize,
    /// Whether the driver may be asked for kicks.
    is_armed: bool,
    /// The driver has filled the queue since it started the device, so it gets frames.
    is_in_use: bool,
    /// The driver may have begun to fill it.
    is_kicked: bool,
    /// It had no chains for too long.
    is_starved: bool,
    /// It has chains that were returned without a decision about an interrupt.
    is_unpublished: bool,
    /// The driver wants an interrupt.
    interrupt: bool,
}

/// The receive queues beside their rings, and a frame for one of them.
#[derive(Debug)]
pub(super) struct Receive {
    frame: Box<[u8]>,
    /// Bytes of the frame that waits for chains; 0: none.
    waiting: usize,
    /// Since when it delays frames for other queues.
    since: Option<Instant>,
    lanes: Vec<Lane>,
    /// The lanes that get frames; during a turn.
    targets: Vec<usize>,
    /// The result for the ring.
    used: Vec<(u16, u32)>,
    /// Whether one frame may have several chains (MRG_RXBUF).
    mergeable: bool,
}

/// A failure, by its consequence.
#[derive(Debug)]
pub(super) enum Fault {
    /// A queue stops until the driver resets the device: its number among the receive queues.
    Ring(usize, Error),
    /// The NIC ends.
    Tap(Error),
}

impl Receive {
    /// The state of so many receive queues.
    pub(super) fn new(queues: usize) -> Self {
        Self {
            frame: vec![0; FRAME_MAX].into_boxed_slice(),
            waiting: 0,
            since: None,
            lanes: (0..queues).map(|_| Lane::default()).collect(),
            targets: Vec::with_capacity(queues),
            used: Vec::new(),
            mergeable: false,
        }
    }

    /// A buffer for one frame, while none waits.
    pub(super) fn buffer(&mut self) -> &mut [u8] {
        self.waiting = 0;
        &mut self.frame
    }

    /// A ring begins again, where the held chains are available. `is_in_use`: the driver has filled
    /// it before.
    pub(super) fn restart(&mut self, queue: usize, mergeable: bool, size: u16, is_in_use: bool) {
        self.mergeable = mergeable;
        if let Some(lane) = self.lanes.get_mut(queue) {
            lane.count = 0;
            lane.size = usize::from(size);
            lane.is_armed = true;
            lane.is_in_use |= is_in_use;
            lane.is_kicked = true;
            lane.is_starved = false;
        }
    }

    /// The driver has reset the device.
    pub(super) fn stop(&mut self) {
        self.lanes.fill_with(Lane::default);
        self.since = None;
    }

    /// The driver may have filled a queue for the first time.
    pub(super) fn kicked(&mut self, queue: usize) {
        if let Some(lane) = self.lanes.get_mut(queue) {
            lane.is_kicked = true;
        }
    }

    /// Whether a frame delays others, so another turn is due after [`PATIENCE`].
    pub(super) fn is_delayed(&self) -> bool {
        self.since.is_some()
    }

    /// Whether the driver wants an interrupt of this queue, once.
    pub(super) fn take_interrupt(&mut self, queue: usize) -> bool {
        let lane = self.lanes.get_mut(queue);
        lane.is_some_and(|lane| std::mem::take(&mut lane.interrupt))
    }

    /// Passes frames until the tap is empty or the driver has no more buffers. `rings` are those of
    /// the receive queues. Returns whether more work waits, for which no event comes.
    pub(super) fn turn(
        &mut self,
        rings: &mut [Option<&mut DeviceQueue>],
        memory: &DeviceMemory,
        tap: &Tap,
    ) -> Result<bool, Fault> {
        let passed = self.pass(rings, memory, tap);
        // Also after a fault, which concerns one queue.
        let published = self.publish(rings);
        passed.and_then(|again| published.map(|()| again))
    }

    fn pass(
        &mut self,
        rings: &mut [Option<&mut DeviceQueue>],
        memory: &DeviceMemory,
        tap: &Tap,
    ) -> Result<bool, Fault> {
        self.find_targets(rings)?;
        if self.targets.is_empty() {
            return Ok(false);
        }
        for _ in 0..BUDGET {
            if self.waiting == 0 {
                let Some(read) = tap.read(&mut self.frame).map_err(Fault::Tap)? else {
                    return Ok(false);
                };
                if read <= HEADER {
                    continue;
                }
                self.waiting = read;
            }
            let queue = self.target();
            let Some(Some(ring)) = rings.get_mut(queue) else {
                return Ok(false);
            };
            let passed = self.pass_one(queue, ring, memory);
            if !passed.map_err(|error| Fault::Ring(queue, error))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Finds the queues that get frames: those that the driver has filled; before, the first one.
    fn find_targets(&mut self, rings: &mut [Option<&mut DeviceQueue>]) -> Result<(), Fault> {
        self.targets.clear();
        let mut first = None;
        for (queue, (lane, ring)) in self.lanes.iter_mut().zip(rings).enumerate() {
            let Some(ring) = ring else {
                continue;
            };
            first = first.or(Some(queue));
            if std::mem::take(&mut lane.is_kicked) && !lane.is_in_use {
                let filled = ring.set_notifications(true);
                lane.is_in_use = filled.map_err(|error| Fault::Ring(queue, error))?;
            }
            if lane.is_in_use {
                self.targets.push(queue);
            }
        }
        if self.targets.is_empty() {
            self.targets.extend(first);
        }
        if self.targets.len() < 2 {
            self.since = None;
        }
        Ok(())
    }

    /// The queue of the frame's flow.
    fn target(&self) -> usize {
        let index = if self.targets.len() > 1 {
            let frame = self.frame.get(HEADER..self.waiting);
            let queues = u64::try_from(self.targets.len()).unwrap_or(1);
            usize::try_from(flow::of(frame.unwrap_or_default()) % queues).unwrap_or(0)
        } else {
            0
        };
        self.targets.get(index).copied().unwrap_or(0)
    }

    /// Passes the frame to its queue, or drops it. `false`: it waits.
    fn pass_one(
        &mut self,
        queue: usize,
        ring: &mut DeviceQueue,
        memory: &DeviceMemory,
    ) -> Result<bool, Error> {
        let Some(lane) = self.lanes.get_mut(queue) else {
            return Ok(false);
        };
        match lane.gather(ring, self.waiting, self.mergeable)? {
            Gathered::Enough(chains) => {
                let frame = self.frame.get_mut(..self.waiting).unwrap_or_default();
                lane.deliver(frame, chains, ring, memory, &mut self.used)?;
                lane.is_starved = false;
            }
            Gathered::Never => {}
            Gathered::NotYet => {
                let delays_others = self.targets.len() > 1;
                if delays_others && !lane.is_starved {
                    let since = self.since.get_or_insert_with(Instant::now);
                    lane.is_starved = since.elapsed() >= PATIENCE;
                }
                if !delays_others || !lane.is_starved {
                    return Ok(false);
                }
            }
        }
        self.waiting = 0;
        self.since = None;
        Ok(true)
    }

    /// Shows what was returned, and finds out which interrupts the driver wants.
    fn publish(&mut self, rings: &mut [Option<&mut DeviceQueue>]) -> Result<(), Fault> {
        let mut published = Ok(());
        for (queue, (lane, ring)) in self.lanes.iter_mut().zip(rings).enumerate() {
            if !std::mem::take(&mut lane.is_unpublished) {
                continue;
            }
            match ring.as_mut().map(|ring| ring.publish()).transpose() {
                Ok(wanted) => lane.interrupt |= wanted.unwrap_or(false),
                Err(error) => published = Err(Fault::Ring(queue, error)),
            }
        }
        published
    }
}

impl Lane {
    /// Takes chains until a frame of this length fits in.
    fn gather(
        &mut self,
        ring: &mut DeviceQueue,
        len: usize,
        mergeable: bool,
    ) -> Result<Gathered, Error> {
        // Of the chains so far, which are all that are held when another one is taken.
        let (mut room, mut pieces) = (0, 0);
        for chains in 1.. {
            if chains > self.count {
                if self.held.len() < chains {
                    self.held.push(Held::default());
                }
                let Some(held) = self.held.get_mut(chains - 1) else {
                    break;
                };
                let mut popped = ring.pop_into(&mut held.pieces)?;
                if popped.is_none() {
                    if pieces >= self.size {
                        // All of the driver's buffers together are too small. Pieces of indirect
                        // tables count, too: at worst a frame is dropped early.
                        return Ok(Gathered::Never);
                    }
                    self.is_armed = true;
                    if !ring.set_notifications(true)? {
                        return Ok(Gathered::NotYet);
                    }
                    popped = ring.pop_into(&mut held.pieces)?;
                }
                let Some(id) = popped else {
                    return Ok(Gathered::NotYet);
                };
                if std::mem::take(&mut self.is_armed) {
                    ring.set_notifications(false)?;
                }
                held.id = id;
                let lengths = held.writable().map(|piece| piece.len as usize);
                held.room = lengths.fold(0, usize::saturating_add);
                self.count = chains;
            }
            if let Some(held) = self.held.get(chains - 1) {
                room += held.room;
                pieces += held.pieces.len();
            }
            if room >= len {
                return Ok(Gathered::Enough(chains));
            }
            if !mergeable {
                break;
            }
        }
        Ok(Gathered::Never)
    }

    /// Writes a frame into the first chains that are held, and returns them.
    fn deliver(
        &mut self,
        frame: &mut [u8],
        chains: usize,
        ring: &mut DeviceQueue,
        memory: &DeviceMemory,
        used: &mut Vec<(u16, u32)>,
    ) -> Result<(), Error> {
        let buffers = u16::try_from(chains).unwrap_or(u16::MAX);
        if let Some(field) = frame.get_mut(NUM_BUFFERS..HEADER) {
            field.copy_from_slice(&buffers.to_le_bytes());
        }
        let mut rest = &*frame;
        used.clear();
        let mut is_mapped = true;
        for held in self.held.iter().take(chains) {
            let before = rest.len();
            for piece in held.writable() {
                let (now, later) = rest.split_at(rest.len().min(piece.len as usize));
                is_mapped &= memory.write_slice(now, GuestAddress(piece.iova.0)).is_ok();
                rest = later;
            }
            // At most the length of a frame.
            let written = u32::try_from(before - rest.len()).unwrap_or(0);
            used.push((held.id, written));
        }
        if !is_mapped {
            // A fault of these buffers, not of the ring: the driver sees that they are empty.
            used.iter_mut().for_each(|(_, written)| *written = 0);
        }
        self.is_unpublished = true;
        ring.push_used_together(used)?;
        // At once: frames that are not shown are lost with this process.
        ring.show()?;
        if let Some(held) = self.held.get_mut(..self.count) {
            held.rotate_left(chains);
        }
        self.count -= chains;
        Ok(())
    }
}

/// Whether there are chains for the waiting frame.
enum Gathered {
    /// The first of those that are held are enough.
    Enough(usize),
    /// The driver will kick.
    NotYet,
    /// No buffers of this driver are: the frame is dropped.
    Never,
}

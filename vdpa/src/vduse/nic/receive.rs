//! Frames from a queue of the tap or port to the driver's receive queue of the same pair.
//!
//! A frame is read first and then gets as many chains as it needs. While the driver has too few
//! for it, the frame waits here, and the queue keeps the chains that were taken: `held`. More
//! frames wait in the tap, which drops those beyond its queue.

use vm_memory::{Bytes as _, GuestAddress};

use super::port::Port;
use super::{BUDGET, BUDGET_BYTES, FRAME_MAX, HEADER, Turn};
use crate::Error;
use crate::memory::DeviceMemory;
use crate::ring::{DeviceQueue, Direction, Piece};

/// Offset of `num_buffers` in the header.
const NUM_BUFFERS: usize = 10;

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

/// A receive queue beside its ring, and a frame for it.
#[derive(Debug)]
pub(super) struct Receive {
    frame: Box<[u8]>,
    /// Bytes of the frame that waits for chains; 0: none.
    waiting: usize,
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
    /// The result for the ring.
    used: Vec<(u16, u32)>,
    /// Whether one frame may have several chains (MRG_RXBUF).
    mergeable: bool,
}

/// A failure, by its consequence.
#[derive(Debug)]
pub(super) enum Fault {
    /// The queue stops until the driver resets the device.
    Ring(Error),
    /// The NIC ends.
    Tap(Error),
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Ring(error)
    }
}

impl Receive {
    pub(super) fn new() -> Self {
        Self {
            frame: vec![0; FRAME_MAX].into_boxed_slice(),
            waiting: 0,
            held: Vec::new(),
            count: 0,
            size: 0,
            is_armed: false,
            is_in_use: false,
            is_kicked: false,
            used: Vec::new(),
            mergeable: false,
        }
    }

    /// A buffer for one frame, while none waits.
    pub(super) fn buffer(&mut self) -> &mut [u8] {
        self.waiting = 0;
        &mut self.frame
    }

    /// The ring begins again, where the held chains are available. `is_in_use`: the driver has
    /// filled it before.
    pub(super) fn restart(&mut self, mergeable: bool, size: u16, is_in_use: bool) {
        self.mergeable = mergeable;
        self.count = 0;
        self.size = usize::from(size);
        self.is_armed = true;
        self.is_in_use |= is_in_use;
        self.is_kicked = true;
    }

    /// The driver has reset the device.
    pub(super) fn stop(&mut self) {
        self.count = 0;
        self.is_in_use = false;
        self.is_kicked = false;
    }

    /// The driver may have filled the queue for the first time.
    pub(super) fn kicked(&mut self) {
        self.is_kicked = true;
    }

    /// Whether the driver has filled the queue since it started the device.
    pub(super) fn is_in_use(&mut self, ring: &mut DeviceQueue) -> Result<bool, Error> {
        if std::mem::take(&mut self.is_kicked) && !self.is_in_use {
            self.is_in_use = ring.set_notifications(true)?;
        }
        Ok(self.is_in_use)
    }

    /// Passes frames until the tap is empty or the driver has no more buffers.
    pub(super) fn turn(
        &mut self,
        ring: &mut DeviceQueue,
        memory: &DeviceMemory,
        port: &mut Port,
    ) -> Result<Turn, Fault> {
        let mut turn = Turn {
            again: true,
            ..Turn::default()
        };
        let mut bytes = 0;
        for _ in 0..BUDGET {
            if self.waiting == 0 {
                let Some(read) = port.read(&mut self.frame).map_err(Fault::Tap)? else {
                    turn.again = false;
                    break;
                };
                if read <= HEADER {
                    continue;
                }
                self.waiting = read;
            }
            match self.gather(ring)? {
                Gathered::Enough(chains) => {
                    self.deliver(chains, ring, memory)?;
                    turn.found = true;
                }
                Gathered::Never => {}
                Gathered::NotYet => {
                    turn.again = false;
                    break;
                }
            }
            bytes += std::mem::take(&mut self.waiting);
            if bytes >= BUDGET_BYTES {
                break;
            }
        }
        turn.interrupt = turn.found && ring.publish()?;
        Ok(turn)
    }

    /// Takes chains until the frame fits in.
    fn gather(&mut self, ring: &mut DeviceQueue) -> Result<Gathered, Error> {
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
            if room >= self.waiting {
                return Ok(Gathered::Enough(chains));
            }
            if !self.mergeable {
                break;
            }
        }
        Ok(Gathered::Never)
    }

    /// Writes the frame into the first chains that are held, and returns them.
    fn deliver(
        &mut self,
        chains: usize,
        ring: &mut DeviceQueue,
        memory: &DeviceMemory,
    ) -> Result<(), Error> {
        let buffers = u16::try_from(chains).unwrap_or(u16::MAX);
        if let Some(field) = self.frame.get_mut(NUM_BUFFERS..HEADER) {
            field.copy_from_slice(&buffers.to_le_bytes());
        }
        let mut rest = self.frame.get(..self.waiting).unwrap_or_default();
        self.used.clear();
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
            self.used.push((held.id, written));
        }
        if !is_mapped {
            // A fault of these buffers, not of the ring: the driver sees that they are empty.
            self.used.iter_mut().for_each(|(_, written)| *written = 0);
        }
        ring.push_used_together(&self.used)?;
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

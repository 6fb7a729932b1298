//! Frames from the driver's transmit queue to the tap or port. The way to a tap has no copy in this
//! process. Neither this process nor its successor sends a frame twice.

use vm_memory::{GuestAddress, GuestMemory as _, Permissions};

use super::in_flight::InFlight;
use super::port::Port;
use super::tap::Vectors;
use super::{BUDGET, BUDGET_BYTES, FRAME_MAX, HEADER, Turn};
use crate::Error;
use crate::memory::DeviceMemory;
use crate::ring::{DeviceQueue, Direction, Piece};

/// The memory of a transmit queue's turns.
#[derive(Debug)]
pub(super) struct Transmit {
    in_flight: InFlight,
    /// The position of the frame that the process before may have sent, until the first chain.
    sent_before: Option<u16>,
    pieces: Vec<Piece>,
    vectors: Vectors,
}

impl Transmit {
    pub(super) fn new(in_flight: InFlight) -> Self {
        Self {
            in_flight,
            sent_before: None,
            pieces: Vec::new(),
            vectors: Vectors::default(),
        }
    }

    /// The queue continues after another process.
    pub(super) fn resume(&mut self) {
        self.sent_before = self.in_flight.position();
    }

    /// The driver has reset the device: the ring's positions begin again.
    pub(super) fn stop(&mut self) {
        self.sent_before = None;
        self.in_flight.clear();
    }

    /// Passes frames until the driver has no more or wants an interrupt. It gets that at once, and
    /// prepares frames while this thread passes others. `arms`: the driver kicks at the next one.
    pub(super) fn turn(
        &mut self,
        ring: &mut DeviceQueue,
        memory: &DeviceMemory,
        port: &mut Port,
        arms: bool,
    ) -> Result<Turn, Error> {
        let mut turn = Turn {
            again: true,
            ..Turn::default()
        };
        ring.set_notifications(false)?;
        let mut bytes = 0;
        for _ in 0..BUDGET {
            let Some(id) = ring.pop_into(&mut self.pieces)? else {
                turn.again = arms && ring.set_notifications(true)?;
                if turn.again {
                    continue;
                }
                break;
            };
            turn.found = true;
            let (_, position) = ring.positions();
            let is_sent = self.sent_before.take() == Some(position);
            // A frame that the driver does not map or that is too long is dropped.
            if !is_sent && let Some(len) = self.find(memory) {
                self.in_flight.set(position);
                bytes += len;
                // SAFETY: needed to pass the frame without a copy. The addresses are those of the
                // driver's memory, which `memory` keeps mapped during the call. No Rust reference
                // points into it.
                let _ = unsafe { port.write(&self.vectors) };
            }
            ring.push_used(id, 0)?;
            // At once: a successor of this process would drop a frame whose chain is not returned.
            turn.interrupt = ring.publish()?;
            if turn.interrupt || bytes >= BUDGET_BYTES {
                break;
            }
        }
        self.vectors.0.clear();
        Ok(turn)
    }

    /// Finds the memory of the current chain's frame, with its header. Returns its bytes.
    fn find(&mut self, memory: &DeviceMemory) -> Option<usize> {
        self.vectors.0.clear();
        let mut len = 0_usize;
        for piece in &self.pieces {
            if piece.direction != Direction::DeviceReads {
                break;
            }
            let more = usize::try_from(piece.len).ok()?;
            len = len.checked_add(more).filter(|&len| len <= FRAME_MAX)?;
            let address = GuestAddress(piece.iova.0);
            for slice in memory.get_slices(address, more, Permissions::Read).ok()? {
                let slice = slice.ok()?;
                self.vectors.0.push(libc::iovec {
                    iov_base: slice.ptr_guard().as_ptr().cast_mut().cast(),
                    iov_len: slice.len(),
                });
            }
        }
        (len > HEADER).then_some(len)
    }
}

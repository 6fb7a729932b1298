//! Frames from the driver's transmit queue to the tap.

use vm_memory::{Bytes as _, GuestAddress};

use super::receive::Fault;
use super::tap::Tap;
use super::{BUDGET, FRAME_MAX, HEADER, Turn};
use crate::memory::DeviceMemory;
use crate::ring::{DeviceQueue, Direction, Piece};

/// The state of the transmit queue beside its ring.
#[derive(Debug)]
pub(super) struct Transmit {
    frame: Box<[u8]>,
    pieces: Vec<Piece>,
}

impl Transmit {
    pub(super) fn new() -> Self {
        Self {
            frame: vec![0; FRAME_MAX].into_boxed_slice(),
            pieces: Vec::new(),
        }
    }

    /// Passes frames until the driver has no more.
    pub(super) fn turn(
        &mut self,
        ring: &mut DeviceQueue,
        memory: &DeviceMemory,
        tap: &Tap,
    ) -> Result<Turn, Fault> {
        let mut again = true;
        ring.set_notifications(false)?;
        for _ in 0..BUDGET {
            let Some(id) = ring.pop_into(&mut self.pieces)? else {
                again = ring.set_notifications(true)?;
                if again {
                    continue;
                }
                break;
            };
            // A frame that the driver does not map or that is too long is dropped.
            if let Some(frame) = self.copy(memory) {
                let _ = tap.write(frame);
            }
            ring.push_used(id, 0)?;
        }
        let interrupt = ring.publish()?;
        Ok(Turn { again, interrupt })
    }

    /// Copies the frame of the current chain, with its header.
    fn copy(&mut self, memory: &DeviceMemory) -> Option<&[u8]> {
        let mut filled = 0_usize;
        for piece in &self.pieces {
            if piece.direction != Direction::DeviceReads {
                break;
            }
            let end = filled.checked_add(usize::try_from(piece.len).ok()?)?;
            let part = self.frame.get_mut(filled..end)?;
            memory.read_slice(part, GuestAddress(piece.iova.0)).ok()?;
            filled = end;
        }
        self.frame
            .get(..filled)
            .filter(|frame| frame.len() > HEADER)
    }
}

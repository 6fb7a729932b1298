//! Applies the changes of a guest's address space to one of a device.

use std::sync::Arc;

use super::{Batch, Iotlb, IotlbSink, Mapping};
use crate::iova::IovaRange;
use crate::memory::{Change, DmaRegion as _, GuestRegion, Piece};
use crate::{Error, ErrorKind};

/// A message to the kernel.
#[derive(Debug)]
enum Step {
    Map(IovaRange, Mapping),
    Unmap(IovaRange),
}

impl<S: IotlbSink> Iotlb<S> {
    /// Applies `changes` in their order, all or none. Adjacent unmaps are one message, and a single
    /// message needs no bracket. The address space maps nothing but guest RAM, which `ram` gives
    /// ([`GuestRegion::all`]).
    ///
    /// # Errors
    /// As [`Iotlb::map`]; nothing has changed then. [`ErrorKind::NotRolledBack`]: the changes
    /// failed, and so did undoing them. The device then lacks mappings or has too many: stop it.
    pub fn apply(
        &mut self,
        asid: u32,
        changes: &[Change],
        ram: &[Arc<GuestRegion>],
    ) -> Result<(), Error> {
        let steps = steps(changes, ram)?;
        let mut batch = self.batch_of(asid, steps.len() > 1)?;
        let done = batch.run(steps).and_then(|()| batch.end());
        done.map_err(|error| match batch.roll_back() {
            Ok(()) => error,
            Err(undo) => {
                let message = format!("{error}; and the IOTLB changes cannot be undone");
                Error::new(ErrorKind::NotRolledBack, message).because(undo)
            }
        })
    }
}

impl<S: IotlbSink> Batch<'_, S> {
    fn run(&mut self, steps: Vec<Step>) -> Result<(), Error> {
        let size = |step: &Step| match step {
            Step::Map(range, _) => range.size(),
            Step::Unmap(_) => None,
        };
        self.announce(steps.iter().filter_map(size).fold(0, u64::saturating_add));
        for step in steps {
            match step {
                Step::Map(range, mapping) => {
                    self.map(range.first(), range.size().unwrap_or(0), mapping)?;
                }
                Step::Unmap(range) => self.unmap_inside(range)?,
            }
        }
        Ok(())
    }
}

/// The messages for these changes.
fn steps(changes: &[Change], ram: &[Arc<GuestRegion>]) -> Result<Vec<Step>, Error> {
    let mut steps = Vec::with_capacity(changes.len());
    let unmaps = |change: &Change| matches!(change, Change::Unmap { .. });
    for run in changes.chunk_by(|one, next| unmaps(one) && unmaps(next)) {
        let mut ranges = Vec::new();
        for change in run {
            match *change {
                Change::Map { range, piece } => map_in_ram(range, piece, ram, &mut steps)?,
                Change::Unmap { range } => ranges.push(range),
            }
        }
        // The order of unmaps does not matter, and drivers unmap downwards as well as upwards.
        ranges.sort_unstable();
        let touches =
            |one: &IovaRange, next: &IovaRange| one.last().checked_add(1) == Some(next.first());
        steps.extend(ranges.chunk_by(touches).filter_map(|chunk| {
            let (first, last) = (chunk.first()?, chunk.last()?);
            IovaRange::new(first.first(), last.last()).map(Step::Unmap)
        }));
    }
    Ok(steps)
}

/// Adds a message for each region of RAM that the piece touches.
fn map_in_ram(
    range: IovaRange,
    piece: Piece,
    ram: &[Arc<GuestRegion>],
    steps: &mut Vec<Step>,
) -> Result<(), Error> {
    let mut done = 0;
    let size = range.size().unwrap_or(u64::MAX);
    while done < size {
        let found = piece.gpa.checked_add(done).and_then(|gpa| {
            ram.iter().find_map(|region| {
                let offset = gpa.checked_sub(region.base())?;
                let left = region.size().checked_sub(offset).filter(|&left| left > 0)?;
                let part = IovaRange::from_size(range.first() + done, left.min(size - done))?;
                Some((region, offset, part))
            })
        });
        let Some((region, offset, part)) = found else {
            let gpa = piece.gpa;
            return Err(Error::other(format!(
                "cannot map {range} to guest-physical {gpa:#x}: not all of it is guest RAM"
            )));
        };
        done += part.size().unwrap_or(size);
        let mapping = Mapping {
            region: Arc::clone(region) as _,
            offset,
            access: piece.access,
        };
        steps.push(Step::Map(part, mapping));
    }
    Ok(())
}

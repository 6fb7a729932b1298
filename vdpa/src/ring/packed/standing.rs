//! Where a packed ring stands, told by the flags of its entries alone.
//!
//! A device that is reset without having said where it was leaves nothing but the
//! ring. As long as every chain is one descriptor and chains are completed in order, the
//! flags of all entries make one of two patterns, in which w is the device's wrap counter:
//! ```text
//!   0            used          available          size
//!   | used, w    | available, w | used, lap before |      driver and device in one lap
//!
//!   0            available     used               size
//!   | available, | used, w      | available, w     |      the driver is a lap ahead
//!   |  next lap  |
//! ```
//! Any part may be empty, and no two places give the same flags. Every entry is compared.
//! A chain of several descriptors breaks the pattern or carries NEXT, with one
//! exception: a last chain of exactly two leaves an entry behind that looks available, with
//! the id that was used just before it. Where the device would write there, the
//! ring is refused (`GuestRing::standing`): the memory may be the driver's again. Where it
//! only reads, drivers that use an id again at once look the same, so it is
//! taken for available; at worst something is read once more.
//!
//! Pure: must not know where the flags come from.

use super::super::guest::DESCRIPTOR_F_NEXT;
use super::{DESCRIPTOR_F_AVAIL, DESCRIPTOR_F_USED, Position};
use crate::Error;

/// What an entry is: used or available, in a lap with this wrap counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Entry {
    Used(bool),
    Available(bool),
}

impl Entry {
    fn of(flags: u16) -> Self {
        let available = flags & DESCRIPTOR_F_AVAIL != 0;
        if available == (flags & DESCRIPTOR_F_USED != 0) {
            Self::Used(available)
        } else {
            Self::Available(available)
        }
    }
}

/// Where the driver adds next, and where the device uses next. The flags must be of
/// one moment, or read from the first entry to the last while the driver adds: then they
/// are those of a moment, or of no place.
pub(super) fn standing(flags: &[u16]) -> Result<(Position, Position), Error> {
    // Each run of equal entries with its first index.
    let mut runs: [Option<(Entry, u16)>; 3] = [None; 3];
    let mut count = 0;
    let mut last = None;
    for (index, &flags) in (0..=u16::MAX).zip(flags) {
        if flags & DESCRIPTOR_F_NEXT != 0 {
            return Err(Error::other(format!(
                "entry {index} belongs to a chain of several descriptors, so the ring does not \
                 tell where it stands: a device that keeps ring positions is needed"
            )));
        }
        let entry = Entry::of(flags);
        if last == Some(entry) {
            continue;
        }
        last = Some(entry);
        let Some(run) = runs.get_mut(count) else {
            return Err(no_pattern(index));
        };
        *run = Some((entry, index));
        count += 1;
    }
    let at = |index, wrap| Position { index, wrap };
    use Entry::{Available, Used};
    let (available, used) = match runs {
        // All of the last lap, or all of this one.
        [Some((Used(lap), _)), None, None] => (at(0, !lap), at(0, !lap)),
        [Some((Available(lap), _)), None, None] => (at(0, !lap), at(0, lap)),
        [Some((Used(lap), _)), Some((Used(_), here)), None] => (at(here, lap), at(here, lap)),
        [Some((Used(lap), _)), Some((Available(same), here)), None] if same == lap => {
            (at(0, !lap), at(here, lap))
        }
        [Some((Available(lap), _)), Some((Used(before), here)), None] if before != lap => {
            (at(here, lap), at(0, lap))
        }
        // Full, the driver a lap ahead.
        [Some((Available(lap), _)), Some((Available(_), here)), None] => {
            (at(here, lap), at(here, !lap))
        }
        [
            Some((Used(lap), _)),
            Some((Available(same), used)),
            Some((Used(before), available)),
        ] if same == lap && before != lap => (at(available, lap), at(used, lap)),
        [
            Some((Available(lap), _)),
            Some((Used(before), available)),
            Some((Available(same), used)),
        ] if before != lap && same != lap => (at(available, lap), at(used, !lap)),
        _ => {
            let first = runs.iter().skip(1).flatten().next();
            let index = first.map_or(0, |&(_, index)| index);
            return Err(no_pattern(index));
        }
    };
    Ok((available, used))
}

/// The flags are not those of a device that works in order, from the entry `index` on.
fn no_pattern(index: u16) -> Error {
    Error::other(format!(
        "the flags of entry {index} fit no place where an orderly device could stand"
    ))
}

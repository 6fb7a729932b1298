//! Finds the position of a packed ring from the flags of its entries alone.
//!
//! If a device is reset before it reports its position, only the ring is left. Suppose that every
//! chain is one descriptor and chains are completed in order. Then the flags of all entries form
//! one of two patterns, in which w is the device's wrap counter:
//! ```text
//!   0            used          available          size
//!   | used, w    | available, w | used, lap before |      driver and device in one lap
//!
//!   0            available     used               size
//!   | available, | used, w      | available, w     |      the driver is a lap ahead
//!   |  next lap  |
//! ```
//! Any part may be empty, and no two positions give the same flags. Every entry is compared. A
//! chain of several descriptors breaks the pattern or carries NEXT, with one exception: a last
//! chain of exactly two. It leaves an entry behind that looks available, with the id that was used
//! just before it.
//!
//! If the device would write to that entry's buffer, the ring is refused
//! (`GuestRing::ring_position`): the memory may be the driver's again. If it only reads, drivers
//! that reuse an id at once look the same, so the entry counts as available. At worst a buffer is
//! read once more.
//!
//! The function is pure: the source of the flags does not matter.

use super::super::guest::{DESCRIPTOR_F_INDIRECT, DESCRIPTOR_F_NEXT, DESCRIPTOR_F_WRITE};
use super::{DESCRIPTOR_F_AVAIL, DESCRIPTOR_F_USED, Position};
use crate::Error;

/// The state of an entry: used or available, in a lap with this wrap counter.
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

/// The driver's position for the next available entry, and the device's for the next used one. The
/// flags must be of one moment, or read from the first entry to the last while the driver adds. In
/// the second case they are those of one moment, or of no position.
pub(super) fn ring_position(flags: &[u16]) -> Result<(Position, Position), Error> {
    // Each run of equal entries, with its first index.
    let mut runs: [Option<(Entry, u16)>; 3] = [None; 3];
    let mut count = 0;
    let mut last = None;
    for (index, &flags) in (0..=u16::MAX).zip(flags) {
        if flags & DESCRIPTOR_F_NEXT != 0 {
            return Err(Error::other(format!(
                "entry {index} belongs to a chain of several descriptors, so the ring does not \
                 show its position: use a device that keeps ring positions"
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
        // All entries of the last lap, or all of this one.
        [Some((Used(lap), _)), None, None] => (at(0, !lap), at(0, !lap)),
        [Some((Available(lap), _)), None, None] => (at(0, !lap), at(0, lap)),
        [Some((Used(lap), _)), Some((Used(_), here)), None] => (at(here, lap), at(here, lap)),
        [Some((Used(lap), _)), Some((Available(same), here)), None] if same == lap => {
            (at(0, !lap), at(here, lap))
        }
        [Some((Available(lap), _)), Some((Used(before), here)), None] if before != lap => {
            (at(here, lap), at(0, lap))
        }
        // Full, with the driver a lap ahead.
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

/// The entries that a device was about to use together when it ended, with the flags that make them
/// available again. The first of them is still available, as the driver wrote it.
///
/// The device writes the flags from the last entry to the first. So these are used in the lap of
/// the available entry before them. If each chain is one descriptor, the lap of a used entry is
/// another one in any other ring, also while the driver adds. The rest of a chain of two looks
/// available, too. So all entries must have WRITE, as those for one frame have: frames from the
/// driver are not used together.
///
/// The device's flags replace the driver's, so a used entry does not show whether its buffer was an
/// indirect table. If one entry has a table, the others may have had one: there are no results.
///
/// `flags` begin with those of the last entry, read before the others.
pub(super) fn unfinished(flags: &[u16]) -> Vec<(u16, u16)> {
    let mut found = Vec::new();
    let unclear = DESCRIPTOR_F_NEXT | DESCRIPTOR_F_INDIRECT;
    if flags.iter().any(|flags| flags & unclear != 0) {
        return found;
    }
    let Some((&last, entries)) = flags.split_first() else {
        return found;
    };
    let mut before = (Entry::of(last), last);
    // A second time, for a run that begins at the end of the ring.
    for _ in 0..2 {
        for (index, &flags) in (0..=u16::MAX).zip(entries) {
            let mut entry = Entry::of(flags);
            let writes = before.1 & flags & DESCRIPTOR_F_WRITE != 0;
            if let (Entry::Available(lap), true) = (before.0, writes) {
                let lap = lap ^ (index == 0);
                if entry == Entry::Used(lap) {
                    let position = Position { index, wrap: lap };
                    let other = flags & !(DESCRIPTOR_F_AVAIL | DESCRIPTOR_F_USED);
                    found.push((index, other | position.available_flags()));
                    entry = Entry::Available(lap);
                }
            }
            before = (entry, flags);
        }
    }
    found.sort_unstable();
    found.dedup();
    found
}

/// From the entry `index` on, the flags are not those of a device that works in order.
fn no_pattern(index: u16) -> Error {
    Error::other(format!(
        "the flags of entry {index} match no position of a device that works in order"
    ))
}

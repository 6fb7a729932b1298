//! Packed virtqueues (virtio 1.3, section 2.8): both sides, and their common part.
//!
//! ```text
//!   descriptor ring     entry i at 16 i:  u64 address, u32 length, u16 id, u16 flags
//!   event suppression   u16 off_wrap (offset, wrap << 15), u16 flags; one of each side
//!
//!   flags of a descriptor     AVAIL  USED        (wrap: the reader's wrap counter)
//!     available                wrap  !wrap
//!     used                     wrap   wrap
//! ```
//! Each side has a position in the ring with a wrap counter, which begins at 1 and changes with
//! each lap. A chain takes as many entries as it has descriptors. Its used descriptor overwrites
//! the entry at the used position, and skips as many. All fields are little-endian.
//!
//! This module has the arithmetic of positions and events, which is the same on both sides.

mod device;
mod driver;
mod guest;
mod ring_position;

use std::num::Wrapping;

pub use self::device::DeviceQueue;
pub(crate) use self::driver::{Driver, table_entry};
pub use self::guest::GuestRing;
use crate::device::VringBase;

const DESCRIPTOR_F_AVAIL: u16 = 1 << 7;
const DESCRIPTOR_F_USED: u16 = 1 << 15;

/// Offsets of the parts of a descriptor.
const DESCRIPTOR_LENGTH: u64 = 8;
const DESCRIPTOR_FLAGS: u64 = 14;

/// RING_EVENT_FLAGS_* (virtio 1.3, 2.8.10).
const EVENT_FLAGS_ENABLE: u16 = 0;
const EVENT_FLAGS_DISABLE: u16 = 1;
const EVENT_FLAGS_DESC: u16 = 2;
const EVENT_FLAGS_MASK: u16 = 3;
/// Offset of the flags in an event suppression structure.
const EVENT_FLAGS: u64 = 2;

/// The wrap counter in `off_wrap`.
const OFF_WRAP: u16 = 1 << 15;

/// A position in the ring, with its side's wrap counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Position {
    /// Below the ring's size, which is at most 32768: 15 bits.
    index: u16,
    wrap: bool,
}

impl Position {
    /// The position in a ring that was never used.
    #[cfg(test)]
    const START: Self = Self {
        index: 0,
        wrap: true,
    };

    /// Both positions of a base, as `(available, used)`; `None` for the base of a split ring.
    fn of(base: VringBase) -> Option<(Self, Self)> {
        let at = |index, wrap| Self { index, wrap };
        match base {
            VringBase::Packed {
                available,
                available_wrap,
                used,
                used_wrap,
            } => Some((at(available, available_wrap), at(used, used_wrap))),
            VringBase::Split { .. } => None,
        }
    }

    /// The position `by` entries further, at most `size`.
    fn advance(self, by: u16, size: u16) -> Self {
        match size.checked_sub(self.index) {
            Some(left) if by >= left => Self {
                index: by - left,
                wrap: !self.wrap,
            },
            _ => Self {
                index: self.index + by,
                wrap: self.wrap,
            },
        }
    }

    /// Its form in an event suppression structure.
    fn off_wrap(self) -> u16 {
        self.index | if self.wrap { OFF_WRAP } else { 0 }
    }

    /// The flags of a descriptor made available here.
    fn available_flags(self) -> u16 {
        if self.wrap {
            DESCRIPTOR_F_AVAIL
        } else {
            DESCRIPTOR_F_USED
        }
    }

    /// The flags of a descriptor used here.
    fn used_flags(self) -> u16 {
        if self.wrap {
            DESCRIPTOR_F_AVAIL | DESCRIPTOR_F_USED
        } else {
            0
        }
    }

    fn is_available(self, flags: u16) -> bool {
        flags & (DESCRIPTOR_F_AVAIL | DESCRIPTOR_F_USED) == self.available_flags()
    }

    fn is_used(self, flags: u16) -> bool {
        flags & (DESCRIPTOR_F_AVAIL | DESCRIPTOR_F_USED) == self.used_flags()
    }
}

/// The base for both positions of a device.
fn base_of(available: Position, used: Position) -> VringBase {
    VringBase::Packed {
        available: available.index,
        available_wrap: available.wrap,
        used: used.index,
        used_wrap: used.wrap,
    }
}

/// The flags of an event suppression structure whose owner enables or disables the event for the
/// next entry.
fn event_flags(enabled: bool, event_idx: bool) -> u16 {
    match (enabled, event_idx) {
        (false, _) => EVENT_FLAGS_DISABLE,
        (true, true) => EVENT_FLAGS_DESC,
        (true, false) => EVENT_FLAGS_ENABLE,
    }
}

/// Whether the other side wants an event for the last `moved` entries before `now`. Its event
/// suppression structure is one 32-bit word (virtio 1.3, 2.8.14): `off_wrap` in the low half, flags
/// in the high one.
fn event_wanted(event: u32, now: Position, moved: u32, size: u16, event_idx: bool) -> bool {
    let [o0, o1, f0, f1] = event.to_le_bytes();
    let off_wrap = u16::from_le_bytes([o0, o1]);
    match u16::from_le_bytes([f0, f1]) & EVENT_FLAGS_MASK {
        EVENT_FLAGS_DISABLE => false,
        EVENT_FLAGS_DESC if event_idx => {
            let moved = match u16::try_from(moved) {
                Ok(moved) if moved <= size => moved,
                // More than a lap: the event was passed, or is at a position that only a later
                // entry with the same index would reach. A spurious event is better than a lost
                // one.
                _ => return true,
            };
            let mut event = Wrapping(off_wrap & !OFF_WRAP);
            if (off_wrap & OFF_WRAP != 0) != now.wrap {
                // The event is in the previous lap.
                event -= size;
            }
            Wrapping(now.index) - event - Wrapping(1) < Wrapping(moved)
        }
        // Enabled, or the reserved value, or DESC without EVENT_IDX.
        _ => true,
    }
}

#[cfg(test)]
mod tests;

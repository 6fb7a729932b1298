//! Offsets of a ring's areas in its memory, in either format.
//!
//! Areas that the device writes have separate pages, so that the rest can be mapped read-only for
//! it. This module has the arithmetic only.

use super::RingFormat;
use super::guest::DESCRIPTOR_SIZE;
use crate::Error;
use crate::device::VringAddresses;
use crate::iova::{DeviceAddress, PAGE_SIZE};

/// Bytes of an event suppression structure (virtio 1.3, 2.8.14).
const EVENT: u64 = 4;

/// Offsets of a split ring's areas in its memory.
///
/// ```text
///  0                                     used_offset
///  | descriptor table | avail ring | ... | used ring | ... |
///  +------- device reads only -----------+-- device writes -+
///            whole pages                     whole pages
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SplitLayout {
    pub(super) size: u16,
    pub(super) avail_offset: u64,
    pub(super) used_offset: u64,
    pub(super) total: u64,
}

impl SplitLayout {
    /// The layout for a ring with `size` entries, a power of two from 1 to 32768.
    ///
    /// # Errors
    /// The size is impossible for a split ring.
    pub fn new(size: u16) -> Result<Self, Error> {
        RingFormat::Split.check(size)?;
        let entries = u64::from(size);
        let avail_offset = DESCRIPTOR_SIZE * entries;
        let used_offset = (avail_offset + 6 + 2 * entries).next_multiple_of(PAGE_SIZE);
        let total = (used_offset + 6 + 8 * entries).next_multiple_of(PAGE_SIZE);
        Ok(Self {
            size,
            avail_offset,
            used_offset,
            total,
        })
    }

    /// Bytes of memory the ring needs, in whole pages.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.total
    }

    /// Entries of the ring.
    #[must_use]
    pub fn entries(&self) -> u16 {
        self.size
    }

    /// Start of the pages that the device writes; it only reads those before.
    #[must_use]
    pub fn used_offset(&self) -> u64 {
        self.used_offset
    }
}

/// Offsets of a packed ring's areas in its memory.
///
/// ```text
///  0                          descriptor_offset        device_offset
///  | driver event | ...       | descriptor ring | device event | ... |
///  +--- device reads only ----+----------- device writes ------------+
///           one page                     whole pages
/// ```
/// The driver writes the descriptor ring too, but the device must be able to: a used descriptor
/// overwrites an available one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedLayout {
    pub(super) size: u16,
    pub(super) descriptor_offset: u64,
    pub(super) device_offset: u64,
    pub(super) total: u64,
}

impl PackedLayout {
    /// The layout for a ring with `size` entries, any number from 1 to 32768.
    ///
    /// # Errors
    /// The size is impossible for a packed ring.
    pub fn new(size: u16) -> Result<Self, Error> {
        RingFormat::Packed.check(size)?;
        let descriptor_offset = PAGE_SIZE;
        let device_offset = descriptor_offset + DESCRIPTOR_SIZE * u64::from(size);
        Ok(Self {
            size,
            descriptor_offset,
            device_offset,
            total: (device_offset + EVENT).next_multiple_of(PAGE_SIZE),
        })
    }

    /// Bytes of memory the ring needs, in whole pages.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.total
    }

    /// Entries of the ring.
    #[must_use]
    pub fn entries(&self) -> u16 {
        self.size
    }

    /// Start of the pages that the device writes; it only reads those before.
    #[must_use]
    pub fn descriptor_offset(&self) -> u64 {
        self.descriptor_offset
    }
}

/// The layout of a ring in one of the formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RingLayout {
    /// The layout of a split ring.
    Split(SplitLayout),
    /// The layout of a packed ring.
    Packed(PackedLayout),
}

impl RingLayout {
    /// The layout for a ring with `size` entries.
    ///
    /// # Errors
    /// The size is impossible for the format.
    pub fn new(format: RingFormat, size: u16) -> Result<Self, Error> {
        Ok(match format {
            RingFormat::Split => Self::Split(SplitLayout::new(size)?),
            RingFormat::Packed => Self::Packed(PackedLayout::new(size)?),
        })
    }

    /// Bytes of memory the ring needs, in whole pages.
    #[must_use]
    pub fn size(&self) -> u64 {
        match self {
            Self::Split(layout) => layout.size(),
            Self::Packed(layout) => layout.size(),
        }
    }

    /// Entries of the ring.
    #[must_use]
    pub fn entries(&self) -> u16 {
        match self {
            Self::Split(layout) => layout.entries(),
            Self::Packed(layout) => layout.entries(),
        }
    }

    /// Addresses of the areas of a ring that begins at `start`.
    pub(super) fn addresses(&self, start: DeviceAddress) -> VringAddresses {
        let (descriptor, driver, device) = match self {
            Self::Split(layout) => (0, layout.avail_offset, layout.used_offset),
            Self::Packed(layout) => (layout.descriptor_offset, 0, layout.device_offset),
        };
        VringAddresses {
            descriptor: start + descriptor,
            driver: start + driver,
            device: start + device,
        }
    }

    /// Start of the pages that the device writes; it only reads those before.
    #[must_use]
    pub fn writable_offset(&self) -> u64 {
        match self {
            Self::Split(layout) => layout.used_offset(),
            Self::Packed(layout) => layout.descriptor_offset(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_writable_areas_have_their_own_pages() {
        for size in [1, 2, 64, 128, 256, 32768] {
            let layout = SplitLayout::new(size).unwrap();
            assert!(layout.used_offset.is_multiple_of(4096) && layout.total.is_multiple_of(4096));
            assert!(layout.avail_offset + 6 + 2 * u64::from(size) <= layout.used_offset);
            assert!(layout.used_offset + 6 + 8 * u64::from(size) <= layout.total);
        }
        for size in [1, 2, 3, 255, 256, 257, 32767, 32768] {
            let layout = PackedLayout::new(size).unwrap();
            assert_eq!((layout.entries(), layout.descriptor_offset()), (size, 4096));
            assert!(layout.total.is_multiple_of(4096));
            assert_eq!(layout.device_offset, 4096 + 16 * u64::from(size));
            assert!(layout.device_offset + 4 <= layout.total);
        }
    }

    #[test]
    fn sizes_by_format() {
        for size in [0, 3, 65535] {
            RingLayout::new(RingFormat::Split, size).unwrap_err();
        }
        for size in [0, 32769, 65535] {
            RingLayout::new(RingFormat::Packed, size).unwrap_err();
        }
        let error = PackedLayout::new(0).unwrap_err().to_string();
        assert_eq!(error, "a packed ring cannot have 0 entries");
    }
}

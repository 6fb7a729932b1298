//! The description of one ring, and the checks that the kernel does not make.
//!
//! vhost-vdpa passes sizes and addresses to the parent driver unchecked. A ring outside guest
//! memory would let a guest use the VMM's private rings. So each area must lie inside ranges that
//! the caller allows. This module has the layout rules; [`crate::ring`] reads and writes rings.

use std::fmt;

use vmm_sys_util::eventfd::EventFd;

use crate::Error;
use crate::iova::{DeviceAddress, IovaRange};

/// Largest split or packed ring (virtio 1.3, 2.7 and 2.8).
pub const RING_SIZE_MAX: u16 = 32768;

/// I/O virtual addresses of a ring's three areas (virtio 1.3, 2.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VringAddresses {
    /// Descriptor Area.
    pub descriptor: DeviceAddress,
    /// Driver Area (split: avail ring; packed: driver event suppression).
    pub driver: DeviceAddress,
    /// Device Area (split: used ring; packed: device event suppression).
    pub device: DeviceAddress,
}

/// The position at which a device continues in a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum VringBase {
    /// A split ring: index of the next available entry, free-running. Some parents (mlx5) report
    /// and accept the used index here.
    Split {
        /// The index.
        index: u16,
    },
    /// A packed ring: positions below the ring size, with their wrap counters.
    Packed {
        /// Next available descriptor.
        available: u16,
        /// Wrap counter of `available`.
        available_wrap: bool,
        /// Next used descriptor.
        used: u16,
        /// Wrap counter of `used`.
        used_wrap: bool,
    },
}

/// Split: the index. Packed: the offsets, each with its wrap counter.
impl fmt::Display for VringBase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Split { index } => index.fmt(f),
            Self::Packed {
                available,
                available_wrap,
                used,
                used_wrap,
            } => {
                let (one, two) = (u8::from(available_wrap), u8::from(used_wrap));
                write!(
                    f,
                    "available {available} wrap {one}, used {used} wrap {two}"
                )
            }
        }
    }
}

const WRAP: u16 = 1 << 15;

impl VringBase {
    /// The position of a ring that was never used.
    #[must_use]
    pub const fn initial(packed: bool) -> Self {
        if packed {
            Self::Packed {
                available: 0,
                available_wrap: true,
                used: 0,
                used_wrap: true,
            }
        } else {
            Self::Split { index: 0 }
        }
    }

    /// Descriptors of a packed ring of `size` entries that the device at this position has taken
    /// and not used. 0 for a split ring, whose base does not include it.
    #[must_use]
    pub fn packed_in_flight(self, size: u16) -> u16 {
        match self {
            Self::Split { .. } => 0,
            Self::Packed {
                available,
                available_wrap,
                used,
                used_wrap,
            } => {
                let ahead = available.wrapping_sub(used);
                if available_wrap == used_wrap {
                    ahead
                } else {
                    ahead.wrapping_add(size)
                }
            }
        }
    }

    /// The position for a device that must take again the chains that were taken and not used.
    #[must_use]
    pub fn at_used(self) -> Self {
        match self {
            Self::Packed {
                used, used_wrap, ..
            } => Self::Packed {
                available: used,
                available_wrap: used_wrap,
                used,
                used_wrap,
            },
            split @ Self::Split { .. } => split,
        }
    }

    /// The number for VHOST_SET_VRING_BASE.
    #[must_use]
    pub fn to_kernel(self) -> u32 {
        let half = |position: u16, wrap: bool| u32::from(position | if wrap { WRAP } else { 0 });
        match self {
            Self::Split { index } => u32::from(index),
            Self::Packed {
                available,
                available_wrap,
                used,
                used_wrap,
            } => half(available, available_wrap) | half(used, used_wrap) << 16,
        }
    }

    /// The position from VHOST_GET_VRING_BASE; `None` if a split ring's index has more than 16
    /// bits.
    #[must_use]
    pub fn from_kernel(number: u32, packed: bool) -> Option<Self> {
        let bytes = number.to_le_bytes();
        let low = u16::from_le_bytes([bytes[0], bytes[1]]);
        let high = u16::from_le_bytes([bytes[2], bytes[3]]);
        if packed {
            Some(Self::Packed {
                available: low & !WRAP,
                available_wrap: low & WRAP != 0,
                used: high & !WRAP,
                used_wrap: high & WRAP != 0,
            })
        } else {
            (high == 0).then_some(Self::Split { index: low })
        }
    }
}

/// The description of one ring.
#[derive(Debug, Clone, Copy)]
pub struct VringConfig<'a> {
    /// Entries.
    pub size: u16,
    /// Addresses of its areas.
    pub addresses: VringAddresses,
    /// Position at which the device begins.
    pub base: VringBase,
    /// Signalled by the driver; `None`: kicks come through a doorbell page.
    pub kick: Option<&'a EventFd>,
    /// Signalled by the device; `None`: it signals nothing.
    pub call: Option<&'a EventFd>,
}

/// Name, alignment and length in bytes of the three areas
/// (virtio 1.3, 2.7: table of split ring; 2.8.10: packed ring).
fn areas(size: u16, packed: bool) -> [(&'static str, u64, u64); 3] {
    let entries = u64::from(size);
    if packed {
        [
            ("descriptor", 16, 16 * entries),
            ("driver", 4, 4),
            ("device", 4, 4),
        ]
    } else {
        // With the event fields: a device may use them with EVENT_IDX, and a driver reserves them
        // anyway.
        [
            ("descriptor", 16, 16 * entries),
            ("driver", 2, 6 + 2 * entries),
            ("device", 4, 6 + 8 * entries),
        ]
    }
}

/// Checks that the areas of a ring are aligned, lie in `allowed` memory and do not overlap.
pub(crate) fn check_areas(
    size: u16,
    addresses: VringAddresses,
    packed: bool,
    allowed: &[IovaRange],
) -> Result<(), Error> {
    let VringAddresses {
        descriptor,
        driver,
        device,
    } = addresses;
    let mut ranges: Vec<IovaRange> = Vec::with_capacity(3);
    for ((area, alignment, len), address) in areas(size, packed)
        .into_iter()
        .zip([descriptor, driver, device])
    {
        if !address.0.is_multiple_of(alignment) {
            return Err(Error::other(format!(
                "the {area} area at {address:#x} is not aligned to {alignment} bytes"
            )));
        }
        let range = IovaRange::from_size(address.0, len)
            .filter(|range| allowed.iter().any(|allowed| allowed.contains(range)))
            .ok_or_else(|| {
                Error::other(format!(
                    "the {area} area of {len} bytes at {address:#x} is outside the memory for rings"
                ))
            })?;
        if let Some(&first) = ranges.iter().find(|other| other.overlaps(&range)) {
            return Err(Error::other(format!(
                "the ring's areas {first} and {range} overlap"
            )));
        }
        ranges.push(range);
    }
    Ok(())
}

impl VringConfig<'_> {
    /// Checks the description against the queue's maximum size and the memory allowed for rings.
    ///
    /// # Errors
    /// The first rule that it breaks (virtio 1.3, 2.7 and 2.8).
    pub fn check(&self, maximum: u16, packed: bool, allowed: &[IovaRange]) -> Result<(), Error> {
        let size = self.size;
        // The kernel accepts only powers of two, for packed rings as well.
        if size == 0 || size > maximum || !size.is_power_of_two() {
            return Err(size_not_possible(size, maximum));
        }
        self.check_base(packed)?;
        check_areas(size, self.addresses, packed, allowed)
    }

    fn check_base(&self, packed: bool) -> Result<(), Error> {
        let fits = match self.base {
            VringBase::Split { .. } => !packed,
            VringBase::Packed {
                available, used, ..
            } => packed && available < self.size && used < self.size,
        };
        if fits {
            return Ok(());
        }
        let format = if packed { "packed" } else { "split" };
        Err(Error::other(format!(
            "the position {:?} does not fit a {format} ring of {} entries",
            self.base, self.size
        )))
    }
}

/// The size is 0, above the device's maximum, or not a power of two on a split ring.
pub(crate) fn size_not_possible(size: u16, maximum: u16) -> Error {
    Error::other(format!(
        "a ring of {size} entries is not possible: the device takes up to {maximum}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(size: u16, descriptor: u64, driver: u64, device: u64) -> VringConfig<'static> {
        VringConfig {
            size,
            addresses: VringAddresses {
                descriptor: DeviceAddress(descriptor),
                driver: DeviceAddress(driver),
                device: DeviceAddress(device),
            },
            base: VringBase::initial(false),
            kick: None,
            call: None,
        }
    }

    fn allowed() -> [IovaRange; 2] {
        [
            IovaRange::new(0x1000, 0x4fff).unwrap(),
            IovaRange::new(0x8000, 0x8fff).unwrap(),
        ]
    }

    #[test]
    fn sizes() {
        for size in [0, 3, 255, 512, 32768, 65535] {
            let result = config(size, 0x1000, 0x2000, 0x3000).check(256, false, &allowed());
            let text = result.unwrap_err().to_string();
            assert!(text.ends_with("the device takes up to 256"), "{text}");
        }
        config(256, 0x1000, 0x2000, 0x3000)
            .check(256, false, &allowed())
            .unwrap();
    }

    #[test]
    fn areas_lie_wholly_in_allowed_memory() {
        let check = |descriptor, driver, device| {
            config(16, descriptor, driver, device).check(256, false, &allowed())
        };
        let refused = |descriptor, driver, device, says| {
            let text = check(descriptor, driver, device).unwrap_err().to_string();
            assert!(text.contains(says), "{text}");
        };
        check(0x1000, 0x1100, 0x8000).unwrap();
        // The last byte of each area counts: 256, 38 and 134 bytes.
        check(0x4f00, 0x1100, 0x8000).unwrap();
        check(0x1000, 0x8fda, 0x2000).unwrap();
        for (descriptor, driver, device) in [
            (0x4f10, 0x1100, 0x8000),
            (0x1000, 0x8fdc, 0x2000),
            (0x1000, 0x1100, 0x8f7c),
            (0x0, 0x1100, 0x8000),
            (u64::MAX - 15, 0x1100, 0x8000),
            (0x1000, u64::MAX - 1, 0x8000),
        ] {
            refused(descriptor, driver, device, "outside the memory for rings");
        }
        for (descriptor, driver, device) in [
            (0x1008, 0x1100, 0x8000),
            (0x1000, 0x1101, 0x8000),
            (0x1000, 0x1100, 0x8002),
        ] {
            refused(descriptor, driver, device, "is not aligned to");
        }
        for (descriptor, driver, device) in [
            (0x1000, 0x1000, 0x8000),
            (0x1000, 0x10fe, 0x8000),
            (0x1000, 0x2000, 0x2024),
        ] {
            refused(descriptor, driver, device, "overlap");
        }
    }

    #[test]
    fn positions_match_the_format() {
        let mut ring = config(16, 0x1000, 0x2000, 0x3000);
        let text = ring.check(256, true, &allowed()).unwrap_err().to_string();
        assert!(
            text.contains("does not fit a packed ring of 16 entries"),
            "{text}"
        );
        ring.base = VringBase::initial(true);
        ring.check(256, true, &allowed()).unwrap();
        ring.base = VringBase::from_kernel(0x0010_0000, true).unwrap();
        assert!(ring.check(256, true, &allowed()).is_err());
        // vp_vdpa accepts only this value for a packed ring.
        assert_eq!(VringBase::initial(true).to_kernel(), 0x8000_8000);
        for number in [0, 1, 0x7fff_8000, 0xffff_ffff, 0x8000_0005] {
            let base = VringBase::from_kernel(number, true).unwrap();
            assert_eq!(base.to_kernel(), number);
        }
        assert_eq!(VringBase::from_kernel(0x1_0000, false), None);
        let base = VringBase::from_kernel(0xffff, false).unwrap();
        assert_eq!(base.to_kernel(), 0xffff);
    }
}

//! The configuration space of one function: header type 0, BARs, capabilities.
//!
//! Every byte has a mask of the bits that the guest can write. So the BAR sizing protocol (write
//! all ones, read the size back) and read-only capabilities need no code of their own. Owns the
//! registers and their masks. It must not know the effect of a write on the function.

use serde::{Deserialize, Serialize};

use super::{Bar, BarType};
use crate::Error;

/// Length of the configuration space with registers, in bytes (PCI 3.0, section 6.1).
pub const CONFIG_SPACE_SIZE: usize = 256;
/// Length of a function in the ECAM, in bytes (PCI Express 3.0, section 7.2.2). The bytes above
/// [`CONFIG_SPACE_SIZE`] read zero: there are no extended capabilities.
pub const EXTENDED_CONFIG_SPACE_SIZE: u16 = 4096;

// PCI 3.0, section 6.1, figure 6-1 and include/uapi/linux/pci_regs.h.
const VENDOR_ID: usize = 0x00;
const DEVICE_ID: usize = 0x02;
const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const REVISION_ID: usize = 0x08;
const CLASS: usize = 0x09;
const BAR_0: usize = 0x10;
const SUBSYSTEM_VENDOR_ID: usize = 0x2c;
const SUBSYSTEM_ID: usize = 0x2e;
const CAPABILITIES_POINTER: usize = 0x34;
const INTERRUPT_LINE: usize = 0x3c;
const FIRST_CAPABILITY: usize = 0x40;

const COMMAND_MEMORY: u8 = 0x02;
const COMMAND_BUS_MASTER: u8 = 0x04;
/// Bit 10 of the command register, in its second byte.
const COMMAND_INTX_DISABLE_HIGH: u8 = 0x04;
const STATUS_CAPABILITIES: u8 = 0x10;

const BAR_REGISTERS: u8 = 6;
const BAR_MEMORY_64: u8 = 0x04;
const BAR_PREFETCHABLE: u8 = 0x08;
const MIN_BAR_SIZE: u64 = 4096;

/// The identity of a function (PCI 3.0, section 6.2.1 and 6.2.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// Vendor ID.
    pub vendor: u16,
    /// Device ID.
    pub device: u16,
    /// Revision ID.
    pub revision: u8,
    /// Base class, sub-class and programming interface.
    pub class: [u8; 3],
    /// Subsystem vendor ID.
    pub subsystem_vendor: u16,
    /// Subsystem ID.
    pub subsystem: u16,
}

/// A saved configuration space: the 256 bytes as the guest reads them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfigSpaceState {
    /// The 256 bytes; any other length is refused.
    pub bytes: Vec<u8>,
}

/// Configuration space of a function without INTx: the interrupt pin reads 0.
#[derive(Debug, Clone)]
pub struct ConfigSpace {
    bytes: [u8; CONFIG_SPACE_SIZE],
    writable: [u8; CONFIG_SPACE_SIZE],
    /// Index, size and type of each BAR, ascending.
    bars: Vec<(u8, u64, BarType)>,
    /// The position of the link to the next capability.
    last_link: usize,
    next_free: usize,
}

impl ConfigSpace {
    /// Creates a header of type 0 without BARs and capabilities.
    #[must_use]
    pub fn new(identity: Identity) -> Self {
        let mut space = Self {
            bytes: [0; CONFIG_SPACE_SIZE],
            writable: [0; CONFIG_SPACE_SIZE],
            bars: Vec::new(),
            last_link: CAPABILITIES_POINTER,
            next_free: FIRST_CAPABILITY,
        };
        space.put(VENDOR_ID, &identity.vendor.to_le_bytes());
        space.put(DEVICE_ID, &identity.device.to_le_bytes());
        space.put(REVISION_ID, &[identity.revision]);
        let [base, sub, interface] = identity.class;
        space.put(CLASS, &[interface, sub, base]);
        space.put(
            SUBSYSTEM_VENDOR_ID,
            &identity.subsystem_vendor.to_le_bytes(),
        );
        space.put(SUBSYSTEM_ID, &identity.subsystem.to_le_bytes());
        space.writable[COMMAND] = COMMAND_MEMORY | COMMAND_BUS_MASTER;
        space.writable[COMMAND + 1] = COMMAND_INTX_DISABLE_HIGH;
        space.writable[INTERRUPT_LINE] = 0xff;
        space
    }

    fn put(&mut self, offset: usize, value: &[u8]) {
        for (byte, new) in self.bytes.iter_mut().skip(offset).zip(value) {
            *byte = *new;
        }
    }

    /// Adds a memory BAR of `size` bytes in the register `index`. A 64-bit BAR also takes the
    /// register `index + 1`.
    ///
    /// # Errors
    /// The size is invalid for a BAR; or a register does not exist or belongs to another BAR.
    pub fn add_bar(&mut self, index: u8, size: u64, bar_type: BarType) -> Result<(), Error> {
        let fits = bar_type.wide || u32::try_from(size).is_ok();
        if !size.is_power_of_two() || size < MIN_BAR_SIZE || !fits {
            let most = if bar_type.wide {
                ""
            } else {
                " and at most 2 GiB"
            };
            return Err(Error::other(format!(
                "a BAR of {size:#x} bytes: must be a power of two of at least 4096{most}"
            )));
        }
        let after = |index: u8, wide: bool| index.saturating_add(1 + u8::from(wide));
        let end = after(index, bar_type.wide);
        let taken = |(other, _, other_type): &(u8, u64, BarType)| {
            *other < end && index < after(*other, other_type.wide)
        };
        if end > BAR_REGISTERS || self.bars.iter().any(taken) {
            return Err(Error::other(format!(
                "BAR {index} does not exist or is taken"
            )));
        }
        let register = BAR_0 + 4 * usize::from(index);
        let writable = self.writable[register..BAR_0 + 4 * usize::from(end)].iter_mut();
        for (byte, bits) in writable.zip((!(size - 1)).to_le_bytes()) {
            *byte = bits;
        }
        if bar_type.wide {
            self.bytes[register] |= BAR_MEMORY_64;
        }
        if bar_type.prefetchable {
            self.bytes[register] |= BAR_PREFETCHABLE;
        }
        self.bars.push((index, size, bar_type));
        self.bars.sort_unstable_by_key(|(index, ..)| *index);
        Ok(())
    }

    /// Appends a capability: its ID, the link to the next one, then `body`. The guest can write the
    /// bits that are set in `writable`; they must be zero in `body`, which is their reset value.
    /// Returns the offset of the ID.
    ///
    /// # Errors
    /// No room is left in the 256 bytes, or body and mask differ in length.
    pub fn add_capability(&mut self, id: u8, body: &[u8], writable: &[u8]) -> Result<u8, Error> {
        if body.len() != writable.len() {
            let (body, mask) = (body.len(), writable.len());
            return Err(Error::other(format!(
                "capability body of {body} bytes with a mask of {mask}"
            )));
        }
        let start = self.next_free;
        let end = body.len().checked_add(start + 2);
        let (Ok(offset), Some(end)) = (
            u8::try_from(start),
            end.filter(|end| *end <= CONFIG_SPACE_SIZE),
        ) else {
            let bytes = body.len().saturating_add(2);
            return Err(Error::other(format!(
                "no room for a capability of {bytes} bytes"
            )));
        };
        self.bytes[self.last_link] = offset;
        self.bytes[STATUS] |= STATUS_CAPABILITIES;
        self.bytes[start] = id;
        for (index, (value, mask)) in body.iter().zip(writable).enumerate() {
            self.bytes[start + 2 + index] = value & !mask;
            self.writable[start + 2 + index] = *mask;
        }
        self.last_link = start + 1;
        self.next_free = end.next_multiple_of(4);
        Ok(offset)
    }

    /// Reads; bytes beyond the 256 existing ones are zero.
    pub fn read(&self, offset: u16, data: &mut [u8]) {
        let mut bytes = self.bytes.iter().skip(usize::from(offset));
        for byte in data {
            *byte = bytes.next().copied().unwrap_or(0);
        }
    }

    /// Writes the bits that the guest can write; the others stay.
    pub fn write(&mut self, offset: u16, data: &[u8]) {
        let offset = usize::from(offset);
        let registers = self.bytes.iter_mut().zip(&self.writable).skip(offset);
        for ((byte, mask), new) in registers.zip(data) {
            *byte = (*byte & !mask) | (new & mask);
        }
    }

    /// Sets bytes of a capability that mirror external state, whatever their mask. `offset` is from
    /// the start of configuration space.
    pub fn set(&mut self, offset: u8, value: &[u8]) {
        self.put(usize::from(offset), value);
    }

    /// Reads a little-endian 16-bit register.
    #[must_use]
    pub fn read_u16(&self, offset: u16) -> u16 {
        let mut bytes = [0; 2];
        self.read(offset, &mut bytes);
        u16::from_le_bytes(bytes)
    }

    /// Reads a little-endian 32-bit register.
    #[must_use]
    pub fn read_u32(&self, offset: u16) -> u32 {
        let mut bytes = [0; 4];
        self.read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    /// Whether the command register's Memory Space bit is set.
    #[must_use]
    pub fn memory_decoding(&self) -> bool {
        self.bytes[COMMAND] & COMMAND_MEMORY != 0
    }

    /// Returns the BARs as currently programmed, ascending by index.
    #[must_use]
    pub fn bars(&self) -> Vec<Bar> {
        let decoded = self.memory_decoding();
        let bar = |&(index, size, BarType { wide, .. }): &(u8, u64, BarType)| {
            let register = BAR_0 + 4 * usize::from(index);
            let len = if wide { 8 } else { 4 };
            let mut address = [0; 8];
            address[..len].copy_from_slice(&self.bytes[register..register + len]);
            Bar {
                index,
                size,
                address: u64::from_le_bytes(address) & !(size - 1),
                wide,
                decoded,
            }
        };
        self.bars.iter().map(bar).collect()
    }

    /// Clears every bit that the guest can write.
    pub fn reset(&mut self) {
        for (byte, mask) in self.bytes.iter_mut().zip(&self.writable) {
            *byte &= !mask;
        }
    }

    /// Returns the input of [`ConfigSpace::restored`].
    #[must_use]
    pub fn save(&self) -> ConfigSpaceState {
        ConfigSpaceState {
            bytes: self.bytes.to_vec(),
        }
    }

    /// Returns this configuration space with the writable bits of `state`.
    ///
    /// # Errors
    /// `state` does not have 256 bytes, or differs in a bit that the guest could not have written.
    pub fn restored(&self, state: &ConfigSpaceState) -> Result<Self, Error> {
        if state.bytes.len() != CONFIG_SPACE_SIZE {
            return Err(Error::other(format!(
                "saved configuration space has {} bytes instead of 256",
                state.bytes.len()
            )));
        }
        let mut restored = self.clone();
        restored.write(0, &state.bytes);
        let mut differences = restored.bytes.iter().zip(&state.bytes);
        match differences.position(|(ours, theirs)| ours != theirs) {
            Some(offset) => Err(Error::other(format!(
                "saved configuration space is another device's: read-only byte {offset:#x} differs"
            ))),
            None => Ok(restored),
        }
    }
}

/// Whether a write of `len` bytes at `offset` touches the command register or a BAR.
pub(super) fn touches_decoding(offset: u16, len: usize) -> bool {
    let start = usize::from(offset);
    let end = start.saturating_add(len);
    let meets = |first: usize, last: usize| start <= last && end > first;
    meets(COMMAND, COMMAND + 1) || meets(BAR_0, BAR_0 + 4 * usize::from(BAR_REGISTERS) - 1)
}

/// Returns the offset of BAR register `index` in configuration space.
pub(super) fn bar_register(index: u8) -> u16 {
    0x10 + 4 * u16::from(index)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NARROW: BarType = BarType {
        wide: false,
        prefetchable: false,
    };

    fn space() -> ConfigSpace {
        let mut space = ConfigSpace::new(Identity {
            vendor: 0x1af4,
            device: 0x1041,
            revision: 1,
            class: [0x02, 0x00, 0x01],
            subsystem_vendor: 0x1af4,
            subsystem: 0x1041,
        });
        space.add_bar(0, 0x2_0000, BarType::WIDE).unwrap();
        space
    }

    #[test]
    fn header_is_where_the_specification_puts_it() {
        let space = space();
        assert_eq!(space.read_u32(0x00), 0x1041_1af4);
        assert_eq!(space.read_u32(0x08), 0x0200_0101);
        assert_eq!(space.read_u32(0x2c), 0x1041_1af4);
        assert_eq!(space.read_u32(0x0c), 0);
        // No interrupt pin, no capability.
        assert_eq!(space.read_u32(0x3c), 0);
        assert_eq!(space.read_u16(0x06), 0);
    }

    #[test]
    fn bar_sizing_and_programming() {
        let mut space = space();
        space.write(0x10, &[0xff; 4]);
        space.write(0x14, &[0xff; 4]);
        assert_eq!(space.read_u32(0x10), 0xfffe_0004);
        assert_eq!(space.read_u32(0x14), 0xffff_ffff);
        space.write(0x10, &0x1234_5678u32.to_le_bytes());
        space.write(0x14, &2u32.to_le_bytes());
        let expected = Bar {
            index: 0,
            size: 0x2_0000,
            address: 0x2_1234_0000,
            wide: true,
            decoded: false,
        };
        assert_eq!(space.bars(), [expected]);
        space.write(0x04, &[0xff; 2]);
        assert_eq!(space.read_u16(0x04), 0x0406);
        assert!(space.bars()[0].decoded);
        space.reset();
        assert_eq!(space.bars()[0].address, 0);
        assert!(!space.memory_decoding());
        assert_eq!(space.read_u32(0x10), 4);
    }

    /// All sizes of a BAR, with addresses of all ones, one bit, and all but one.
    #[test]
    fn all_sizes_of_a_bar_and_all_bits_of_its_address() {
        let bits = (0..64).flat_map(|bit| [1u64 << bit, !(1u64 << bit)]);
        let addresses: Vec<u64> = bits.chain([0, u64::MAX]).collect();
        for exponent in 12..64 {
            let size = 1u64 << exponent;
            let mut space = space();
            space.add_bar(2, size, BarType::WIDE).unwrap();
            for &address in &addresses {
                for width in [1, 2, 4, 8] {
                    let parts = address.to_le_bytes();
                    for (at, part) in (0x18..).step_by(width).zip(parts.chunks(width)) {
                        space.write(at, part);
                    }
                    let bar = space.bars()[1];
                    assert_eq!((bar.size, bar.address), (size, address & !(size - 1)));
                    let low = u64::from(space.read_u32(0x18));
                    let read = u64::from(space.read_u32(0x1c)) << 32 | low;
                    // Bit 2: a 64-bit memory BAR.
                    assert_eq!(read, address & !(size - 1) | 4);
                }
            }
        }
    }

    #[test]
    fn a_32_bit_bar_leaves_the_next_register_alone() {
        let mut space = space();
        space.add_bar(2, 1 << 31, NARROW).unwrap();
        let prefetchable = BarType {
            wide: false,
            prefetchable: true,
        };
        space.add_bar(3, 4096, prefetchable).unwrap();
        space.write(0x18, &[0xff; 8]);
        assert_eq!(space.read_u32(0x18), 0x8000_0000);
        assert_eq!(space.read_u32(0x1c), 0xffff_f008);
        let bars = space.bars();
        assert_eq!((bars[1].address, bars[1].wide), (1 << 31, false));
        assert_eq!((bars[2].address, bars[2].wide), (0xffff_f000, false));
    }

    #[test]
    fn bars_that_cannot_be() {
        let mut space = space();
        for size in [0, 1, 2048, 4097, u64::MAX] {
            let error = space.add_bar(2, size, BarType::WIDE).unwrap_err();
            assert!(error.to_string().contains("power of two"), "{error}");
        }
        let error = space.add_bar(2, 1 << 32, NARROW).unwrap_err();
        assert!(error.to_string().contains("at most 2 GiB"), "{error}");
        for index in [0, 1, 5, 6, 255] {
            let error = space.add_bar(index, 4096, BarType::WIDE).unwrap_err();
            assert!(error.to_string().contains("is taken"), "{error}");
        }
        space.add_bar(3, 4096, NARROW).unwrap();
        space.add_bar(4, 1 << 63, BarType::WIDE).unwrap();
        for index in [0, 1, 3, 4, 5, 6, 255] {
            space.add_bar(index, 4096, NARROW).unwrap_err();
        }
        space.add_bar(2, 4096, BarType::WIDE).unwrap_err();
        space.add_bar(2, 4096, NARROW).unwrap();
        assert_eq!(space.bars().len(), 4);
    }

    #[test]
    fn capabilities_are_linked_and_masked() {
        let mut space = space();
        let first = space.add_capability(0x09, &[1, 2, 3], &[0; 3]).unwrap();
        let second = space.add_capability(0x11, &[0; 10], &[0xf0; 10]).unwrap();
        assert_eq!((first, second), (0x40, 0x48));
        assert_eq!(space.read_u16(0x06), 0x10);
        assert_eq!(space.read_u32(0x34), 0x40);
        assert_eq!(space.read_u32(0x40), 0x0201_4809);
        assert_eq!(space.read_u16(0x48), 0x0011);
        space.write(0x40, &[0xff; 8]);
        assert_eq!(space.read_u32(0x40), 0x0201_4809);
        space.write(0x4a, &[0xff; 1]);
        assert_eq!(space.read_u16(0x4a), 0xf0);
        let full = space.add_capability(9, &[0; 200], &[0; 200]).unwrap_err();
        assert_eq!(full.to_string(), "no room for a capability of 202 bytes");
        let mask = space.add_capability(9, &[0; 2], &[0; 3]).unwrap_err();
        assert_eq!(
            mask.to_string(),
            "capability body of 2 bytes with a mask of 3"
        );
        while space.add_capability(9, &[0; 2], &[0; 2]).is_ok() {}
        assert_eq!(space.next_free, CONFIG_SPACE_SIZE);
    }

    #[test]
    fn restores_only_possible_guest_writes() {
        let mut written = space();
        written.write(0x04, &[2]);
        written.write(0x14, &[7]);
        let state = written.save();
        assert_eq!(space().restored(&state).unwrap().bars(), written.bars());
        let mut other = state.clone();
        other.bytes[2] ^= 1;
        let refused = space().restored(&other).unwrap_err();
        assert!(refused.to_string().ends_with("read-only byte 0x2 differs"));
        other.bytes.pop();
        let refused = space().restored(&other).unwrap_err();
        assert!(refused.to_string().contains("255 bytes instead of 256"));
    }

    proptest! {
        #[test]
        fn read_only_bits_never_change(writes in prop::collection::vec(
            (any::<u16>(), prop::collection::vec(any::<u8>(), 0..16)), 0..64)) {
            let mut space = space();
            let before = space.bytes;
            for (offset, data) in writes {
                space.write(offset % 300, &data);
                space.write(offset, &data);
                let mut back = [0xaa; 16];
                space.read(offset, &mut back);
                if usize::from(offset) >= CONFIG_SPACE_SIZE {
                    prop_assert_eq!(back, [0; 16]);
                }
                for bar in space.bars() {
                    prop_assert_eq!(bar.address % bar.size, 0);
                }
            }
            for ((old, new), mask) in before.iter().zip(space.bytes).zip(space.writable) {
                prop_assert_eq!(old & !mask, new & !mask);
            }
            space.reset();
            prop_assert_eq!(space.bytes, before);
        }
    }

    #[test]
    fn decoding_registers_are_recognised() {
        for (offset, len, touches) in [
            (0x00, 4, false),
            (0x03, 2, true),
            (0x04, 2, true),
            (0x05, 1, true),
            (0x06, 2, false),
            (0x0c, 4, false),
            (0x0e, 4, true),
            (0x27, 1, true),
            (0x28, 4, false),
            (0xffff, 8, false),
        ] {
            assert_eq!(touches_decoding(offset, len), touches, "{offset:#x}+{len}");
        }
    }
}

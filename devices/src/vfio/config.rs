//! The configuration space that the guest sees of a host's function.
//!
//! It is built anew from an allowlist, once. No later read of the guest reaches the device. A list
//! of hidden parts would show capabilities of later devices, and some of these program address
//! translation, sizes or power.
//!
//! | part | guest sees |
//! |---|---|
//! | IDs, class, revision | a copy |
//! | memory BARs | own registers of the same size and type, at least a page |
//! | I/O BARs, ROM, interrupt pin | nothing |
//! | MSI-X | own registers, the same places of table and Pending Bit Array |
//! | PCI Express | a root complex integrated endpoint with function-level reset |
//! | vendor-specific | a copy that cannot be written |
//! | everything else, all extended capabilities | nothing |
//!
//! The bytes come from the device and are not trusted.

use super::host::{BARS, Description};
use crate::Error;
use crate::pci::{
    BarType, CONFIG_SPACE_SIZE, ConfigSpace, Identity, MSIX_CAPABILITY_ID, Msix, PBA_WORD_SIZE,
    TABLE_ENTRY_SIZE,
};

// PCI 3.0, section 6.1 and include/uapi/linux/pci_regs.h.
const STATUS: usize = 0x06;
const STATUS_CAPABILITIES: u8 = 0x10;
const HEADER_TYPE: usize = 0x0e;
const BAR_0: usize = 0x10;
const CAPABILITIES_POINTER: usize = 0x34;
const BAR_IO: u8 = 0x01;
const BAR_TYPE_MASK: u8 = 0x06;
const BAR_TYPE_64: u8 = 0x04;
const BAR_PREFETCHABLE: u8 = 0x08;
const PAGE: u64 = 4096;
const CLASS_BRIDGE: u8 = 0x06;

const VENDOR_ID_VIRTIO: u16 = 0x1af4;
const VENDOR_CAPABILITY_ID: u8 = 0x09;
/// `cfg_type` of the window through which a virtio driver reaches BARs by configuration space.
const VIRTIO_PCI_CAP_PCI_CFG: u8 = 5;

const EXPRESS_CAPABILITY_ID: u8 = 0x10;
/// Bytes of the capability of version 2, without ID and link.
const EXPRESS_LEN: usize = 58;
/// Version 2, root complex integrated endpoint: there is no link, as there is no port above it.
const EXPRESS_FLAGS: u16 = 2 | 9 << 4;
/// Maximum payload, extended tags, role-based errors.
const EXPRESS_DEVICE_MASK: u32 = 0x7 | 1 << 5 | 1 << 15;
const EXPRESS_DEVICE_FLR: u32 = 1 << 28;
/// Payload and read request sizes, which the guest only reads.
const EXPRESS_CONTROL_MASK: u16 = 0x7 << 5 | 0x7 << 12;
/// Initiate Function Level Reset.
pub(super) const EXPRESS_CONTROL_FLR: u16 = 1 << 15;
/// Offset of Device Control from the start of the capability.
const EXPRESS_CONTROL: u16 = 8;

/// A part of a BAR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) bar: u8,
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl Part {
    /// Returns the end of the part; the constructors check that it exists.
    pub(super) fn end(&self) -> u64 {
        self.offset.saturating_add(self.len)
    }

    /// Whether an access of `len` bytes touches the part.
    pub(super) fn touches(&self, bar: u8, offset: u64, len: u64) -> bool {
        bar == self.bar && offset < self.end() && offset.saturating_add(len) > self.offset
    }

    /// Returns the offset in the part of an access that lies in it.
    pub(super) fn locate(&self, bar: u8, offset: u64, len: u64) -> Option<u64> {
        let inside = offset.checked_add(len)? <= self.end();
        offset
            .checked_sub(self.offset)
            .filter(|_| bar == self.bar && inside)
    }
}

/// Where the device has its MSI-X structures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MsixPlaces {
    pub(super) vectors: u16,
    pub(super) table: Part,
    pub(super) pending: Part,
}

/// The registers, and those whose writes have an effect.
#[derive(Debug)]
pub(super) struct GuestConfig {
    pub(super) space: ConfigSpace,
    /// Message Control of MSI-X.
    pub(super) msix_control: u16,
    /// Device Control of PCI Express, which has the bit for a reset.
    pub(super) express_control: Option<u16>,
}

/// The 256 bytes of a device.
pub(super) struct DeviceConfig<'a> {
    bytes: &'a [u8; CONFIG_SPACE_SIZE],
    /// ID and offset of each capability.
    capabilities: Vec<(u8, usize)>,
}

impl<'a> DeviceConfig<'a> {
    /// Reads the list of capabilities, each once.
    ///
    /// # Errors
    /// The function is a bridge, or does not answer.
    pub(super) fn new(bytes: &'a [u8; CONFIG_SPACE_SIZE]) -> Result<Self, Error> {
        let mut config = Self {
            bytes,
            capabilities: Vec::new(),
        };
        if config.u16(0) == 0xffff {
            return Err(Error::other(
                "the function does not answer, its vendor ID reads 0xffff: power-cycle the host, \
                 or use another function",
            ));
        }
        if config.u8(HEADER_TYPE) & 0x7f != 0 || config.u8(0x0b) == CLASS_BRIDGE {
            return Err(Error::other(
                "the function is a bridge: give the guest an endpoint, such as a NIC's virtual \
                 function",
            ));
        }
        if config.u8(STATUS) & STATUS_CAPABILITIES != 0 {
            let mut next = usize::from(config.u8(CAPABILITIES_POINTER) & 0xfc);
            while next >= 0x40 && config.capabilities.iter().all(|(_, seen)| *seen != next) {
                config.capabilities.push((config.u8(next), next));
                next = usize::from(config.u8(next + 1) & 0xfc);
            }
        }
        Ok(config)
    }

    fn u8(&self, offset: usize) -> u8 {
        self.bytes.get(offset).copied().unwrap_or(0)
    }

    fn u16(&self, offset: usize) -> u16 {
        u16::from_le_bytes([self.u8(offset), self.u8(offset + 1)])
    }

    fn u32(&self, offset: usize) -> u32 {
        u32::from(self.u16(offset)) | u32::from(self.u16(offset + 2)) << 16
    }

    /// Returns `len` bytes of a capability after its link, if it has them.
    fn body(&self, capability: usize, len: usize) -> Option<&[u8]> {
        let start = capability.checked_add(2)?;
        self.bytes.get(start..start.checked_add(len)?)
    }

    fn capability(&self, id: u8) -> Option<usize> {
        let mut capabilities = self.capabilities.iter();
        let found = capabilities.find(|(other, _)| *other == id)?;
        Some(found.1)
    }

    /// Returns the places of the MSI-X structures.
    ///
    /// # Errors
    /// The device has no MSI-X, or structures outside its memory BARs.
    pub(super) fn msix(&self, description: &Description) -> Result<MsixPlaces, Error> {
        let capability = self
            .capability(MSIX_CAPABILITY_ID)
            .filter(|capability| self.body(*capability, 10).is_some())
            .ok_or_else(|| {
                Error::other(
                    "the device has no MSI-X, and interrupts by INTx or MSI are not supported: \
                     use a function that has it (lspci -vv shows MSI-X)",
                )
            })?;
        let vectors = (self.u16(capability + 2) & 0x7ff) + 1;
        if u32::from(vectors) > description.vectors {
            return Err(Error::other(format!(
                "the device has {vectors} MSI-X vectors, and the host gives {}: use another \
                 function or host",
                description.vectors
            )));
        }
        let part = |register: usize, len: u64| {
            let place = self.u32(register);
            let offset = u64::from(place & !7);
            let bar = u8::try_from(place & 7).unwrap_or(u8::MAX);
            let region = description.regions.get(usize::from(bar));
            let memory = self.u8(BAR_0 + 4 * usize::from(bar)) & BAR_IO == 0;
            let fits = region.is_some_and(|region| {
                offset
                    .checked_add(len)
                    .is_some_and(|end| end <= region.size)
            });
            if !fits || !memory {
                return Err(Error::other(format!(
                    "the device has MSI-X structures at {offset:#x} of BAR {bar}, outside its \
                     memory: use another function or host"
                )));
            }
            Ok(Part { bar, offset, len })
        };
        Ok(MsixPlaces {
            vectors,
            table: part(capability + 4, u64::from(vectors) * TABLE_ENTRY_SIZE)?,
            pending: part(
                capability + 8,
                u64::from(vectors).div_ceil(64) * PBA_WORD_SIZE,
            )?,
        })
    }

    /// Builds the guest's configuration space; see the module.
    ///
    /// # Errors
    /// The device's BARs or capabilities do not fit.
    pub(super) fn for_guest(
        &self,
        description: &Description,
        places: &MsixPlaces,
        msix: &Msix,
    ) -> Result<GuestConfig, Error> {
        let mut space = ConfigSpace::new(Identity {
            vendor: self.u16(0x00),
            device: self.u16(0x02),
            revision: self.u8(0x08),
            class: [self.u8(0x0b), self.u8(0x0a), self.u8(0x09)],
            subsystem_vendor: self.u16(0x2c),
            subsystem: self.u16(0x2e),
        });
        self.add_bars(&mut space, description)?;

        let place = |part: &Part| (part.bar, u32::try_from(part.offset).unwrap_or(0));
        let (body, mask) = msix.capability(place(&places.table), place(&places.pending));
        let capability = space.add_capability(MSIX_CAPABILITY_ID, &body, &mask)?;
        let msix_control = u16::from(capability) + crate::pci::MSIX_CONTROL_OFFSET;

        let mut express_control = None;
        if let Some(capability) = self.capability(EXPRESS_CAPABILITY_ID)
            && self.body(capability, 8).is_some()
        {
            let device = self.u32(capability + 4) & EXPRESS_DEVICE_MASK | EXPRESS_DEVICE_FLR;
            let control = self.u16(capability + 8) & EXPRESS_CONTROL_MASK;
            let mut body = [0; EXPRESS_LEN];
            body[..2].copy_from_slice(&EXPRESS_FLAGS.to_le_bytes());
            body[2..6].copy_from_slice(&device.to_le_bytes());
            body[6..8].copy_from_slice(&control.to_le_bytes());
            let mut mask = [0; EXPRESS_LEN];
            mask[6..8].copy_from_slice(&EXPRESS_CONTROL_FLR.to_le_bytes());
            let shown = space.add_capability(EXPRESS_CAPABILITY_ID, &body, &mask)?;
            express_control = Some(u16::from(shown) + EXPRESS_CONTROL);
        }

        for (id, capability) in &self.capabilities {
            // The length includes ID and link.
            let len = usize::from(self.u8(capability + 2)).saturating_sub(2);
            if *id == VENDOR_CAPABILITY_ID
                && let Some(body) = self.body(*capability, len)
            {
                let mut body = body.to_vec();
                let window = body.get(1) == Some(&VIRTIO_PCI_CAP_PCI_CFG);
                if window && self.u16(0) == VENDOR_ID_VIRTIO {
                    // A second road to the BARs: it leads nowhere.
                    body.iter_mut().skip(2).for_each(|byte| *byte = 0);
                }
                space.add_capability(VENDOR_CAPABILITY_ID, &body, &vec![0; body.len()])?;
            }
        }
        Ok(GuestConfig {
            space,
            msix_control,
            express_control,
        })
    }

    fn add_bars(&self, space: &mut ConfigSpace, description: &Description) -> Result<(), Error> {
        let mut index = 0;
        while usize::from(index) < BARS {
            let flags = self.u8(BAR_0 + 4 * usize::from(index));
            let wide = flags & BAR_IO == 0 && flags & BAR_TYPE_MASK == BAR_TYPE_64;
            let region = description.regions.get(usize::from(index));
            let size = region.map_or(0, |region| region.size);
            if size != 0 && flags & BAR_IO == 0 {
                let shown = size.checked_next_power_of_two().unwrap_or(0).max(PAGE);
                let bar_type = BarType {
                    wide,
                    prefetchable: flags & BAR_PREFETCHABLE != 0,
                };
                space.add_bar(index, shown, bar_type)?;
            }
            index += 1 + u8::from(wide);
        }
        Ok(())
    }
}

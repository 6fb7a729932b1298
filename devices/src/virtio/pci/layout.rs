//! The layout of BAR 0 of a virtio function, and of its configuration space.
//!
//! ```text
//!   0x00000  common configuration        60 bytes
//!   0x01000  ISR status                   1 byte
//!   0x02000  device configuration        up to 24 KiB
//!   0x08000  MSI-X table                 up to 1024 entries of 16 bytes
//!   0x0c000  MSI-X Pending Bit Array     128 bytes
//!   0x10000  notify: one page of 4 KiB per queue
//! ```
//! Each part has its own pages, so that a notify page can become a mapping of a hardware doorbell.
//! The BAR's size is the next power of two. This file must not know the function of the parts.

use crate::Error;
use crate::pci::{BarType, ConfigSpace, Identity, MSIX_CAPABILITY_ID, Msix};

/// Index of the only BAR.
pub(super) const BAR: u8 = 0;

const COMMON: u64 = 0x0000;
/// Up to and including `queue_reset` (virtio 1.3, 4.1.4.3).
const COMMON_LEN: u32 = 60;
const ISR: u64 = 0x1000;
const ISR_LEN: u32 = 1;
const DEVICE: u64 = 0x2000;
const MSIX_TABLE: u64 = 0x8000;
const MSIX_PENDING: u64 = 0xc000;
const MSIX_END: u64 = 0xd000;
/// The first notify page.
pub(super) const NOTIFY: u64 = 0x1_0000;
/// `notify_off_multiplier`: the distance in bytes between the doorbells of two queues.
pub(super) const NOTIFY_STRIDE: u64 = 4096;

/// Maximum device configuration, in bytes.
pub(super) const MAX_DEVICE_CONFIG: u32 = 0x6000;
/// Maximum number of queues: their vectors and the configuration vector fill the MSI-X table.
pub(super) const MAX_QUEUES: usize = 1023;

/// The part of BAR 0 that an access addresses; offsets are from the part's start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Region {
    Common(u64),
    Isr,
    Device(u64),
    MsixTable(u64),
    MsixPending(u64),
}

impl Region {
    /// Returns the part that holds the first byte of an access below [`NOTIFY`]. The parts check
    /// the width themselves.
    pub(super) fn of(offset: u64) -> Option<Self> {
        match offset {
            COMMON..ISR => Some(Self::Common(offset - COMMON)),
            ISR => Some(Self::Isr),
            DEVICE..MSIX_TABLE => Some(Self::Device(offset - DEVICE)),
            MSIX_TABLE..MSIX_PENDING => Some(Self::MsixTable(offset - MSIX_TABLE)),
            MSIX_PENDING..MSIX_END => Some(Self::MsixPending(offset - MSIX_PENDING)),
            _ => None,
        }
    }
}

/// Returns the queue whose notify page holds `offset` of BAR 0, if it is in that part.
pub(super) fn notified_queue(offset: u64) -> Option<usize> {
    let page = offset.checked_sub(NOTIFY)? / NOTIFY_STRIDE;
    usize::try_from(page).ok()
}

/// Returns the length of the notify part in bytes.
fn notify_len(queues: u16) -> u64 {
    u64::from(queues) * NOTIFY_STRIDE
}

/// Returns the size of BAR 0 in bytes.
pub(super) fn bar_size(queues: u16) -> u64 {
    (NOTIFY + notify_len(queues)).next_power_of_two()
}

// virtio 1.3, section 4.1.2: identity.
const VENDOR: u16 = 0x1af4;
const DEVICE_BASE: u16 = 0x1040;
/// The PCI device IDs 0x1040 to 0x107f belong to virtio.
const MAX_DEVICE_TYPE: u16 = 0x3f;
const REVISION: u8 = 1;

// virtio 1.3, section 4.1.4: `struct virtio_pci_cap` without its first two bytes.
const VENDOR_CAPABILITY_ID: u8 = 0x09;
const CFG_TYPE_COMMON: u8 = 1;
const CFG_TYPE_NOTIFY: u8 = 2;
const CFG_TYPE_ISR: u8 = 3;
const CFG_TYPE_DEVICE: u8 = 4;
const CFG_TYPE_PCI: u8 = 5;
const CAPABILITY_LEN: u8 = 16;
const LONG_CAPABILITY_LEN: u8 = 20;
/// Offset of `length` in `struct virtio_pci_cap`.
const LENGTH: u8 = 12;

/// Offsets of capabilities in configuration space that the transport accesses.
#[derive(Debug, Clone, Copy)]
pub(super) struct Capabilities {
    /// The length of device configuration in its `struct virtio_pci_cap`; `None`: there is none.
    pub(super) config_len: Option<u8>,
    /// `struct virtio_pci_cfg_cap`.
    pub(super) pci_cfg: u8,
    /// MSI-X.
    pub(super) msix: u8,
}

/// Returns the PCI device ID for a virtio device type; `None` if the type has none.
pub(super) fn device_id(device_type: u32) -> Option<u16> {
    let device_type = u16::try_from(device_type).ok()?;
    (1..=MAX_DEVICE_TYPE)
        .contains(&device_type)
        .then_some(DEVICE_BASE + device_type)
}

/// Returns base class, sub-class and programming interface, as other VMMs set them.
fn class(device_type: u32) -> [u8; 3] {
    match device_type {
        // network: Ethernet controller
        1 => [0x02, 0x00, 0x00],
        // block and SCSI host: SCSI controller
        2 | 8 => [0x01, 0x00, 0x00],
        // console and socket: other communication controller
        3 | 19 => [0x07, 0x80, 0x00],
        // file system: other mass storage controller
        26 => [0x01, 0x80, 0x00],
        // other system peripheral
        _ => [0x08, 0x80, 0x00],
    }
}

/// Builds a `struct virtio_pci_cap` from `cap_len` on.
fn capability(len: u8, cfg_type: u8, offset: u64, length: u32) -> [u8; 14] {
    let mut body = [0; 14];
    body[0] = len;
    body[1] = cfg_type;
    body[2] = BAR;
    // bytes 3 to 5: id and padding
    let [a, b, c, d, ..] = offset.to_le_bytes();
    body[6..10].copy_from_slice(&[a, b, c, d]);
    body[10..14].copy_from_slice(&length.to_le_bytes());
    body
}

fn long_capability(cfg_type: u8, offset: u64, length: u32, extra: u32) -> [u8; 18] {
    let mut body = [0; 18];
    body[..14].copy_from_slice(&capability(LONG_CAPABILITY_LEN, cfg_type, offset, length));
    body[14..].copy_from_slice(&extra.to_le_bytes());
    body
}

/// Builds the configuration space of a virtio function with the PCI device ID `device_id`.
///
/// # Errors
/// None for the sizes that the transport accepts.
pub(super) fn config_space(
    device_id: u16,
    device_type: u32,
    config_len: u32,
    queues: u16,
    msix: &Msix,
) -> Result<(ConfigSpace, Capabilities), Error> {
    let mut space = ConfigSpace::new(Identity {
        vendor: VENDOR,
        device: device_id,
        revision: REVISION,
        class: class(device_type),
        subsystem_vendor: VENDOR,
        subsystem: device_id,
    });
    space.add_bar(BAR, bar_size(queues), BarType::WIDE)?;

    let common = capability(CAPABILITY_LEN, CFG_TYPE_COMMON, COMMON, COMMON_LEN);
    let isr = capability(CAPABILITY_LEN, CFG_TYPE_ISR, ISR, ISR_LEN);
    let device = capability(CAPABILITY_LEN, CFG_TYPE_DEVICE, DEVICE, config_len);
    for body in [common, isr] {
        space.add_capability(VENDOR_CAPABILITY_ID, &body, &[0; 14])?;
    }
    // A device without configuration has no such capability (4.1.4.6).
    let device = (config_len != 0)
        .then(|| space.add_capability(VENDOR_CAPABILITY_ID, &device, &[0; 14]))
        .transpose()?;
    let length = u32::try_from(notify_len(queues)).unwrap_or(0);
    let stride = u32::try_from(NOTIFY_STRIDE).unwrap_or(0);
    let notify = long_capability(CFG_TYPE_NOTIFY, NOTIFY, length, stride);
    space.add_capability(VENDOR_CAPABILITY_ID, &notify, &[0; 18])?;

    // The driver may write bar, offset, length and pci_cfg_data (4.1.4.9).
    let access = long_capability(CFG_TYPE_PCI, 0, 0, 0);
    let mut mask = [0xff; 18];
    mask[..2].fill(0);
    mask[3..6].fill(0);
    let pci_cfg = space.add_capability(VENDOR_CAPABILITY_ID, &access, &mask)?;

    let table = u32::try_from(MSIX_TABLE).unwrap_or(0);
    let pending = u32::try_from(MSIX_PENDING).unwrap_or(0);
    let (body, mask) = msix.capability((BAR, table), (BAR, pending));
    let msix = space.add_capability(MSIX_CAPABILITY_ID, &body, &mask)?;
    let capabilities = Capabilities {
        config_len: device.map(|device| device + LENGTH),
        pci_cfg,
        msix,
    };
    Ok((space, capabilities))
}

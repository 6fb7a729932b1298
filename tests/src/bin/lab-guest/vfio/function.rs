//! The registers of a modern virtio network function (virtio 1.3, 4.1.4 and 5.1.4), mapped into
//! this process.
//!
//! This module knows registers and the order of a start, not rings or frames.

use super::access::Access;
use crate::network::Address;
use crate::notify::{self, PAGE, Part};
use lab::error::{Error, Result, report};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use vdpa::ring::DriverQueue;
use vm_memory::{AtomicAccess, Bytes as _, FileOffset, MmapRegion, VolatileMemory as _};

/// Command register: memory space and bus master.
const COMMAND: u64 = 4;
const COMMAND_ON: u16 = 0b110;

/// `struct virtio_pci_common_cfg`.
const DEVICE_FEATURE_SELECT: usize = 0x00;
const DEVICE_FEATURE: usize = 0x04;
const DRIVER_FEATURE_SELECT: usize = 0x08;
const DRIVER_FEATURE: usize = 0x0c;
const DEVICE_STATUS: usize = 0x14;
const QUEUE_SELECT: usize = 0x16;
const QUEUE_SIZE: usize = 0x18;
const QUEUE_ENABLE: usize = 0x1c;
const QUEUE_NOTIFY_OFF: usize = 0x1e;
const QUEUE_DESC: usize = 0x20;
const QUEUE_DRIVER: usize = 0x28;
const QUEUE_DEVICE: usize = 0x30;

/// Device status: ACKNOWLEDGE and DRIVER; then FEATURES_OK; then DRIVER_OK.
const DRIVER: u8 = 0b11;
const FEATURES_OK: u8 = 8 | DRIVER;
const DRIVER_OK: u8 = 4 | FEATURES_OK;

/// MAC and VERSION_1.
const FEATURES: u64 = 1 << 5 | 1 << 32;

/// CTRL_VQ, CTRL_MAC_ADDR and ACCESS_PLATFORM, if offered. The VMM sets the address by the first
/// two when the guest moves to a device with another one. This driver has no control queue.
const OPTIONAL: u64 = 1 << 17 | 1 << 23 | ACCESS_PLATFORM;
pub(super) const ACCESS_PLATFORM: u64 = 1 << 33;

/// How long a reset may take.
const RESET_LIMIT: Duration = Duration::from_secs(10);

/// A mapped part of a BAR.
pub(super) struct Registers {
    region: MmapRegion<()>,
    /// Where the part begins in the mapped pages.
    start: usize,
}

impl Registers {
    pub(super) fn map(access: &Access, part: &Part) -> Result<Self> {
        let failed = |error| Error::invalid("a part of the BAR", report(&error));
        let (file, bar) = access.bar(part.bar)?;
        let offset = u64::from(part.offset);
        let start = usize::try_from(offset % PAGE).unwrap_or_default();
        let len = usize::try_from(part.length).unwrap_or_default();
        let region = MmapRegion::build(
            Some(FileOffset::new(file, bar + offset - offset % PAGE)),
            start.saturating_add(len),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
        );
        let region = region.map_err(failed)?;
        Ok(Self { region, start })
    }

    /// One access of the value's width.
    pub(super) fn load<T: AtomicAccess>(&self, at: usize) -> Result<T> {
        self.region
            .as_volatile_slice()
            .load(at.saturating_add(self.start), Ordering::Acquire)
            .map_err(|_| Error::invalid("a register", "it is outside of its part"))
    }

    /// One access of the value's width.
    pub(super) fn store<T: AtomicAccess>(&self, value: T, at: usize) -> Result<()> {
        self.region
            .as_volatile_slice()
            .store(value, at.saturating_add(self.start), Ordering::Release)
            .map_err(|_| Error::invalid("a register", "it is outside of its part"))
    }
}

/// A function with mapped registers.
pub(super) struct Function {
    common: Registers,
    device: Registers,
    doorbells: Registers,
    /// Bytes between two doorbells.
    stride: usize,
    // Dropped after the mappings.
    access: Access,
}

impl Function {
    /// Finds the parts and makes the function a bus master.
    pub(super) fn new(access: Access) -> Result<Self> {
        let (file, space) = access.config()?;
        let mut config = vec![0; 256];
        let failed = || Error::file("access the configuration space of", access.function());
        file.read_exact_at(&mut config, space).map_err(failed())?;
        file.write_all_at(&COMMAND_ON.to_le_bytes(), space + COMMAND)
            .map_err(failed())?;
        let find = |kind| {
            Part::find(&config, kind)
                .ok_or_else(|| Error::invalid("the function", "a virtio capability is missing"))
        };
        let notify = find(notify::NOTIFY)?;
        Ok(Self {
            common: Registers::map(&access, &find(notify::COMMON)?)?,
            device: Registers::map(&access, &find(notify::DEVICE)?)?,
            doorbells: Registers::map(&access, &notify)?,
            stride: usize::try_from(notify.multiplier).unwrap_or_default(),
            access,
        })
    }

    pub(super) fn access(&self) -> &Access {
        &self.access
    }

    fn status(&self) -> Result<u8> {
        self.common.load(DEVICE_STATUS)
    }

    fn set_status(&self, status: u8) -> Result<()> {
        self.common.store(status, DEVICE_STATUS)
    }

    /// Resets the device and waits until it has done so.
    pub(super) fn reset(&self) -> Result<()> {
        self.set_status(0)?;
        let begin = Instant::now();
        while self.status()? != 0 {
            if begin.elapsed() > RESET_LIMIT {
                return Err(Error::invalid("the device", "its reset does not end"));
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Resets the device and negotiates [`FEATURES`]; returns its address.
    pub(super) fn negotiate(&self) -> Result<Address> {
        if !self.accepts(FEATURES | OPTIONAL)? {
            return Err(Error::invalid("the device", "it refuses the features"));
        }
        let mut address = Address::default();
        for (at, byte) in address.iter_mut().enumerate() {
            *byte = self.device.load(at)?;
        }
        Ok(address)
    }

    /// Resets the device and negotiates without one feature. Returns true if it accepts.
    pub(super) fn accepts_without(&self, feature: u64) -> Result<bool> {
        self.accepts((FEATURES | OPTIONAL) & !feature)
    }

    /// Negotiates these features, or as many of [`OPTIONAL`] as the device offers.
    fn accepts(&self, features: u64) -> Result<bool> {
        self.reset()?;
        self.set_status(DRIVER)?;
        for half in [0_u32, 1] {
            // Lossless: each half has 32 bits.
            let half_of =
                |bits: u64| u32::try_from(bits >> (32 * half) & 0xffff_ffff).unwrap_or_default();
            self.common.store(half.to_le(), DEVICE_FEATURE_SELECT)?;
            let offered = u32::from_le(self.common.load(DEVICE_FEATURE)?);
            let wanted = half_of(features) & (offered | !half_of(OPTIONAL));
            if wanted & !offered != 0 {
                let why = format!("it offers {offered:#x}, without {wanted:#x} (half {half})");
                return Err(Error::invalid("the device", why));
            }
            self.common.store(half.to_le(), DRIVER_FEATURE_SELECT)?;
            self.common.store(wanted.to_le(), DRIVER_FEATURE)?;
        }
        self.set_status(FEATURES_OK)?;
        Ok(self.status()? == FEATURES_OK)
    }

    /// Most entries of a queue.
    pub(super) fn entries(&self, queue: u16) -> Result<u16> {
        self.common.store(queue.to_le(), QUEUE_SELECT)?;
        self.common.load(QUEUE_SIZE).map(u16::from_le)
    }

    /// Enables a queue, without an interrupt, and returns its doorbell.
    pub(super) fn set_queue(&self, queue: u16, ring: &DriverQueue) -> Result<usize> {
        let common = &self.common;
        common.store(queue.to_le(), QUEUE_SELECT)?;
        common.store(ring.size().to_le(), QUEUE_SIZE)?;
        let areas = ring.addresses();
        for (register, address) in [
            (QUEUE_DESC, areas.descriptor),
            (QUEUE_DRIVER, areas.driver),
            (QUEUE_DEVICE, areas.device),
        ] {
            for (at, half) in address.0.to_le_bytes().as_chunks().0.iter().enumerate() {
                common.store(u32::from_ne_bytes(*half), register + 4 * at)?;
            }
        }
        common.store(1_u16.to_le(), QUEUE_ENABLE)?;
        let number = u16::from_le(common.load(QUEUE_NOTIFY_OFF)?);
        Ok(usize::from(number).saturating_mul(self.stride))
    }

    pub(super) fn set_ready(&self) -> Result<()> {
        self.set_status(DRIVER_OK)
    }

    /// Rings a queue's doorbell.
    pub(super) fn kick(&self, queue: u16, doorbell: usize) -> Result<()> {
        self.doorbells.store(queue.to_le(), doorbell)
    }
}

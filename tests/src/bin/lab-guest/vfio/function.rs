//! The registers of a modern virtio network function (virtio 1.3, 4.1.4 and 5.1.4), by VFIO.
//!
//! This module knows registers and the order of a start, not rings or frames.

use super::group::Group;
use crate::network::Address;
use crate::notify::{self, Part};
use lab::error::{Error, Result};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use vdpa::ring::DriverQueue;
use vm_memory::{Bytes as _, FileOffset, MmapRegion, VolatileMemory as _};

/// `VFIO_PCI_CONFIG_REGION_INDEX`; smaller ones are BARs.
const CONFIG_SPACE: u32 = 7;

/// Command register: memory space and bus master.
const COMMAND: u64 = 4;
const COMMAND_ON: u16 = 0b110;

/// `struct virtio_pci_common_cfg`.
const DEVICE_FEATURE_SELECT: u64 = 0x00;
const DEVICE_FEATURE: u64 = 0x04;
const DRIVER_FEATURE_SELECT: u64 = 0x08;
const DRIVER_FEATURE: u64 = 0x0c;
const DEVICE_STATUS: u64 = 0x14;
const QUEUE_SELECT: u64 = 0x16;
const QUEUE_SIZE: u64 = 0x18;
const QUEUE_ENABLE: u64 = 0x1c;
const QUEUE_NOTIFY_OFF: u64 = 0x1e;
const QUEUE_DESC: u64 = 0x20;
const QUEUE_DRIVER: u64 = 0x28;
const QUEUE_DEVICE: u64 = 0x30;

/// Device status: ACKNOWLEDGE and DRIVER; then FEATURES_OK; then DRIVER_OK.
const DRIVER: u8 = 0b11;
const FEATURES_OK: u8 = 8 | DRIVER;
const DRIVER_OK: u8 = 4 | FEATURES_OK;

/// CTRL_VQ and CTRL_MAC_ADDR, if offered: the VMM sets the address by them when the guest moves to
/// a device with another one. This driver has no control queue.
const OPTIONAL: u64 = 1 << 17 | 1 << 23;

/// MAC, VERSION_1 and ACCESS_PLATFORM.
const FEATURES: u64 = 1 << 5 | 1 << 32 | ACCESS_PLATFORM;
pub(super) const ACCESS_PLATFORM: u64 = 1 << 33;

/// How long a reset may take.
const RESET_LIMIT: Duration = Duration::from_secs(10);

/// A function with mapped doorbells.
pub(super) struct Function {
    group: Group,
    /// Offsets in the group's device file.
    common: u64,
    device: u64,
    doorbells: MmapRegion<()>,
    /// Bytes between two doorbells.
    stride: usize,
}

impl Function {
    /// Finds the parts and makes the function a bus master.
    pub(super) fn new(group: Group) -> Result<Self> {
        let space = group.region(CONFIG_SPACE)?;
        let mut config = vec![0; 256];
        let failed = || Error::file("read", group.function());
        let device = group.device();
        device.read_exact_at(&mut config, space).map_err(failed())?;
        device
            .write_all_at(&COMMAND_ON.to_le_bytes(), space + COMMAND)
            .map_err(failed())?;
        let part = |kind| {
            let part = Part::find(&config, kind)
                .ok_or_else(|| Error::invalid("the function", "a virtio capability is missing"))?;
            let bar = group.region(part.bar.into())?;
            Ok((bar + u64::from(part.offset), part))
        };
        let (common, _) = part(notify::COMMON)?;
        let (device_config, _) = part(notify::DEVICE)?;
        let (doorbells, part) = part(notify::NOTIFY)?;
        let file = device.try_clone().map_err(failed())?;
        let doorbells = MmapRegion::build(
            Some(FileOffset::new(file, doorbells)),
            usize::try_from(part.length).unwrap_or_default(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
        );
        let doorbells = doorbells
            .map_err(|error| Error::invalid("the notify part", lab::error::report(&error)))?;
        Ok(Self {
            common,
            device: device_config,
            doorbells,
            stride: usize::try_from(part.multiplier).unwrap_or_default(),
            group,
        })
    }

    pub(super) fn group(&self) -> &Group {
        &self.group
    }

    fn read<const N: usize>(&self, at: u64) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        let device = self.group.device();
        device
            .read_exact_at(&mut bytes, at)
            .map_err(Error::system("read a register"))?;
        Ok(bytes)
    }

    /// One access of the bytes' width.
    fn write(&self, register: u64, bytes: &[u8]) -> Result<()> {
        let device = self.group.device();
        device
            .write_all_at(bytes, self.common + register)
            .map_err(Error::system("write a register"))
    }

    fn status(&self) -> Result<u8> {
        self.read(self.common + DEVICE_STATUS)
            .map(|[status]| status)
    }

    fn set_status(&self, status: u8) -> Result<()> {
        self.write(DEVICE_STATUS, &[status])
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
        if !self.accepts(FEATURES)? {
            return Err(Error::invalid("the device", "it refuses the features"));
        }
        self.read(self.device)
    }

    /// Resets the device and negotiates without one of [`FEATURES`]. Returns true if it accepts.
    pub(super) fn accepts_without(&self, feature: u64) -> Result<bool> {
        self.accepts(FEATURES & !feature)
    }

    fn accepts(&self, features: u64) -> Result<bool> {
        self.reset()?;
        self.set_status(DRIVER)?;
        for half in [0_u32, 1] {
            self.write(DEVICE_FEATURE_SELECT, &half.to_le_bytes())?;
            let offered = u32::from_le_bytes(self.read(self.common + DEVICE_FEATURE)?);
            // Lossless: each half has 32 bits.
            let half_of =
                |bits: u64| u32::try_from(bits >> (32 * half) & 0xffff_ffff).unwrap_or_default();
            let wanted = half_of(features) | half_of(OPTIONAL) & offered;
            if wanted & !offered != 0 {
                let why = format!("it offers {offered:#x}, without {wanted:#x} (half {half})");
                return Err(Error::invalid("the device", why));
            }
            self.write(DRIVER_FEATURE_SELECT, &half.to_le_bytes())?;
            self.write(DRIVER_FEATURE, &wanted.to_le_bytes())?;
        }
        self.set_status(FEATURES_OK)?;
        Ok(self.status()? == FEATURES_OK)
    }

    /// Most entries of a queue.
    pub(super) fn entries(&self, queue: u16) -> Result<u16> {
        self.write(QUEUE_SELECT, &queue.to_le_bytes())?;
        self.read(self.common + QUEUE_SIZE).map(u16::from_le_bytes)
    }

    /// Enables a queue, without an interrupt, and returns its doorbell.
    pub(super) fn set_queue(&self, queue: u16, ring: &DriverQueue) -> Result<usize> {
        self.write(QUEUE_SELECT, &queue.to_le_bytes())?;
        self.write(QUEUE_SIZE, &ring.size().to_le_bytes())?;
        let areas = ring.addresses();
        for (register, address) in [
            (QUEUE_DESC, areas.descriptor),
            (QUEUE_DRIVER, areas.driver),
            (QUEUE_DEVICE, areas.device),
        ] {
            let bytes = address.0.to_le_bytes();
            let (low, high) = bytes.split_at(4);
            self.write(register, low)?;
            self.write(register + 4, high)?;
        }
        self.write(QUEUE_ENABLE, &1_u16.to_le_bytes())?;
        let number = u16::from_le_bytes(self.read(self.common + QUEUE_NOTIFY_OFF)?);
        Ok(usize::from(number).saturating_mul(self.stride))
    }

    pub(super) fn set_ready(&self) -> Result<()> {
        self.set_status(DRIVER_OK)
    }

    /// Rings a queue's doorbell, by a store past the kernel.
    pub(super) fn kick(&self, queue: u16, doorbell: usize) -> Result<()> {
        self.doorbells
            .as_volatile_slice()
            .store(queue.to_le(), doorbell, Ordering::Release)
            .map_err(|_| Error::invalid("the notify part", "a doorbell is outside"))
    }
}

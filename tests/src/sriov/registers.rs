//! A virtio PCI function's common configuration, accessed from user space while no driver is bound
//! to the function.
//!
//! The module finds it by its vendor capability (virtio 1.3, 4.1.4) and maps it from sysfs
//! (`resourceN`). It owns the mapping and does not trust the function: it checks offsets against
//! the file's size.

use crate::error::{Error, Result};
use crate::files;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::ffi::c_void;
use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

/// Bytes of the common configuration that are used here.
const LENGTH: usize = 0x38;

/// Fields of the common configuration (virtio 1.3, 4.1.4.3), offsets in bytes.
const DEVICE_FEATURE_SELECT: usize = 0x00;
const DEVICE_FEATURE: usize = 0x04;
const DRIVER_FEATURE_SELECT: usize = 0x08;
const DRIVER_FEATURE: usize = 0x0c;
const NUM_QUEUES: usize = 0x12;
const DEVICE_STATUS: usize = 0x14;

/// Device status bits (virtio 1.3, 2.1).
const ACKNOWLEDGE: u8 = 1;
const DRIVER: u8 = 2;

/// Features of a network device (virtio 1.3, 5.1.3), as bits of the low word.
const CTRL_VQ: u32 = 1 << 17;
const MQ: u32 = 1 << 22;

/// Configuration space (PCI 3.0, 6.1 and 6.7).
const STATUS: usize = 0x06;
const STATUS_HAS_CAPABILITIES: u8 = 0x10;
const CAPABILITIES: usize = 0x34;
const CAPABILITY_VENDOR: u8 = 0x09;
/// More capabilities than fit into configuration space: a loop.
const CAPABILITIES_LIMIT: usize = 48;
/// `cfg_type` of the common configuration.
const COMMON: u8 = 1;

/// How long a reset of the function may take.
const RESET_LIMIT: Duration = Duration::from_secs(5);

/// The mapped registers.
#[derive(Debug)]
pub(super) struct Registers {
    mapping: *mut c_void,
    size: usize,
    /// The offset of the common configuration in the mapping.
    offset: usize,
}

impl Registers {
    /// Maps the registers of the function with this sysfs directory.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a function that is not a modern virtio device;
    /// [`Error::File`] when the kernel refuses, as it does under lockdown.
    pub(super) fn open(directory: &Path) -> Result<Self> {
        let config = files::read(&directory.join("config"))?;
        let (bar, offset) = common_configuration(&config).ok_or_else(|| {
            Error::invalid(
                directory.display().to_string(),
                "it is not a modern virtio device",
            )
        })?;
        let path = directory.join(format!("resource{bar}"));
        let file = File::options()
            .read(true)
            .write(true)
            .open(&path)
            .map_err(Error::file("open", &path))?;
        let length = file
            .metadata()
            .map_err(Error::file("look at", &path))?
            .len();
        let size = usize::try_from(length)
            .ok()
            .filter(|size| {
                offset
                    .checked_add(LENGTH)
                    .is_some_and(|end| end <= *size && offset.is_multiple_of(4))
            })
            .ok_or_else(|| {
                Error::invalid(
                    path.display().to_string(),
                    "its registers lie outside of it",
                )
            })?;
        // SAFETY: needed because registers can only be reached through a mapping. A new one of the
        // whole file, at an address of the kernel's choice, touches no memory of this program.
        let mapping = unsafe {
            mmap(
                std::ptr::null_mut(),
                size,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )
        }
        .map_err(|error| Error::file("map", &path)(error.into()))?;
        Ok(Self {
            mapping,
            size,
            offset,
        })
    }

    /// Resets the function, negotiates all its queue pairs (without finishing: the next driver
    /// resets it again), and returns the number of its queues.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it does not reset.
    pub(super) fn negotiate_queues(&self) -> Result<u16> {
        self.write_u8(DEVICE_STATUS, 0);
        let started = Instant::now();
        while self.read_u8(DEVICE_STATUS) != 0 {
            if started.elapsed() > RESET_LIMIT {
                return Err(Error::invalid("the virtual function", "it does not reset"));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        self.write_u8(DEVICE_STATUS, ACKNOWLEDGE);
        self.write_u8(DEVICE_STATUS, ACKNOWLEDGE | DRIVER);
        self.write_u32(DEVICE_FEATURE_SELECT, 0);
        let offered = self.read_u32(DEVICE_FEATURE);
        self.write_u32(DRIVER_FEATURE_SELECT, 0);
        self.write_u32(DRIVER_FEATURE, offered & (MQ | CTRL_VQ));
        Ok(self.read_u16(NUM_QUEUES))
    }

    fn register<T>(&self, field: usize) -> *mut T {
        self.mapping.wrapping_byte_add(self.offset + field).cast()
    }

    fn read_u8(&self, field: usize) -> u8 {
        // SAFETY: needed to read a register. `open` has checked that the common configuration lies
        // inside the mapping and is aligned to 4 bytes, and each field is aligned to its size. The
        // mapping lives as long as `self`.
        unsafe { self.register::<u8>(field).read_volatile() }
    }

    fn read_u16(&self, field: usize) -> u16 {
        // SAFETY: as in `read_u8`.
        u16::from_le(unsafe { self.register::<u16>(field).read_volatile() })
    }

    fn read_u32(&self, field: usize) -> u32 {
        // SAFETY: as in `read_u8`.
        u32::from_le(unsafe { self.register::<u32>(field).read_volatile() })
    }

    fn write_u8(&self, field: usize, value: u8) {
        // SAFETY: as in `read_u8`; the mapping is writable.
        unsafe { self.register::<u8>(field).write_volatile(value) }
    }

    fn write_u32(&self, field: usize, value: u32) {
        // SAFETY: as in `write_u8`.
        unsafe { self.register::<u32>(field).write_volatile(value.to_le()) }
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: needed to unmap the registers. `open` made the mapping with this size, and no
        // pointer into it is left.
        if let Err(error) = unsafe { munmap(self.mapping, self.size) } {
            eprintln!("lab: cannot unmap a function's registers: {error}");
        }
    }
}

/// BAR and offset of the common configuration, from configuration space.
fn common_configuration(config: &[u8]) -> Option<(u8, usize)> {
    if config.get(STATUS)? & STATUS_HAS_CAPABILITIES == 0 {
        return None;
    }
    let mut next = usize::from(config.get(CAPABILITIES)? & !3);
    for _ in 0..CAPABILITIES_LIMIT {
        if next == 0 {
            return None;
        }
        let capability = config.get(next..next.checked_add(16)?)?;
        let [id, following, _, kind, bar, _, _, _, a, b, c, d, ..] = *capability else {
            return None;
        };
        if id == CAPABILITY_VENDOR && kind == COMMON && bar <= 5 {
            return Some((bar, usize::try_from(u32::from_le_bytes([a, b, c, d])).ok()?));
        }
        next = usize::from(following & !3);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(capabilities: &[(usize, [u8; 16])]) -> Vec<u8> {
        let mut config = vec![0; 256];
        config[STATUS] = STATUS_HAS_CAPABILITIES;
        config[CAPABILITIES] = 0x40;
        for (place, bytes) in capabilities {
            config[*place..place + 16].copy_from_slice(bytes);
        }
        config
    }

    fn capability(id: u8, next: u8, kind: u8, bar: u8, offset: u32) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..5].copy_from_slice(&[id, next, 16, kind, bar]);
        bytes[8..12].copy_from_slice(&offset.to_le_bytes());
        bytes
    }

    #[test]
    fn the_common_configuration_is_found_behind_others() {
        let found = config(&[
            (0x40, capability(0x11, 0x50, 1, 0, 7)),
            (0x50, capability(9, 0x60, 2, 4, 0x1000)),
            (0x60, capability(9, 0, 1, 4, 0x2000)),
        ]);
        assert_eq!(common_configuration(&found), Some((4, 0x2000)));
    }

    #[test]
    fn broken_lists_end() {
        let endless = config(&[(0x40, capability(5, 0x40, 0, 0, 0))]);
        let outside = config(&[(0x40, capability(5, 0xfc, 0, 0, 0))]);
        let no_bar = config(&[(0x40, capability(9, 0, 1, 6, 0))]);
        for config in [endless, outside, no_bar, vec![0; 256], Vec::new()] {
            assert_eq!(common_configuration(&config), None);
        }
    }

    #[test]
    fn registers_outside_of_the_file_are_refused() {
        let directory = std::env::temp_dir().join(format!("lab-registers-{}", std::process::id()));
        files::create_directory(&directory).unwrap();
        files::write(&directory.join("resource4"), [0; 4096]).unwrap();
        for (offset, good) in [
            (4096 - 0x38, true),
            (4096 - 0x34, false),
            (2, false),
            (u32::MAX, false),
        ] {
            let found = config(&[(0x40, capability(9, 0, 1, 4, offset))]);
            files::write(&directory.join("config"), found).unwrap();
            assert_eq!(Registers::open(&directory).is_ok(), good, "{offset}");
        }
        launcher::cache::remove_tree(&directory).unwrap();
    }
}

//! The parts of a virtio NIC's BAR, by its configuration space (virtio 1.3, 4.1.4), and reads of
//! the notify part past the driver.
//!
//! No sane driver reads a notify page; this module does, to show that a guest can.

use lab::error::{Error, Result, report};
use lab::files;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use serde_json::{Value, json};
use std::fs::File;
use std::path::{Path, PathBuf};
use vm_memory::{FileOffset, MmapRegion};

/// ID of a vendor-specific capability, which virtio's are.
const VENDOR_CAPABILITY: u8 = 9;

/// `cfg_type` of the common configuration.
pub(crate) const COMMON: u8 = 1;

/// `cfg_type` of the notify part.
pub(crate) const NOTIFY: u8 = 2;

/// `cfg_type` of the device configuration.
pub(crate) const DEVICE: u8 = 4;

/// Bytes of the pages that are mapped.
pub(crate) const PAGE: u64 = 4096;

/// Most capabilities that fit into configuration space.
const MAXIMUM_CAPABILITIES: usize = 48;

/// The location of a part.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) bar: u8,
    /// Bytes from the BAR's start.
    pub(crate) offset: u32,
    pub(crate) length: u32,
    /// Bytes between the pages of two queues; of the notify part only.
    pub(crate) multiplier: u32,
}

impl Part {
    /// Walks the capabilities of a function's configuration space, to the first of this type.
    pub(crate) fn find(config: &[u8], cfg_type: u8) -> Option<Self> {
        let byte = |at: usize| config.get(at).copied();
        let word = |at: usize| {
            let bytes = config.get(at..at.checked_add(4)?)?;
            Some(u32::from_le_bytes(bytes.try_into().ok()?))
        };
        let mut at = usize::from(byte(0x34)?);
        for _ in 0..MAXIMUM_CAPABILITIES {
            if at == 0 {
                return None;
            }
            if byte(at)? == VENDOR_CAPABILITY && byte(at + 3)? == cfg_type {
                return Some(Self {
                    bar: byte(at + 4)?,
                    offset: word(at + 8)?,
                    length: word(at + 12)?,
                    multiplier: word(at + 16)?,
                });
            }
            at = usize::from(byte(at + 1)?);
        }
        None
    }
}

/// The PCI function of a virtio NIC, by sysfs.
pub(crate) fn function(nic: &str) -> Result<PathBuf> {
    let virtio = Path::new("/sys/class/net").join(nic).join("device");
    let virtio = std::fs::canonicalize(&virtio).map_err(Error::file("find", &virtio))?;
    virtio
        .parent()
        .map(Path::to_path_buf)
        .ok_or_else(|| Error::invalid(nic, "it is on no PCI function"))
}

fn part(function: &Path) -> Result<Part> {
    let config = files::read(&function.join("config"))?;
    Part::find(&config, NOTIFY)
        .ok_or_else(|| Error::invalid(function.display().to_string(), "it has no notify part"))
}

/// `notify`: the guest-physical addresses of the notify part.
pub(crate) fn describe(nic: &str) -> Result<Value> {
    let function = function(nic)?;
    let part = part(&function)?;
    let resources = files::read_text(&function.join("resource"))?;
    let start = resources
        .lines()
        .nth(part.bar.into())
        .and_then(|line| line.split_whitespace().next()?.strip_prefix("0x"))
        .and_then(|start| u64::from_str_radix(start, 16).ok())
        .ok_or_else(|| Error::invalid(nic, "its BAR has no address"))?;
    Ok(json!({
        "address": start + u64::from(part.offset),
        "length": part.length,
        "multiplier": part.multiplier,
    }))
}

/// Maps the first page of a NIC's notify part.
pub(crate) fn first_page(nic: &str) -> Result<MmapRegion<()>> {
    let function = function(nic)?;
    let part = part(&function)?;
    let path = function.join(format!("resource{}", part.bar));
    let file = File::options().read(true).write(true).open(&path);
    let file = file.map_err(Error::file("open", &path))?;
    MmapRegion::build(
        Some(FileOffset::new(file, part.offset.into())),
        usize::try_from(PAGE).unwrap_or_default(),
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_SHARED,
    )
    .map_err(|error| Error::invalid("a BAR", report(&error)))
}

/// `notify-read`: reads 16 bits at the start of a queue's page.
pub(crate) fn read(nic: &str, queue: u32) -> Result<Value> {
    let function = function(nic)?;
    let part = part(&function)?;
    let inside = queue
        .checked_mul(part.multiplier)
        .filter(|offset| *offset < part.length && u64::from(part.multiplier) == PAGE);
    let offset = inside.ok_or_else(|| Error::invalid("QUEUE", "it has no page of its own"))?;
    let path = function.join(format!("resource{}", part.bar));
    let file = File::options()
        .read(true)
        .write(true)
        .open(&path)
        .map_err(Error::file("open", &path))?;
    let size = usize::try_from(PAGE).unwrap_or_default();
    let at = u64::from(part.offset) + u64::from(offset);
    // SAFETY: needed because the page is reachable only by a mapping. A new mapping at an address
    // of the kernel's choice replaces nothing.
    let page = unsafe {
        mmap(
            std::ptr::null_mut(),
            size,
            ProtFlags::READ,
            MapFlags::SHARED,
            &file,
            at,
        )
    };
    let page = page.map_err(|error| Error::file("map", &path)(error.into()))?;
    // SAFETY: needed to read a register. The page was just mapped, is aligned,
    // and nothing else in this process points to it.
    let value = unsafe { page.cast::<u16>().read_volatile() };
    // SAFETY: needed to undo the mapping; the pointer is not used again.
    let unmapped = unsafe { munmap(page, size) };
    unmapped.map_err(Error::system("unmap a notify page"))?;
    Ok(json!({ "queue": queue, "value": value }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(capabilities: &[(usize, [u8; 20])]) -> Vec<u8> {
        let mut config = vec![0; 256];
        config[0x34] = u8::try_from(capabilities[0].0).unwrap();
        for (at, bytes) in capabilities {
            config[*at..at + 20].copy_from_slice(bytes);
        }
        config
    }

    #[test]
    fn the_notify_part_is_found_among_others() {
        let common = [
            9, 0x60, 16, 1, 4, 0, 0, 0, 0, 0, 0, 0, 60, 0, 0, 0, 0, 0, 0, 0,
        ];
        let notify = [
            9, 0, 20, 2, 4, 0, 0, 0, 0, 0, 1, 0, 0, 0x30, 0, 0, 0, 0x10, 0, 0,
        ];
        let found = Part::find(&config(&[(0x40, common), (0x60, notify)]), NOTIFY).unwrap();
        let expected = Part {
            bar: 4,
            offset: 0x1_0000,
            length: 0x3000,
            multiplier: 0x1000,
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn loops_and_short_files_end() {
        let mut circle = [0; 20];
        circle[..2].copy_from_slice(&[9, 0x40]);
        assert_eq!(Part::find(&config(&[(0x40, circle)]), NOTIFY), None);
        assert_eq!(Part::find(&[0; 20], NOTIFY), None);
        let notify = [9, 0, 20, 2, 4, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let whole = config(&[(0xe0, notify)]);
        assert!(Part::find(&whole, NOTIFY).is_some());
        assert_eq!(Part::find(&whole[..0xf0], NOTIFY), None);
    }
}

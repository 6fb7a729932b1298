//! Removal of an open device by the host: deleted, unbound from its driver, or gone with its
//! function.
//!
//! `vhost_vdpa_remove` (drivers/vhost/vdpa.c) deletes the device's node and its entry in sysfs.
//! Then it waits for the last close of the open file, in a sleep that no signal ends. Until then
//! the parent's device works as before. The kernel signals no eventfd, and sends its uevents only
//! after the wait. So a user of the device has to look.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{major, minor};

use super::Device;
use crate::iotlb::{Iotlb, Mappings};

/// The entries of all character devices, by number.
const BY_NUMBER: &str = "/sys/dev/char";

/// The open file of a closed [`Device`]. Dropping it closes the file. The kernel then unpins the
/// memory, which may take long.
#[derive(Debug)]
#[must_use = "dropping it may take long"]
pub struct ClosedDevice {
    // In this order: the memory is alive until the kernel has released it.
    _file: Option<Arc<File>>,
    _memory: Mappings,
}

impl Device {
    /// Whether the host is removing the device, and waits until this process closes it. False for a
    /// device that was [closed](Device::close).
    #[must_use]
    pub fn is_removed(&self) -> bool {
        let file = self.handle.file();
        file.is_ok_and(|file| is_removed(file, Path::new(BY_NUMBER)))
    }

    /// Closes the device, which the caller has reset: every later operation on it and on its IOTLB
    /// fails. The caller drops its [doorbells](crate::doorbell) and the result.
    pub fn close(&mut self, iotlb: &mut Iotlb) -> ClosedDevice {
        self.give_up();
        ClosedDevice {
            _memory: iotlb.close(),
            _file: self.handle.file.take(),
        }
    }
}

/// Whether the device of this open file is being removed. Its number is not used again meanwhile.
fn is_removed(file: &File, by_number: &Path) -> bool {
    let Ok(metadata) = file.metadata() else {
        return false;
    };
    if !by_number.is_dir() {
        // A jail without sysfs. The kernel removes its own link to the node of a removed device.
        return metadata.nlink() == 0;
    }
    let number = metadata.rdev();
    let entry = by_number.join(format!("{}:{}", major(number), minor(number)));
    let found = entry.symlink_metadata();
    found.is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_removed_device_has_no_entry_in_sysfs() {
        let root = std::env::temp_dir().join(format!("bellhop-removal-{}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        let device = File::open("/dev/null").unwrap();
        assert!(is_removed(&device, &root));
        symlink("../../devices/virtual/mem/null", root.join("1:3")).unwrap();
        assert!(!is_removed(&device, &root));
        fs::remove_dir_all(&root).unwrap();
        // Without sysfs the node counts.
        assert!(!is_removed(&device, &root));
        let name = root.with_extension("node");
        let node = File::create(&name).unwrap();
        assert!(!is_removed(&node, &root));
        fs::remove_file(&name).unwrap();
        assert!(is_removed(&node, &root));
    }
}

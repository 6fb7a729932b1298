//! Whether somebody has a device open.
//!
//! Deleting or unbinding a device whose character device is open makes the kernel wait
//! until it is closed, in a sleep that no signal ends. So this is asked first.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use super::bus::BusDevice;
use vdpa::device::holder::{Holder, holders, sentence};

/// Somebody has the device open.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name} is in use by {} through {}: end that first", sentence(holders), path.display())]
pub struct InUse {
    /// The device.
    pub name: String,
    /// Its character device.
    pub path: PathBuf,
    /// The processes that have it open, as far as they are visible.
    pub holders: Vec<Holder>,
}

/// Fails if the device's character device is open. The file opens once, so a trial tells,
/// also about processes that are not visible from here; only who may not open it must rely on
/// what is visible. The trial resets the device, which is about to lose its driver anyway.
pub(super) fn check(device: &BusDevice) -> Result<(), InUse> {
    let Some(path) = device.path() else {
        return Ok(());
    };
    let trial = OpenOptions::new().read(true).write(true).open(&path);
    let Err(error) = trial else {
        return Ok(());
    };
    let holders = fs::metadata(&path)
        .map(|file| holders(file.rdev()))
        .unwrap_or_default();
    if holders.is_empty() && error.raw_os_error() != Some(libc::EBUSY) {
        return Ok(());
    }
    Err(InUse {
        name: device.name.clone(),
        path,
        holders,
    })
}

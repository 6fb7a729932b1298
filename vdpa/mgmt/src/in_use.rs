//! Whether somebody has a device open.
//!
//! Deleting or unbinding a device whose character device is open makes the kernel wait
//! until it is closed, in a sleep that no signal ends. So this is asked first.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::MetadataExt;

use super::bus::BusDevice;
use super::error::{Error, ErrorKind};
use vdpa::device::holder::{holders, sentence};

/// Fails if the device's character device is open. The file opens once, so a trial tells,
/// also about processes that are not visible from here; only who may not open it must rely on
/// what is visible. The trial resets the device, which is about to lose its driver anyway.
pub(super) fn check(device: &BusDevice) -> Result<(), Error> {
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
    let message = format!(
        "{} is in use by {} through {}: end that first",
        device.name,
        sentence(&holders),
        path.display()
    );
    Err(Error::new(ErrorKind::InUse, message))
}

//! Directories of sysfs that appear and vanish while they are read.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::error::{Error, ErrorKind};

/// Maximum reads of a changing directory before it counts as gone.
const ATTEMPTS: u32 = 5;

/// Reads a directory's content so that the result is from one directory: sysfs gives a new
/// directory a new inode, also under an old name. `None` if it is gone.
pub(super) fn whole<T>(
    directory: &Path,
    read: impl Fn() -> Result<T, Error>,
) -> Result<Option<T>, Error> {
    for _ in 0..ATTEMPTS {
        let Some(before) = identity(directory) else {
            return Ok(None);
        };
        let outcome = read();
        let same = identity(directory) == Some(before);
        match outcome {
            Ok(value) if same => return Ok(Some(value)),
            // An entry vanished, or was read while it was being removed.
            Err(error) if same && !is_gone(&error) => return Err(error),
            _ => {}
        }
    }
    tracing::debug!(directory = %directory.display(), "the directory changes at each read");
    Ok(None)
}

/// Distinguishes a directory from a later one of the same name: device and inode.
pub(super) type Identity = (u64, u64);

/// `None` if there is no such directory.
pub(super) fn identity(directory: &Path) -> Option<Identity> {
    let metadata = fs::metadata(directory).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

fn is_gone(error: &Error) -> bool {
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::NoVdpa => true,
        // sysfs returns ENODEV for a file whose device is being removed.
        ErrorKind::Failed => error.io().is_some_and(|source| {
            source.kind() == io::ErrorKind::NotFound || source.raw_os_error() == Some(libc::ENODEV)
        }),
        _ => false,
    }
}

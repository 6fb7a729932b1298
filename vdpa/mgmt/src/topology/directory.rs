//! Directories of sysfs that come and go while they are read.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::error::{Error, ErrorKind};

/// How often a directory that changes is read before it counts as gone.
const ATTEMPTS: u32 = 5;

/// Reads what is in a directory, so that the answer is about one and the same: sysfs gives a new
/// directory a new inode, also under an old name. None if it is gone.
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
            // Something in it went, or was asked at its end.
            Err(error) if same && !is_gone(&error) => return Err(error),
            _ => {}
        }
    }
    tracing::debug!(directory = %directory.display(), "changes each time that it is read");
    Ok(None)
}

/// Tells a directory from a later one of the same name: device and inode.
pub(super) type Identity = (u64, u64);

/// None if there is no such directory.
pub(super) fn identity(directory: &Path) -> Option<Identity> {
    let metadata = fs::metadata(directory).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

fn is_gone(error: &Error) -> bool {
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::NoVdpa => true,
        // sysfs answers ENODEV for a file whose device is being taken away.
        ErrorKind::Failed => error.io().is_some_and(|source| {
            source.kind() == io::ErrorKind::NotFound || source.raw_os_error() == Some(libc::ENODEV)
        }),
        _ => false,
    }
}

//! A file system of a few MiB, which is soon full.

use std::process::Command;

use crate::error::Result;
use crate::notice;
use crate::process::output;
use crate::temp_path::TempPath;

/// A file system, until it is dropped.
#[derive(Debug)]
pub struct SmallFileSystem(TempPath);

impl SmallFileSystem {
    /// Mounts it at a new directory.
    ///
    /// # Errors
    /// [`Error::File`](crate::error::Error::File), or `mount` fails.
    pub fn mount() -> Result<Self> {
        let place = TempPath::new("small");
        crate::files::create_directory(place.path())?;
        let options = ["-t", "tmpfs", "-o", "size=4m", "none"];
        output(Command::new("mount").args(options).arg(place.path()))?;
        Ok(Self(place))
    }

    /// Where it is mounted.
    #[must_use]
    pub fn path(&self) -> &std::path::Path {
        self.0.path()
    }
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        let unmounted = output(Command::new("umount").arg(self.path()));
        notice::left_behind(unmounted.map(drop));
    }
}

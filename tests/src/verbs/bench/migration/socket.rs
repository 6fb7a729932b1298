//! A socket of a measurement's own.

use std::path::{Path, PathBuf};

/// Where a socket is made; it goes with this.
#[derive(Debug)]
pub(super) struct Socket(PathBuf);

impl Socket {
    pub(super) fn new(name: &str) -> Self {
        let name = format!("lab-{name}-{}", std::process::id());
        let this = Self(std::env::temp_dir().join(name));
        this.remove();
        this
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// So that who makes it again is seen to have.
    pub(super) fn remove(&self) {
        // One that was never made is gone as well.
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.remove();
    }
}

//! Where the daemon keeps what.
//!
//! ```text
//!   STATE    /var/lib/bellhop    0700   node.redb            what should be; outlives a reboot
//!                                       vms/NAME/            logs
//!   RUNTIME  /run/bellhop        0755   node.socket          the API
//!                                       vms/NAME/      0700  a machine's sockets
//! ```

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

/// The daemon's directories.
#[derive(Debug, Clone)]
pub(crate) struct Paths {
    state: PathBuf,
    runtime: PathBuf,
}

impl Paths {
    /// Below these two.
    pub(crate) fn new(state: &Path, runtime: &Path) -> Self {
        Self {
            state: state.to_owned(),
            runtime: runtime.to_owned(),
        }
    }

    /// Makes both directories, where they are not there.
    ///
    /// # Errors
    /// The directory that cannot be made, and the kernel's answer.
    pub(crate) fn make(&self) -> Result<(), (PathBuf, io::Error)> {
        for (path, mode) in [(&self.state, 0o700), (&self.runtime, 0o755)] {
            DirBuilder::new()
                .recursive(true)
                .mode(mode)
                .create(path)
                .and_then(|()| fs::metadata(path).map(|_| ()))
                .map_err(|error| (path.clone(), error))?;
        }
        Ok(())
    }

    /// The API's socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.runtime.join("node.socket")
    }
}

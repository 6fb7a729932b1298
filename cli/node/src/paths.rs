//! Where the daemon keeps what.
//!
//! ```text
//!   STATE    /var/lib/bellhop    0700   node.redb            what should be; outlives a reboot
//!                                       vms/NAME/            logs
//!   RUNTIME  /run/bellhop        0755   node.socket          the API
//!                                       nics/          0700  records of NICs that were made
//!                                       vms/NAME/      0700  a machine's sockets
//! ```

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use super::machines::spec::VmName;

/// The daemon's directories.
#[derive(Debug, Clone)]
pub struct Paths {
    state: PathBuf,
    runtime: PathBuf,
}

impl Paths {
    /// Below these two.
    #[must_use]
    pub fn new(state: &Path, runtime: &Path) -> Self {
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

    /// What does not.
    pub(crate) fn runtime(&self) -> &Path {
        &self.runtime
    }

    /// The node's memory.
    pub(crate) fn store(&self) -> PathBuf {
        self.state.join("node.redb")
    }

    /// The records of the node's NICs. By default these are those of `bellhop nic`, too.
    pub(crate) fn nics(&self) -> PathBuf {
        self.runtime.join("nics")
    }

    /// A machine's directory of what a reboot takes away. It is its process' mark, too.
    pub(crate) fn runtime_of(&self, vm: &VmName) -> PathBuf {
        self.runtime.join("vms").join(vm.as_str())
    }

    /// A machine's directory of what outlives a reboot.
    pub(crate) fn state_of(&self, vm: &VmName) -> PathBuf {
        self.state.join("vms").join(vm.as_str())
    }

    /// The socket of a machine's own API.
    pub(crate) fn api_socket(&self, vm: &VmName) -> PathBuf {
        self.runtime_of(vm).join("api.socket")
    }

    /// The socket of a machine's serial console.
    pub(crate) fn console_socket(&self, vm: &VmName) -> PathBuf {
        self.runtime_of(vm).join("console.socket")
    }

    /// Where a machine is waited for that comes from another daemon of this host.
    pub(crate) fn migration_socket(&self, vm: &VmName) -> PathBuf {
        self.runtime_of(vm).join("migration.socket")
    }

    /// What a guest has written on its console.
    pub(crate) fn console_log(&self, vm: &VmName) -> PathBuf {
        self.state_of(vm).join("console.log")
    }

    /// What a machine's process has to say.
    pub(crate) fn log(&self, vm: &VmName) -> PathBuf {
        self.state_of(vm).join("vmm.log")
    }

    /// The API's socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.runtime.join("node.socket")
    }
}

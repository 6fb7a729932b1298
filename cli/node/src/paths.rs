//! The files and directories of the daemon.
//!
//! ```text
//!   STATE    /var/lib/bellhop    0700   node.redb            the desired state; survives a reboot
//!                                       vms/NAME/            logs
//!                                       snapshots/NAME/      snapshots
//!                                       cordoned             while it accepts no new VMs
//!   RUNTIME  /run/bellhop        0755   node.socket          the API
//!                                       owner                the ID of STATE, and its path
//!                                       nics/          0700  records of created NICs
//!                                       vms/NAME/      0700  a VM's sockets
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
    /// Paths below these two directories.
    #[must_use]
    pub fn new(state: &Path, runtime: &Path) -> Self {
        Self {
            state: state.to_owned(),
            runtime: runtime.to_owned(),
        }
    }

    /// Creates both directories if they do not exist.
    ///
    /// # Errors
    /// The directory that cannot be created, and the kernel's error.
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

    /// The directory whose contents do not survive a reboot.
    pub(crate) fn runtime(&self) -> &Path {
        &self.runtime
    }

    /// The directory whose contents survive a reboot.
    pub(crate) fn state(&self) -> &Path {
        &self.state
    }

    /// The file that names the state directory of the runtime directory's VMs.
    pub(crate) fn owner(&self) -> PathBuf {
        self.runtime.join("owner")
    }

    /// The file of the node's store.
    pub(crate) fn store(&self) -> PathBuf {
        self.state.join("node.redb")
    }

    /// The snapshots that the daemon keeps.
    pub(crate) fn snapshots(&self) -> PathBuf {
        self.state.join("snapshots")
    }

    /// The file that exists while the node accepts no new VMs.
    pub(crate) fn cordon(&self) -> PathBuf {
        self.state.join("cordoned")
    }

    /// The records of the node's NICs. By default they are also those of `bellhop nic`.
    pub(crate) fn nics(&self) -> PathBuf {
        self.runtime.join("nics")
    }

    /// A VM's directory that does not survive a reboot. Its path is also the mark of the VM's
    /// process.
    pub(crate) fn runtime_of(&self, vm: &VmName) -> PathBuf {
        self.runtime.join("vms").join(vm.as_str())
    }

    /// A VM's directory that survives a reboot.
    pub(crate) fn state_of(&self, vm: &VmName) -> PathBuf {
        self.state.join("vms").join(vm.as_str())
    }

    /// The socket of a VM's own API.
    pub(crate) fn api_socket(&self, vm: &VmName) -> PathBuf {
        self.runtime_of(vm).join("api.socket")
    }

    /// The socket of a VM's serial console.
    pub(crate) fn console_socket(&self, vm: &VmName) -> PathBuf {
        self.runtime_of(vm).join("console.socket")
    }

    /// The socket that waits for a VM from another daemon of this host.
    pub(crate) fn migration_socket(&self, vm: &VmName) -> PathBuf {
        self.runtime_of(vm).join("migration.socket")
    }

    /// The log of a guest's console output.
    pub(crate) fn console_log(&self, vm: &VmName) -> PathBuf {
        self.state_of(vm).join("console.log")
    }

    /// The log of a VM's process.
    pub(crate) fn log(&self, vm: &VmName) -> PathBuf {
        self.state_of(vm).join("vmm.log")
    }

    /// The API's socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.runtime.join("node.socket")
    }
}

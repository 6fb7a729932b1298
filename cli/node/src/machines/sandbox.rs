//! The sandbox of VMs' processes: their users, their control groups, and the files in their roots.
//!
//! ```text
//!   start    user chosen ─> directories given to it ─> process jails itself (`vmm::sandbox`)
//!   request  names files ─> they appear in the jail ─> the VM's process opens them
//! ```
//! Owns the numbers of users. It must not know how a jail is built.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::io;
use std::ops::RangeInclusive;
use std::os::unix::fs::{PermissionsExt, lchown};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use bellhop_api::machine::MigrationRequest;
use parking_lot::Mutex;
use vmm::config::{DiskConfig, VmConfig};
use vmm::sandbox::cgroup::Groups;
use vmm::sandbox::namespaces::{Access, FileError, JailFiles};

use super::Machines;
use super::host::functions;
use super::process::Process;
use super::record::Record;
use super::spec::{NicSpec, VmName};
use crate::error::{Error, UNUSABLE};

/// Above the IDs of `/etc/subuid` (login.defs(5)) and of systemd's containers.
const FIRST: u32 = 1_900_000_000;
const LAST: u32 = 1_900_065_535;
/// The user ID that means "no change" in system calls.
const NO_USER: u32 = u32::MAX;

/// The user IDs of VMs: one for each. They must belong to no one else on the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VmUsers {
    /// VMs run as the daemon's user, and see the host's files.
    Off,
    /// Each VM has one of these.
    Range(RangeInclusive<u32>),
}

impl Default for VmUsers {
    fn default() -> Self {
        Self::Range(FIRST..=LAST)
    }
}

impl fmt::Display for VmUsers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Range(range) => write!(f, "{}-{}", range.start(), range.end()),
        }
    }
}

/// A text that is not a range of user IDs.
#[derive(Debug, PartialEq, Eq)]
pub struct BadUsers(String);

impl fmt::Display for BadUsers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(text) = self;
        write!(
            f,
            "{text:?} is not FIRST-LAST, two user IDs from 1 to 4294967294, or `off`"
        )
    }
}

impl std::error::Error for BadUsers {}

impl FromStr for VmUsers {
    type Err = BadUsers;

    fn from_str(text: &str) -> Result<Self, BadUsers> {
        if text == "off" {
            return Ok(Self::Off);
        }
        let range = text.split_once('-').and_then(|(first, last)| {
            let (first, last) = (first.parse().ok()?, last.parse().ok()?);
            let fits = 0 < first && first <= last && last < NO_USER;
            fits.then_some(first..=last)
        });
        range
            .map(Self::Range)
            .ok_or_else(|| BadUsers(text.to_owned()))
    }
}

/// The options of VMs' processes.
#[derive(Debug, Default)]
pub(crate) struct ProcessOptions {
    /// The log level, in the form of `--log-level`.
    pub(crate) log_level: String,
    /// How they are confined.
    pub(crate) sandbox: Sandbox,
}

/// The sandbox of this node's VMs.
#[derive(Debug, Default)]
pub(crate) struct Sandbox {
    /// None: VMs run as the daemon's user.
    users: Option<RangeInclusive<u32>>,
    /// The user of each VM that has or had one. Two VMs never have the same.
    taken: Mutex<BTreeMap<VmName, u32>>,
    /// None: VMs have no control groups of their own.
    groups: Option<Groups>,
}

impl Sandbox {
    /// The sandbox of a daemon. One that does not run as root cannot confine VMs.
    pub(crate) fn open(users: &VmUsers, runtime: &Path) -> Self {
        if !is_root() {
            tracing::warn!("VMs are not confined, because this daemon does not run as root");
            return Self::default();
        }
        let users = match users {
            VmUsers::Off => None,
            VmUsers::Range(range) => Some(range.clone()),
        };
        let groups = Groups::open(runtime);
        if let Err(error) = &groups {
            let error = error as &dyn std::error::Error;
            tracing::warn!(error, "VMs have no control groups, and no limit of memory");
        }
        Self {
            users,
            groups: groups.ok(),
            ..Self::default()
        }
    }

    /// The control groups.
    pub(super) fn groups(&self) -> Option<&Groups> {
        self.groups.as_ref()
    }

    /// Notes the user of a VM in the store.
    pub(super) fn note(&self, vm: &VmName, user: u32) {
        self.taken.lock().insert(vm.clone(), user);
    }

    /// Frees the user of a VM that is gone.
    pub(super) fn free(&self, vm: &VmName) {
        self.taken.lock().remove(vm);
    }

    /// The user for a VM, the same as before if possible.
    pub(super) fn user(&self, vm: &VmName) -> Result<Option<u32>, Error> {
        let Some(range) = &self.users else {
            return Ok(None);
        };
        let mut taken = self.taken.lock();
        if let Some(user) = taken.get(vm).filter(|user| range.contains(user)) {
            return Ok(Some(*user));
        }
        let others: BTreeSet<u32> = taken.values().copied().collect();
        let free = range.clone().find(|user| !others.contains(user));
        let free = free.ok_or_else(|| {
            let message = "each user ID of --vm-uids belongs to a VM: give the daemon more";
            Error::conflict("no_room", message)
        })?;
        taken.insert(vm.clone(), free);
        Ok(Some(free))
    }
}

/// Whether this daemon runs as root: others cannot confine VMs.
pub(super) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Gives a directory of a VM and the files in it to a user.
pub(super) fn give(directory: &Path, user: u32) -> io::Result<()> {
    // The user may have created links.
    lchown(directory, Some(user), Some(user))?;
    // A captured process may have closed its own directory.
    fs::set_permissions(directory, PermissionsExt::from_mode(0o700))?;
    for entry in fs::read_dir(directory)? {
        lchown(entry?.path(), Some(user), Some(user))?;
    }
    Ok(())
}

/// Files that a request names.
pub(super) type Files = Vec<(PathBuf, Access)>;

/// The files of a VM, without its NICs.
pub(super) fn files_of(machine: &VmConfig) -> Files {
    let boot = [Some(&machine.kernel), machine.initramfs.as_ref()];
    let boot = boot.into_iter().flatten();
    let mut files: Files = boot.map(|path| (path.clone(), Access::Read)).collect();
    files.extend(machine.disks.iter().map(file_of));
    files
}

/// The image of a disk.
pub(super) fn file_of(disk: &DiskConfig) -> (PathBuf, Access) {
    let access = if disk.readonly {
        Access::Read
    } else {
        Access::Write
    };
    (disk.path.clone(), access)
}

/// The paths of files.
pub(super) fn paths_of(files: Files) -> Vec<PathBuf> {
    files.into_iter().map(|(path, _)| path).collect()
}

/// The certificates that a request to send a VM names. The daemon opens the connections, and the
/// VM's process rejects a malformed request.
pub(super) fn files_to_send(body: &[u8]) -> Files {
    let Ok(MigrationRequest::Send(send)) = serde_json::from_slice(body) else {
        return Files::new();
    };
    let tls = send.tls.into_iter();
    let files = tls.flat_map(|tls| [tls.certificate, tls.key, tls.authority]);
    files.map(|path| (path, Access::Read)).collect()
}

impl Machines {
    /// The process of a VM that has a user of its own, and that user. None: the VM has no process,
    /// or one that sees the host's files.
    ///
    /// # Errors
    /// The process cannot be opened: this daemon has no free descriptor.
    fn jailed(&self, vm: &VmName) -> Result<Option<(Process, u32)>, Error> {
        let record = self.entries().get(vm).and_then(|entry| entry.record());
        let jailed = record.and_then(|record| Some((record.user?, record.process()?.0?)));
        let Some((user, identity)) = jailed else {
            return Ok(None);
        };
        let process = Process::open(identity);
        let process = process.map_err(Error::context("cannot open the VM's process"))?;
        Ok(process.map(|process| (process, user)))
    }

    /// Whether the process of a VM sees only its own files.
    ///
    /// # Errors
    /// The process cannot be opened.
    pub(super) fn is_jailed(&self, vm: &VmName) -> Result<bool, Error> {
        Ok(self.jailed(vm)?.is_some())
    }

    /// Whether a path is in a directory of the VM, which its process always sees.
    fn is_own(&self, vm: &VmName, path: &Path) -> bool {
        let own = [self.paths.runtime_of(vm), self.paths.state_of(vm)];
        own.iter().any(|own| path.starts_with(own))
    }

    /// Makes files visible to a VM's process. Its own directories always are. Returns the paths of
    /// those that it did not see before.
    ///
    /// # Errors
    /// A file does not exist, or its file system cannot show it to another user.
    pub(super) fn show_files(&self, vm: &VmName, mut files: Files) -> Result<Vec<PathBuf>, Error> {
        let Some((process, user)) = self.jailed(vm)? else {
            return Ok(Vec::new());
        };
        files.retain(|(path, _)| !self.is_own(vm, path));
        let jail = JailFiles {
            pidfd: process.pidfd(),
            user,
        };
        jail.show(&files)
            .map_err(|error| Error::transparent(UNUSABLE, error))
    }

    /// Sends a request that names files to a VM's process, which sees them from then on. If the
    /// request fails, the process sees no more than before.
    ///
    /// # Errors
    /// As [`Self::show_files`], or the request fails.
    pub(super) fn with_files<T>(
        &self,
        vm: &VmName,
        files: Files,
        request: impl FnOnce() -> Result<T, Error>,
    ) -> Result<T, Error> {
        let new = self.show_files(vm, files)?;
        request().inspect_err(|_| self.hide_files(vm, &new))
    }

    /// Hides files from a VM's process again. It keeps those that it has open.
    pub(super) fn hide_files(&self, vm: &VmName, paths: &[PathBuf]) {
        let paths = paths.iter().filter(|path| !self.is_own(vm, path));
        let paths: Vec<PathBuf> = paths.cloned().collect();
        self.change_jail(vm, |jail| jail.hide(&paths));
    }

    /// Hides all devices of NICs and functions that the VM does not have by its record. The reports
    /// of the process do not count: a guest may have taken it over, and another VM may get the same
    /// device.
    pub(super) fn hide_devices(&self, vm: &VmName) {
        self.hide_devices_after(vm, |_| {});
    }

    /// The same, after the guest has released a device: `released` marks that in the record.
    pub(super) fn hide_devices_after(&self, vm: &VmName, released: impl FnOnce(&mut Record)) {
        let Some(mut record) = self.entries().get(vm).and_then(|entry| entry.record()) else {
            return;
        };
        released(&mut record);
        let nics = record.nics_now(vm).chain(record.former_nics().cloned());
        // A device that is gone needs no file. The other device of its NIC does.
        let devices = nics.flat_map(|nic| {
            let backup = self.backup_path(vm, &nic).ok().flatten();
            [self.character_device_of(vm, &nic).ok(), backup]
        });
        let functions = record.functions_in_guest();
        let functions = functions.filter_map(|function| functions::files_of(function).ok());
        let functions = functions.flat_map(paths_of);
        let mut kept: Vec<PathBuf> = devices.flatten().chain(functions).collect();
        kept.retain(|path| path.exists());
        self.change_jail(vm, |jail| jail.hide_devices_except(&kept));
    }

    /// Changes the files that a VM's process sees, if it does not see all.
    fn change_jail(
        &self,
        vm: &VmName,
        change: impl FnOnce(&JailFiles<'_>) -> Result<(), FileError>,
    ) {
        let hidden = self.jailed(vm).and_then(|jailed| {
            let Some((process, user)) = &jailed else {
                return Ok(());
            };
            let jail = JailFiles {
                pidfd: process.pidfd(),
                user: *user,
            };
            change(&jail).map_err(|error| Error::transparent(UNUSABLE, error))
        });
        if let Err(error) = hidden {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(%vm, error, "cannot hide a file from a VM");
        }
    }

    /// Hides files from a VM's process in a thread that may block.
    pub(super) async fn hide_soon(self: &Arc<Self>, vm: &VmName, files: Files) {
        let (machines, vm) = (self.clone(), vm.clone());
        let hide = move || machines.hide_files(&vm, &paths_of(files));
        // It fails only if the daemon ends.
        let _ = tokio::task::spawn_blocking(hide).await;
    }

    /// The devices of a NIC: its own and its backup. Its process has them open, or opens them by
    /// path: for a failover, or because another program takes over.
    pub(super) fn devices_to_open(&self, vm: &VmName, nic: &NicSpec) -> Result<Files, Error> {
        let own = self.character_device_of(vm, nic)?;
        let devices = std::iter::once(own).chain(self.backup_path(vm, nic)?);
        Ok(devices.map(|path| (path, Access::Write)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_a_range_without_root() {
        let parse = |text: &str| text.parse::<VmUsers>();
        assert_eq!(parse("off"), Ok(VmUsers::Off));
        assert_eq!(parse("7-9"), Ok(VmUsers::Range(7..=9)));
        let shown = VmUsers::default().to_string();
        assert_eq!(parse(&shown), Ok(VmUsers::default()));
        for text in ["", "7", "9-7", "0-7", "1-4294967295", "a-b", "1-2-3", "on"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn no_two_vms_have_one_user() {
        let sandbox = Sandbox {
            users: Some(7..=8),
            ..Sandbox::default()
        };
        let [a, b, c] = ["a", "b", "c"].map(|name| name.parse::<VmName>().unwrap());
        sandbox.note(&a, 8);
        assert_eq!(sandbox.user(&a).unwrap(), Some(8));
        assert_eq!(sandbox.user(&b).unwrap(), Some(7));
        assert_eq!(sandbox.user(&c).unwrap_err().answer().1, "no_room");
        sandbox.free(&a);
        assert_eq!(sandbox.user(&c).unwrap(), Some(8));
        assert_eq!(sandbox.user(&b).unwrap(), Some(7));
        // The daemon has another range since.
        sandbox.note(&b, 100);
        assert_eq!(sandbox.user(&b).unwrap(), Some(7));
        assert_eq!(Sandbox::default().user(&a).unwrap(), None);
    }
}

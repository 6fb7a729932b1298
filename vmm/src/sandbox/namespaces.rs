//! The namespaces and the root directory of a jailed process.
//!
//! ```text
//!   /             tmpfs of root: the process cannot create files in it
//!   /dev          kvm, null, urandom; nodes of its own, which belong to its user
//!   /proc         a read-only instance that shows this process only
//!   /sys          read-only: devices, huge pages, parameters of modules
//!   DIRECTORY     its own directories, at the paths that they have on the host
//!   FILE          files that the daemon brings in, each a mount or a device node
//! ```
//! The root is a directory below that of the mount namespace, and the process is in a chroot(2)
//! there. The kernel refuses new user namespaces to such a process (user_namespaces(7)). Without
//! capabilities it cannot leave.
//!
//! A file of another user is mounted with its owner mapped to the user of the jail
//! (mount_setattr(2), `MOUNT_ATTR_IDMAP`). The file on the host stays as it is.
//!
//! Owns the mounts. It must not know which files a VM needs.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, lchown};
use std::path::{Component, Path, PathBuf};
use std::thread;

use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, Stat, StatxFlags, Uid};
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
};
use rustix::process::{Pid, Signal, WaitOptions};
use rustix::thread::{ThreadNameSpaceType, UnshareFlags};

use super::Own;

/// The place where the new root is built, which every system has.
const NEW_ROOT: &str = "/proc";
/// The root of the process, below that of its mount namespace.
const JAIL: &str = "jail";
const DEVICES: [&str; 3] = ["/dev/kvm", "/dev/null", "/dev/urandom"];
/// Where the VMM looks up devices, IOMMU groups, free huge pages and the limits of vhost-vdpa.
const SYSFS: [&str; 7] = [
    "/sys/bus/pci/devices",
    "/sys/dev/block",
    "/sys/dev/char",
    "/sys/devices",
    "/sys/kernel/iommu_groups",
    "/sys/kernel/mm/hugepages",
    "/sys/module",
];
/// The size of the root, which only has directories and mount points.
const TMPFS: &std::ffi::CStr = c"mode=0755,size=1m";
const NO_FLAGS: u64 = 0;

/// What a jailed process may do with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Read it.
    Read,
    /// Read and write it. In a directory, also create files.
    Write,
    /// Read and execute it.
    Execute,
}

impl Access {
    fn attributes(self) -> u64 {
        let more = match self {
            Self::Read => libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOEXEC,
            Self::Write => libc::MOUNT_ATTR_NOEXEC,
            Self::Execute => libc::MOUNT_ATTR_RDONLY,
        };
        libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | more
    }

    /// The mode bits that other users need.
    const fn bits(self) -> u32 {
        match self {
            Self::Read => 0o4,
            Self::Write => 0o6,
            Self::Execute => 0o5,
        }
    }
}

/// A file cannot be brought into a jail.
#[derive(Debug, thiserror::Error)]
#[error("cannot bring {} into the sandbox of the VM", path.display())]
pub struct FileError {
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// A file of the host, ready for a jail.
enum Source {
    /// A copy of its mount, which is not attached anywhere.
    Mount { tree: OwnedFd, is_directory: bool },
    /// The number and type of a device.
    Device(u64, FileType),
}

/// Moves this process into namespaces of its own, with a new root.
///
/// # Errors
/// The kernel refuses a step.
pub(super) fn enter(own: &Own) -> io::Result<()> {
    leave()?;
    // The new root hides `/proc`, so everything is opened before.
    let mut sources = Vec::new();
    for path in &own.directories {
        sources.push((path.as_path(), mount(path, Access::Write.attributes())?));
    }
    for path in SYSFS.map(Path::new) {
        match mount(path, Access::Read.attributes()) {
            Err(error) if is_absent(&error) => {}
            source => sources.push((path, source?)),
        }
    }
    for path in DEVICES.map(Path::new) {
        match open(path, Access::Write, own.user) {
            // A VM without KVM fails later, with a better message.
            Err(error) if is_absent(&error) => {}
            source => sources.push((path, source?)),
        }
    }
    let umask = rustix::process::umask(Mode::from_raw_mode(0o022));
    let flags = MountFlags::NOSUID | MountFlags::NOEXEC;
    new_root()?;
    let root = rustix::fs::open(JAIL, DIRECTORY, Mode::empty())?;
    for (path, source) in sources {
        place(root.as_fd(), path, source, own.user)?;
    }
    let proc = Path::new(JAIL).join("proc");
    rustix::fs::mkdir(&proc, Mode::from_raw_mode(0o755))?;
    let flags = flags | MountFlags::NODEV | MountFlags::RDONLY;
    let options = Some(c"hidepid=invisible");
    rustix::mount::mount("proc", &proc, "proc", flags, options)?;
    enter_root()?;
    rustix::process::umask(umask);
    Ok(())
}

/// Moves this process into namespaces of its own with an empty root, in which it can create no
/// file after it has changed its user.
///
/// # Errors
/// The kernel refuses a step.
pub(super) fn enter_empty() -> io::Result<()> {
    leave()?;
    new_root()?;
    enter_root()
}

/// Leaves the namespaces of the parent. The new mount namespace still has its mounts.
fn leave() -> io::Result<()> {
    let flags = UnshareFlags::NEWNS
        | UnshareFlags::NEWIPC
        | UnshareFlags::NEWUTS
        | UnshareFlags::NEWNET
        | UnshareFlags::NEWCGROUP;
    // SAFETY: needed because rustix has no safe call: CLONE_FILES would invalidate descriptors that
    // threads share. It is not among the flags.
    unsafe { rustix::thread::unshare_unsafe(flags) }?;
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private)?;
    Ok(())
}

/// Mounts the new root, and makes it the current directory.
fn new_root() -> io::Result<()> {
    let flags = MountFlags::NOSUID | MountFlags::NOEXEC;
    rustix::mount::mount("tmpfs", NEW_ROOT, "tmpfs", flags, Some(TMPFS))?;
    rustix::process::chdir(NEW_ROOT)?;
    rustix::fs::mkdir(JAIL, Mode::from_raw_mode(0o755))?;
    Ok(())
}

/// Makes the jail in the current directory the root.
fn enter_root() -> io::Result<()> {
    // The former root is on top of the new one afterwards (pivot_root(2)).
    rustix::process::pivot_root(".", ".")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    rustix::process::chroot(Path::new("/").join(JAIL))?;
    rustix::process::chdir("/")?;
    Ok(())
}

const DIRECTORY: OFlags = OFlags::PATH
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// The files that the jail of a running process shows.
#[derive(Debug)]
pub struct JailFiles<'a> {
    /// The process.
    pub pidfd: BorrowedFd<'a>,
    /// The user of the jail.
    pub user: u32,
}

impl JailFiles<'_> {
    /// Makes files appear in the jail, at their own paths, in place of those that are there. A file
    /// that does not exist is missing there, too: the process has a better error for that. Returns
    /// the paths at which no file was before.
    ///
    /// # Errors
    /// The file system of a file does not support ID-mapped mounts, and the user of the jail may
    /// not use the file. No file is new in the jail then.
    pub fn show(&self, files: &[(PathBuf, Access)]) -> Result<Vec<PathBuf>, FileError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| FileError { path, source }
        };
        let mut sources = Vec::new();
        for (path, access) in files.iter().filter(|(path, _)| path.is_absolute()) {
            let source = match open(path, *access, self.user) {
                Err(error) if is_absent(&error) => None,
                source => Some(source.map_err(failed(path))?),
            };
            sources.push((path.as_path(), source));
        }
        self.inside(|root| {
            let mut new = Vec::new();
            for (path, source) in sources {
                if !remove(path) {
                    new.push(path.to_owned());
                }
                if let Some(source) = source
                    && let Err(error) = place(root.as_fd(), path, source, self.user)
                {
                    new.iter().for_each(|path| _ = remove(path));
                    return Err(failed(path)(error));
                }
            }
            Ok(new)
        })
    }

    /// Removes files from the jail. The process keeps those that it has open.
    ///
    /// # Errors
    /// The jail cannot be entered.
    pub fn hide(&self, paths: &[PathBuf]) -> Result<(), FileError> {
        self.inside(|_| {
            paths.iter().for_each(|path| _ = remove(path));
            Ok(())
        })
    }

    /// Removes the character devices from the jail that are neither in `kept` nor those of every
    /// VM. Only the daemon creates files there, so the process cannot conceal one.
    ///
    /// # Errors
    /// The jail cannot be entered or read.
    pub fn hide_devices_except(&self, kept: &[PathBuf]) -> Result<(), FileError> {
        let jail = Path::new("/").join(JAIL);
        self.inside(|_| {
            let failed = |source| FileError {
                path: PathBuf::from("/"),
                source,
            };
            for device in character_devices(&jail).map_err(failed)? {
                let path = device.strip_prefix(&jail).unwrap_or(&device);
                let path = Path::new("/").join(path);
                if !kept.contains(&path) && !DEVICES.iter().any(|own| path == Path::new(own)) {
                    remove(&path);
                }
            }
            Ok(())
        })
    }

    /// Does something in the mount namespace of the process, with its root. It needs a thread of
    /// its own, which has another root than its process afterwards.
    fn inside<T: Send>(
        &self,
        work: impl FnOnce(OwnedFd) -> Result<T, FileError> + Send,
    ) -> Result<T, FileError> {
        let failed = |source| FileError {
            path: PathBuf::from("/"),
            source,
        };
        let done = thread::scope(|scope| {
            let thread = thread::Builder::new().name("sandbox".to_owned());
            let thread = thread.spawn_scoped(scope, || work(self.root().map_err(failed)?));
            Ok::<_, FileError>(thread.map_err(failed)?.join())
        })?;
        done.unwrap_or_else(|_| Err(failed(io::ErrorKind::Other.into())))
    }

    /// Enters the mount namespace of the process; returns its root.
    fn root(&self) -> io::Result<OwnedFd> {
        // SAFETY: needed because rustix has no safe call; the flags leave the descriptors shared.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS) }?;
        let namespace = ThreadNameSpaceType::MOUNT;
        rustix::thread::move_into_thread_name_spaces(self.pidfd, namespace)?;
        // Of this thread only.
        rustix::process::umask(Mode::from_raw_mode(0o022));
        let jail = Path::new("/").join(JAIL);
        Ok(rustix::fs::open(jail, DIRECTORY, Mode::empty())?)
    }
}

/// Removes a mount or a device node from the mount namespace of this thread. A mount that is in use
/// stays until its last file is closed. Returns whether there was one.
fn remove(path: &Path) -> bool {
    let Ok(name) = path.strip_prefix("/") else {
        return false;
    };
    if !name
        .components()
        .all(|component| matches!(component, Component::Normal(_)))
    {
        return false;
    }
    let there = Path::new("/").join(JAIL).join(name);
    // No mount is there yet, or a device.
    let flags = UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
    let unmounted = rustix::mount::unmount(&there, flags).is_ok();
    remove_node(&there) || unmounted
}

/// Removes a device node of the jail, at whatever path: a disk or a NIC may be named by a link.
/// Returns whether there was one. The process may have a descriptor of the node itself (`O_PATH`),
/// and could open the device through it. So the node loses its user first.
fn remove_node(node: &Path) -> bool {
    let jail = identify(&Path::new("/").join(JAIL));
    // Another file system may be the process's.
    let is_node = match (identify(node), jail) {
        (Ok((kind, there)), Ok((_, jail))) => {
            there == jail && matches!(kind, FileType::CharacterDevice | FileType::BlockDevice)
        }
        _ => false,
    };
    if !is_node {
        return false;
    }
    let _ = lchown(node, Some(0), Some(0));
    fs::remove_file(node).is_ok()
}

/// The character devices below a directory, in its file system: another one may be the process's.
fn character_devices(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let (_, file_system) = identify(directory)?;
    let mut found = Vec::new();
    let mut directories = vec![directory.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            // That of a mount point, not of the file that is mounted there.
            let kind = entry.file_type()?;
            let path = entry.path();
            if kind.is_char_device() {
                found.push(path);
            } else if kind.is_dir() && identify(&path)?.1 == file_system {
                directories.push(path);
            }
        }
    }
    Ok(found)
}

/// The type of a file, and its file system. It sends no request to a file server, which may not
/// answer.
fn identify(path: &Path) -> io::Result<(FileType, (u32, u32))> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
    let found = rustix::fs::statx(CWD, path, flags, StatxFlags::TYPE)?;
    let kind = FileType::from_raw_mode(found.stx_mode.into());
    Ok((kind, (found.stx_dev_major, found.stx_dev_minor)))
}

/// Opens a file of the host for a jail of `user`.
fn open(path: &Path, access: Access, user: u32) -> io::Result<Source> {
    let metadata = fs::metadata(path)?;
    let kind = FileType::from_raw_mode(metadata.mode());
    if matches!(kind, FileType::CharacterDevice | FileType::BlockDevice) {
        return Ok(Source::Device(metadata.rdev(), kind));
    }
    let source = mount(path, access.attributes())?;
    let Source::Mount { tree, is_directory } = &source else {
        return Ok(source);
    };
    let stat = rustix::fs::fstat(tree)?;
    let by_others = stat.st_mode & access.bits() == access.bits() && !is_directory;
    if stat.st_uid == user || by_others {
        return Ok(source);
    }
    map_owner(tree, &stat, user).map_err(|error| match error.raw_os_error() {
        Some(libc::EINVAL | libc::EOPNOTSUPP) => io::Error::other(format!(
            "user {user} may not use it, and its file system has no ID-mapped mounts: `chown \
             {user} {}`, or move it to ext4, XFS or Btrfs",
            path.display()
        )),
        _ => error,
    })?;
    Ok(source)
}

/// Copies the mount of a path.
fn mount(path: &Path, attributes: u64) -> io::Result<Source> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let tree = rustix::mount::open_tree(CWD, path, flags)?;
    set_attributes(&tree, attributes, NO_FLAGS)?;
    let mode = rustix::fs::fstat(&tree)?.st_mode;
    let is_directory = FileType::from_raw_mode(mode) == FileType::Directory;
    Ok(Source::Mount { tree, is_directory })
}

/// Sets attributes of a mount. With `MOUNT_ATTR_IDMAP`, `user_namespace` is a descriptor.
fn set_attributes(tree: &OwnedFd, set: u64, user_namespace: u64) -> io::Result<()> {
    let attributes = libc::mount_attr {
        attr_set: set,
        attr_clr: NO_FLAGS,
        propagation: NO_FLAGS,
        userns_fd: user_namespace,
    };
    // SAFETY: needed because neither rustix nor libc has a function for mount_setattr(2). It reads
    // an empty string and one structure of the given size, which both outlive the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Maps the owner of a file to `user`. The file belongs to `user` in this mount. Files that `user`
/// creates belong to the owner on the disk.
fn map_owner(tree: &OwnedFd, stat: &Stat, user: u32) -> io::Result<()> {
    let namespace = user_namespace(stat.st_uid, stat.st_gid, user)?;
    let number = u64::try_from(namespace.as_raw_fd()).map_err(io::Error::other)?;
    set_attributes(tree, libc::MOUNT_ATTR_IDMAP, number)
}

/// A user namespace that maps this owner to `user` and no other ID. Only a process can create one.
fn user_namespace(uid: u32, gid: u32, user: u32) -> io::Result<File> {
    let flags = libc::CLONE_NEWUSER | libc::CLONE_FILES | libc::SIGCHLD;
    // SAFETY: needed because no safe function creates a process in a new user namespace. The child
    // has a copy of this thread's stack and makes two system calls, prctl(2) and pause(2), until it
    // is killed. It touches no lock and no allocator, whatever the other threads were doing.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
    if pid == 0 {
        // A daemon that is killed here leaves no process behind.
        // SAFETY: as above.
        unsafe {
            libc::syscall(
                libc::SYS_prctl,
                libc::PR_SET_PDEATHSIG,
                libc::SIGKILL,
                0,
                0,
                0,
            )
        };
        loop {
            // SAFETY: as above.
            unsafe { libc::syscall(libc::SYS_pause) };
        }
    }
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(io::Error::last_os_error)?;
    let directory = PathBuf::from(format!("/proc/{}", pid.as_raw_pid()));
    let mapped = fs::write(directory.join("uid_map"), format!("{uid} {user} 1"))
        .and_then(|()| fs::write(directory.join("gid_map"), format!("{gid} {user} 1")))
        .and_then(|()| File::open(directory.join("ns/user")));
    let _ = rustix::process::kill_process(pid, Signal::KILL);
    let _ = rustix::process::waitpid(Some(pid), WaitOptions::empty());
    mapped
}

/// Puts a file at its path below `root`. Follows no link, because a jailed process may have created
/// one.
fn place(root: BorrowedFd<'_>, path: &Path, source: Source, user: u32) -> io::Result<()> {
    let (directory, name) = parent(root, path)?;
    match source {
        Source::Mount { tree, is_directory } => {
            let made = if is_directory {
                rustix::fs::mkdirat(&directory, name, Mode::from_raw_mode(0o755))
            } else {
                let kind = FileType::RegularFile;
                rustix::fs::mknodat(&directory, name, kind, Mode::from_raw_mode(0o600), 0)
            };
            existing(made)?;
            let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
            rustix::mount::move_mount(&tree, "", &directory, name, flags)?;
        }
        Source::Device(number, kind) => {
            match rustix::fs::unlinkat(&directory, name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(error) => return Err(error.into()),
            }
            let mode = Mode::from_raw_mode(0o600);
            rustix::fs::mknodat(&directory, name, kind, mode, number)?;
            let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(user));
            let flags = AtFlags::SYMLINK_NOFOLLOW;
            rustix::fs::chownat(&directory, name, Some(uid), Some(gid), flags)?;
        }
    }
    Ok(())
}

/// The directory of a path below `root`, created as necessary, and the last component.
fn parent<'a>(root: BorrowedFd<'_>, path: &'a Path) -> io::Result<(OwnedFd, &'a OsStr)> {
    let wrong = || io::Error::new(io::ErrorKind::InvalidInput, "it is not an absolute path");
    let mut names = Vec::new();
    let mut components = path.components();
    if components.next() != Some(Component::RootDir) {
        return Err(wrong());
    }
    for component in components {
        let Component::Normal(name) = component else {
            return Err(wrong());
        };
        names.push(name);
    }
    let last = names.pop().ok_or_else(wrong)?;
    let mut directory = root.try_clone_to_owned()?;
    for name in names {
        existing(rustix::fs::mkdirat(
            &directory,
            name,
            Mode::from_raw_mode(0o755),
        ))?;
        directory = rustix::fs::openat(&directory, name, DIRECTORY, Mode::empty())?;
    }
    Ok((directory, last))
}

fn is_absent(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
    )
}

/// Treats an existing file as success.
fn existing(made: Result<(), Errno>) -> Result<(), Errno> {
    match made {
        Err(Errno::EXIST) => Ok(()),
        made => made,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_absolute_paths_without_dots_have_a_place() {
        let directory = std::env::temp_dir().join(format!("jail-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let root = rustix::fs::open(&directory, DIRECTORY, Mode::empty()).unwrap();
        for path in ["a", "/", "", "/a/../b", "../b"] {
            assert!(parent(root.as_fd(), Path::new(path)).is_err(), "{path}");
        }
        let (_, name) = parent(root.as_fd(), Path::new("/a/b/c")).unwrap();
        assert_eq!(name, "c");
        assert!(directory.join("a/b").is_dir());
        // A link that a jailed process has created leads nowhere.
        std::os::unix::fs::symlink("/etc", directory.join("link")).unwrap();
        assert!(parent(root.as_fd(), Path::new("/link/passwd")).is_err());
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn a_link_in_the_place_of_a_device_is_replaced_and_not_followed() {
        let directory = std::env::temp_dir().join(format!("jail-link-{}", std::process::id()));
        let jail = directory.join("jail");
        fs::create_dir_all(&jail).unwrap();
        let target = directory.join("target");
        fs::write(&target, "foreign").unwrap();
        std::os::unix::fs::symlink(&target, jail.join("link")).unwrap();
        let former = fs::metadata(&target).unwrap();
        let root = rustix::fs::open(&jail, DIRECTORY, Mode::empty()).unwrap();
        // Every user may create the device 0:0.
        let source = Source::Device(0, FileType::CharacterDevice);
        let user = rustix::process::getuid().as_raw();
        let placed = place(root.as_fd(), Path::new("/link"), source, user);
        let node = fs::symlink_metadata(jail.join("link")).unwrap();
        assert!(node.file_type().is_char_device(), "{placed:?}");
        assert_eq!(fs::read_to_string(&target).unwrap(), "foreign");
        let ctime = |file: &fs::Metadata| (file.ctime(), file.ctime_nsec());
        assert_eq!(ctime(&fs::metadata(&target).unwrap()), ctime(&former));
        fs::remove_dir_all(&directory).unwrap();
    }
}

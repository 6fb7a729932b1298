//! The host as the checks see it: files below a root.
//!
//! Owns every access to `/proc`, `/sys`, `/dev`, `/boot`, `/lib` and `/etc`. Reads have a size
//! limit, never block (a FIFO is rejected) and never panic. The root is `/`; tests use a fake tree.
//! The checks interpret the content.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rustix::fs::{Access, Mode, OFlags};
use rustix::io::Errno;
use vdpa::device::holder::{self, Holder};
use vdpa::vduse::Control;

use bellhop_common::error::{Error, ErrorKind};
use bellhop_common::groups;

/// Maximum size of an ordinary attribute file, in bytes.
const TEXT_MAX: u64 = 64 << 10;

/// The most entries of a directory that are read.
const ENTRIES_MAX: usize = 4096;

/// A file that does not exist.
pub(super) fn absent(path: &str) -> Error {
    Error::new(ErrorKind::Absent, format!("there is no {path}"))
}

/// A file whose content cannot be decoded.
pub(super) fn odd(path: &str) -> Error {
    Error::failed(format!("cannot parse {path}: unexpected content"))
}

fn unread(path: &str, source: io::Error) -> Error {
    if source.kind() == io::ErrorKind::NotFound {
        return absent(path);
    }
    Error::failed(format!("cannot read {path}")).because(source)
}

/// Owner and permissions of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Owner {
    /// Permission bits.
    pub(crate) mode: u32,
    /// Group id.
    pub(crate) gid: u32,
    /// The group's name in `/etc/group`, if it is one that can be typed.
    pub(crate) group: Option<String>,
    /// User id.
    pub(crate) uid: u32,
}

impl std::fmt::Display for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { mode, uid, gid, .. } = self;
        let mode = mode & 0o7777;
        match &self.group {
            Some(group) => write!(f, "mode {mode:04o}, user {uid}, group {group}"),
            None => write!(f, "mode {mode:04o}, user {uid}, group {gid}"),
        }
    }
}

/// Queries the system about a device file.
type Ask = fn(&Path) -> Result<(), Errno>;

/// Asks the control file of VDUSE for the API version.
type AskVersion = fn(&Path) -> io::Result<u64>;

/// A host.
#[derive(Debug)]
pub struct Host {
    root: PathBuf,
    /// Whether this is the machine of the current process.
    is_this: bool,
    open: Ask,
    may_open: Ask,
    vduse_version: AskVersion,
}

fn open_for_both(path: &Path) -> Result<(), Errno> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    rustix::fs::open(path, flags, Mode::empty()).map(drop)
}

fn may_open_for_both(path: &Path) -> Result<(), Errno> {
    rustix::fs::access(path, Access::READ_OK | Access::WRITE_OK)
}

impl Host {
    /// The machine of the current process.
    #[must_use]
    pub fn this() -> Self {
        Self {
            root: PathBuf::from("/"),
            is_this: true,
            open: open_for_both,
            may_open: may_open_for_both,
            vduse_version: Control::api_version,
        }
    }

    /// A fake host below `root`, whose devices answer as `devices` and `vduse_version` do.
    #[cfg(test)]
    pub(super) fn fake(root: &Path, devices: Ask, vduse_version: AskVersion) -> Self {
        Self {
            root: root.to_owned(),
            is_this: false,
            open: devices,
            may_open: devices,
            vduse_version,
        }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    fn file(&self, path: &str) -> Result<File, Error> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = rustix::fs::open(self.path(path), flags, Mode::empty())
            .map(File::from)
            .map_err(|error| unread(path, error.into()))?;
        match file.metadata() {
            Ok(metadata) if metadata.is_file() => Ok(file),
            Ok(_) => Err(Error::failed(format!("{path} is not a regular file"))),
            Err(error) => Err(unread(path, error)),
        }
    }

    /// The contents of a file of at most `max` bytes.
    pub(crate) fn bytes(&self, path: &str, max: u64) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::new();
        self.file(path)?
            .take(max.saturating_add(1))
            .read_to_end(&mut bytes)
            .map_err(|error| unread(path, error))?;
        if u64::try_from(bytes.len()).is_ok_and(|len| len <= max) {
            return Ok(bytes);
        }
        Err(Error::failed(format!(
            "cannot read {path}: it is larger than {max} bytes"
        )))
    }

    /// A small text file, trimmed; invalid UTF-8 is replaced.
    pub(crate) fn text(&self, path: &str) -> Result<String, Error> {
        let bytes = self.bytes(path, TEXT_MAX)?;
        Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    /// The beginning of a text file that may be long.
    pub(crate) fn beginning(&self, path: &str) -> Result<String, Error> {
        let mut bytes = Vec::new();
        self.file(path)?
            .take(TEXT_MAX)
            .read_to_end(&mut bytes)
            .map_err(|error| unread(path, error))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// A file with one decimal number.
    pub(crate) fn number<T: FromStr>(&self, path: &str) -> Result<T, Error> {
        let text = self.text(path)?;
        text.parse().map_err(|_| odd(path))
    }

    /// The sorted names in a directory; at most [`ENTRIES_MAX`], and only those in UTF-8.
    pub(crate) fn names(&self, path: &str) -> Result<Vec<String>, Error> {
        let mut names: Vec<String> = fs::read_dir(self.path(path))
            .map_err(|error| unread(path, error))?
            .flatten()
            .take(ENTRIES_MAX)
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        names.sort();
        Ok(names)
    }

    /// As [`Self::names`], for a directory of sysfs that the kernel creates only with its first
    /// object: empty if it does not exist. An error if sysfs itself is missing.
    pub(crate) fn sysfs_names(&self, path: &str) -> Result<Vec<String>, Error> {
        match self.names(path) {
            Err(why) if why.is_absent() => self.sysfs().map(|()| Vec::new()),
            names => names,
        }
    }

    /// An error if sysfs is not mounted: then a missing file proves nothing.
    pub(crate) fn sysfs(&self) -> Result<(), Error> {
        const ALWAYS: &str = "/sys/kernel";
        if self.exists(ALWAYS) {
            Ok(())
        } else {
            Err(absent(ALWAYS))
        }
    }

    /// Whether a file of this name exists.
    pub(crate) fn exists(&self, path: &str) -> bool {
        fs::symlink_metadata(self.path(path)).is_ok()
    }

    /// The target of a symbolic link.
    pub(crate) fn link(&self, path: &str) -> Result<String, Error> {
        fs::read_link(self.path(path))
            .map(|target| target.to_string_lossy().into_owned())
            .map_err(|error| unread(path, error))
    }

    /// The last component of a symbolic link: a device's driver, IOMMU group, …
    pub(crate) fn link_name(&self, path: &str) -> Option<String> {
        let link = self.link(path).ok()?;
        let name = Path::new(&link).file_name()?.to_str()?;
        Some(name.to_owned())
    }

    /// The name of the real parent directory: a device's parent.
    pub(crate) fn parent_name(&self, path: &str) -> Option<String> {
        let real = fs::canonicalize(self.path(path)).ok()?;
        let parent = real.parent()?.file_name()?.to_str()?;
        Some(parent.to_owned())
    }

    /// Owner and permissions.
    pub(crate) fn owner(&self, path: &str) -> Result<Owner, Error> {
        let metadata = fs::metadata(self.path(path)).map_err(|error| unread(path, error))?;
        Ok(Owner {
            mode: metadata.mode(),
            gid: metadata.gid(),
            group: self.group_name(metadata.gid()),
            uid: metadata.uid(),
        })
    }

    fn group_name(&self, gid: u32) -> Option<String> {
        let text = self.beginning(groups::PATH).ok()?;
        let (name, _) = groups::parse(&text).find(|(_, number)| *number == gid)?;
        is_plain(name).then(|| name.to_owned())
    }

    /// Opens a device for reading and writing, and closes it. Only for devices that this does not
    /// affect.
    pub(crate) fn open_device(&self, path: &str) -> Result<(), Errno> {
        (self.open)(&self.path(path))
    }

    /// Whether permissions allow opening for reading and writing (access(2)),
    /// without opening.
    pub(crate) fn may_open(&self, path: &str) -> Result<(), Errno> {
        (self.may_open)(&self.path(path))
    }

    /// The API version of the kernel's VDUSE, by its control file.
    pub(crate) fn vduse_version(&self, path: &str) -> io::Result<u64> {
        (self.vduse_version)(&self.path(path))
    }

    /// Visible processes that have the device with this number, `major:minor`, open.
    pub(crate) fn holders(&self, number: &str) -> Vec<Holder> {
        let number = number.split_once(':').and_then(|(major, minor)| {
            Some(rustix::fs::makedev(
                major.parse().ok()?,
                minor.parse().ok()?,
            ))
        });
        match number {
            Some(number) if self.is_this => holder::holders(number),
            _ => Vec::new(),
        }
    }
}

/// Whether a name can be part of a command without quotes.
pub(crate) fn is_plain(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 128
        && !name.starts_with(['-', '.'])
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"_-.:+~".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::super::fake::Tree;
    use super::*;

    #[test]
    fn odd_files_are_refused_with_a_reason() {
        let tree = Tree::new();
        tree.file("/proc/large", vec![b'7'; 70_000]);
        tree.file("/proc/garbage", b"12\xff\xfe");
        tree.file("/proc/negative", "-1\n");
        tree.file("/proc/huge", "99999999999999999999999");
        tree.file("/proc/good", " 42\n");
        tree.directory("/proc/directory");
        tree.fifo("/proc/fifo");
        let host = tree.host();
        let number = |path| host.number::<u64>(path);
        assert_eq!(number("/proc/good").unwrap(), 42);
        for (path, words) in [
            ("/proc/large", "is larger than"),
            ("/proc/garbage", "unexpected content"),
            ("/proc/negative", "unexpected content"),
            ("/proc/huge", "unexpected content"),
            ("/proc/directory", "not a regular file"),
            ("/proc/fifo", "not a regular file"),
        ] {
            let error = number(path).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        let absent = number("/proc/absent").unwrap_err();
        assert!(absent.is_absent());
        assert_eq!(absent.to_string(), "there is no /proc/absent");
        assert!(host.text("/proc/garbage").unwrap().starts_with("12"));
        assert_eq!(host.beginning("/proc/large").unwrap().len(), 65_536);
    }

    #[test]
    fn groups_have_names_only_if_they_can_be_typed() {
        let tree = Tree::new();
        tree.file(
            "/etc/group",
            "x\n:::\nroot:x:0:\nkvm:x:104:qemu\nbad;rm:x:105:\n",
        );
        let host = tree.host();
        assert_eq!(host.group_name(104).unwrap(), "kvm");
        assert_eq!(host.group_name(105), None);
        assert_eq!(host.group_name(7), None);
    }

    #[test]
    fn plain_names() {
        for good in ["nic0", "0000:01:00.0", "6.12.107+deb13-amd64"] {
            assert!(is_plain(good), "{good}");
        }
        for bad in ["", "..", "-rf", "a b", "a;b", "a/b", "ä", "$(x)"] {
            assert!(!is_plain(bad), "{bad}");
        }
    }
}

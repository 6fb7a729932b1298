//! Finds the processes that have a character device open.
//!
//! vhost-vdpa devices open exclusively, and EBUSY does not name the holder. The scan reads the file
//! descriptors in `/proc`, so it finds only processes that this one may inspect.

use std::fmt;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::OFlags;

/// A process that has the device open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Process id.
    pub pid: u32,
    /// Its name (`/proc/PID/comm`).
    pub command: String,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (PID {})", self.command, self.pid)
    }
}

/// All visible processes that have the character device with this device
/// number (`st_rdev`) open, by ascending PID.
#[must_use]
pub fn holders(device_number: u64) -> Vec<Holder> {
    let mut found: Vec<Holder> = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            holds(&entry.path(), device_number).then(|| Holder {
                pid,
                command: process_name(&entry.path()),
            })
        })
        .collect();
    found.sort_by_key(|holder| holder.pid);
    found
}

fn holds(process: &Path, device_number: u64) -> bool {
    fs::read_dir(process.join("fd"))
        .into_iter()
        .flatten()
        .flatten()
        // Following the link gives the open file itself, even if its name in /dev was removed or
        // belongs to another mount namespace.
        .filter(|entry| fs::read_link(entry.path()).is_ok_and(|target| is_in_dev(&target)))
        .filter(|entry| {
            let file = fs::metadata(entry.path());
            file.is_ok_and(|file| file.file_type().is_char_device() && file.rdev() == device_number)
        })
        .any(|entry| !is_path(&process.join("fdinfo").join(entry.file_name())))
}

/// Whether a descriptor names a file without having it open (`O_PATH`). `fdinfo` is its entry in
/// `/proc/PID/fdinfo`.
fn is_path(fdinfo: &Path) -> bool {
    let text = fs::read_to_string(fdinfo).unwrap_or_default();
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
    flags.is_some_and(|flags| flags & OFlags::PATH.bits() != 0)
}

/// Whether an open file is in a directory of device files: that of this host, or that of a sandbox
/// of Bellhop. Other files are not looked at: a stat on a dead network file system would hang.
#[must_use]
pub fn is_in_dev(target: &Path) -> bool {
    target.starts_with("/dev") || target.starts_with("/jail/dev")
}

/// The name of the process with this directory in `/proc`. Unprintable characters are replaced,
/// since the name comes from another process and goes to a terminal. Empty if the process has
/// exited.
#[must_use]
pub fn process_name(process: &Path) -> String {
    let name = fs::read(process.join("comm")).unwrap_or_default();
    String::from_utf8_lossy(&name)
        .trim_end()
        .chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect()
}

/// The list as part of a sentence; a default text if no holder is visible.
pub fn sentence(holders: &[Holder]) -> String {
    if holders.is_empty() {
        return "a process that is not visible from here (`fuser -v` as root names it)".to_owned();
    }
    let names: Vec<String> = holders.iter().map(Holder::to_string).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use rustix::fs::Mode;

    use super::*;

    #[test]
    fn finds_this_process_by_its_open_device() {
        let file = fs::File::open("/dev/full").unwrap();
        let number = file.metadata().unwrap().rdev();
        let own = std::process::id();
        let holder = holders(number).into_iter().find(|holder| holder.pid == own);
        let holder = holder.unwrap();
        assert!(sentence(std::slice::from_ref(&holder)).contains(&format!("PID {own}")));
        assert!(!holder.command.is_empty());
        drop(file);
        // Names it, and does not have it open.
        let _path = rustix::fs::open("/dev/full", OFlags::PATH, Mode::empty()).unwrap();
        assert!(holders(number).iter().all(|holder| holder.pid != own));
    }

    #[test]
    fn an_invisible_holder_still_makes_a_sentence() {
        assert!(sentence(&holders(u64::MAX)).contains("fuser -v"));
    }
}

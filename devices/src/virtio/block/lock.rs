//! The advisory lock of a disk image, and the holders of a conflicting lock.
//!
//! The lock is an open-file-description lock over the whole file. The last copy of the descriptor
//! releases it, however the process ends. The lock moves with a descriptor that is passed on. It
//! conflicts with the byte locks of QEMU, and with another lock of this same process. This module
//! must not know the content of the file.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use vdpa::device::holder::{Holder, process_name};

/// Takes the lock, either `shared` or exclusive. Returns `Ok(false)` if another lock excludes it.
pub(super) fn take(file: &File, shared: bool) -> io::Result<bool> {
    let kind = if shared { libc::F_RDLCK } else { libc::F_WRLCK };
    let narrow = |value: i32| i16::try_from(value).map_err(io::Error::other);
    let request = libc::flock {
        l_type: narrow(kind)?,
        l_whence: narrow(libc::SEEK_SET)?,
        l_start: 0,
        // To the end of the file, wherever it is later.
        l_len: 0,
        // F_OFD_SETLK requires 0.
        l_pid: 0,
    };
    // SAFETY: F_OFD_SETLK reads one `struct flock` through a pointer that is valid
    // for the call, on a descriptor that `file` keeps open. There is no safe
    // wrapper for open-file-description locks among the dependencies.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const request) };
    if result == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => Ok(false),
        _ => Err(error),
    }
}

/// The processes that have locked a file, as far as this process may see them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holders(Vec<Holder>);

impl fmt::Display for Holders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            let hidden = "another process, not visible from here (`fuser -v` as root names it)";
            return f.write_str(hidden);
        }
        let own = std::process::id();
        let names: Vec<String> = self
            .0
            .iter()
            .map(|holder| match holder.pid {
                pid if pid == own => "this process, as another disk".to_owned(),
                _ => format!("another process, {holder}"),
            })
            .collect();
        f.write_str(&names.join(", "))
    }
}

/// Finds the processes that hold a lock on `file`, by ascending PID. The kernel names no owner of
/// open-file-description locks, but it lists the locks of each descriptor.
pub(super) fn holders(file: &File) -> Holders {
    let Ok(metadata) = file.metadata() else {
        return Holders(Vec::new());
    };
    let device = metadata.dev();
    // The format of `lock_get_status` in the kernel's fs/locks.c.
    let locked = format!(
        " {:02x}:{:02x}:{} ",
        libc::major(device),
        libc::minor(device),
        metadata.ino()
    );
    let mut found: Vec<Holder> = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let process = entry.path();
            has_locked(&process, &locked).then(|| Holder {
                pid,
                command: process_name(&process),
            })
        })
        .collect();
    found.sort_by_key(|holder| holder.pid);
    Holders(found)
}

/// Whether one of the process's descriptors has a lock on the file.
fn has_locked(process: &Path, file: &str) -> bool {
    fs::read_dir(process.join("fdinfo"))
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| fs::read_to_string(entry.path()).ok())
        .any(|info| is_locked(&info, file))
}

/// Whether an entry in `/proc/PID/fdinfo` shows a lock on the file.
fn is_locked(info: &str, file: &str) -> bool {
    info.lines()
        .filter_map(|line| line.strip_prefix("lock:"))
        .any(|lock| lock.contains(file))
}

#[cfg(test)]
mod tests {
    use super::super::tests::TempFile;
    use super::*;

    #[test]
    fn the_kernels_account_of_a_descriptor() {
        let info = "pos:\t0\nflags:\t0100002\nmnt_id:\t31\nino:\t77\n\
                    lock:\t1: OFDLCK  ADVISORY  WRITE -1 08:01:77 0 EOF\n";
        assert!(is_locked(info, " 08:01:77 "));
        for other in [" 08:01:7 ", " 08:02:77 ", " 08:01:770 "] {
            assert!(!is_locked(info, other), "{other}");
        }
        assert!(!is_locked("ino:\t08:01:77 \n", " 08:01:77 "));
    }

    #[test]
    fn a_holder_is_named() {
        let file = TempFile::new(&[0; 512]);
        let open = || File::options().read(true).write(true).open(file.path());
        let holder = open().unwrap();
        let other = open().unwrap();
        assert!(take(&holder, false).unwrap());
        assert!(!take(&other, true).unwrap());
        assert_eq!(holders(&other).to_string(), "this process, as another disk");
        drop(holder);
        assert!(holders(&other).to_string().contains("not visible"));
        let holder = Holder {
            pid: 1,
            command: "init".to_owned(),
        };
        let holders = Holders(vec![holder]);
        assert_eq!(holders.to_string(), "another process, init (PID 1)");
    }
}

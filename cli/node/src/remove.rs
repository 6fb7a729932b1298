//! Deletes files and directories that the process of a VM may have created.
//!
//! A captured VMM can nest directories as deep as its file system allows. The recursion of
//! `std::fs::remove_dir_all` takes stack and a descriptor for each level, so it would end the
//! daemon. This module moves each directory to the top instead, which needs neither.

use std::io;
use std::path::Path;

use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

/// More entries than this are an error, so that a process that keeps creating files cannot hold
/// the caller. The next call continues.
const ENTRIES_MAX: u64 = 10_000_000;

/// Deletes a file, or a directory with all that it contains, if there is one. It follows no
/// symbolic link.
///
/// # Errors
/// An entry cannot be deleted, or there are too many. Some entries may be deleted already.
pub(crate) fn remove_any(path: &Path) -> io::Result<()> {
    match rustix::fs::unlink(path) {
        Err(Errno::ISDIR) => remove_tree(path),
        removed => if_there(removed),
    }
}

fn remove_tree(path: &Path) -> io::Result<()> {
    let top = match open(CWD, path) {
        Err(Errno::NOENT) => return Ok(()),
        top => top?,
    };
    let mut removal = Removal::default();
    while removal.remove_entries(&top, &top)? {}
    if_there(rustix::fs::rmdir(path))
}

fn if_there(removed: rustix::io::Result<()>) -> io::Result<()> {
    match removed {
        Err(Errno::NOENT) => Ok(()),
        removed => Ok(removed?),
    }
}

fn open(parent: impl AsFd, name: impl rustix::path::Arg) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(parent, name, flags, Mode::empty())
}

#[derive(Debug, Default)]
struct Removal {
    entries: u64,
    /// The number of the next directory that moves to the top.
    next: u64,
}

impl Removal {
    /// Deletes the files in `directory`. Directories below the top move there; those in the top
    /// are emptied first. Returns whether there were any entries.
    fn remove_entries(&mut self, top: &OwnedFd, directory: &OwnedFd) -> io::Result<bool> {
        let is_top = std::ptr::eq(top, directory);
        let mut any = false;
        for entry in Dir::read_from(directory)? {
            let entry = entry?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            any = true;
            self.entries = self.entries.saturating_add(1);
            if self.entries > ENTRIES_MAX {
                let message = format!("it has more than {ENTRIES_MAX} files: repeat the request");
                return Err(io::Error::other(message));
            }
            match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
                Err(Errno::ISDIR) if is_top => {
                    match open(top, name) {
                        // A process has renamed or replaced it: the next pass finds it.
                        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => continue,
                        below => self.remove_entries(top, &below?)?,
                    };
                    match rustix::fs::unlinkat(top, name, AtFlags::REMOVEDIR) {
                        // A process has added a file: the next pass deletes it.
                        Err(Errno::NOTEMPTY | Errno::NOENT) => {}
                        removed => removed?,
                    }
                }
                Err(Errno::ISDIR) => self.move_up(top, directory, name)?,
                Err(Errno::NOENT) => {}
                removed => removed?,
            }
        }
        Ok(any)
    }

    /// Moves a directory into the top, under a name that is free there.
    fn move_up(&mut self, top: &OwnedFd, from: &OwnedFd, name: &std::ffi::CStr) -> io::Result<()> {
        loop {
            let to = format!("removed-{}", self.next);
            self.next = self.next.saturating_add(1);
            match rustix::fs::renameat_with(from, name, top, to, RenameFlags::NOREPLACE) {
                Err(Errno::EXIST) => {}
                Err(Errno::NOENT) => return Ok(()),
                moved => return Ok(moved?),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_directory_of_any_depth_is_deleted_and_no_link_is_followed() {
        // Deeper than the stack of a thread and the limit of descriptors allow to recurse.
        const DEPTH: usize = 20_000;
        let name = format!("node-remove-tree-{}", std::process::id());
        let root = std::env::temp_dir().join(name);
        let (top, kept) = (root.join("top"), root.join("kept"));
        fs::create_dir_all(top.join("a/b")).unwrap();
        fs::create_dir(&kept).unwrap();
        fs::write(kept.join("file"), "").unwrap();
        symlink(&kept, top.join("link")).unwrap();
        symlink(&kept, top.join("a/b/link")).unwrap();
        // A name that this module would choose.
        fs::write(top.join("removed-0"), "").unwrap();
        let mut last = open(CWD, &top).unwrap();
        for _ in 0..DEPTH {
            rustix::fs::mkdirat(&last, "d", Mode::RWXU).unwrap();
            last = open(&last, "d").unwrap();
        }
        drop(last);
        remove_any(&top).unwrap();
        assert!(!top.exists() && kept.join("file").exists());
        remove_any(&top).unwrap();
        // A link is deleted, not its target.
        symlink(&kept, &top).unwrap();
        remove_any(&top).unwrap();
        remove_any(&kept.join("file")).unwrap();
        fs::remove_dir(&kept).unwrap();
        fs::remove_dir(&root).unwrap();
    }
}

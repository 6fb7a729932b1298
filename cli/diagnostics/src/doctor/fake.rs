//! Fake hosts for tests: a tree of files in a temporary directory.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;

use super::host::Host;

static COUNT: AtomicU32 = AtomicU32::new(0);

/// A directory that serves as `/`; removed when dropped.
pub(super) struct Tree(PathBuf);

impl Tree {
    /// A tree with an empty sysfs.
    pub(super) fn new() -> Self {
        let tree = Self::without_sysfs();
        tree.directory("/sys/kernel");
        tree
    }

    pub(super) fn without_sysfs() -> Self {
        let name = format!(
            "bellhop-doctor-{}-{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        );
        let root = std::env::temp_dir().join(name);
        fs::create_dir(&root).unwrap();
        Self(root)
    }

    pub(super) fn path(&self, path: &str) -> PathBuf {
        let path = self.0.join(path.trim_start_matches('/'));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        path
    }

    pub(super) fn file(&self, path: &str, content: impl AsRef<[u8]>) -> &Self {
        fs::write(self.path(path), content).unwrap();
        self
    }

    pub(super) fn directory(&self, path: &str) -> &Self {
        fs::create_dir_all(self.path(path)).unwrap();
        self
    }

    /// A symbolic link, relative as in sysfs.
    pub(super) fn link(&self, path: &str, target: &str) -> &Self {
        symlink(target, self.path(path)).unwrap();
        self
    }

    pub(super) fn fifo(&self, path: &str) {
        let mode = rustix::fs::Mode::RUSR;
        rustix::fs::mknodat(
            rustix::fs::CWD,
            self.path(path),
            rustix::fs::FileType::Fifo,
            mode,
            0,
        )
        .unwrap();
    }

    /// The host; a device opens if its file exists. The control file of VDUSE has its version.
    pub(super) fn host(&self) -> Host {
        let open = |path: &Path| {
            if path.exists() {
                Ok(())
            } else {
                Err(Errno::NOENT)
            }
        };
        Host::fake(&self.0, open, |path| {
            let text = fs::read_to_string(path).unwrap();
            let number = text.parse();
            number.map_err(|_| io::Error::other("VDUSE has no version"))
        })
    }

    /// The host for a user without permissions.
    pub(super) fn host_without_rights(&self) -> Host {
        let open = |path: &Path| {
            if path.exists() {
                Err(Errno::ACCESS)
            } else {
                Err(Errno::NOENT)
            }
        };
        Host::fake(&self.0, open, |_| panic!("no rights"))
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

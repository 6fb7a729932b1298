//! A path in the lab host's /tmp for one process: for a socket, a file or a directory.

use std::path::Path;

/// A path. It creates nothing there; dropping it removes the file or directory at the path.
#[derive(Debug)]
pub struct TempPath(String);

impl TempPath {
    /// A free path: it removes leftovers of an earlier process with this process ID.
    #[must_use]
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("lab-{name}-{}", std::process::id()));
        let this = Self(path.to_string_lossy().into_owned());
        this.clear();
        this
    }

    /// The path.
    #[must_use]
    pub fn path(&self) -> &Path {
        Path::new(&self.0)
    }

    /// The path as text, for command lines and bodies.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.0
    }

    /// Removes the file or directory, if there is one.
    pub fn clear(&self) {
        let _ = std::fs::remove_dir_all(&self.0);
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Drop for TempPath {
    fn drop(&mut self) {
        self.clear();
    }
}

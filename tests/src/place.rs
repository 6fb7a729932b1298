//! A path of one process's own in the lab host's /tmp: for a socket, a file or a directory.

use std::path::Path;

/// A path; what is there goes with it. Nothing is made there.
#[derive(Debug)]
pub struct Place(String);

impl Place {
    /// A path that is free: what another process with this one's number left there is gone.
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

    /// The same as text, for command lines and bodies.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.0
    }

    /// Takes away what is there, if anything is.
    pub fn clear(&self) {
        let _ = std::fs::remove_dir_all(&self.0);
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.clear();
    }
}

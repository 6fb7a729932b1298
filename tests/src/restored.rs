//! A kernel file whose value a test changes. It is restored even if the test fails.

use crate::error::Result;
use crate::{files, notice};
use std::path::{Path, PathBuf};

/// Restores the original value when dropped.
#[derive(Debug)]
pub struct Restored {
    path: PathBuf,
    before: String,
}

impl Restored {
    /// Saves the file's current value.
    ///
    /// # Errors
    /// [`Error::File`](crate::error::Error::File).
    pub fn keep(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let before = files::read_text(&path)?.trim().to_owned();
        Ok(Self { path, before })
    }

    /// Writes another value to the file.
    ///
    /// # Errors
    /// [`Error::File`](crate::error::Error::File).
    pub fn set(&self, value: &str) -> Result<()> {
        files::write(&self.path, value)
    }
}

impl Drop for Restored {
    fn drop(&mut self) {
        notice::left_behind(self.set(&self.before));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_value_of_before_is_back_at_the_end() {
        let path = std::env::temp_dir().join(format!("lab-restored-{}", std::process::id()));
        files::write(&path, "7\n").unwrap();
        let restored = Restored::keep(&path).unwrap();
        restored.set("9").unwrap();
        assert_eq!(files::read_text(&path).unwrap(), "9");
        drop(restored);
        assert_eq!(files::read_text(&path).unwrap(), "7");
        std::fs::remove_file(&path).unwrap();
    }
}

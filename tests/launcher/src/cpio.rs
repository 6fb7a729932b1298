//! Writes initial ramdisks: cpio archives in the "newc" format.
//!
//! Format: Documentation/driver-api/early-userspace/buffer-format.rst of the kernel. Each entry
//! begins with a header of 110 ASCII bytes (magic "070701", then 13 fields of eight hexadecimal
//! digits). The name with its NUL follows, padding to four bytes, the data, and padding to four
//! bytes. An entry `TRAILER!!!` ends the archive.
//!
//! The same input gives the same archive: times are zero, owners are root, inode numbers count up.

use crate::error::{Error, Result};
use std::io::Write as _;

/// File type bits of the mode field (inode(7)).
const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

/// An archive in memory.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    /// An empty archive.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a directory with mode 0755. Parents must have been added before.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a name that the format cannot hold.
    pub fn directory(&mut self, name: &str) -> Result<()> {
        self.entry(name, DIRECTORY | 0o755, (0, 0), &[])
    }

    /// Adds a regular file with the given permission bits.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a name or size that the format cannot hold.
    pub fn file(&mut self, name: &str, permissions: u32, data: &[u8]) -> Result<()> {
        self.entry(name, REGULAR | (permissions & 0o7777), (0, 0), data)
    }

    /// Adds a symbolic link.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a name that the format cannot hold.
    pub fn symlink(&mut self, name: &str, target: &str) -> Result<()> {
        self.entry(name, SYMLINK | 0o777, (0, 0), target.as_bytes())
    }

    /// Adds a character device with mode 0600.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a name that the format cannot hold.
    pub fn character_device(&mut self, name: &str, major: u32, minor: u32) -> Result<()> {
        self.entry(name, CHARACTER_DEVICE | 0o600, (major, minor), &[])
    }

    /// Ends the archive and returns its bytes.
    ///
    /// # Errors
    /// [`Error::Invalid`] when there are too many entries.
    pub fn finish(mut self) -> Result<Vec<u8>> {
        self.entry("TRAILER!!!", 0, (0, 0), &[])?;
        Ok(self.bytes)
    }

    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), data: &[u8]) -> Result<()> {
        let invalid = |why: &str| Error::invalid(format!("archive entry {name:?}"), why);
        if name.is_empty() || name.contains('\0') || name.starts_with('/') {
            return Err(invalid("the name is empty, absolute, or has a NUL"));
        }
        let name_size =
            u32::try_from(name.len() + 1).map_err(|_| invalid("the name is too long"))?;
        let data_size = u32::try_from(data.len())
            .map_err(|_| invalid("files of 4 GiB and more do not fit the format"))?;
        self.entries = self
            .entries
            .checked_add(1)
            .ok_or_else(|| invalid("there are too many entries"))?;
        let links = if mode & DIRECTORY == DIRECTORY { 2 } else { 1 };
        let (major, minor) = device;
        let fields = [
            self.entries, // inode
            mode,
            0, // user
            0, // group
            links,
            0, // time of modification
            data_size,
            0, // device that holds the file
            0,
            major,
            minor,
            name_size,
            0, // checksum, unused in this format
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            // Writing to a vector cannot fail.
            let _ = write!(self.bytes, "{field:08x}");
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(data);
        self.pad();
        Ok(())
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_follows_the_format() {
        let mut archive = Archive::new();
        archive.directory("dev").unwrap();
        archive.character_device("dev/console", 5, 1).unwrap();
        archive.file("init", 0o755, b"hello").unwrap();
        let bytes = archive.finish().unwrap();
        assert_eq!(&bytes[..6], b"070701");
        assert_eq!(&bytes[14..22], b"000041ed");
        assert_eq!(&bytes[110..114], b"dev\0");
        assert_eq!(bytes.len() % 4, 0);
        let text = String::from_utf8_lossy(&bytes);
        assert!(text.contains("TRAILER!!!"));
        assert!(text.contains("init\0\0hello\0\0\0"));
    }

    #[test]
    fn names_that_do_not_fit_are_refused() {
        let mut archive = Archive::new();
        assert!(archive.directory("").is_err());
        assert!(archive.directory("/abs").is_err());
        assert!(archive.file("a\0b", 0o644, b"").is_err());
    }
}

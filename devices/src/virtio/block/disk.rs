//! The file behind a block device: opening, locking, size.
//!
//! Owns the open file and with it the lock (see `lock.rs`). It must not know virtio.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use super::lock;
use crate::Error;

/// Bytes in a sector, the unit of addresses in requests (virtio 1.3, 5.2.4).
pub const SECTOR: u64 = 512;

/// An open, locked disk image.
#[derive(Debug)]
pub struct Disk {
    file: File,
    sectors: u64,
    read_only: bool,
    physical_block_exp: u8,
}

impl Disk {
    /// Opens and locks an image: exclusively, or shared with other readers if `read_only`. A length
    /// that is not a multiple of 512 is rounded down.
    ///
    /// # Errors
    /// The file does not exist, is not accessible, is no image, is in use, or is smaller than a
    /// sector.
    pub fn open(path: &Path, read_only: bool) -> Result<Self, Error> {
        // Checked before opening, because opening alone affects some devices: a watchdog starts
        // counting. The check of the open file is the authoritative one.
        if let Ok(metadata) = fs::metadata(path) {
            check_kind(path, metadata.file_type())?;
        }
        let file = open_file(path, read_only)?;
        let io_error = |action| move |source| cannot(path, action, source);
        let metadata = file.metadata().map_err(io_error("inspect"))?;
        check_kind(path, metadata.file_type())?;
        // O_NONBLOCK only guards against a pipe without a writer. If kept, it would turn every read
        // that has to wait into EAGAIN.
        rustix::fs::fcntl_setfl(&file, rustix::fs::OFlags::empty())
            .map_err(|errno| io_error("prepare")(errno.into()))?;
        if !lock::take(&file, read_only).map_err(io_error("lock"))? {
            return Err(Error::other(format!(
                "disk image {} is in use by {}; end that use, or open the image with readonly=on \
                 in both",
                path.display(),
                lock::holders(&file)
            )));
        }
        // Unlike the metadata, this is correct for block devices too.
        let len = (&file)
            .seek(SeekFrom::End(0))
            .map_err(io_error("measure"))?;
        if len < SECTOR {
            return Err(Error::other(format!(
                "disk image {} has {len} bytes; at least one sector of 512 is needed",
                path.display()
            )));
        }
        if len % SECTOR != 0 {
            tracing::warn!(
                path = %path.display(),
                "the size of the disk image is not a multiple of 512; the last {} bytes are unused",
                len % SECTOR
            );
        }
        Ok(Self {
            file,
            sectors: len / SECTOR,
            read_only,
            physical_block_exp: physical_block_exp(metadata.blksize()),
        })
    }

    /// Creates a disk of any size on any file, unlocked.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn for_test(file: File, sectors: u64) -> Self {
        Self {
            file,
            sectors,
            read_only: false,
            physical_block_exp: 0,
        }
    }

    /// Returns the open file.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Returns the capacity in sectors of 512 bytes.
    #[must_use]
    pub fn sectors(&self) -> u64 {
        self.sectors
    }

    /// Whether it was opened for reading only.
    #[must_use]
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// Returns log2 of the host's block size in sectors: smaller or unaligned writes make the host
    /// read before it writes.
    #[must_use]
    pub fn physical_block_exp(&self) -> u8 {
        self.physical_block_exp
    }
}

fn open_file(path: &Path, read_only: bool) -> Result<File, Error> {
    OpenOptions::new()
        .read(true)
        .write(!read_only)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
        .map_err(|source| match source.raw_os_error() {
            Some(libc::ENOENT) => Error::other(format!(
                "disk image {}: no such file; check the path, or create it with truncate -s SIZE",
                path.display()
            )),
            Some(libc::EISDIR) => wrong_kind(path, "a directory"),
            Some(libc::EACCES | libc::EPERM | libc::EROFS) if !read_only => no_permission(
                path,
                "read and write it; readonly=on needs only reading",
                source,
            ),
            Some(libc::EACCES | libc::EPERM) => no_permission(path, "read it", source),
            _ => cannot(path, "open", source),
        })
}

/// The error for an action on the image that failed.
fn cannot(path: &Path, action: &str, source: io::Error) -> Error {
    let path = path.display();
    Error::other(format!("disk image {path}: cannot {action} it")).because(source)
}

fn no_permission(path: &Path, access: &str, source: io::Error) -> Error {
    let path = path.display();
    Error::other(format!("disk image {path}: no permission to {access}")).because(source)
}

fn wrong_kind(path: &Path, found: &str) -> Error {
    let path = path.display();
    Error::other(format!(
        "disk image {path} is {found}; a regular file or a block device is needed"
    ))
}

fn check_kind(path: &Path, kind: fs::FileType) -> Result<(), Error> {
    if kind.is_file() || kind.is_block_device() {
        return Ok(());
    }
    Err(wrong_kind(path, describe(kind)))
}

fn describe(kind: fs::FileType) -> &'static str {
    if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a pipe"
    } else if kind.is_char_device() {
        "a character device"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "something else"
    }
}

/// Converts the host's block size in bytes; 0 if it is invalid.
fn physical_block_exp(block_size: u64) -> u8 {
    let sectors = block_size / SECTOR;
    if sectors.is_power_of_two() && sectors <= 128 {
        u8::try_from(sectors.trailing_zeros()).unwrap_or(0)
    } else {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::TempFile;
    use super::*;

    #[test]
    fn rounds_down_and_measures() {
        let file = TempFile::new(&[0; 1300]);
        let disk = Disk::open(file.path(), false).unwrap();
        assert_eq!(disk.sectors(), 2);
        assert!(!disk.read_only());
        assert_eq!(physical_block_exp(4096), 3);
        for odd in [0, 1, 512, 3 * 512, 1 << 40] {
            assert_eq!(physical_block_exp(odd), 0);
        }
    }

    #[test]
    fn refuses_other_files_than_images() {
        let error = Disk::open(Path::new("/nowhere/at/all"), true).unwrap_err();
        assert!(error.to_string().contains("no such file"));

        let directory = std::env::temp_dir();
        for read_only in [true, false] {
            let error = Disk::open(&directory, read_only).unwrap_err();
            assert!(error.to_string().contains("is a directory;"));
        }
        let error = Disk::open(Path::new("/dev/null"), false).unwrap_err();
        assert!(error.to_string().contains("a character device"));

        let short = TempFile::new(&[0; 511]);
        let error = Disk::open(short.path(), false).unwrap_err();
        assert!(error.to_string().contains("has 511 bytes"));
    }

    #[test]
    fn a_pipe_without_a_writer_does_not_hang() {
        let file = TempFile::new(&[]);
        let pipe = file.path().with_extension("pipe");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .unwrap();
        let error = Disk::open(&pipe, true).unwrap_err();
        std::fs::remove_file(&pipe).unwrap();
        assert!(error.to_string().contains("a pipe"));
    }

    #[test]
    fn one_writer_or_many_readers() {
        let file = TempFile::new(&[0; 512]);
        let locked = |read_only| {
            let opened = Disk::open(file.path(), read_only);
            opened.is_err_and(|error| error.to_string().contains("is in use by"))
        };
        let writer = Disk::open(file.path(), false).unwrap();
        assert!(locked(false) && locked(true));
        drop(writer);
        let reader = Disk::open(file.path(), true).unwrap();
        assert!(locked(false) && !locked(true));
        drop(reader);
        assert!(!locked(false));
    }
}

//! A console's log: a file that does not grow beyond a size ([`crate::rotating_file`]).
//!
//! Owns the count of lost bytes. It must not know where the bytes come from.
//!
//! Bytes that cannot be written (the file system is full, a limit) are dropped and counted. Once
//! writing works again, the file states how many are missing.

use std::io;
use std::path::Path;

use crate::Error;
use crate::rotating_file::{NO_FILE, RotatingFile};

/// See the module.
#[derive(Debug)]
pub(super) struct LogFile {
    file: RotatingFile,
    /// Bytes lost since the last one that was written.
    missing: u64,
    /// Bytes lost in total.
    lost: u64,
}

impl LogFile {
    /// Opens or creates `path` and keeps its content. It grows to `limit` bytes.
    ///
    /// # Errors
    /// The file cannot be opened, or is no regular file of this user.
    pub(super) fn open(path: &Path, limit: u64) -> Result<Self, Error> {
        let shown = path.display();
        let failed = |source: io::Error| match source.kind() {
            NO_FILE => Error::host(format!(
                "cannot use {shown} as a console's log: it is not a regular file of this user"
            )),
            _ => Error::host(format!("cannot open the console's log {shown}")).because(source),
        };
        Ok(Self {
            file: RotatingFile::open(path, limit).map_err(failed)?,
            missing: 0,
            lost: 0,
        })
    }

    /// Bytes missing in the log.
    pub(super) fn lost(&self) -> u64 {
        self.lost
    }

    /// Counts bytes that never arrived here.
    pub(super) fn lose(&mut self, count: u64) {
        self.missing = self.missing.saturating_add(count);
        self.lost = self.lost.saturating_add(count);
    }

    /// Writes `bytes`, or drops and counts them.
    pub(super) fn write(&mut self, bytes: &[u8]) {
        if self.missing > 0 {
            let note = format!(
                "\n[bellhop: {} bytes of output are missing here]\n",
                self.missing
            );
            if self.file.append(note.as_bytes()).is_ok() {
                tracing::warn!(
                    bytes = self.missing,
                    "the console's log continues after a gap"
                );
                self.missing = 0;
            }
        }
        if self.missing > 0 {
            return self.lose(bytes.len() as u64);
        }
        if let Err(failed) = self.file.append(bytes) {
            let lost = bytes.len().saturating_sub(failed.written);
            tracing::warn!(
                path = %self.file.path().display(), error = %failed.source,
                "cannot write the console's log: dropping the guest's output"
            );
            self.lose(lost as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::MetadataExt as _;
    use std::path::PathBuf;

    use super::*;

    struct Directory(PathBuf);

    impl Directory {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn log(&self) -> PathBuf {
            self.0.join("console.log")
        }

        fn old(&self) -> PathBuf {
            self.0.join("console.log.1")
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn it_grows_to_its_limit_and_keeps_one_older() {
        let directory = Directory::new("console-log");
        let path = directory.log();
        fs::write(&path, "before\n").unwrap();
        let mut log = LogFile::open(&path, 100).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
        log.write(b"after\n");
        assert_eq!(fs::read(&path).unwrap(), b"before\nafter\n");
        for number in 0..50 {
            log.write(format!("line {number:03}\n").as_bytes());
            assert!(fs::metadata(&path).unwrap().len() <= 100);
        }
        let kept =
            fs::read_to_string(directory.old()).unwrap() + &fs::read_to_string(&path).unwrap();
        assert!(kept.ends_with("line 048\nline 049\n"), "{kept}");
        assert!(kept.len() <= 200 && kept.starts_with("line 0"), "{kept}");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
        assert_eq!(log.lost(), 0);
        // A write larger than the limit is not split: it gets a file of its own.
        log.write(&[b'x'; 300]);
        assert_eq!(fs::metadata(&path).unwrap().len(), 300);
        assert_eq!(fs::read_dir(&directory.0).unwrap().count(), 2);
    }

    #[test]
    fn unwritten_output_is_counted_and_reported_later() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let directory = Directory::new("console-full");
        let path = directory.log();
        let mut log = LogFile::open(&path, 1000).unwrap();
        let file = log.file.file.replace(full);
        log.write(b"12345");
        log.write(b"678");
        assert_eq!((log.lost(), log.missing), (8, 8));
        log.lose(2);
        log.file.file = file;
        log.write(b"again\n");
        let said = fs::read_to_string(&path).unwrap();
        assert_eq!(
            said,
            "\n[bellhop: 10 bytes of output are missing here]\nagain\n"
        );
        assert_eq!((log.lost(), log.missing), (10, 0));
    }

    #[test]
    fn a_failed_rotation_loses_bytes_and_writing_continues() {
        let directory = Directory::new("console-rotate");
        let path = directory.log();
        let mut log = LogFile::open(&path, 10).unwrap();
        log.write(b"0123456789");
        // Not even root replaces a directory by a file.
        fs::create_dir(directory.old()).unwrap();
        log.write(b"lost");
        assert_eq!(log.lost(), 4);
        fs::remove_dir(directory.old()).unwrap();
        log.write(b"kept");
        let said = fs::read_to_string(&path).unwrap();
        assert!(said.ends_with("kept"), "{said}");
        // The file was removed: the next rotation creates it again.
        fs::remove_file(&path).unwrap();
        log.write(b"0123456789");
        log.write(b"x");
        assert_eq!(fs::read(&path).unwrap(), b"x");
    }

    #[test]
    fn foreign_files_are_refused() {
        let directory = Directory::new("console-odd");
        let link = directory.0.join("link");
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        let fifo = directory.0.join("fifo");
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RUSR).unwrap();
        for path in [&link, &fifo, Path::new("/dev/null")] {
            let refused = LogFile::open(path, 100);
            let error = refused.unwrap_err().to_string();
            assert!(error.contains("not a regular file"), "{error}");
        }
        for path in [directory.0.join("no/such"), directory.0.clone()] {
            let refused = LogFile::open(&path, 100);
            let error = refused.unwrap_err().to_string();
            assert!(
                error.starts_with("cannot open the console's log"),
                "{error}"
            );
        }
    }
}

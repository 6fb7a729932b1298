//! Log files for clients: the last lines, and then the additions.
//!
//! Owns positions in a log that rotates.
//!
//! ```text
//!   FILE.1 (the older one) ──┐
//!   FILE ────────────────────┴──> the last lines, and the position behind them
//!   position ──> the text added since, also if FILE is FILE.1 by now; else all of both, with a gap
//! ```
//! A process that its guest has compromised may replace its log by anything: the daemon follows no
//! link, and reads only regular files.

use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::UNIX_EPOCH;

use crate::remove::remove_any;

/// The most bytes per read.
const BYTES_MAX: usize = 1 << 20;
/// How often both files are opened until they are different files.
const TRIES: usize = 4;

/// Identifies a file under any name. An inode number alone is soon reused.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Identity {
    inode: u64,
    /// Birth time in nanoseconds since 1970; 0 on file systems that do not record it.
    birth: u64,
}

/// A position in a log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Position {
    file: Identity,
    offset: u64,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}-{}", self.file.inode, self.file.birth, self.offset)
    }
}

/// A text that is not a position.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct BadPosition;

impl FromStr for Position {
    type Err = BadPosition;

    fn from_str(text: &str) -> Result<Self, BadPosition> {
        let mut numbers = text.split('-').map(|number| number.parse().ok());
        let mut number = || numbers.next().flatten().ok_or(BadPosition);
        let file = Identity {
            inode: number()?,
            birth: number()?,
        };
        let offset = number()?;
        match numbers.next() {
            None => Ok(Self { file, offset }),
            Some(_) => Err(BadPosition),
        }
    }
}

/// A part of a log.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// The bytes, unchanged.
    pub(crate) bytes: Vec<u8>,
    /// The position of its end.
    pub(crate) end: Position,
    /// Whether text between the requested position and its beginning is missing.
    pub(crate) gap: bool,
}

/// One of the two files.
struct Segment {
    file: File,
    identity: Identity,
    /// Its length when it was opened.
    length: u64,
}

impl Segment {
    fn open(path: &Path) -> io::Result<Option<Self>> {
        let opened = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(path);
        let file = match opened {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        let birth = metadata.created().ok();
        let birth = birth.and_then(|birth| birth.duration_since(UNIX_EPOCH).ok());
        let birth = birth.and_then(|birth| u64::try_from(birth.as_nanos()).ok());
        Ok(Some(Self {
            identity: Identity {
                inode: metadata.ino(),
                birth: birth.unwrap_or_default(),
            },
            length: metadata.len(),
            file,
        }))
    }

    /// At most `room` bytes from `offset` on.
    fn read(&self, offset: u64, room: usize) -> io::Result<Vec<u8>> {
        let rest = usize::try_from(self.length.saturating_sub(offset)).unwrap_or(room);
        let mut bytes = vec![0; rest.min(room)];
        let mut filled = 0;
        while let Some(space) = bytes.get_mut(filled..)
            && !space.is_empty()
        {
            match self
                .file
                .read_at(space, offset.saturating_add(filled as u64))
            {
                // The file was truncated meanwhile.
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        bytes.truncate(filled);
        Ok(bytes)
    }

    /// At most `room` of its last bytes.
    fn end(&self, room: usize) -> io::Result<Vec<u8>> {
        self.read(self.length.saturating_sub(room as u64), room)
    }
}

/// Deletes a file at the path of a log or of the older one, unless the VM's process can use it as a
/// log. A captured process before may have created it.
///
/// # Errors
/// A file cannot be deleted.
pub(crate) fn free(log: &Path) -> io::Result<()> {
    for path in [log.to_owned(), older(log)] {
        let is_usable = |found: fs::Metadata| found.is_file() && found.mode() & 0o600 == 0o600;
        if fs::symlink_metadata(&path).is_ok_and(|found| !is_usable(found)) {
            remove_any(&path)?;
        }
    }
    Ok(())
}

fn older(path: &Path) -> PathBuf {
    let mut older = OsString::from(path);
    older.push(".1");
    older.into()
}

/// The existing files, the older one first.
fn segments(path: &Path) -> io::Result<Vec<Segment>> {
    for _ in 0..TRIES {
        // In this order no file is missed. A file that rotates in between appears twice.
        let current = Segment::open(path)?;
        let older = Segment::open(&older(path))?;
        let which = |segment: &Option<Segment>| segment.as_ref().map(|segment| segment.identity);
        if current.is_none() || which(&current) != which(&older) {
            return Ok(older.into_iter().chain(current).collect());
        }
    }
    Err(io::Error::other("it rotates too fast"))
}

/// The last lines of a log, at most 1 MiB of them.
///
/// # Errors
/// The files cannot be read.
pub(crate) fn tail(path: &Path, lines: usize) -> io::Result<Part> {
    let segments = segments(path)?;
    let mut bytes = Vec::new();
    for segment in segments.iter().rev() {
        let mut end = segment.end(BYTES_MAX.saturating_sub(bytes.len()))?;
        end.append(&mut bytes);
        bytes = end;
    }
    let end = segments.last().map(|segment| Position {
        file: segment.identity,
        offset: segment.length,
    });
    Ok(Part {
        bytes: last_lines(bytes, lines),
        end: end.unwrap_or_default(),
        gap: false,
    })
}

/// An unterminated line counts as one.
fn last_lines(mut bytes: Vec<u8>, lines: usize) -> Vec<u8> {
    let complete = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
    let breaks = complete.iter().enumerate().rev();
    let mut breaks = breaks.filter(|(_, byte)| **byte == b'\n');
    let begin = match lines.checked_sub(1) {
        Some(between) => breaks.nth(between).map_or(0, |(place, _)| place + 1),
        None => bytes.len(),
    };
    bytes.drain(..begin);
    bytes
}

/// The text after a position, at most 1 MiB of it.
///
/// # Errors
/// The files cannot be read.
pub(crate) fn after(path: &Path, position: Position) -> io::Result<Part> {
    let segments = segments(path)?;
    let known = segments
        .iter()
        .position(|segment| segment.identity == position.file && segment.length >= position.offset);
    let mut part = Part {
        bytes: Vec::new(),
        end: position,
        gap: known.is_none() && position != Position::default(),
    };
    if known.is_none() {
        part.end = Position::default();
    }
    for segment in segments.iter().skip(known.unwrap_or_default()) {
        let room = BYTES_MAX.saturating_sub(part.bytes.len());
        let offset = if segment.identity == part.end.file {
            part.end.offset
        } else {
            0
        };
        let read = segment.read(offset, room)?;
        part.end = Position {
            file: segment.identity,
            offset: offset.saturating_add(read.len() as u64),
        };
        part.bytes.extend(read);
        if part.end.offset < segment.length {
            break;
        }
    }
    Ok(part)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    struct Log(PathBuf);

    impl Log {
        fn new(name: &str) -> Self {
            let directory =
                std::env::temp_dir().join(format!("bellhop-logs-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&directory);
            fs::create_dir(&directory).unwrap();
            Self(directory.join("vmm.log"))
        }

        fn add(&self, text: &str) {
            use std::io::Write as _;
            let mut file = File::options()
                .append(true)
                .create(true)
                .open(&self.0)
                .unwrap();
            file.write_all(text.as_bytes()).unwrap();
        }

        fn rotate(&self) {
            fs::rename(&self.0, older(&self.0)).unwrap();
        }

        fn tail(&self, lines: usize) -> (String, Position) {
            let part = tail(&self.0, lines).unwrap();
            (String::from_utf8(part.bytes).unwrap(), part.end)
        }

        fn after(&self, position: Position) -> (String, Position, bool) {
            let part = after(&self.0, position).unwrap();
            (String::from_utf8(part.bytes).unwrap(), part.end, part.gap)
        }
    }

    impl Drop for Log {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(self.0.parent().unwrap());
        }
    }

    #[test]
    fn the_last_lines_come_from_both_files() {
        let log = Log::new("tail");
        assert_eq!(log.tail(5), (String::new(), Position::default()));
        log.add("a\nb\n");
        assert_eq!(log.tail(1).0, "b\n");
        assert_eq!(log.tail(0).0, "");
        assert_eq!(log.tail(2).0, "a\nb\n");
        log.rotate();
        // Between the two steps of a rotation.
        assert_eq!(log.tail(9).0, "a\nb\n");
        log.add("c\nlogin: ");
        assert_eq!(log.tail(1).0, "login: ");
        assert_eq!(log.tail(3).0, "b\nc\nlogin: ");
        assert_eq!(log.tail(9).0, "a\nb\nc\nlogin: ");
        log.add(&"x".repeat(2 * BYTES_MAX));
        assert_eq!(log.tail(9).0.len(), BYTES_MAX);
    }

    #[test]
    fn appended_lines_are_read_once_across_rotations() {
        let log = Log::new("after");
        let (_, position) = log.tail(9);
        log.add("a\n");
        let (text, position, gap) = log.after(position);
        assert_eq!((text.as_str(), gap), ("a\n", false));
        assert_eq!(log.after(position), (String::new(), position, false));
        log.add("b\n");
        log.rotate();
        log.add("c\n");
        let (text, position, gap) = log.after(position);
        assert_eq!((text.as_str(), gap), ("b\nc\n", false));
        // After two rotations the position is gone: the whole kept text follows, with a gap.
        for text in ["d\n", "e\n"] {
            // The clock of file systems ticks every few milliseconds.
            std::thread::sleep(std::time::Duration::from_millis(30));
            log.rotate();
            log.add(text);
        }
        let (text, _, gap) = log.after(position);
        assert_eq!((text.as_str(), gap), ("d\ne\n", true));
        // A large part arrives in pieces.
        let (_, mut position) = log.tail(0);
        log.add(&"x".repeat(BYTES_MAX + 10));
        for length in [BYTES_MAX, 10, 0] {
            let (text, next, gap) = log.after(position);
            assert_eq!((text.len(), gap), (length, false));
            position = next;
        }
    }

    #[test]
    fn positions_are_text_and_odd_files_are_refused() {
        let log = Log::new("odd");
        log.add("a\n");
        let (_, position) = log.tail(1);
        assert_eq!(position.to_string().parse(), Ok(position));
        for bad in [
            "",
            "1",
            "-",
            "1-2",
            "1-2-x",
            "1-2-3-4",
            "-1-2-3",
            "1-2-99999999999999999999",
        ] {
            assert_eq!(bad.parse::<Position>(), Err(BadPosition), "{bad}");
        }
        let beyond = Position {
            offset: 1000,
            ..position
        };
        assert_eq!(log.after(beyond).0, "a\n");
        fs::remove_file(&log.0).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", &log.0).unwrap();
        tail(&log.0, 1).unwrap_err();
        fs::remove_file(&log.0).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, &log.0, rustix::fs::Mode::RUSR).unwrap();
        tail(&log.0, 1).unwrap_err();
    }

    #[test]
    fn a_log_is_kept_and_anything_else_at_its_paths_is_deleted() {
        let owned = Log::new("odd");
        let log = owned.0.clone();
        let (older, kept) = (older(&log), log.with_file_name("kept"));
        fs::write(&kept, "kept").unwrap();
        free(&log).unwrap();
        for path in [&log, &older] {
            let none = || assert!(fs::symlink_metadata(path).is_err(), "{}", path.display());
            fs::create_dir_all(path.join("a/b")).unwrap();
            free(&log).unwrap();
            none();
            symlink(&kept, path).unwrap();
            free(&log).unwrap();
            none();
            fs::write(path, "text").unwrap();
            free(&log).unwrap();
            assert_eq!(fs::read(path).unwrap(), b"text");
            // Its user could not open it.
            fs::set_permissions(path, fs::Permissions::from_mode(0o000)).unwrap();
            free(&log).unwrap();
            none();
        }
        assert_eq!(fs::read(&kept).unwrap(), b"kept");
    }
}

//! A `.tar.gz` of files that are in memory: ustar (POSIX.1-2017, pax, "ustar Interchange Format") inside
//! gzip (RFC 1952).
//!
//! Owns both formats, of which it writes regular files only. Must not know what is in them.

use std::io;

use miniz_oxide::deflate::compress_to_vec;

/// The unit of a tar archive, in bytes.
const BLOCK: usize = 512;
/// Where fields of a header are: offset, size in bytes.
const NAME: (usize, usize) = (0, 100);
const MODE: (usize, usize) = (100, 8);
const OWNER: (usize, usize) = (108, 8);
const GROUP: (usize, usize) = (116, 8);
const SIZE: (usize, usize) = (124, 12);
const TIME: (usize, usize) = (136, 12);
const CHECKSUM: (usize, usize) = (148, 8);
const TYPE: usize = 156;
const MAGIC: (usize, usize) = (257, 8);
const PREFIX: (usize, usize) = (345, 155);
/// How well it is compressed: the usual balance.
const LEVEL: u8 = 6;

/// An archive that grows.
#[derive(Debug, Clone)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    /// When its files were written, in seconds since 1970.
    time: u64,
}

impl Archive {
    pub(crate) fn new(time: u64) -> Self {
        Self {
            bytes: Vec::new(),
            time,
        }
    }

    /// Adds a file. Its `name` has directories in front, divided by slashes.
    ///
    /// # Errors
    /// The name or the size does not fit into a header.
    pub(crate) fn add(&mut self, name: &str, content: &[u8]) -> io::Result<()> {
        let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidInput, what.to_owned());
        let (prefix, name) = split(name).ok_or_else(|| invalid("the name is too long"))?;
        let size = u64::try_from(content.len()).map_err(io::Error::other)?;
        let mut header = [0; BLOCK];
        put(&mut header, NAME, name.as_bytes());
        put(&mut header, PREFIX, prefix.as_bytes());
        put(&mut header, MODE, b"0000600\0");
        put(&mut header, OWNER, b"0000000\0");
        put(&mut header, GROUP, b"0000000\0");
        put(
            &mut header,
            SIZE,
            &octal(size).ok_or_else(|| invalid("the file is too large"))?,
        );
        put(
            &mut header,
            TIME,
            &octal(self.time).ok_or_else(|| invalid("the time is too late"))?,
        );
        // Counted as if the checksum were blanks.
        put(&mut header, CHECKSUM, b"        ");
        put(&mut header, MAGIC, b"ustar\x0000");
        header[TYPE] = b'0';
        let sum: u32 = header.iter().copied().map(u32::from).sum();
        put(&mut header, CHECKSUM, format!("{sum:06o}\0 ").as_bytes());
        self.bytes.extend_from_slice(&header);
        self.bytes.extend_from_slice(content);
        let end = self.bytes.len().next_multiple_of(BLOCK);
        self.bytes.resize(end, 0);
        Ok(())
    }

    /// The whole archive, compressed.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        // Two blocks of zeros end it.
        let end = self.bytes.len().saturating_add(2 * BLOCK);
        self.bytes.resize(end, 0);
        gzip(&self.bytes)
    }
}

/// The part in front of the last slash at which both fit, and the rest.
fn split(name: &str) -> Option<(&str, &str)> {
    if name.len() <= NAME.1 {
        return Some(("", name));
    }
    name.match_indices('/')
        .filter_map(|(at, _)| Some((name.get(..at)?, name.get(at + 1..)?)))
        .find(|(prefix, rest)| prefix.len() <= PREFIX.1 && rest.len() <= NAME.1 && !rest.is_empty())
}

/// Eleven octal digits and a zero byte; `None` from 8 GiB on.
fn octal(number: u64) -> Option<Vec<u8>> {
    let digits = format!("{number:011o}\0").into_bytes();
    (digits.len() == SIZE.1).then_some(digits)
}

fn put(header: &mut [u8; BLOCK], (offset, size): (usize, usize), value: &[u8]) {
    let field = header.get_mut(offset..offset + size).unwrap_or_default();
    for (byte, value) in field.iter_mut().zip(value) {
        *byte = *value;
    }
}

/// RFC 1952: a header without a name and a time, deflate, CRC-32 and size modulo 2^32.
fn gzip(bytes: &[u8]) -> Vec<u8> {
    const HEADER: [u8; 10] = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];
    const WRAP: usize = 1 << 32;
    let size = u32::try_from(bytes.len() % WRAP).unwrap_or_default();
    let mut compressed = HEADER.to_vec();
    compressed.extend(compress_to_vec(bytes, LEVEL));
    compressed.extend(crc32(bytes).to_le_bytes());
    compressed.extend(size.to_le_bytes());
    compressed
}

/// The CRC-32 of gzip: polynomial 0x04c11db7, reflected.
fn crc32(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = crc_table();
    let crc = bytes.iter().fold(u32::MAX, |crc, byte| {
        let [low, ..] = crc.to_le_bytes();
        TABLE[usize::from(low ^ byte)] ^ (crc >> 8)
    });
    !crc
}

const fn crc_table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut index = 0;
    let mut seed: u32 = 0;
    while index < table.len() {
        let mut crc = seed;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 {
                (crc >> 1) ^ 0xedb8_8320
            } else {
                crc >> 1
            };
            bit += 1;
        }
        table[index] = crc;
        index += 1;
        seed += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn the_crc_is_that_of_the_standard() {
        // The check value of CRC-32/ISO-HDLC.
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        assert_eq!(crc32(b""), 0);
    }

    #[test]
    fn names_are_split_where_both_parts_fit() {
        assert_eq!(split("a/b"), Some(("", "a/b")));
        let (long, short) = ("d".repeat(90), "f".repeat(90));
        let name = format!("{long}/{short}");
        assert_eq!(split(&name), Some((long.as_str(), short.as_str())));
        assert_eq!(split(&"x".repeat(101)), None);
        assert_eq!(split(&format!("{}/f", "d".repeat(156))), None);
        let mut archive = Archive::new(0);
        assert!(archive.add(&"x".repeat(101), b"").is_err());
        assert!(octal(1 << 33).is_none() && octal((1 << 33) - 1).is_some());
    }

    #[test]
    fn tar_reads_what_was_written() {
        let deep = format!("top/{}/{}.txt", "d".repeat(80), "f".repeat(60));
        let large: Vec<u8> = (0..100_000_u32).flat_map(u32::to_le_bytes).collect();
        let mut archive = Archive::new(1_700_000_000);
        archive.add("top/empty", b"").unwrap();
        archive.add("top/block", &[b'x'; BLOCK]).unwrap();
        archive.add(&deep, b"deep\n").unwrap();
        archive.add("top/large", &large).unwrap();
        let bytes = archive.finish();
        let tar = |arguments: &[&str]| {
            let mut tar = Command::new("tar")
                .args(arguments)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut input = tar.stdin.take().unwrap();
            let bytes = bytes.clone();
            let writer = std::thread::spawn(move || {
                let _ = input.write_all(&bytes);
            });
            let output = tar.wait_with_output().unwrap();
            writer.join().unwrap();
            assert!(output.status.success());
            output.stdout
        };
        let list = String::from_utf8(tar(&["-tzf", "-"])).unwrap();
        let wanted = format!("top/empty\ntop/block\n{deep}\ntop/large\n");
        assert_eq!(list, wanted);
        assert_eq!(tar(&["-xzOf", "-", &deep]), b"deep\n");
        assert_eq!(tar(&["-xzOf", "-", "top/large"]), large);
    }
}

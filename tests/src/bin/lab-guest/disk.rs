//! Disks: writes a pattern, reads it back past the cache, and verifies it.

use crate::random::Sequence;
use lab::error::{Error, Result};
use lab::files;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Bytes in a sector, as sysfs counts them.
const SECTOR: u64 = 512;

/// Sectors handled at a time.
const PIECE: u64 = 256;

/// Writes a pattern made from `seed` to the first `sectors` sectors, drops the
/// page cache, reads them back and compares.
pub(crate) fn check(device: &str, seed: u64, sectors: u64) -> Result<Value> {
    let path = find_with(device, sectors)?;
    let started = Instant::now();
    {
        let mut disk = File::options()
            .write(true)
            .open(&path)
            .map_err(Error::file("open", &path))?;
        for_pieces(sectors, |first, length| {
            disk.write_all(&pattern(seed, first, length))
                .map_err(Error::file("write", &path))
        })?;
        disk.sync_all().map_err(Error::file("flush", &path))?;
    }
    let written = started.elapsed();
    let mut value = compare(&path, seed, sectors)?;
    if let Some(object) = value.as_object_mut() {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        object.insert("write_us".into(), micros(written).into());
        object.insert("elapsed_us".into(), micros(started.elapsed()).into());
    }
    Ok(value)
}

/// Reads the pattern of an earlier [`check`], perhaps from before a reboot, and compares.
pub(crate) fn verify(device: &str, seed: u64, sectors: u64) -> Result<Value> {
    compare(&find_with(device, sectors)?, seed, sectors)
}

fn compare(path: &Path, seed: u64, sectors: u64) -> Result<Value> {
    files::write(Path::new("/proc/sys/vm/drop_caches"), "3")?;
    let mut disk = File::open(path).map_err(Error::file("open", path))?;
    let mut wrong = 0_u64;
    let mut first_wrong = None;
    for_pieces(sectors, |first, length| {
        let expected = pattern(seed, first, length);
        let mut bytes = vec![0; expected.len()];
        disk.read_exact(&mut bytes)
            .map_err(Error::file("read", path))?;
        // 512 bytes each; the pieces are whole sectors.
        for (index, (is, should)) in bytes.chunks(512).zip(expected.chunks(512)).enumerate() {
            if is != should {
                wrong += 1;
                first_wrong = first_wrong.or(u64::try_from(index).ok().map(|index| first + index));
            }
        }
        Ok(())
    })?;
    Ok(json!({
        "sectors": sectors,
        "wrong": wrong,
        "first_wrong": first_wrong,
    }))
}

/// Reads the whole disk past the page cache.
pub(crate) fn read(device: &str) -> Result<Value> {
    let (path, size) = find(device)?;
    files::write(Path::new("/proc/sys/vm/drop_caches"), "3")?;
    let started = Instant::now();
    let mut disk = File::open(&path).map_err(Error::file("open", &path))?;
    let mut digest = Sha256::new();
    for_pieces(size, |_, length| {
        let mut bytes = vec![0; bytes_in(length)];
        disk.read_exact(&mut bytes)
            .map_err(Error::file("read", &path))?;
        digest.update(&bytes);
        Ok(())
    })?;
    let mut sum = String::new();
    for byte in digest.finalize() {
        // Writing to a string cannot fail.
        let _ = write!(sum, "{byte:02x}");
    }
    Ok(json!({
        "sectors": size,
        "sha256": sum,
        "elapsed_us": started.elapsed().as_micros(),
    }))
}

/// A disk's device file and its size in sectors.
fn find(device: &str) -> Result<(PathBuf, u64)> {
    let plain = !device.is_empty() && device.chars().all(|c| c.is_ascii_alphanumeric());
    let size = crate::info::attribute(Path::new("/sys/block").join(device).join("size"))
        .filter(|_| plain)
        .and_then(|size| size.parse().ok())
        .ok_or_else(|| Error::invalid("DEV", format!("there is no disk {device:?}")))?;
    Ok((Path::new("/dev").join(device), size))
}

/// The device file of a disk that has at least this many sectors.
fn find_with(device: &str, sectors: u64) -> Result<PathBuf> {
    let (path, size) = find(device)?;
    if sectors == 0 || sectors > size {
        return Err(Error::invalid("SECTORS", format!("{device} has {size}")));
    }
    Ok(path)
}

fn for_pieces(sectors: u64, mut each: impl FnMut(u64, u64) -> Result<()>) -> Result<()> {
    let mut first = 0;
    while first < sectors {
        let length = PIECE.min(sectors - first);
        each(first, length)?;
        first += length;
    }
    Ok(())
}

/// At most [`PIECE`] sectors in bytes.
fn bytes_in(sectors: u64) -> usize {
    usize::try_from(sectors.min(PIECE) * SECTOR).unwrap_or(0)
}

/// Every sector has its own pattern, so that a misplaced sector is detected.
fn pattern(seed: u64, first: u64, sectors: u64) -> Vec<u8> {
    let mut bytes = vec![0; bytes_in(sectors)];
    for (sector, piece) in (first..).zip(bytes.chunks_mut(512)) {
        Sequence::new(seed ^ sector.wrapping_mul(0x2545_f491_4f6c_dd1d)).fill(piece);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sector_has_its_pattern_wherever_a_piece_starts() {
        let whole = pattern(1, 0, 4);
        assert_eq!(&whole[1024..], pattern(1, 2, 2));
        assert_ne!(&whole[..512], &whole[512..1024]);
    }

    #[test]
    fn pieces_cover_everything_once() {
        let mut seen = Vec::new();
        for_pieces(600, |first, length| {
            seen.push((first, length));
            Ok(())
        })
        .unwrap();
        assert_eq!(seen, [(0, 256), (256, 256), (512, 88)]);
    }

    #[test]
    fn device_names_are_names() {
        assert!(find("../etc").is_err());
        assert!(find("").is_err());
    }
}

//! Memory: writes a pattern to a file in RAM, verifies it, and reports where in guest-physical
//! memory the kernel took the pages from.
//!
//! Linux fills its highest zone first, so on a machine with RAM above 4 GiB the file lies there.
//! The zone's count of free pages proves it.

use crate::random::Sequence;
use lab::error::{Error, Result};
use lab::files;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::Path;

/// The file; /tmp is a tmpfs.
const FILE: &str = "/tmp/memory-check";

/// Bytes handled at a time.
const PIECE: u64 = 1 << 20;

/// Most MiB of one check.
const MAXIMUM: u64 = 4096;

/// `memory-check`: writes and verifies `mib` MiB.
pub(crate) fn check(mib: u64) -> Result<Value> {
    if mib == 0 || mib > MAXIMUM {
        return Err(Error::invalid("MIB", format!("it is not in 1..={MAXIMUM}")));
    }
    let path = Path::new(FILE);
    let before = free_above_4_gib()?;
    let checked = write_and_verify(path, mib);
    let after = free_above_4_gib()?;
    std::fs::remove_file(path).map_err(Error::file("remove", path))?;
    Ok(json!({
        "wrong_mib": checked?,
        "taken_above_4gib_kib": before.saturating_sub(after),
        "ram": system_ram()?,
    }))
}

fn write_and_verify(path: &Path, mib: u64) -> Result<u64> {
    let mut file = File::options()
        .create(true)
        .truncate(true)
        .read(true)
        .write(true)
        .open(path)
        .map_err(Error::file("open", path))?;
    for number in 0..mib {
        file.write_all(&pattern(number))
            .map_err(Error::file("write", path))?;
    }
    let mut file = File::open(path).map_err(Error::file("open", path))?;
    let mut wrong = 0;
    for number in 0..mib {
        let expected = pattern(number);
        let mut bytes = vec![0; expected.len()];
        file.read_exact(&mut bytes)
            .map_err(Error::file("read", path))?;
        wrong += u64::from(bytes != expected);
    }
    Ok(wrong)
}

/// Every MiB has its own pattern, so that two that share pages are detected.
fn pattern(number: u64) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(PIECE).unwrap_or(0)];
    Sequence::new(number.wrapping_mul(0x2545_f491_4f6c_dd1d)).fill(&mut bytes);
    bytes
}

/// KiB that are free in the zone above 4 GiB; 0 if there is no such zone.
fn free_above_4_gib() -> Result<u64> {
    Ok(free_in_normal(&files::read_text(Path::new("/proc/zoneinfo"))?).unwrap_or(0))
}

/// The zone named Normal begins at 4 GiB on x86-64 (arch/x86/mm/init.c).
fn free_in_normal(zoneinfo: &str) -> Option<u64> {
    let pages: u64 = zoneinfo
        .lines()
        .skip_while(|line| !(line.starts_with("Node") && line.trim_end().ends_with("Normal")))
        .find_map(|line| line.trim().strip_prefix("pages free"))?
        .trim()
        .parse()
        .ok()?;
    // A page has 4 KiB on x86-64.
    pages.checked_mul(4)
}

/// First and last address of each range of RAM.
fn system_ram() -> Result<Vec<[u64; 2]>> {
    Ok(ram_ranges(&files::read_text(Path::new("/proc/iomem"))?))
}

fn ram_ranges(iomem: &str) -> Vec<[u64; 2]> {
    iomem
        .lines()
        .filter_map(|line| line.split_once(" : "))
        .filter(|(range, name)| *name == "System RAM" && !range.starts_with(' '))
        .filter_map(|(range, _)| {
            let (first, last) = range.split_once('-')?;
            Some([
                u64::from_str_radix(first, 16).ok()?,
                u64::from_str_radix(last, 16).ok()?,
            ])
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_right_zone_is_read() {
        let text = "Node 0, zone    DMA32\n  pages free     7\n        boost    0\n\
                    Node 0, zone   Normal\n  per-node stats\n  pages free     25\n";
        assert_eq!(free_in_normal(text), Some(100));
        assert_eq!(free_in_normal("Node 0, zone DMA32\n  pages free 7\n"), None);
    }

    #[test]
    fn ranges_of_ram_are_read() {
        let text = "00001000-0009ffff : System RAM\n  00000000-00000000 : System RAM\n\
                    000a0000-000fffff : Reserved\n100000000-121ffffff : System RAM\n";
        assert_eq!(
            ram_ranges(text),
            [[0x1000, 0x9_ffff], [0x1_0000_0000, 0x1_21ff_ffff]]
        );
    }
}

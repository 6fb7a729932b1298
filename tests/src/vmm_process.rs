//! The cost of a running VMM, by the kernel's account (`/proc/PID`).

use crate::error::{Error, Result};
use crate::files;
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

/// The resources of a VMM's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cost {
    /// Resident memory in KiB, without guest RAM.
    pub rss_outside_ram_kib: u64,
    /// The part of it that belongs to no file or was written to, in KiB. Pages of the program's
    /// file come and go with the page cache and with recent execution; these pages stay until the
    /// process frees them.
    pub own_kib: u64,
    /// Its threads, without those that the kernel runs on its behalf (KVM's `kvm-nx-lpage-re`,
    /// `iou-…`).
    pub threads: u64,
    /// Open file descriptors.
    pub descriptors: u64,
    /// Pages pinned for devices, in KiB (VmPin), with those of VFIO's containers (VmLck).
    pub pinned_kib: u64,
    /// Memory mappings.
    pub mappings: u64,
}

/// Reads the resources of the process `pid`.
///
/// # Errors
/// [`Error::File`] if there is no such process; [`Error::Invalid`] for an answer in an unexpected
/// format.
pub fn cost(pid: u32) -> Result<Cost> {
    let directory = PathBuf::from(format!("/proc/{pid}"));
    let smaps = files::read_text(&directory.join("smaps"))?;
    let status = files::read_text(&directory.join("status"))?;
    let (resident, mappings) = outside_ram(&smaps);
    Ok(Cost {
        rss_outside_ram_kib: resident.all_kib,
        own_kib: resident.own_kib,
        threads: threads(&directory)?,
        descriptors: count(files::list(&directory.join("fd"))?.len()),
        pinned_kib: kib_of(&status, "VmPin")?.saturating_add(kib_of(&status, "VmLck")?),
        mappings,
    })
}

/// The open descriptors of a process. Each has its number and its file, such as
/// `7 /dev/vhost-vdpa-0`.
///
/// # Errors
/// [`Error::File`] if there is no such process.
pub fn descriptors(pid: u32) -> Result<BTreeSet<String>> {
    let all = files::list(&PathBuf::from(format!("/proc/{pid}/fd")))?;
    // A descriptor may be closed during the scan.
    let open = all.iter().filter_map(|path| {
        let (number, file) = (path.file_name()?, fs::read_link(path).ok()?);
        Some(format!("{} {}", number.display(), file.display()))
    });
    Ok(open.collect())
}

/// The processor time of a process and its threads, also of its guest: user and system time.
///
/// # Errors
/// As [`cost`].
pub fn processor_time(pid: u32) -> Result<Duration> {
    let stat = files::read_text(&PathBuf::from(format!("/proc/{pid}/stat")))?;
    // The name before it may contain anything, even parentheses. Fields 14 and 15 of proc(5), in
    // ticks of 10 ms, as the kernel reports them to programs on x86.
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let mut fields = fields.split_whitespace().skip(11);
    let mut ticks = || fields.next().and_then(|field| field.parse::<u64>().ok());
    let sum = ticks()
        .zip(ticks())
        .map(|(user, system)| user.saturating_add(system));
    let sum = sum.ok_or_else(|| Error::invalid("/proc/PID/stat", "it has no times"))?;
    Ok(Duration::from_millis(sum.saturating_mul(10)))
}

fn kib_of(status: &str, name: &str) -> Result<u64> {
    let missing = || Error::invalid("/proc/PID/status", format!("it has no {name}"));
    field(status, name).ok_or_else(missing)
}

fn count(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

fn threads(directory: &std::path::Path) -> Result<u64> {
    let mut own = 0;
    for task in files::list(&directory.join("task"))? {
        // A thread may exit during the scan.
        let name = files::read_text(&task.join("comm")).unwrap_or_default();
        if !name.starts_with("kvm-") && !name.starts_with("iou-") {
            own += 1;
        }
    }
    Ok(own)
}

/// The names of guest RAM mappings: ours, and those of QEMU's memory-backend-memfd.
const GUEST_RAM: [&str; 2] = ["memfd:guest-ram", "memfd:memory-backend-memfd"];

/// A process's resident memory: its own part, and pages of files, which other processes of the same
/// program share. Guest RAM is left out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Resident {
    /// All, in KiB.
    pub all_kib: u64,
    /// The part that belongs to no file or was written to: each further process costs that again.
    pub own_kib: u64,
}

/// Reads the resident memory of the process `pid`.
///
/// # Errors
/// [`Error::File`] if there is no such process.
pub fn resident(pid: u32) -> Result<Resident> {
    let smaps = files::read_text(&PathBuf::from(format!("/proc/{pid}/smaps")))?;
    Ok(outside_ram(&smaps).0)
}

/// The resident memory of all mappings that are not guest RAM, and the number of mappings.
fn outside_ram(smaps: &str) -> (Resident, u64) {
    let mut resident = Resident::default();
    let mappings = for_each_outside_ram(smaps, |line| {
        resident.all_kib += field(line, "Rss").unwrap_or(0);
        resident.own_kib += field(line, "Anonymous").unwrap_or(0);
    });
    (resident, mappings)
}

/// Passes every line that describes a mapping other than guest RAM; returns the number of all
/// mappings.
fn for_each_outside_ram(smaps: &str, mut line_of: impl FnMut(&str)) -> u64 {
    let mut mappings = 0;
    let mut guest_ram = false;
    for line in smaps.lines() {
        // A mapping begins with its addresses, a field of it with a word and a colon.
        if line
            .split_once(' ')
            .is_some_and(|(first, _)| !first.ends_with(':'))
        {
            guest_ram = GUEST_RAM.iter().any(|name| line.contains(name));
            mappings += 1;
        } else if !guest_ram {
            line_of(line);
        }
    }
    mappings
}

/// The value of a line such as `VmPin:     12 kB`.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let value = line.strip_prefix(name)?.strip_prefix(':')?;
        value.split_whitespace().next()?.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
00400000-00401000 r--p 00000000 00:10 1 /usr/bin/bellhop
Size:                  4 kB
Rss:                   4 kB
Anonymous:             0 kB
Pss:                   4 kB
VmFlags: rd mr
7f0000000000-7f0010000000 rw-s 00000000 00:01 2 /memfd:guest-ram (deleted)
Size:             262144 kB
Rss:               31388 kB
Anonymous:            12 kB
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0 [stack]
Rss:                  32 kB
Anonymous:            28 kB
";

    #[test]
    fn guest_ram_is_left_out() {
        let resident = Resident {
            all_kib: 36,
            own_kib: 28,
        };
        assert_eq!(outside_ram(SMAPS), (resident, 3));
    }

    #[test]
    fn this_process_has_a_cost() {
        let cost = cost(std::process::id()).unwrap();
        assert!(cost.own_kib > 0 && cost.own_kib < cost.rss_outside_ram_kib);
        assert!(cost.descriptors > 0 && cost.threads > 0);
        let own = fs::File::open("/dev/null").unwrap();
        let line = format!("{} /dev/null", std::os::fd::AsRawFd::as_raw_fd(&own));
        let open = descriptors(std::process::id()).unwrap();
        assert!(open.contains(&line), "{open:?}");
        assert!(super::cost(u32::MAX).is_err());
        let resident = resident(std::process::id()).unwrap();
        assert!(resident.own_kib > 0 && resident.own_kib < resident.all_kib);
    }
}

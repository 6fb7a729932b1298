//! The guest's own view: processors, NICs, disks, kernel messages.
//!
//! It only reads sysfs and procfs.

use crate::network;
use lab::error::{Error, Result};
use lab::files;
use serde_json::{Map, Value, json};
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::process::Command;

/// The most kernel messages in one `dmesg`.
const MAXIMUM_MESSAGES: usize = 100;

/// The content of `ready` and `info`.
pub(crate) fn all(problems: &[String]) -> Value {
    json!({
        "uptime_ms": uptime_ms(),
        "unix_ms": unix_ms(),
        "kernel": rustix::system::uname().release().to_string_lossy(),
        "cpus_online": processors_online(),
        "memory_kib": memory_kib(),
        "nics": network::names().iter().map(|name| nic(name)).collect::<Vec<_>>(),
        "disks": disks(),
        "hwrng": hardware_random(),
        "problems": problems,
    })
}

/// Milliseconds since the kernel started.
fn uptime_ms() -> u128 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    std::time::Duration::try_from(time).map_or(0, |time| time.as_millis())
}

/// Milliseconds since 1970, by the guest's clock.
fn unix_ms() -> u128 {
    let since = std::time::SystemTime::UNIX_EPOCH.elapsed();
    since.map_or(0, |since| since.as_millis())
}

fn processors_online() -> usize {
    let list = attribute("/sys/devices/system/cpu/online").unwrap_or_default();
    count_of_list(&list)
}

/// The number of entries in a kernel list like "0-3,6".
fn count_of_list(list: &str) -> usize {
    list.split(',')
        .filter_map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let first: usize = first.trim().parse().ok()?;
            let last: usize = last.trim().parse().ok()?;
            last.checked_sub(first)?.checked_add(1)
        })
        .sum()
}

fn memory_kib() -> Option<u64> {
    files::read_text(Path::new("/proc/meminfo"))
        .ok()?
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))
        .and_then(|rest| rest.split_whitespace().next()?.parse().ok())
}

/// A sysfs attribute without its line break; `None` if it does not exist.
pub(crate) fn attribute(path: impl AsRef<Path>) -> Option<String> {
    files::read_text(path.as_ref())
        .ok()
        .map(|text| text.trim().to_owned())
}

fn number(path: impl AsRef<Path>) -> Option<u64> {
    attribute(path)?.parse().ok()
}

fn nic(name: &str) -> Value {
    let directory = Path::new("/sys/class/net").join(name);
    let driver = std::fs::read_link(directory.join("device/driver"))
        .ok()
        .and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
    let master = std::fs::read_link(directory.join("master"))
        .ok()
        .and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
    json!({
        "name": name,
        "master": master,
        "rx_packets": number(directory.join("statistics/rx_packets")),
        "tx_packets": number(directory.join("statistics/tx_packets")),
        "mac": attribute(directory.join("address")),
        "mtu": number(directory.join("mtu")),
        "driver": driver,
        "operstate": attribute(directory.join("operstate")),
        "carrier": number(directory.join("carrier")),
        "flags": attribute(directory.join("flags")),
        "features": attribute(directory.join("device/features")),
        "status": attribute(directory.join("device/status")),
        "config_interrupts": config_interrupts(&directory),
        // The device is a virtio device of the PCI function, or the function itself.
        "iommu": attribute(directory.join("device/../iommu_group/type"))
            .or_else(|| attribute(directory.join("device/iommu_group/type"))),
        "rx_queues": queues(&directory, "rx-"),
        "tx_queues": queues(&directory, "tx-"),
    })
}

/// How often the NIC's device has reported a configuration change, on all processors; `None` if it
/// has no vector for that.
fn config_interrupts(directory: &Path) -> Option<u64> {
    let device = std::fs::read_link(directory.join("device")).ok()?;
    let name = format!("{}-config", device.file_name()?.to_string_lossy());
    let table = files::read_text(Path::new("/proc/interrupts")).ok()?;
    interrupts(&table, &name)
}

/// The sum of a line of /proc/interrupts: `NUMBER: COUNT … CHIP … NAME`.
fn interrupts(table: &str, name: &str) -> Option<u64> {
    let line = table
        .lines()
        .find(|line| line.split_whitespace().last() == Some(name))?;
    let counts = line.split_whitespace().skip(1);
    Some(counts.map_while(|word| word.parse::<u64>().ok()).sum())
}

fn queues(directory: &Path, prefix: &str) -> usize {
    files::list(&directory.join("queues"))
        .unwrap_or_default()
        .iter()
        .filter(|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with(prefix))
        })
        .count()
}

fn disks() -> Vec<Value> {
    files::list(Path::new("/sys/block"))
        .unwrap_or_default()
        .iter()
        .filter_map(|directory| {
            let name = directory.file_name()?.to_string_lossy().into_owned();
            name.starts_with("vd").then(|| {
                json!({
                    "name": name,
                    "sectors": number(directory.join("size")),
                    "read_only": number(directory.join("ro")) == Some(1),
                    "serial": attribute(directory.join("serial")),
                    "features": attribute(directory.join("device/features")),
                    "iommu": attribute(directory.join("device/../iommu_group/type")),
                })
            })
        })
        .collect()
}

fn hardware_random() -> Option<String> {
    attribute("/sys/class/misc/hw_random/rng_current").filter(|name| name != "none")
}

/// The statistics of a NIC, by the kernel's names.
pub(crate) fn statistics(nic: &str) -> Map<String, Value> {
    files::list(&Path::new("/sys/class/net").join(nic).join("statistics"))
        .unwrap_or_default()
        .iter()
        .filter_map(|path| {
            let name = path.file_name()?.to_string_lossy().into_owned();
            Some((name, number(path)?.into()))
        })
        .collect()
}

/// The counters that changed between two statistics.
pub(crate) fn difference(before: &Map<String, Value>, after: &Map<String, Value>) -> Value {
    let moved: Map<String, Value> = after
        .iter()
        .filter_map(|(name, value)| {
            let then = before.get(name).and_then(Value::as_u64).unwrap_or(0);
            let moved = value.as_u64()?.wrapping_sub(then);
            (moved != 0).then(|| (name.clone(), moved.into()))
        })
        .collect();
    Value::Object(moved)
}

/// The NICs, and the same as `ip link` prints it.
pub(crate) fn link() -> Result<Value> {
    let output = Command::new("/bin/busybox")
        .args(["ip", "link", "show"])
        .output()
        .map_err(|source| Error::Start {
            program: "/bin/busybox".into(),
            source,
        })?;
    Ok(json!({
        "nics": network::names().iter().map(|name| nic(name)).collect::<Vec<_>>(),
        "text": String::from_utf8_lossy(&output.stdout),
    }))
}

/// The kernel's warnings and errors so far.
pub(crate) fn kernel_messages() -> Result<Value> {
    let path = "/dev/kmsg";
    // Each read gives one record; the end is EAGAIN.
    let mut log = std::fs::File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        .map_err(Error::file("open", path))?;
    let mut record = vec![0; 8192];
    let (mut errors, mut warnings, mut lines) = (0_u64, 0_u64, Vec::new());
    loop {
        let count = match log.read(&mut record) {
            Ok(count) => count,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
            // EPIPE: records were overwritten before they could be read.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => continue,
            Err(error) => return Err(Error::file("read", path)(error)),
        };
        let text = String::from_utf8_lossy(record.get(..count).unwrap_or_default());
        let Some((level, message)) = parse_record(&text) else {
            continue;
        };
        match level {
            0..=3 => errors += 1,
            4 => warnings += 1,
            _ => continue,
        }
        if lines.len() < MAXIMUM_MESSAGES {
            lines.push(message.to_owned());
        }
    }
    Ok(json!({ "errors": errors, "warnings": warnings, "lines": lines }))
}

/// Level and text of a record of /dev/kmsg (Documentation/ABI/testing/dev-kmsg).
fn parse_record(record: &str) -> Option<(u32, &str)> {
    let (prefix, message) = record.split_once(';')?;
    let priority: u32 = prefix.split(',').next()?.parse().ok()?;
    // The low three bits are the level, the others the facility.
    Some((priority & 7, message.lines().next().unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_counted() {
        assert_eq!(count_of_list("0"), 1);
        assert_eq!(count_of_list("0-3,6\n"), 5);
        assert_eq!(count_of_list(""), 0);
        assert_eq!(count_of_list("3-1,x"), 0);
    }

    #[test]
    fn interrupts_are_summed() {
        let table = "           CPU0       CPU1\n \
             24:          3          4  PCI-MSIX-0000:00:01.0   0-edge      virtio0-config\n \
             25:          9          0  PCI-MSIX-0000:00:01.0   1-edge      virtio0-input.0\n";
        assert_eq!(interrupts(table, "virtio0-config"), Some(7));
        assert_eq!(interrupts(table, "virtio1-config"), None);
    }

    #[test]
    fn records_are_parsed() {
        assert_eq!(parse_record("6,1,2,-;hello\n KEY=v\n"), Some((6, "hello")));
        assert_eq!(parse_record("28,1,2,-;daemon"), Some((4, "daemon")));
        assert_eq!(parse_record("nonsense"), None);
    }

    #[test]
    fn only_counters_that_moved_are_shown() {
        let map = |a: u64, b: u64| {
            Map::from_iter([("a".to_owned(), a.into()), ("b".to_owned(), b.into())])
        };
        assert_eq!(difference(&map(1, 2), &map(1, 5)), json!({ "b": 3 }));
    }
}

//! How much guest memory this host could provide.
//!
//! Owns reading that from `/proc` and `/sys`. It must not know its callers, and changes nothing.

use std::fs;
use std::io;
use std::path::Path;

use crate::config::HugePageSize;

/// One directory per node of the host.
const NODES: &str = "/sys/devices/system/node";
/// One directory per size of huge pages.
const HUGE_PAGES: &str = "/sys/kernel/mm/hugepages";

/// Returns how much guest memory (bytes) this host could provide now without taking it from others.
/// That is the memory the kernel reports as available, or the free and unreserved huge pages of the
/// given size. With `node`, counts that NUMA node only.
///
/// # Errors
/// The kernel does not report it; [`io::ErrorKind::NotFound`] if the host has no such huge pages,
/// or no such node.
pub(crate) fn free(hugepages: Option<HugePageSize>, node: Option<u16>) -> io::Result<u64> {
    let of_node = node.map(|node| format!("{NODES}/node{node}"));
    let malformed = || io::Error::from(io::ErrorKind::InvalidData);
    let Some(page) = hugepages.map(HugePageSize::bytes) else {
        let host = fs::read_to_string("/proc/meminfo")?;
        let host = available(&host).ok_or_else(malformed)?;
        let Some(node) = of_node else {
            return Ok(host);
        };
        let node = fs::read_to_string(format!("{node}/meminfo"))?;
        return Ok(host.min(available_of_node(&node).ok_or_else(malformed)?));
    };
    let size = format!("hugepages-{}kB", page >> 10);
    let host = Path::new(HUGE_PAGES).join(&size);
    let promised = count(&host.join("resv_hugepages"))?;
    let pages = count(&host.join("free_hugepages"))?.saturating_sub(promised);
    let pages = match of_node {
        // Reserved pages have no node yet.
        Some(node) => pages.min(count(
            &Path::new(&node)
                .join("hugepages")
                .join(&size)
                .join("free_hugepages"),
        )?),
        None => pages,
    };
    pages.checked_mul(page).ok_or_else(malformed)
}

/// Reads the number in a file.
fn count(path: &Path) -> io::Result<u64> {
    let text = fs::read_to_string(path)?;
    text.trim().parse().map_err(io::Error::other)
}

/// MemAvailable of `/proc/meminfo`, in bytes.
fn available(meminfo: &str) -> Option<u64> {
    meminfo
        .lines()
        .find_map(|line| bytes_of(line, "MemAvailable:"))
}

/// Estimates the same in bytes from a node's `meminfo`, whose lines begin with `Node 0 ` and have
/// no MemAvailable. It counts free memory, and file pages that can be read again.
fn available_of_node(meminfo: &str) -> Option<u64> {
    let field = |name: &str| {
        let mut lines = meminfo.lines();
        lines.find_map(|line| bytes_of(line.splitn(3, ' ').nth(2)?, name))
    };
    ["MemFree:", "Active(file):", "Inactive(file):"]
        .into_iter()
        .try_fold(0_u64, |sum, name| sum.checked_add(field(name)?))
}

/// The bytes of a line `NAME:   N kB`.
fn bytes_of(line: &str, name: &str) -> Option<u64> {
    let kib = line.strip_prefix(name)?.trim().strip_suffix("kB")?;
    kib.trim_end().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_parsed() {
        let text =
            "MemTotal:       99 kB\nMemFree: 7 kB\nMemAvailable:       21 kB\nBuffers: 1 kB\n";
        assert_eq!(available(text), Some(21 << 10));
        let node = "Node 12 MemTotal:       99 kB\nNode 12 MemFree:        12 kB\n\
                    Node 12 Active(file):     3 kB\n\
                    Node 12 Inactive(anon):  77 kB\nNode 12 Inactive(file):   5 kB\n";
        assert_eq!(available_of_node(node), Some(20 << 10));
        for text in [
            "",
            "MemAvailable: 21",
            "MemAvailable: x kB",
            "MemAvailable: -1 kB",
            "MemAvailable: 18446744073709551615 kB",
            "XMemAvailable: 21 kB",
            "Node 0 MemFree: 1 kB",
            "Node 0 MemFree: 18014398509481983 kB\nNode 0 Active(file): 1 kB\n\
             Node 0 Inactive(file): 1 kB",
        ] {
            assert_eq!(available(text), None, "{text}");
            assert_eq!(available_of_node(text), None, "{text}");
        }
    }

    #[test]
    fn free_memory_is_below_the_total_and_a_missing_node_is_an_error() {
        let total = rustix::system::sysinfo().totalram;
        assert!((1..total).contains(&free(None, None).unwrap()));
        if let Ok(free) = free(Some(HugePageSize::Size2M), None) {
            assert!(free.is_multiple_of(2 << 20));
        }
        let error = free(None, Some(u16::MAX)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}

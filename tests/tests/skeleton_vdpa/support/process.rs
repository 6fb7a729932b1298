//! What this process holds, as the kernel counts it.

/// Open file descriptors.
pub(crate) fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Bytes of memory that devices have pinned (`VmPin`).
pub(crate) fn pinned() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:"));
    let kib = line.unwrap().trim().strip_suffix("kB").unwrap().trim();
    1024 * kib.parse::<u64>().unwrap()
}

//! Why a mapping may have failed with EFAULT, in words a user can act on.
//!
//! The kernel gives EFAULT for nearly everything (`vhost_chr_write_iter` turns
//! every error of the handler into it). The commonest cause by far is the
//! limit on locked memory: parents that pin pages count them against
//! RLIMIT_MEMLOCK, once per device and with no exemption for CAP_IPC_LOCK.
//!
//! The next one: for such parents vhost_vdpa keeps an entry for each piece of
//! memory that is contiguous in *physical* memory, and newer kernels (and
//! their stable versions) keep at most `max_iotlb_entries`, 2048 by default.
//! Whether guest RAM in 4 KiB pages fits depends on how fragmented the host's
//! memory is at that moment.

use std::fmt;
use std::fs;

use rustix::process::{Resource, getrlimit};

/// The limit of entries; not there on kernels without one.
const ENTRIES_LIMIT: &str = "/sys/module/vhost_vdpa/parameters/max_iotlb_entries";

/// What is known about locked memory at the time of a failure. In bytes where
/// nothing else is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memlock {
    /// RLIMIT_MEMLOCK; `None`: unlimited.
    pub limit: Option<u64>,
    /// Pinned by this process already (`VmPin`).
    pub pinned: u64,
    /// Still to be pinned.
    pub wanted: u64,
    /// How many pieces of memory vhost_vdpa keeps at most; `None`: no limit.
    pub entries_limit: Option<u64>,
}

impl Memlock {
    /// Looks at this process, which wants to pin `wanted` more bytes.
    #[must_use]
    pub fn now(wanted: u64) -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        Self {
            limit: getrlimit(Resource::Memlock).current,
            pinned: pinned(&status),
            wanted,
            entries_limit: fs::read_to_string(ENTRIES_LIMIT)
                .ok()
                .and_then(|text| text.trim().parse().ok()),
        }
    }

    /// Whether the limit explains the failure.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.limit.is_some_and(|limit| self.needed() > limit)
    }

    /// What the limit would have to be at least.
    #[must_use]
    pub fn needed(&self) -> u64 {
        self.pinned.saturating_add(self.wanted)
    }
}

/// `VmPin` of `/proc/PID/status` in bytes; 0 if it is not there.
fn pinned(status: &str) -> u64 {
    status
        .lines()
        .find_map(|line| line.strip_prefix("VmPin:"))
        .and_then(|value| value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
        .map_or(0, |kib| kib.saturating_mul(1024))
}

impl fmt::Display for Memlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.limit {
            Some(limit) if self.is_short() => write!(
                f,
                "the limit of locked memory (RLIMIT_MEMLOCK) is {} KiB and {needed} KiB are \
                 needed: raise it with `ulimit -l {needed}` in the shell, LimitMEMLOCK= in a \
                 systemd unit, or `prlimit --memlock` (each device pins all memory again)",
                limit / 1024,
                needed = self.needed().div_ceil(1024),
            ),
            _ => {
                f.write_str("the limit of locked memory is not the cause: ")?;
                if let Some(limit) = self.entries_limit {
                    write!(
                        f,
                        "the memory may lie in more than {limit} pieces, which is the limit of \
                         vhost_vdpa (give the guest 2M or 1G pages, or load vhost_vdpa with a \
                         larger max_iotlb_entries); or "
                    )?;
                }
                f.write_str(
                    "the memory may not be a shared mapping (MAP_SHARED of a memfd), or the \
                     device ran out of resources; the kernel log may say more",
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_how_much_is_needed() {
        let memlock = Memlock {
            limit: Some(8 << 20),
            pinned: 1 << 20,
            wanted: 512 << 20,
            entries_limit: Some(2048),
        };
        let text = memlock.to_string();
        assert!(text.contains("is 8192 KiB and 525312 KiB are"), "{text}");
        assert!(text.contains("ulimit -l 525312"), "{text}");
        for limit in [None, Some(513 << 20)] {
            let text = Memlock { limit, ..memlock }.to_string();
            assert!(text.contains("not the cause"), "{text}");
            assert!(text.contains("more than 2048 pieces"), "{text}");
        }
        let unlimited = Memlock {
            limit: None,
            entries_limit: None,
            ..memlock
        };
        assert!(!unlimited.to_string().contains("pieces"), "{unlimited}");
    }

    #[test]
    fn reads_the_status_file() {
        assert_eq!(pinned("VmLck:\t 4 kB\nVmPin:\t      12 kB\n"), 12288);
        for text in [
            "",
            "VmPin:",
            "VmPin: x kB",
            "VmPin: -1 kB",
            "VmPin: 99999999999999999999 kB",
        ] {
            assert_eq!(pinned(text), 0);
        }
        assert_eq!(Memlock::now(5).wanted, 5);
    }
}

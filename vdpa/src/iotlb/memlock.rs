//! Likely causes of a mapping that failed with EFAULT, for the error text.
//!
//! The kernel returns EFAULT for nearly everything (`vhost_chr_write_iter` turns every error of the
//! handler into it). By far the most common cause is the limit on locked memory. Parents that pin
//! pages count them against RLIMIT_MEMLOCK, once per device and with no exemption for CAP_IPC_LOCK.
//!
//! The next one is fragmentation. For such parents the kernel keeps an entry for each physically
//! contiguous piece. Since 6.12 (stable) it keeps at most `max_iotlb_entries` of vhost_vdpa, 2048
//! unless set (`vhost_vdpa_pa_map`, `vhost_iotlb_add_range_ctx`: ENOSPC). 8 MiB in 4 KiB pages can
//! be too many pieces; with huge pages 4 GiB never are.

use std::fmt;

use rustix::process::{Resource, getrlimit};

/// The state of locked memory at the time of a failure. All in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memlock {
    /// RLIMIT_MEMLOCK; `None`: unlimited.
    pub limit: Option<u64>,
    /// Pinned by this process before (`VmPin`).
    pub pinned: u64,
    /// Still to be pinned.
    pub wanted: u64,
    /// Maximum number of contiguous pieces that the kernel maps. `None`: this kernel has no such
    /// limit, or vhost_vdpa is not loaded.
    pub max_iotlb_entries: Option<u64>,
}

/// The kernel's limit on entries of an address space.
const MAX_IOTLB_ENTRIES: &str = "/sys/module/vhost_vdpa/parameters/max_iotlb_entries";

impl Memlock {
    /// Reads the state of this process, which is about to pin `wanted` more bytes.
    #[must_use]
    pub fn now(wanted: u64) -> Self {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        Self {
            limit: getrlimit(Resource::Memlock).current,
            pinned: pinned(&status),
            wanted,
            max_iotlb_entries: std::fs::read_to_string(MAX_IOTLB_ENTRIES)
                .ok()
                .and_then(|text| text.trim().parse().ok()),
        }
    }

    /// Whether the limit explains the failure.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.limit.is_some_and(|limit| self.needed() > limit)
    }

    /// The minimum limit that would suffice.
    #[must_use]
    pub fn needed(&self) -> u64 {
        self.pinned.saturating_add(self.wanted)
    }
}

/// `VmPin` of `/proc/PID/status` in bytes; 0 if absent.
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
                if let Some(pieces) = self.max_iotlb_entries {
                    write!(
                        f,
                        "the memory may lie in more than {pieces} pieces, the limit of vhost_vdpa \
                         for a device that pins it: use huge pages, such as hugepages=2M, or load \
                         vhost_vdpa with a larger max_iotlb_entries; or "
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
    fn names_the_needed_limit() {
        let memlock = Memlock {
            limit: Some(8 << 20),
            pinned: 1 << 20,
            wanted: 512 << 20,
            max_iotlb_entries: Some(2048),
        };
        let text = memlock.to_string();
        assert!(text.contains("is 8192 KiB and 525312 KiB are"), "{text}");
        assert!(text.contains("ulimit -l 525312"), "{text}");
        for limit in [None, Some(513 << 20)] {
            let text = Memlock { limit, ..memlock }.to_string();
            assert!(text.contains("not the cause"), "{text}");
            assert!(text.contains("more than 2048 pieces"), "{text}");
            assert!(text.contains("hugepages=2M"), "{text}");
        }
        let text = Memlock {
            limit: None,
            max_iotlb_entries: None,
            ..memlock
        }
        .to_string();
        assert!(!text.contains("pieces"), "{text}");
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

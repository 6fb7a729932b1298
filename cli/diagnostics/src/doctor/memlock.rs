//! The limit of locked memory.
//!
//! Parents that pin guest memory count it against RLIMIT_MEMLOCK, once for each device.
//! CAP_IPC_LOCK does not exempt a process from that.

use bellhop_common::error::Error;

use super::finding::Finding;
use super::host::{Host, odd};
use super::{devices, vfio};

/// The default guest memory of `bellhop run`, in bytes.
pub(super) const DEFAULT_MEMORY: u64 = 512 << 20;

/// A limit in bytes; `None`: unlimited.
pub(super) type Limit = Option<u64>;

/// Checks the limit of this process, which VMs started from here inherit.
pub(super) fn check(host: &Host) -> Vec<Finding> {
    const NAME: &str = "RLIMIT_MEMLOCK";
    let limit = match limit(host) {
        Ok(Some(limit)) => limit,
        Ok(None) => return vec![Finding::ok(NAME, "unlimited")],
        Err(why) => return vec![Finding::unread(NAME, &why)],
    };
    let pinned = devices::pin_memory(host)
        || vfio::functions(host).is_ok_and(|functions| !functions.is_empty());
    let found = format!(
        "{} KiB: each device that pins memory counts all RAM of its guest against this limit ({})",
        limit / 1024,
        if pinned {
            "this host has such devices"
        } else {
            "no such device found"
        }
    );
    let finding = if pinned && limit < DEFAULT_MEMORY {
        Finding::missing(NAME, found)
    } else {
        Finding::warning(NAME, found)
    };
    vec![raise(finding)]
}

/// Adds the commands that raise the limit.
pub(super) fn raise(finding: Finding) -> Finding {
    finding
        .mend("in a shell: ulimit -l unlimited    (root, or below the hard limit)")
        .mend("in a systemd unit: LimitMEMLOCK=infinity")
        .mend("for logins, in /etc/security/limits.d/bellhop.conf: USER - memlock unlimited")
}

/// Reads the soft limit of this process.
pub(super) fn limit(host: &Host) -> Result<Limit, Error> {
    const PATH: &str = "/proc/self/limits";
    let text = host.text(PATH)?;
    text.lines()
        .find_map(|line| {
            let rest = line.strip_prefix("Max locked memory")?;
            match rest.split_whitespace().next()? {
                "unlimited" => Some(None),
                soft => soft.parse().ok().map(Some),
            }
        })
        .ok_or_else(|| odd(PATH))
}

#[cfg(test)]
mod tests {
    use super::super::fake::Tree;
    use super::super::finding::State;
    use super::*;

    #[test]
    fn limits() {
        let look = |soft: &str, pins: bool| {
            let tree = Tree::new();
            tree.file(
                "/proc/self/limits",
                format!(
                    "Limit   Soft Limit  Hard Limit  Units\n\
                     Max locked memory         {soft}     unlimited  bytes\n"
                ),
            );
            if pins {
                tree.link("/sys/bus/pci/devices/0000:01:00.0/driver", "../mlx5_core");
            }
            check(&tree.host()).remove(0)
        };
        assert_eq!(look("unlimited", true).state, State::Ok);
        assert_eq!(look("8388608", false).state, State::Warning);
        let short = look("8388608", true);
        assert_eq!(short.state, State::Missing);
        assert!(short.found.starts_with("8192 KiB"));
        assert!(short.remedy[1].contains("LimitMEMLOCK=infinity"));
        assert_eq!(look("68719476736", true).state, State::Warning);
        for garbage in ["", "-1", "99999999999999999999999", "x"] {
            let state = look(garbage, true).state;
            // With an empty field the hard limit is parsed instead.
            assert_eq!(state == State::Unknown, !garbage.is_empty(), "{garbage}");
        }
        assert_eq!(check(&Tree::new().host())[0].state, State::Unknown);
    }
}

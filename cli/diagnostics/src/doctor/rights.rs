//! The requirements for managing vDPA devices: CAP_NET_ADMIN and the initial network namespace,
//! because the vDPA netlink family answers only there. Running VMs needs neither.

use bellhop_common::error::Error;

use super::finding::Finding;
use super::host::{Host, odd};

/// The bit of CAP_NET_ADMIN in `CapEff` (`linux/capability.h`).
const CAP_NET_ADMIN: u32 = 12;

/// Fixed inode numbers of initial namespaces (`linux/nsfs.h`; the network's since 6.18).
const INITIAL_NETWORK: u64 = 0xeffffff9;
const INITIAL_PROCESSES: u64 = 0xeffffffc;

const CAPABILITY: &str = "CAP_NET_ADMIN";
const NAMESPACE: &str = "network namespace";

/// Checks this process.
pub(super) fn check(host: &Host) -> Vec<Finding> {
    vec![
        Finding::or_unread(CAPABILITY, capability(host)),
        Finding::or_unread(NAMESPACE, namespace(host)),
    ]
}

fn capability(host: &Host) -> Result<Finding, Error> {
    const STATUS: &str = "/proc/self/status";
    let capabilities = host.text(STATUS).and_then(|text| {
        text.lines()
            .find_map(|line| line.strip_prefix("CapEff:"))
            .and_then(|value| u64::from_str_radix(value.trim(), 16).ok())
            .ok_or_else(|| odd(STATUS))
    })?;
    if capabilities >> CAP_NET_ADMIN & 1 == 0 {
        return Ok(Finding::warning(
            CAPABILITY,
            "no: this user can run VMs, but cannot create or delete vDPA devices",
        )
        .mend(
            "run `bellhop dev add …` as root, or once: setcap cap_net_admin+ep $(command -v \
             bellhop)",
        ));
    }
    // Capabilities in a user namespace do not count for the family.
    let whole = host.text("/proc/self/uid_map").map(|map| {
        let numbers: Vec<&str> = map.split_whitespace().collect();
        numbers == ["0", "0", "4294967295"]
    });
    Ok(match whole {
        Ok(false) => Finding::warning(
            CAPABILITY,
            "only inside a user namespace (a rootless container?): cannot create vDPA devices here",
        )
        .mend("create them outside the container, as root"),
        Ok(true) => Finding::ok(
            CAPABILITY,
            "yes: this user can create and delete vDPA devices",
        ),
        Err(why) if why.is_absent() => Finding::ok(CAPABILITY, "yes"),
        Err(why) => return Err(why),
    })
}

/// The number in `net:[4026531833]`.
fn inode(host: &Host, path: &str) -> Result<u64, Error> {
    let link = host.link(path)?;
    link.split_once(":[")
        .and_then(|(_, number)| number.strip_suffix(']')?.parse().ok())
        .ok_or_else(|| odd(path))
}

fn namespace(host: &Host) -> Result<Finding, Error> {
    let own = inode(host, "/proc/self/ns/net")?;
    if own == INITIAL_NETWORK {
        return Ok(Finding::ok(NAMESPACE, "the initial one"));
    }
    // PID 1 proves something only if it is the host's own.
    if inode(host, "/proc/self/ns/pid").is_ok_and(|pid| pid != INITIAL_PROCESSES) {
        return Ok(Finding::unknown(
            NAMESPACE,
            "unknown in a container; the vDPA netlink family exists only in the host's initial one",
        )
        .mend("in a container: start it with --network host to manage devices"));
    }
    let first = inode(host, "/proc/1/ns/net")?;
    if first == own {
        return Ok(Finding::ok(NAMESPACE, "the initial one, that of PID 1"));
    }
    Ok(Finding::warning(
        NAMESPACE,
        "not the initial one: the vDPA netlink family does not exist here",
    )
    .mend("nsenter --net --target 1 bellhop dev show    (on the host, as root)")
    .mend("VMs run in any namespace; only management needs the initial one"))
}

#[cfg(test)]
mod tests {
    use super::super::fake::Tree;
    use super::super::finding::State;
    use super::*;

    fn tree(capabilities: &str, map: &str) -> Tree {
        let tree = Tree::new();
        tree.file(
            "/proc/self/status",
            format!("Name:\tx\nCapEff:\t{capabilities}\n"),
        );
        tree.file("/proc/self/uid_map", map);
        tree
    }

    #[test]
    fn capabilities() {
        let state = |capabilities, map| check(&tree(capabilities, map).host())[0].state;
        let all = "0  0 4294967295\n";
        assert_eq!(state("000001ffffffffff", all), State::Ok);
        assert_eq!(state("0000000000001000", all), State::Ok);
        assert_eq!(state("0000000000000fff", all), State::Warning);
        assert_eq!(state("000001ffffffffff", "0 1000 1\n"), State::Warning);
        for garbage in ["", "x", "fffffffffffffffffffff"] {
            assert_eq!(state(garbage, all), State::Unknown, "{garbage}");
        }
    }

    #[test]
    fn namespaces() {
        let look = |own: &str, pid: u64, first: Option<&str>| {
            let tree = Tree::new();
            tree.link("/proc/self/ns/net", own);
            tree.link("/proc/self/ns/pid", &format!("pid:[{pid}]"));
            if let Some(first) = first {
                tree.link("/proc/1/ns/net", first);
            }
            check(&tree.host())[1].state
        };
        let host = INITIAL_PROCESSES;
        assert_eq!(look("net:[4026531833]", 7, None), State::Ok);
        assert_eq!(
            look("net:[4026531840]", host, Some("net:[4026531840]")),
            State::Ok
        );
        assert_eq!(
            look("net:[5]", host, Some("net:[4026531840]")),
            State::Warning
        );
        assert_eq!(look("net:[5]", host, None), State::Unknown);
        assert_eq!(look("net:[5]", 9, Some("net:[5]")), State::Unknown);
        for garbage in ["net:[", "net:[-1]", "x", "net:[99999999999999999999]"] {
            assert_eq!(look(garbage, host, Some(garbage)), State::Unknown);
        }
    }
}

//! NICs without hardware: the abilities that depend on the kernel.
//!
//! A host does not need such NICs, so an ability that is missing is no fault. The group of modules
//! has the modules and their files.

use rustix::io::Errno;

use super::finding::Finding;
use super::host::Host;
use super::modules::{Build, Modules, Presence, VDUSE};

const CONTROL: &str = "/dev/vduse/control";
/// The API version of VDUSE that the NICs use.
const API: u64 = 0;
/// The first kernel whose taps have segmentation of UDP (`TUN_F_USO4`).
const TAP_USO: (u32, u32) = (6, 2);
/// The first kernel that lets the process of a NIC map the rings of a socket that is bound.
const XDP: (u32, u32) = (6, 4);
/// The first kernel whose VDUSE has a message to suspend a device.
const SUSPEND: (u32, u32) = (7, 3);

/// Describes the abilities, if this kernel has VDUSE.
pub(super) fn check(host: &Host) -> Vec<Finding> {
    let modules = Modules::of(host);
    match modules.presence(VDUSE) {
        Presence::Loaded | Presence::BuiltIn | Presence::Loadable => {}
        Presence::Absent => return vec![Finding::ok("abilities", "this kernel has no VDUSE")],
        Presence::Unknown(why) => return vec![Finding::unknown("abilities", why)],
    }
    let mut findings: Vec<Finding> = api(host).into_iter().collect();
    let Some(version) = modules.version() else {
        let why = "the release of the kernel is unknown";
        findings.push(Finding::unknown("abilities", why));
        return findings;
    };
    let has_xdp = modules.symbol("XDP_SOCKETS") != Some(Build::No);
    findings.extend([
        udp_segmentation(version),
        xdp(version, has_xdp),
        suspend(version),
    ]);
    findings
}

/// `None`: the module is not loaded, or this user may not open its file.
fn api(host: &Host) -> Option<Finding> {
    const NAME: &str = "VDUSE API";
    match host.may_open(CONTROL) {
        Err(Errno::NOENT | Errno::ACCESS | Errno::PERM) => return None,
        Err(error) => return Some(Finding::unknown(NAME, error.to_string())),
        Ok(()) => {}
    }
    Some(match host.vduse_version(CONTROL) {
        Ok(version) => Finding::ok(NAME, format!("version {version}; NICs use version {API}")),
        Err(error) => Finding::unknown(NAME, format!("cannot read it: {error}")),
    })
}

fn udp_segmentation(version: (u32, u32)) -> Finding {
    let found = if version >= TAP_USO {
        "taps segment UDP (USO), for guests that come from hardware with it"
    } else {
        "taps do not segment UDP (USO) before Linux 6.2; TCP is not affected"
    };
    Finding::ok("UDP segmentation", found)
}

fn xdp(version: (u32, u32), is_built: bool) -> Finding {
    let found = match (is_built, version >= XDP) {
        (true, true) => "NICs can have a queue of a port (--port) instead of a tap",
        (true, false) => "no NIC can have a queue of a port (--port): Linux 6.4 or later can",
        (false, _) => {
            "no NIC can have a queue of a port (--port): this kernel has no CONFIG_XDP_SOCKETS"
        }
    };
    Finding::ok("AF_XDP", found)
}

fn suspend(version: (u32, u32)) -> Finding {
    let found = if version >= SUSPEND {
        "not used: a migration, snapshot or swap of a NIC resets it"
    } else {
        "VDUSE of this kernel has none: a migration, snapshot or swap of a NIC resets it"
    };
    Finding::ok("suspend", found)
}

#[cfg(test)]
mod tests {
    use super::super::fake::Tree;
    use super::super::finding::State;
    use super::*;

    fn tree(release: &str) -> Tree {
        let tree = Tree::new();
        tree.file("/proc/sys/kernel/osrelease", release);
        tree.file("/sys/module/vduse/initstate", "live\n");
        tree
    }

    fn found(tree: &Tree, name: &str) -> String {
        let findings = check(&tree.host());
        let finding = findings.into_iter().find(|one| one.name == name).unwrap();
        assert_eq!(finding.state, State::Ok, "{finding:?}");
        finding.found
    }

    #[test]
    fn abilities_depend_on_the_kernel() {
        for (release, has_uso, has_xdp) in [
            ("6.1.0-37-amd64", false, false),
            ("6.2.0", true, false),
            ("6.4.16", true, true),
            ("6.12.107+deb13-amd64", true, true),
        ] {
            let tree = tree(release);
            let uso = found(&tree, "UDP segmentation");
            assert_eq!(uso.starts_with("taps segment UDP"), has_uso, "{uso}");
            let xdp = found(&tree, "AF_XDP");
            assert_eq!(xdp.starts_with("NICs can"), has_xdp, "{xdp}");
            let suspend = found(&tree, "suspend");
            assert!(suspend.starts_with("VDUSE of this kernel has none"));
            assert!(suspend.ends_with("resets it"));
        }
        let suspend = found(&tree("7.3.4"), "suspend");
        assert!(suspend.starts_with("not used"), "{suspend}");
        let without = tree("6.12.1");
        without.file("/boot/config-6.12.1", "CONFIG_VDPA_USER=m\n");
        let xdp = found(&without, "AF_XDP");
        assert!(xdp.contains("CONFIG_XDP_SOCKETS"), "{xdp}");
    }

    #[test]
    fn the_version_of_vduse_is_that_of_the_kernel() {
        let tree = tree("6.12.1");
        assert_eq!(check(&tree.host()).len(), 3, "the file is absent");
        tree.file(CONTROL, "1");
        let wanted = "version 1; NICs use version 0";
        assert_eq!(found(&tree, "VDUSE API"), wanted);
        assert_eq!(check(&tree.host_without_rights()).len(), 3);
        tree.file(CONTROL, "x");
        let finding = &check(&tree.host())[0];
        assert_eq!(finding.state, State::Unknown);
        assert!(finding.found.contains("no version"), "{finding:?}");
    }

    #[test]
    fn a_kernel_without_vduse_lacks_nothing() {
        let tree = Tree::new();
        tree.file("/proc/sys/kernel/osrelease", "6.12.1");
        tree.file("/lib/modules/6.12.1/modules.dep", "");
        assert_eq!(found(&tree, "abilities"), "this kernel has no VDUSE");
        assert_eq!(check(&tree.host()).len(), 1);
        assert_eq!(check(&Tree::new().host())[0].state, State::Unknown);
    }

    #[test]
    fn an_odd_release_is_unknown() {
        let findings = check(&tree("six").host());
        let [finding] = &findings[..] else {
            panic!("{findings:?}");
        };
        assert_eq!(finding.state, State::Unknown);
    }
}

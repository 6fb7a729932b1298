//! The IOMMU: whether it is on, and whether each function is alone in its group.
//!
//! vhost-vdpa attaches a device through `iommu_attach_device`, which refuses a
//! group of several devices (EINVAL).

use bellhop_common::error::Error;

use super::finding::Finding;
use super::host::Host;
use super::{nics, vfio};

const NAME: &str = "groups";
pub(super) const GROUPS: &str = "/sys/kernel/iommu_groups";

/// Checks the groups and the kernel's command line.
pub(super) fn check(host: &Host) -> Vec<Finding> {
    let functions = nics::functions(host).unwrap_or_default();
    let needs_it = functions
        .iter()
        .any(|function| function.parent.platform_iommu)
        || vfio::functions(host).is_ok_and(|functions| !functions.is_empty());
    let mut findings = vec![Finding::or_unread(NAME, groups(host, needs_it))];
    findings.extend(command_line(host));
    for function in functions
        .iter()
        .filter(|function| function.parent.platform_iommu && function.becomes_a_device())
    {
        let Some(group) = &function.group else {
            continue;
        };
        let Ok(devices) = host.names(&format!("{GROUPS}/{group}/devices")) else {
            continue;
        };
        if devices.len() > 1 {
            let others: Vec<&str> = devices
                .iter()
                .map(String::as_str)
                .filter(|device| *device != function.address)
                .collect();
            let found = format!(
                "shares IOMMU group {group} with {}: vhost-vdpa cannot attach it",
                others.join(", ")
            );
            findings.push(Finding::warning(&function.address, found).mend(
                "use a slot or a function with access control (ACS), or enable ACS in the firmware \
                 setup",
            ));
        }
    }
    findings
}

fn groups(host: &Host, needs_it: bool) -> Result<Finding, Error> {
    let count = host.sysfs_names(GROUPS)?.len();
    if count > 0 {
        return Ok(Finding::ok(
            NAME,
            format!("the IOMMU is on, {count} groups"),
        ));
    }
    let (state, who): (fn(&'static str, String) -> Finding, _) = if needs_it {
        (Finding::missing, "a function of this host needs it")
    } else {
        (
            Finding::warning,
            "all NICs except those of mlx5_core need it; simulators do not",
        )
    };
    Ok(enable(state(NAME, format!("the IOMMU is off ({who})"))))
}

/// Adds how to enable the IOMMU.
pub(super) fn enable(finding: Finding) -> Finding {
    finding
        .mend("enable VT-d or AMD-Vi (IOMMU) in the firmware setup")
        .mend("kernel command line: intel_iommu=on iommu=pt    (AMD: iommu=pt)")
}

/// The IOMMU options of the kernel's command line. `None`: there are none.
fn command_line(host: &Host) -> Option<Finding> {
    const NAME: &str = "command line";
    let text = match host.text("/proc/cmdline") {
        Ok(text) => text,
        Err(why) => return Some(Finding::unread(NAME, &why)),
    };
    let words: Vec<&str> = text
        .split_whitespace()
        .filter(|word| {
            ["intel_iommu=", "amd_iommu=", "iommu=", "iommu."]
                .iter()
                .any(|prefix| word.starts_with(prefix))
        })
        .collect();
    let off: Vec<&str> = words
        .iter()
        .copied()
        .filter(|word| {
            word.split_once('=')
                .is_some_and(|(_, value)| value.split(',').any(|one| one == "off"))
        })
        .collect();
    if !off.is_empty() {
        let found = format!("{}: this disables the IOMMU", off.join(" "));
        let finding = Finding::warning(NAME, found);
        return Some(finding.mend(format!(
            "remove from the kernel command line: {}",
            off.join(" ")
        )));
    }
    (!words.is_empty()).then(|| Finding::ok(NAME, words.join(" ")))
}

#[cfg(test)]
mod tests {
    use super::super::fake::Tree;
    use super::super::finding::State;
    use super::*;

    fn function(tree: &Tree, address: &str, driver: &str, group: &str) {
        let path = format!("/sys/bus/pci/devices/{address}");
        tree.directory(&path);
        tree.link(
            &format!("{path}/driver"),
            &format!("../../drivers/{driver}"),
        );
        tree.link(
            &format!("{path}/iommu_group"),
            &format!("../../../kernel/iommu_groups/{group}"),
        );
        tree.directory(&format!("{GROUPS}/{group}/devices/{address}"));
    }

    #[test]
    fn off_is_a_fault_only_where_a_nic_needs_it() {
        let tree = Tree::new();
        tree.file("/proc/cmdline", "quiet intel_iommu=on,sm_off iommu=off\n");
        let findings = check(&tree.host());
        assert_eq!(findings[0].state, State::Warning);
        assert!(findings[0].remedy[1].contains("intel_iommu=on"));
        assert_eq!(findings[1].state, State::Warning);
        assert_eq!(
            findings[1].remedy,
            ["remove from the kernel command line: iommu=off"]
        );
        tree.link("/sys/bus/pci/devices/0000:01:00.0/driver", "../ifcvf");
        assert_eq!(check(&tree.host())[0].state, State::Missing);
    }

    #[test]
    fn shared_groups_are_named() {
        let tree = Tree::new();
        tree.file("/proc/cmdline", "intel_iommu=on iommu=pt");
        function(&tree, "0000:01:00.1", "vp-vdpa", "4");
        function(&tree, "0000:02:00.0", "mlx5_core", "5");
        tree.directory(&format!("{GROUPS}/5/devices/0000:02:00.1"));
        let findings = check(&tree.host());
        assert_eq!(findings.len(), 2, "{findings:?}");
        assert!(findings.iter().all(|finding| finding.state == State::Ok));
        tree.directory(&format!("{GROUPS}/4/devices/0000:00:02.0"));
        let finding = check(&tree.host()).remove(2);
        assert_eq!(finding.name, "0000:01:00.1");
        assert!(finding.found.contains("with 0000:00:02.0:"), "{finding:?}");
        assert!(finding.remedy[0].contains("ACS"));
    }

    #[test]
    fn nothing_and_garbage() {
        assert_eq!(check(&Tree::new().host())[1].state, State::Unknown);
        let tree = Tree::new();
        tree.file("/proc/cmdline", vec![b'a'; 1 << 20]);
        tree.file(GROUPS, "");
        let findings = check(&tree.host());
        assert!(findings.iter().all(|one| one.state == State::Unknown));
    }
}

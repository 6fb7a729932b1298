//! PCI functions for guests by VFIO: their IOMMU groups, and the files that a VM opens.
//!
//! The groups of modules, IOMMU and locked memory have what functions share with vDPA devices.

use bellhop_common::error::Error;
use rustix::io::Errno;

use super::finding::{Finding, first};
use super::host::Host;
use super::iommu::{GROUPS, enable};

const PCI: &str = "/sys/bus/pci/devices";
/// The file of IOMMU mappings.
const CONTAINER: &str = "/dev/vfio/vfio";
/// The file of IOMMU mappings that VMs prefer, on hosts that have it.
const IOMMUFD: &str = "/dev/iommu";
/// Whether VFIO works without interrupt remapping, by [`IOMMUFD`] and by [`CONTAINER`].
const UNSAFE: [&str; 2] = [
    "/sys/module/iommufd/parameters/allow_unsafe_interrupts",
    "/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts",
];
/// Drivers that do not use the memory of their function.
const HARMLESS: [&str; 2] = ["pci-stub", "pcieport"];
/// The most functions that are listed.
const SHOWN_MAX: usize = 32;

/// Addresses of the functions that are bound to vfio-pci, or to a variant of it.
pub(super) fn functions(host: &Host) -> Result<Vec<String>, Error> {
    let mut functions = host.sysfs_names(PCI)?;
    functions.retain(|address| driver(host, address).is_some_and(|driver| is_vfio(&driver)));
    Ok(functions)
}

fn driver(host: &Host, address: &str) -> Option<String> {
    host.link_name(&format!("{PCI}/{address}/driver"))
}

fn is_vfio(driver: &str) -> bool {
    driver.contains("vfio")
}

/// Checks the files of VFIO and the functions that are bound to it.
pub(super) fn check(host: &Host) -> Vec<Finding> {
    let functions = match functions(host) {
        Ok(functions) => functions,
        Err(why) => return vec![Finding::unread("functions", &why)],
    };
    let mut findings = vec![container(host, !functions.is_empty())];
    findings.extend(iommufd(host));
    for parameter in UNSAFE {
        if host.text(parameter).is_ok_and(|text| text == "Y") {
            let found = "on: a guest with a function can send any interrupt to this host";
            findings.push(
                Finding::warning("allow_unsafe_interrupts", found)
                    .mend("enable interrupt remapping in the firmware setup")
                    .mend(format!("echo N >{parameter}")),
            );
        }
    }
    findings.extend(first(&functions, SHOWN_MAX, "functions", |address| {
        describe(host, address)
    }));
    findings
}

fn container(host: &Host, needed: bool) -> Finding {
    match host.may_open(CONTAINER) {
        Ok(()) => Finding::ok(CONTAINER, "VMs can have PCI functions"),
        Err(Errno::NOENT) if needed => {
            Finding::missing(CONTAINER, "absent: VFIO is not loaded completely")
                .mend("modprobe vfio-pci")
        }
        Err(Errno::NOENT) => Finding::ok(
            CONTAINER,
            "absent; `modprobe vfio-pci` before a VM has a PCI function",
        ),
        Err(error) => Finding::warning(CONTAINER, format!("this user cannot open it: {error}"))
            .mend("run the VM as root or by the node daemon, or: chmod 0666 /dev/vfio/vfio"),
    }
}

/// A VM that cannot open the file gets no function, unless that has `iommufd=off`.
fn iommufd(host: &Host) -> Option<Finding> {
    let found = match host.may_open(IOMMUFD) {
        Ok(()) | Err(Errno::NOENT) => return None,
        Err(error) => format!("this user cannot open it: {error}"),
    };
    let finding = Finding::warning(IOMMUFD, found);
    let finding =
        finding.mend("run the VM as root or by the node daemon, or: chmod 0666 /dev/iommu");
    Some(finding.mend("or give functions with iommufd=off, which uses /dev/vfio/vfio"))
}

/// A function that is bound to VFIO.
fn describe(host: &Host, address: &str) -> Finding {
    let Some(group) = host.link_name(&format!("{PCI}/{address}/iommu_group")) else {
        let found = "bound to VFIO, but has no IOMMU group: no VM can have it";
        return enable(Finding::missing(address, found));
    };
    let members = host.names(&format!("{GROUPS}/{group}/devices"));
    let mut others = members.unwrap_or_default();
    others.retain(|other| {
        other != address
            && driver(host, other)
                .is_some_and(|driver| !is_vfio(&driver) && !HARMLESS.contains(&driver.as_str()))
    });
    if others.is_empty() {
        let found = format!("for a guest by VFIO: /dev/vfio/{group}");
        return Finding::ok(address, found);
    }
    let found = format!(
        "shares IOMMU group {group} with {}, which this host uses: no VM can have it",
        others.join(", ")
    );
    let finding = Finding::warning(address, found);
    others.iter().fold(finding, |finding, other| {
        finding.mend(format!("bellhop bind pci/{other} vfio-pci"))
    })
}

#[cfg(test)]
mod tests {
    use super::super::fake::Tree;
    use super::super::finding::State;
    use super::*;

    fn function(tree: &Tree, address: &str, driver: &str, group: &str) {
        let path = format!("{PCI}/{address}");
        tree.link(&format!("{path}/driver"), &format!("../drivers/{driver}"));
        tree.link(&format!("{path}/iommu_group"), &format!("../{group}"));
        tree.directory(&format!("{GROUPS}/{group}/devices/{address}"));
    }

    #[test]
    fn a_host_without_functions_for_guests_lacks_nothing() {
        let tree = Tree::new();
        function(&tree, "0000:01:00.0", "igb", "4");
        let findings = check(&tree.host());
        assert_eq!(findings.len(), 1, "{findings:?}");
        assert_eq!(findings[0].state, State::Ok);
        assert!(findings[0].found.contains("modprobe vfio-pci"));
    }

    #[test]
    fn files_and_groups_are_named_with_their_remedy() {
        let tree = Tree::new();
        function(&tree, "0000:01:00.1", "vfio-pci", "4");
        function(&tree, "0000:02:00.1", "mlx5_vfio_pci", "5");
        function(&tree, "0000:02:00.2", "igbvf", "5");
        function(&tree, "0000:02:00.0", "pcieport", "5");
        tree.link(&format!("{PCI}/0000:03:00.0/driver"), "../drivers/vfio-pci");
        let [container, good, shared, none] = &check(&tree.host())[..] else {
            panic!("other findings");
        };
        assert_eq!(container.state, State::Missing);
        assert_eq!(container.remedy, ["modprobe vfio-pci"]);
        assert_eq!(
            (good.state, good.found.as_str()),
            (State::Ok, "for a guest by VFIO: /dev/vfio/4")
        );
        assert_eq!(shared.state, State::Warning);
        assert!(shared.found.contains("with 0000:02:00.2, which"));
        assert_eq!(shared.remedy, ["bellhop bind pci/0000:02:00.2 vfio-pci"]);
        assert_eq!(none.state, State::Missing);
        assert!(none.remedy[1].contains("intel_iommu=on"), "{none:?}");

        tree.file(CONTAINER, "");
        assert_eq!(check(&tree.host())[0].state, State::Ok);
        tree.file(IOMMUFD, "");
        let iommufd = |finding: &&Finding| finding.name == IOMMUFD;
        assert_eq!(check(&tree.host()).iter().find(iommufd), None);
        let findings = check(&tree.host_without_rights());
        assert_eq!(findings[0].state, State::Warning);
        let found = findings.iter().find(iommufd).unwrap();
        assert_eq!(found.state, State::Warning);
        assert!(found.remedy[1].contains("iommufd=off"), "{found:?}");
    }

    #[test]
    fn unsafe_interrupts_are_found_on_both_paths() {
        let tree = Tree::new();
        for (parameter, text) in UNSAFE.into_iter().zip(["N\n", "Y\n"]) {
            tree.file(parameter, text);
        }
        let warnings = || {
            let mut findings = check(&tree.host());
            findings.retain(|finding| finding.name == "allow_unsafe_interrupts");
            assert!(findings.iter().all(|one| one.state == State::Warning));
            findings
                .into_iter()
                .map(|mut one| one.remedy.pop().unwrap())
                .collect::<Vec<_>>()
        };
        let [iommufd, type1] = UNSAFE.map(|parameter| format!("echo N >{parameter}"));
        assert_eq!(warnings(), [type1.as_str()]);
        tree.file(UNSAFE[0], "Y\n");
        assert_eq!(warnings(), [iommufd, type1]);
    }
}

//! Whole reports of fake hosts.

use std::collections::HashSet;

use super::fake::Tree;
use super::*;

/// A host without faults.
fn good() -> Tree {
    let tree = Tree::new();
    tree.file("/dev/kvm", "")
        .file("/dev/vhost-vdpa-0", "")
        .file("/proc/cpuinfo", "flags : vmx ept\n")
        .file("/proc/cmdline", "quiet\n")
        .file("/proc/sys/kernel/osrelease", "6.12\n")
        .file("/lib/modules/6.12/modules.dep", "")
        .file("/sys/module/vdpa/initstate", "live\n")
        .file("/sys/module/vhost_vdpa/initstate", "live\n")
        .file(
            "/proc/self/limits",
            "Max locked memory unlimited unlimited bytes\n",
        )
        .file("/sys/devices/sim/nic0/vhost-vdpa-0/dev", "511:0\n")
        .link("/sys/bus/vdpa/devices/nic0", "../../../devices/sim/nic0")
        .link(
            "/sys/devices/sim/nic0/driver",
            "../../../bus/vdpa/drivers/vhost_vdpa",
        );
    tree
}

#[test]
fn a_good_host_is_fit() {
    let report = report(&good().host());
    assert!(report.fit, "{}", text(&report, false, COLUMNS));
    let shown = text(&report, false, COLUMNS);
    assert!(shown.contains("No required part is missing ("), "{shown}");
    let next = "\n\nNext:\n  bellhop run --kernel KERNEL --vdpa path=/dev/vhost-vdpa-0\n";
    assert!(shown.ends_with(next), "{shown}");
    assert!(!shown.contains('\x1b'));
    assert!(text(&report, true, COLUMNS).contains("\x1b[32mok"));
}

#[test]
fn a_machine_with_nothing_is_not_fit_and_all_groups_are_named() {
    let report = report(&Tree::new().host());
    assert!(!report.fit);
    let groups: HashSet<&str> = report.findings.iter().map(|line| line.group).collect();
    assert_eq!(groups.len(), CHECKS.len());
    for line in &report.findings {
        let finding = &line.finding;
        let silent = finding.state == State::Missing && finding.remedy.is_empty();
        assert!(!silent, "no remedy: {finding:?}");
        assert!(!finding.found.is_empty());
    }
    assert!(text(&report, false, COLUMNS).contains("Not ready for VMs on vDPA NICs: "));
}

/// An empty chroot: a part that cannot be read is not reported as missing.
#[test]
fn without_proc_and_sys_all_but_the_device_of_kvm_is_unknown() {
    let report = report(&Tree::without_sysfs().host());
    for line in &report.findings {
        let wanted = match line.finding.name.as_str() {
            "/dev/kvm" => State::Missing,
            _ => State::Unknown,
        };
        assert_eq!(line.finding.state, wanted, "{line:?}");
    }
}

#[test]
fn a_report_fits_the_terminal() {
    for tree in [Tree::new(), good()] {
        let report = report(&tree.host());
        for (columns, widest) in [(80, 80), (100, 100), (500, 100)] {
            let shown = text(&report, false, columns);
            let is_wide = |line: &&str| line.chars().count() > widest;
            assert_eq!(shown.lines().find(is_wide), None, "{columns} columns");
        }
    }
}

#[test]
fn json_has_its_keys() {
    let report = report(&good().host_without_rights());
    let value = serde_json::to_value(&report).unwrap();
    assert_eq!(value["fit"], false);
    let findings = value["findings"].as_array().unwrap();
    let kvm = findings
        .iter()
        .find(|finding| finding["name"] == "/dev/kvm")
        .unwrap();
    assert_eq!(kvm["group"], "kvm");
    assert_eq!(kvm["state"], "missing");
    assert!(kvm["remedy"].as_array().unwrap().len() > 1);
}

#[test]
fn this_machine_gets_a_report() {
    let report = report(&Host::this());
    assert!(!report.findings.is_empty());
}

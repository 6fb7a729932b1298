//! NUMA: the nodes, their distances, and the NICs of each.

use super::finding::{Finding, first};
use super::host::Host;
use super::nics;

const NODES: &str = "/sys/devices/system/node";

/// The most nodes that are listed.
const SHOWN_MAX: usize = 16;

/// Checks all nodes.
pub(super) fn check(host: &Host) -> Vec<Finding> {
    const NAME: &str = "nodes";
    let mut nodes: Vec<u32> = match host.sysfs_names(NODES) {
        Ok(names) => names
            .iter()
            .filter_map(|name| name.strip_prefix("node")?.parse().ok())
            .collect(),
        Err(why) => return vec![Finding::unread(NAME, &why)],
    };
    nodes.sort_unstable();
    if nodes.len() <= 1 {
        return vec![Finding::ok(NAME, "one: all memory is equally near")];
    }
    let functions = nics::functions(host).unwrap_or_default();
    let mut findings = first(&nodes, SHOWN_MAX, NAME, |node| {
        let distance = format!("{NODES}/node{node}/distance");
        let distance = match host.text(&distance) {
            Ok(text) => text.split_whitespace().collect::<Vec<_>>().join(" "),
            Err(why) => return Finding::unread(format!("node {node}"), &why),
        };
        let near: Vec<&str> = functions
            .iter()
            .filter(|function| function.node == Some(*node))
            .map(|function| function.address.as_str())
            .collect();
        let near = if near.is_empty() {
            "no NIC".to_owned()
        } else {
            near.join(" ")
        };
        let found = format!("distances {distance}; {near}");
        Finding::ok(format!("node {node}"), found)
    });
    for function in functions
        .iter()
        .filter(|function| function.node.is_none() && !function.becomes_a_device())
    {
        let found = "the firmware does not report its NUMA node";
        findings.push(Finding::warning(&function.address, found).mend(format!(
            "echo N >/sys/bus/pci/devices/{}/numa_node    (if you know the node)",
            function.address
        )));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::fake::Tree;
    use super::super::finding::State;
    use super::*;

    fn card(tree: &Tree, address: &str, node: &str) {
        let path = format!("/sys/bus/pci/devices/{address}");
        tree.file(&format!("{path}/numa_node"), node);
        tree.link(&format!("{path}/driver"), "../mlx5_core");
    }

    #[test]
    fn nics_are_listed_with_their_node() {
        let tree = Tree::new();
        assert_eq!(check(&tree.host())[0].state, State::Ok);
        tree.file(&format!("{NODES}/node0/distance"), "10 21\n");
        tree.file(&format!("{NODES}/node1/distance"), "21 10\n");
        tree.directory(&format!("{NODES}/nodeX"));
        card(&tree, "0000:01:00.0", "1\n");
        card(&tree, "0000:02:00.0", "-1\n");
        let findings = check(&tree.host());
        assert_eq!(findings[0].found, "distances 10 21; no NIC");
        assert_eq!(findings[1].found, "distances 21 10; 0000:01:00.0");
        assert_eq!(findings[2].state, State::Warning);
        assert!(findings[2].remedy[0].contains("0000:02:00.0/numa_node"));
    }

    #[test]
    fn garbage() {
        let tree = Tree::new();
        for node in 0..20 {
            tree.file(&format!("{NODES}/node{node}/distance"), b"\xff\x1b");
        }
        tree.directory(&format!("{NODES}/node99999999999"));
        let findings = check(&tree.host());
        assert_eq!(findings.len(), SHOWN_MAX + 1);
        assert!(!findings[0].found.contains('\x1b'));
        let tree = Tree::new();
        tree.file(NODES, "");
        assert_eq!(check(&tree.host())[0].state, State::Unknown);
    }
}

//! PCI functions with a current or possible driver for vDPA, and the modules that these need.
//!
//! Owns the table of such drivers. Must not know the vDPA bus.

use bellhop_common::error::Error;

use super::finding::{Finding, State, first};
use super::host::{Host, is_plain};
use super::modules::{self, Module, Modules, VDPA_SIM_NET};

/// Directory of PCI functions.
const PCI: &str = "/sys/bus/pci/devices";

/// The most functions that are listed.
const SHOWN_MAX: usize = 32;

/// A PCI driver known for vDPA.
#[derive(Debug)]
pub(super) struct Parent {
    pub(super) driver: &'static str,
    /// The module that creates vDPA devices of its functions; `None`: only the vendor's own driver
    /// does.
    module: Option<Module>,
    /// Whether its vDPA devices are behind the platform's IOMMU (no `set_map` or `dma_map` of their
    /// own).
    pub(super) platform_iommu: bool,
    /// Whether a function bound to it is a vDPA device, or could be one at once.
    dedicated: bool,
}

const fn parent(driver: &'static str, module: &'static str, symbol: &'static str) -> Parent {
    Parent {
        driver,
        module: Some(Module {
            name: module,
            symbol,
        }),
        platform_iommu: true,
        dedicated: false,
    }
}

const fn dedicated(parent: Parent) -> Parent {
    Parent {
        dedicated: true,
        ..parent
    }
}

/// Parents of Linux's drivers/vdpa, by the name of the driver of the PCI function.
static PARENTS: [Parent; 10] = [
    Parent {
        platform_iommu: false,
        ..parent("mlx5_core", "mlx5_vdpa", "MLX5_VDPA_NET")
    },
    parent("virtio-pci", "vp_vdpa", "VP_VDPA"),
    dedicated(parent("vp-vdpa", "vp_vdpa", "VP_VDPA")),
    dedicated(parent("ifcvf", "ifcvf", "IFCVF")),
    parent("pds_core", "pds_vdpa", "PDS_VDPA"),
    parent("octeon_ep", "octep_vdpa", "OCTEONEP_VDPA"),
    dedicated(parent("octep_vdpa", "octep_vdpa", "OCTEONEP_VDPA")),
    dedicated(parent("snet-vdpa-driver", "snet_vdpa", "SNET_VDPA")),
    dedicated(parent("alibaba-eni-vdpa", "eni_vdpa", "ALIBABA_ENI_VDPA")),
    Parent {
        driver: "sfc",
        module: None,
        platform_iommu: true,
        dedicated: false,
    },
];

/// A PCI function that supports vDPA.
#[derive(Debug)]
pub(super) struct Function {
    /// The address, such as `0000:01:00.0`.
    pub(super) address: String,
    /// The driver that creates vDPA devices of it.
    pub(super) parent: &'static Parent,
    /// Its current driver.
    driver: Option<String>,
    /// The maximum number of its virtual functions.
    total: u32,
    /// The current number of its virtual functions.
    present: u32,
    is_virtual: bool,
    /// Its IOMMU group.
    pub(super) group: Option<String>,
    /// Its NUMA node, if the firmware reports one.
    pub(super) node: Option<u32>,
}

impl Function {
    /// Whether vDPA devices are created of this function itself, not of its virtual functions.
    pub(super) fn becomes_a_device(&self) -> bool {
        self.is_virtual || self.parent.dedicated
    }

    /// Whether a NIC for a guest can be created of it with the kernel's drivers.
    pub(super) fn is_source(&self) -> bool {
        self.parent.module.is_some() && (self.total > 0 || self.becomes_a_device())
    }

    fn of(host: &Host, address: &str) -> Option<Self> {
        let path = format!("{PCI}/{address}");
        let is_virtual = host.exists(&format!("{path}/physfn"));
        let driver = host.link_name(&format!("{path}/driver"));
        let known = |driver: &str| PARENTS.iter().find(|parent| parent.driver == driver);
        // A virtual function may have no driver, or vfio-pci for now.
        let parent = driver.as_deref().and_then(known).or_else(|| {
            let owner = host.link_name(&format!("{path}/physfn/driver"))?;
            known(&owner)
        })?;
        let total = host.number(&format!("{path}/sriov_totalvfs")).unwrap_or(0);
        // Block devices and consoles are virtio functions, too.
        let is_network = host
            .text(&format!("{path}/class"))
            .is_ok_and(|class| class.starts_with("0x0200"));
        if parent.driver == "virtio-pci" && !(is_network && (is_virtual || total > 0)) {
            return None;
        }
        Some(Self {
            address: address.to_owned(),
            parent,
            driver,
            total,
            present: host.number(&format!("{path}/sriov_numvfs")).unwrap_or(0),
            is_virtual,
            group: host.link_name(&format!("{path}/iommu_group")),
            node: host.number(&format!("{path}/numa_node")).ok(),
        })
    }

    fn describe(&self) -> Finding {
        let mut text = self.driver.clone().unwrap_or("no driver".to_owned());
        if self.total > 0 {
            text += &format!(", {} of {} virtual functions", self.present, self.total);
        }
        match self.node {
            Some(node) => text += &format!(", NUMA node {node}"),
            None => text += ", NUMA node unknown",
        }
        match &self.group {
            Some(group) => text += &format!(", IOMMU group {group}"),
            None => text += ", no IOMMU group",
        }
        if self.parent.module.is_none() {
            text += "; vDPA only with the vendor's own driver";
        } else if self.total > 0 && self.present == 0 {
            text += &format!(
                "; `echo N >{PCI}/{}/sriov_numvfs` creates functions for guests",
                self.address
            );
        }
        Finding::ok(&self.address, text)
    }
}

/// All functions that support vDPA, including virtual functions.
pub(super) fn functions(host: &Host) -> Result<Vec<Function>, Error> {
    let functions = host.sysfs_names(PCI)?.into_iter();
    Ok(functions
        .filter(|address| is_plain(address))
        .filter_map(|address| Function::of(host, &address))
        .collect())
}

/// Lists the functions and checks the modules they need.
pub(super) fn check(host: &Host) -> Vec<Finding> {
    let functions = match functions(host) {
        Ok(functions) => functions,
        Err(why) => return vec![Finding::unread("PCI functions", &why)],
    };
    if functions.is_empty() {
        let known: Vec<&str> = PARENTS.iter().map(|parent| parent.driver).collect();
        let found = format!("none has a driver known for vDPA ({})", known.join(", "));
        let finding = Finding::warning("PCI functions", found);
        // The check of modules reports the state of the simulator.
        let has_simulator = Modules::of(host).presence(VDPA_SIM_NET).is_possible();
        return vec![if has_simulator {
            finding.mend("to try without a NIC: modprobe vdpa_sim_net && bellhop mgmtdev show")
        } else {
            finding
        }];
    }
    // Virtual functions are counted with their physical function.
    let listed: Vec<&Function> = functions
        .iter()
        .filter(|function| !function.is_virtual || function.parent.dedicated)
        .collect();
    let mut findings = first(&listed, SHOWN_MAX, "PCI functions", |one| one.describe());
    findings.extend(parent_modules(host, &functions));
    findings
}

/// Each module that creates vDPA devices of these functions, once.
fn parent_modules(host: &Host, functions: &[Function]) -> Vec<Finding> {
    let known = Modules::of(host);
    let mut seen = Vec::new();
    let mut findings = Vec::new();
    for function in functions {
        let Some(module) = function.parent.module else {
            continue;
        };
        if seen.contains(&module.name) {
            continue;
        }
        seen.push(module.name);
        let purpose = format!(
            "provides vDPA devices on functions of {}",
            function.parent.driver
        );
        let mut finding = modules::describe(module, &known, &purpose, true);
        // Another parent may suffice.
        if finding.state == State::Missing {
            finding.state = State::Warning;
        }
        findings.push(finding);
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::fake::Tree;
    use super::*;

    fn function(tree: &Tree, address: &str, driver: &str, files: &[(&str, &str)]) {
        let path = format!("{PCI}/{address}");
        tree.directory(&path);
        tree.link(
            &format!("{path}/driver"),
            &format!("../../../bus/pci/drivers/{driver}"),
        );
        for (name, content) in files {
            tree.file(&format!("{path}/{name}"), content);
        }
    }

    #[test]
    fn a_card_with_virtual_functions() {
        let tree = Tree::new();
        let card = [
            ("class", "0x020000\n"),
            ("sriov_totalvfs", "8\n"),
            ("sriov_numvfs", "1\n"),
            ("numa_node", "1\n"),
        ];
        function(&tree, "0000:01:00.0", "mlx5_core", &card);
        function(&tree, "0000:01:00.2", "mlx5_core", &[("class", "0x020000")]);
        tree.link(&format!("{PCI}/0000:01:00.2/physfn"), "../0000:01:00.0");
        function(&tree, "0000:02:00.0", "nvme", &[("class", "0x010802")]);
        let host = tree.host();
        let all = functions(&host).unwrap();
        assert_eq!(all.len(), 2);
        assert!(all[1].becomes_a_device() && !all[0].becomes_a_device());
        let findings = check(&host);
        assert_eq!(findings.len(), 2);
        assert_eq!(findings[0].name, "0000:01:00.0");
        assert!(
            findings[0]
                .found
                .contains("1 of 8 virtual functions, NUMA node 1")
        );
        assert_eq!(findings[1].name, "mlx5_vdpa");
        assert_eq!(findings[1].state, State::Unknown);

        tree.file("/proc/sys/kernel/osrelease", "6.12");
        tree.file("/lib/modules/6.12/modules.dep", "a/mlx5_vdpa.ko: b\n");
        let finding = check(&tree.host()).remove(1);
        assert_eq!(finding.state, State::Warning);
        assert_eq!(finding.remedy[0], "modprobe mlx5_vdpa");
    }

    #[test]
    fn virtio_functions_count_only_as_network_cards_with_virtual_functions() {
        let tree = Tree::new();
        let network = ("class", "0x020000\n");
        function(&tree, "0000:00:01.0", "virtio-pci", &[network]);
        let block = [("class", "0x010000"), ("sriov_totalvfs", "4")];
        function(&tree, "0000:00:02.0", "virtio-pci", &block);
        assert_eq!(functions(&tree.host()).unwrap().len(), 0);
        let card = [network, ("sriov_totalvfs", "4\n"), ("numa_node", "-1\n")];
        function(&tree, "0000:00:03.0", "virtio-pci", &card);
        // A virtual function without a driver belongs to its card's.
        tree.file(&format!("{PCI}/0000:00:03.1/class"), "0x020000\n");
        tree.link(&format!("{PCI}/0000:00:03.1/physfn"), "../0000:00:03.0");
        let host = tree.host();
        let all = functions(&host).unwrap();
        assert_eq!(all.len(), 2);
        assert_eq!(all[0].node, None);
        assert!(
            check(&host)[0]
                .found
                .contains("creates functions for guests")
        );
    }

    #[test]
    fn nothing_and_garbage() {
        let tree = Tree::new();
        assert_eq!(check(&tree.host())[0].state, State::Warning);
        // The simulator is no remedy on a kernel without it.
        assert!(check(&tree.host())[0].remedy.is_empty());
        tree.file("/proc/sys/kernel/osrelease", "6.12");
        tree.file("/lib/modules/6.12/modules.dep", "a/vdpa_sim_net.ko: b\n");
        assert!(check(&tree.host())[0].remedy[0].contains("modprobe vdpa_sim_net"));
        let garbage = [
            ("sriov_totalvfs", "99999999999"),
            ("sriov_numvfs", "\u{7}"),
            ("numa_node", "x"),
            ("class", ""),
        ];
        function(&tree, "0000:05:00.0", "ifcvf", &garbage);
        tree.directory(&format!("{PCI}/$(reboot)"));
        for number in 0..40 {
            function(&tree, &format!("0000:06:00.{number}"), "ifcvf", &[]);
        }
        let findings = check(&tree.host());
        assert!(
            findings[0]
                .found
                .contains("NUMA node unknown, no IOMMU group")
        );
        assert_eq!(findings[SHOWN_MAX].found, "9 more");

        let tree = Tree::new();
        tree.file(PCI, "not a directory");
        assert_eq!(check(&tree.host())[0].state, State::Unknown);
    }
}

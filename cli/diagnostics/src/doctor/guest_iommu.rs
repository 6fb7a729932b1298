//! Which NICs suit the guest's IOMMU (`iommu=on`), and what its mappings cost.
//!
//! Linux ignores a refused MAP, so the NIC fails later and silently. This check names the limits
//! that lead to a refusal before a guest meets them.

use super::devices;
use super::finding::Finding;
use super::host::Host;
use super::{iotlb, memlock, nics};

/// Locked memory of a device beyond twice the guest's RAM, in bytes: see docs/design/iommu.md.
const BEYOND_RAM: u64 = 1 << 30;

const MLX5: &str = "mlx5_core";

/// Checks the parents, their limits and that of locked memory.
pub(super) fn check(host: &Host) -> Vec<Finding> {
    let functions = nics::functions(host).unwrap_or_default();
    let has_mlx5 = functions
        .iter()
        .any(|function| function.parent.driver == MLX5);
    let rebuilds = has_mlx5.then(|| {
        Finding::warning(
            MLX5,
            "each MAP or UNMAP of a guest stops all queues and rebuilds the memory key: iommu=on \
             suits guests that map once, such as DPDK",
        )
        .mend("in a Linux guest that uses the NIC itself: iommu=pt on its kernel command line")
    });
    let limits = iotlb::MODULES
        .iter()
        .filter_map(|module| entries(host, module));
    rebuilds
        .into_iter()
        .chain(limits)
        .chain([locked(host)])
        .collect()
}

/// The limit on the entries of a module, if it is below that on a guest's mappings.
fn entries(host: &Host, module: &str) -> Option<Finding> {
    let limit = iotlb::entries(host, module).ok()?;
    let finding = (1..iotlb::GOOD).contains(&limit).then(|| {
        Finding::warning(
            module,
            format!(
                "at most {limit} IOTLB entries, at least one per mapping: with iommu=on a guest \
                 may have {}",
                iotlb::GOOD
            ),
        )
        .mend(format!("bellhop run --iommu mappings={limit}, or"))
    });
    finding.map(|finding| iotlb::raise(module, finding))
}

/// Locked memory: each mapping counts, even if its pages are locked already.
fn locked(host: &Host) -> Finding {
    const NAME: &str = "locked memory";
    const RULE: &str = "with iommu=on, each device locks at most twice the guest's RAM and 1 GiB";
    let limit = match memlock::limit(host) {
        Ok(Some(limit)) => limit,
        Ok(None) => return Finding::ok(NAME, format!("{RULE}; the limit is unlimited")),
        Err(why) => return Finding::unread(NAME, &why),
    };
    let ram = limit.saturating_sub(BEYOND_RAM) / 2;
    let found = format!(
        "{RULE}; the limit of {} KiB suffices for one device and {} MiB of RAM",
        limit / 1024,
        ram >> 20
    );
    if devices::pin_memory(host) && ram < memlock::DEFAULT_MEMORY {
        memlock::raise(Finding::warning(NAME, found))
    } else {
        Finding::ok(NAME, found)
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake::Tree;
    use super::super::finding::State;
    use super::*;

    fn limited(soft: u64) -> Tree {
        let tree = Tree::new();
        tree.file(
            "/proc/self/limits",
            format!("Max locked memory  {soft}  unlimited  bytes\n"),
        );
        tree
    }

    #[test]
    fn parents_and_modules_that_do_not_suit_are_named() {
        let tree = limited(64 << 30);
        assert_eq!(check(&tree.host()).len(), 1);
        tree.link("/sys/bus/pci/devices/0000:01:00.0/driver", "../ifcvf");
        for (module, entries) in [("vdpa_sim", "2048"), ("vduse", "65536"), ("mlx5_vdpa", "0")] {
            let path = format!("/sys/module/{module}/parameters/max_iotlb_entries");
            tree.file(&path, entries);
        }
        let findings = check(&tree.host());
        assert_eq!(findings.len(), 2);
        let sim = &findings[0];
        assert_eq!((sim.name.as_str(), sim.state), ("vdpa_sim", State::Warning));
        assert!(sim.remedy[0].contains("mappings=2048"));
        assert!(sim.remedy[1].contains("options vdpa_sim max_iotlb_entries=65536"));
        tree.link("/sys/bus/pci/devices/0000:02:00.0/driver", "../mlx5_core");
        let findings = check(&tree.host());
        assert_eq!((findings.len(), findings[0].state), (3, State::Warning));
        assert!(findings[0].found.contains("DPDK"));
    }

    #[test]
    fn locked_memory_is_twice_the_ram_and_a_gibibyte() {
        let look = |soft: u64, pins: bool| {
            let tree = limited(soft);
            if pins {
                tree.link("/sys/bus/pci/devices/0000:01:00.0/driver", "../ifcvf");
            }
            locked(&tree.host())
        };
        assert_eq!(look(2 << 30, true).state, State::Ok);
        let short = look((2 << 30) - 1, true);
        assert_eq!(short.state, State::Warning);
        assert!(short.found.contains("511 MiB of RAM"), "{}", short.found);
        assert!(short.remedy[1].contains("LimitMEMLOCK=infinity"));
        let none = look(8 << 20, false);
        assert_eq!(none.state, State::Ok);
        assert!(none.found.contains(" 0 MiB"), "{}", none.found);
        assert_eq!(locked(&Tree::new().host()).state, State::Unknown);
    }
}

//! The maximum number of physically contiguous pieces of guest memory.
//!
//! Where memory is pinned, the kernel keeps an entry for each physically contiguous piece. The
//! module's parameter `max_iotlb_entries` limits them (2048 unless set; stable kernels since 6.12;
//! 0 or less: no limit). Each table that a mapping passes through has its own limit.

use bellhop_common::error::Error;

use super::devices;
use super::finding::Finding;
use super::host::Host;

/// Modules with such a table. vDPA devices do not use the one of `vhost`.
pub(super) const MODULES: [&str; 4] = ["vhost_vdpa", "mlx5_vdpa", "vduse", "vdpa_sim"];

/// Enough for 64 GiB in pieces of 1 MiB, and for all mappings of a guest's IOMMU.
pub(super) const GOOD: i64 = 65_536;

/// Checks the parameter of each loaded module.
pub(super) fn check(host: &Host) -> Vec<Finding> {
    let pinned = devices::pin_memory(host);
    let findings: Vec<Finding> = MODULES
        .iter()
        .filter(|module| host.exists(&format!("/sys/module/{module}")))
        .map(|module| limit(host, module, pinned))
        .collect();
    if let Err(why) = host.sysfs() {
        return vec![Finding::unread("max_iotlb_entries", &why)];
    }
    if findings.is_empty() {
        return vec![Finding::unknown(
            "max_iotlb_entries",
            "unknown while vhost_vdpa is not loaded",
        )];
    }
    findings
}

/// Reads the limit of a loaded module.
pub(super) fn entries(host: &Host, module: &str) -> Result<i64, Error> {
    host.number(&format!(
        "/sys/module/{module}/parameters/max_iotlb_entries"
    ))
}

/// Adds the commands that raise the limit of a module.
pub(super) fn raise(module: &str, finding: Finding) -> Finding {
    finding
        .mend(format!(
            "echo 'options {module} max_iotlb_entries={GOOD}' >/etc/modprobe.d/{module}.conf"
        ))
        .mend(format!("modprobe -r {module} && modprobe {module}"))
}

fn limit(host: &Host, module: &str, pinned: bool) -> Finding {
    match entries(host, module) {
        Ok(..=0) => Finding::ok(module, "no limit on IOTLB entries"),
        Ok(limit) if limit >= GOOD || !pinned => {
            Finding::ok(module, format!("at most {limit} IOTLB entries"))
        }
        Ok(limit) => raise(
            module,
            Finding::warning(
                module,
                format!(
                    "at most {limit} IOTLB entries, one per contiguous piece of guest memory: on \
                     fragmented memory the kernel may reject guests with 4 KiB pages"
                ),
            )
            .mend("bellhop run --memory size=…,hugepages=2M, or"),
        ),
        Err(why) if why.is_absent() => {
            Finding::ok(module, "this kernel does not limit IOTLB entries")
        }
        Err(why) => Finding::unread(module, &why),
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake::Tree;
    use super::super::finding::State;
    use super::*;

    #[test]
    fn limits() {
        let look = |value: &str, pins: bool| {
            let tree = Tree::new();
            tree.file("/sys/module/vhost_vdpa/parameters/max_iotlb_entries", value);
            if pins {
                tree.link("/sys/bus/pci/devices/0000:01:00.0/driver", "../mlx5_core");
            }
            check(&tree.host()).remove(0)
        };
        assert_eq!(look("2048\n", false).state, State::Ok);
        let finding = look("2048\n", true);
        assert_eq!(finding.state, State::Warning);
        assert!(finding.remedy[1].contains("options vhost_vdpa max_iotlb_entries=65536"));
        assert_eq!(look("65536\n", true).state, State::Ok);
        assert!(look("0", true).found.contains("no limit"));
        assert_eq!(look("-5", true).state, State::Ok);
        assert_eq!(look("2e3", true).state, State::Unknown);
    }

    #[test]
    fn without_the_parameter_or_the_module() {
        let tree = Tree::new();
        assert_eq!(check(&tree.host())[0].state, State::Unknown);
        tree.directory("/sys/module/vhost_vdpa");
        assert_eq!(check(&tree.host())[0].state, State::Ok);
    }
}

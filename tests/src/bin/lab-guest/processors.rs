//! Processors as the guest's kernel sees them: the topology in sysfs
//! (Documentation/ABI/stable/sysfs-devices-system-cpu) and /proc/cpuinfo.

use crate::info::attribute;
use lab::error::{Error, Result};
use lab::files;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;

/// `processors`: packages, cores, threads of a core, the sharing of caches, and the features that
/// all processors have.
pub(crate) fn topology() -> Result<Value> {
    let directory = Path::new("/sys/devices/system/cpu");
    let mut online = 0_u64;
    let (mut packages, mut cores, mut threads) =
        (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for path in files::list(directory)? {
        let of_processor = |name: &str| attribute(path.join("topology").join(name));
        // Only processors that are online have a topology.
        let (Some(package), Some(core)) =
            (of_processor("physical_package_id"), of_processor("core_id"))
        else {
            continue;
        };
        online += 1;
        cores.insert((package.clone(), core));
        packages.insert(package);
        threads.insert(of_processor("thread_siblings_list").unwrap_or_default());
    }
    let cpuinfo = files::read_text(Path::new("/proc/cpuinfo"))?;
    let (count, features) = common_features(&cpuinfo)
        .ok_or_else(|| Error::invalid("/proc/cpuinfo", "it has no processor"))?;
    Ok(json!({
        "online": online,
        "listed": count,
        "packages": packages.len(),
        "cores": cores.len(),
        "thread_groups": threads.len(),
        "tsc_deadline_timer": features.contains("tsc_deadline_timer"),
        "hypervisor": features.contains("hypervisor"),
        "sse4_2": features.contains("sse4_2"),
        "xsave": features.contains("xsave"),
    }))
}

/// The number of processors in /proc/cpuinfo, and the flags that all have.
fn common_features(cpuinfo: &str) -> Option<(u64, BTreeSet<&str>)> {
    cpuinfo
        .lines()
        .filter_map(|line| line.split_once(':'))
        .filter(|(name, _)| name.trim() == "flags")
        .map(|(_, flags)| (1, flags.split_whitespace().collect::<BTreeSet<_>>()))
        .reduce(|(count, common), (one, flags)| {
            (count + one, common.intersection(&flags).copied().collect())
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_common_features_count() {
        let text =
            "processor\t: 0\nflags\t\t: fpu tsc apic\n\nprocessor\t: 1\nflags\t\t: tsc fpu\n";
        let (count, features) = common_features(text).unwrap();
        assert_eq!(count, 2);
        assert_eq!(features, BTreeSet::from(["fpu", "tsc"]));
        assert_eq!(common_features("nothing: here\n"), None);
    }
}

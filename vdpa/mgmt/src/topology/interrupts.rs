//! Whether interrupts of devices can be posted to a guest's processor.
//!
//! Linux does not report posted interrupts: KVM informs only the IOMMU driver. It does show
//! obstacles, and only those are searched for: the parameters of KVM's modules, the capabilities of
//! the IOMMUs, the kernel's command line.

use std::fs;
use std::path::Path;

use super::tree::PostingObstacle;
use crate::sysfs::{attribute, names};

/// VT-d's capability register: posted interrupts (`cap_pi_support`, drivers/iommu/intel/iommu.h).
const VTD_POSTED_INTERRUPTS: u64 = 1 << 59;

/// AMD's extended features: guest virtual APIC (`FEATURE_GAM_VAPIC`,
/// drivers/iommu/amd/amd_iommu_types.h).
const AMD_GUEST_VIRTUAL_APIC: u64 = 1 << 21;

/// The obstacle that makes posting impossible for every PCI device of the machine below `root`.
pub(super) fn obstacle(root: &Path) -> Option<PostingObstacle> {
    if kvm_does_not_post(&root.join("sys/module")) {
        return Some(PostingObstacle::Kvm);
    }
    if command_line_forbids(&root.join("proc/cmdline")) {
        return Some(PostingObstacle::CommandLine);
    }
    // One unit without it is enough: the kernel uses the minimum of all.
    some_iommu_cannot(&root.join("sys/class/iommu")).then_some(PostingObstacle::Iommu)
}

fn kvm_does_not_post(modules: &Path) -> bool {
    [
        "kvm_intel/parameters/enable_apicv",
        "kvm_amd/parameters/avic",
    ]
    .into_iter()
    .filter_map(|file| attribute(&modules.join(file)).ok()?)
    .any(|value| matches!(value.as_str(), "N" | "0"))
}

fn command_line_forbids(path: &Path) -> bool {
    let line = fs::read_to_string(path).unwrap_or_default();
    line.split_ascii_whitespace()
        .filter_map(|word| word.strip_prefix("intremap="))
        .flat_map(|options| options.split(','))
        .any(|option| matches!(option, "off" | "nopost"))
}

fn some_iommu_cannot(units: &Path) -> bool {
    names(units).unwrap_or_default().iter().any(|unit| {
        let lacks = |file: &str, bit: u64| {
            let text = attribute(&units.join(unit).join(file)).ok().flatten();
            // AMD's are two registers, in another order before Linux 6.7. Only a bit that is in
            // neither is certain.
            let registers: Option<Vec<u64>> = text.and_then(|text| {
                let words = text.split(':');
                words
                    .map(|word| u64::from_str_radix(word, 16).ok())
                    .collect()
            });
            registers.is_some_and(|registers| registers.iter().all(|one| one & bit == 0))
        };
        lacks("intel-iommu/cap", VTD_POSTED_INTERRUPTS)
            || lacks("amd-iommu/features", AMD_GUEST_VIRTUAL_APIC)
    })
}

//! A NIC in a host whose IOMMU is off.

mod iommu;

use lab::sim;
use std::path::Path;

#[test]
fn a_nic_without_an_iommu_is_refused_with_the_remedy() {
    sim::require_lab().unwrap();
    if !Path::new("/sys/module/vp_vdpa").exists() {
        sim::load("vp_vdpa.ko", "").unwrap();
    }
    iommu::refused(0, &["behind no IOMMU", "intel_iommu=on"]);
}

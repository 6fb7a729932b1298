//! A NIC that shares its IOMMU group with another one.

mod iommu;

#[test]
fn a_nic_in_a_shared_group_is_refused_with_the_remedy() {
    iommu::refused(0, &["shares an IOMMU group", "ACS"]);
}

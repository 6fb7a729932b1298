//! `vdpa_mgmt::pci`, `vdpa_mgmt::sriov`, `bellhop vf` and `bellhop bind` of PCI functions on the
//! SR-IOV rig's NIC. Settings of virtual functions are tested on netdevsim, beside iproute2's `ip`.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[path = "mgmt_sriov/life.rs"]
mod life;
#[path = "mgmt_sriov/settings.rs"]
mod settings;
#[path = "mgmt_dev/support.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod support;

//! `vdpa_mgmt::nic` and `bellhop nic` on virtual functions: created, used, removed. Each step also
//! fails, is interrupted or is killed; afterwards the lab host is as before.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[path = "mgmt_nic/faults.rs"]
mod faults;
#[path = "mgmt_nic/host.rs"]
mod host;
#[path = "mgmt_dev/support.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod support;
#[path = "rings_netdev/traffic.rs"]
mod traffic;
#[path = "mgmt_nic/virtual_functions.rs"]
mod virtual_functions;

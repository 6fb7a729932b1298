//! `bellhop nic` on subfunctions of the lab NIC: created with a connection, used by a guest,
//! removed. Each step also fails or is killed; afterwards the lab host is as before.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[path = "mgmt_nic/bridge.rs"]
mod bridge;
#[path = "mgmt_nic/faults.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod faults;
#[path = "mgmt_nic/host.rs"]
mod host;
#[path = "mgmt_nic/subfunctions.rs"]
mod subfunctions;
#[path = "mgmt_dev/support.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod support;
#[path = "rings_netdev/traffic.rs"]
mod traffic;

//! Subfunctions of the lab NIC, end to end with iproute2's tools: port, function, auxiliary device,
//! vDPA device, representor, bridge. `vdpa::netdev` sends traffic through all of it.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[path = "mgmt_labnic_sf/connection.rs"]
mod connection;
#[path = "mgmt_labnic_sf/life.rs"]
mod life;
#[path = "mgmt_labnic_sf/support.rs"]
mod support;
#[path = "rings_netdev/traffic.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod traffic;

//! `vdpa_mgmt::link` and `vdpa_mgmt::connectivity`: on real bridges, veths and namespaces, and on
//! netdevsim's representors, beside iproute2's `ip` and `bridge`.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[path = "mgmt_link/attach.rs"]
mod attach;
#[path = "mgmt_link/namespace.rs"]
mod namespace;
#[path = "mgmt_link/netdevsim.rs"]
mod netdevsim;
#[path = "mgmt_link/same.rs"]
mod same;
#[path = "mgmt_link/udp.rs"]
mod udp;

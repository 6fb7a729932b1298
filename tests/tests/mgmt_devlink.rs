//! `vdpa_mgmt::devlink` and `bellhop port` on netdevsim, beside iproute2's `devlink`.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[path = "mgmt_devlink/errors.rs"]
mod errors;
#[path = "mgmt_devlink/events.rs"]
mod events;
#[path = "mgmt_devlink/life.rs"]
mod life;
#[path = "mgmt_devlink/same.rs"]
mod same;
#[path = "mgmt_dev/support.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod support;
#[path = "mgmt_devlink/tool.rs"]
mod tool;
#[path = "mgmt_devlink/wire.rs"]
mod wire;

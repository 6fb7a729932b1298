//! `vdpa_mgmt`, `bellhop mgmtdev` and `bellhop dev` on real vDPA parents, beside iproute2's `vdpa`.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[path = "mgmt_dev/bad_input.rs"]
mod bad_input;
#[path = "mgmt_dev/bus.rs"]
mod bus;
#[path = "mgmt_dev/holder.rs"]
mod holder;
#[path = "mgmt_dev/life.rs"]
mod life;
#[path = "mgmt_dev/same.rs"]
mod same;
#[path = "mgmt_dev/same_output.rs"]
mod same_output;
#[path = "mgmt_dev/support.rs"]
mod support;
#[path = "mgmt_dev/vduse.rs"]
mod vduse;

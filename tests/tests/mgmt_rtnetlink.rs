//! `vdpa_mgmt::link` and `vdpa_mgmt::sriov` beside the crate rtnetlink, as an independent oracle:
//! the same requests have the same effect, and the kernel's answers mean the same.
//!
//! `faults.rs` repeats why Bellhop does not send its requests through that crate.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[path = "mgmt_rtnetlink/answers.rs"]
mod answers;
#[path = "mgmt_rtnetlink/changes.rs"]
mod changes;
#[path = "mgmt_rtnetlink/faults.rs"]
mod faults;
#[path = "mgmt_link/namespace.rs"]
mod namespace;
#[path = "mgmt_rtnetlink/oracle.rs"]
mod oracle;

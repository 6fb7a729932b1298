//! The `vdpa` library and the vDPA backend on real devices of the kernel's simulator, without any
//! virtual machine.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[path = "skeleton_vdpa/backend.rs"]
mod backend;
#[path = "skeleton_vdpa/control.rs"]
mod control;
#[path = "skeleton_vdpa/dirty_log.rs"]
mod dirty_log;
#[path = "skeleton_vdpa/holder.rs"]
mod holder;
#[path = "skeleton_vdpa/iotlb.rs"]
mod iotlb;
#[path = "skeleton_vdpa/loopback.rs"]
mod loopback;
#[path = "skeleton_vdpa/own_features.rs"]
mod own_features;
#[path = "skeleton_vdpa/restore.rs"]
mod restore;
#[path = "skeleton_vdpa/states.rs"]
mod states;
#[path = "skeleton_vdpa/support/mod.rs"]
mod support;
#[path = "skeleton_vdpa/uapi.rs"]
mod uapi;

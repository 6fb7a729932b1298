//! The `vdpa` library and the vDPA backend on real devices of the kernel's simulator, without any
//! virtual machine.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[path = "vdpa_backend/backend.rs"]
mod backend;
#[path = "vdpa_backend/control.rs"]
mod control;
#[path = "vdpa_backend/dirty_log.rs"]
mod dirty_log;
#[path = "vdpa_backend/holder.rs"]
mod holder;
#[path = "vdpa_backend/iommu.rs"]
mod iommu;
#[path = "vdpa_backend/iotlb.rs"]
mod iotlb;
#[path = "vdpa_backend/loopback.rs"]
mod loopback;
#[path = "vdpa_backend/own_features.rs"]
mod own_features;
#[path = "vdpa_backend/restore.rs"]
mod restore;
#[path = "vdpa_backend/states.rs"]
mod states;
#[path = "vdpa_backend/support/mod.rs"]
mod support;
#[path = "vdpa_backend/uapi.rs"]
mod uapi;

//! Virtio: the transport, the backend interface, and the backends.

pub mod backend;
pub mod block;
#[cfg(any(test, feature = "fuzz"))]
#[allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "code of tests, which fuzz targets use"
)]
mod fuzz;
pub mod iommu;
mod own_space;
pub mod pci;
pub mod rng;
pub mod saved_state;
pub mod single_queue;
pub mod status;
pub mod userspace_queue;
pub mod vdpa;

#[cfg(any(test, feature = "fuzz"))]
pub use fuzz::rings_anything;

/// Returns the versions of the saved states, by unique names. They cover the transport, each kind
/// of backend, and the identity of a network device for another host. A program reads these
/// versions only.
#[must_use]
pub fn state_versions() -> [(&'static str, u32); 6] {
    let [device, identity] = vdpa::STATE_VERSIONS;
    [
        ("virtio-pci", pci::VIRTIO_PCI_STATE_VERSION),
        device,
        identity,
        (block::STATE_NAME, block::STATE_VERSION),
        (rng::STATE_NAME, rng::STATE_VERSION),
        (iommu::STATE_NAME, iommu::STATE_VERSION),
    ]
}

//! Virtio: the transport, the seam behind it, and the backends.

pub mod backend;
pub mod block;
pub mod pci;
pub mod rng;
pub mod saved_state;
pub mod single_queue;
pub mod status;
pub mod userspace_queue;
pub mod vdpa;

/// The versions of what the devices save, by names that no two have in common: the transport, each kind of backend, and what a
/// network device is remembered by at another host. A program reads these and no others.
#[must_use]
pub fn state_versions() -> [(&'static str, u32); 5] {
    [
        ("virtio-pci", pci::VIRTIO_PCI_STATE_VERSION),
        (vdpa::STATE_NAME, vdpa::STATE_VERSION),
        (vdpa::IDENTITY_NAME, vdpa::IDENTITY_VERSION),
        (block::STATE_NAME, block::STATE_VERSION),
        (rng::STATE_NAME, rng::STATE_VERSION),
    ]
}

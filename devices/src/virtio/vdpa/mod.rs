//! A vhost-vdpa device as a virtio [`Backend`](crate::virtio::backend::Backend): the guest's
//! settings are passed to the device, which then works alone.
//!
//! ```text
//!   transport (what the guest programmed)
//!       |  negotiate, activate, change, reset
//!       v
//!   VdpaBackend --+--> Rings       the device, what it reaches (guest RAM at IOVA = guest-physical
//!                 |                address, for the VM's life), its queues and doorbells
//!                 +--> NetOverlay  the guest's features, including the VMM's own; the fields
//!                 |                that the VMM lays over the configuration: MAC, announcement
//!                 +--> WriteLog    the record of the device's writes; the thread of relayed
//!                 |                queues, while there are any
//!                 +--> Control     the control queue, which belongs to the VMM
//!
//!   data queues: kick eventfd -> vhost worker -> device -> call eventfd -> guest
//!            or: the device's own doorbell ---> device
//! ```
//! Any device class works: only the control queue and the MAC address are specific to network
//! devices. Owns the device; must not know PCI, KVM or who polls its descriptors.

mod announce;
mod backend;
mod control;
mod device;
mod doorbells;
mod eventfd;
#[cfg(test)]
pub(crate) mod fake_kernel;
mod hot_swap;
mod identity;
mod mac;
mod offer;
mod overlay;
mod poller;
mod relays;
mod reset_queue;
mod restore;
mod rings;
mod saved;
mod start;
mod translated;
mod write_log;

#[cfg(any(test, feature = "fuzz"))]
pub use self::control::control_anything;
pub use self::device::{VdpaBackend, VdpaOptions};
pub use self::doorbells::DoorbellMode;
pub use self::identity::not_replaceable;
pub use self::poller::at_relay_start;

/// Names and versions of the saved states: of a device and of an identity.
pub(super) const STATE_VERSIONS: [(&str, u32); 2] = [
    (saved::STATE_NAME, saved::STATE_VERSION),
    (identity::IDENTITY_NAME, identity::IDENTITY_VERSION),
];

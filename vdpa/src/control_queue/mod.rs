//! The control virtqueue of a network device (virtio 1.3, 5.1.6.5), which the VMM owns.
//!
//! ```text
//!   guest's bytes --Command::parse--> Command --ControlQueue::submit--> device
//!                     (checked)          |                                |
//!                                        +--> ControlState <--Answer::Ok--+
//!                                              |
//!                                        replay after reset, restore, migration
//! ```
//! [`command`] defines and validates the commands, [`state`] remembers what the device
//! acknowledged, and [`queue`] carries a command to the device. None of them depends on the guest's
//! ring.

pub mod command;
pub mod queue;
pub mod state;

use virtio_bindings::virtio_net::{VIRTIO_NET_F_MQ, VIRTIO_NET_F_RSS};

pub use self::command::{Command, Limits, MacAddress, MacTable, RxMode};
pub use self::queue::{Answer, ControlQueue, Placement};
pub use self::state::ControlState;

/// Index of the control queue (virtio 1.3, 5.1.2). It comes after all pairs with MQ or RSS, else
/// after the first pair. `max_virtqueue_pairs` is from the device configuration and used only in
/// the first case.
#[must_use]
pub fn queue_index(features: u64, max_virtqueue_pairs: u16) -> Option<u16> {
    let several = features & (1 << VIRTIO_NET_F_MQ | 1 << VIRTIO_NET_F_RSS) != 0;
    match (several, max_virtqueue_pairs) {
        (false, _) => Some(2),
        (true, 0) => None,
        (true, pairs) => pairs.checked_mul(2),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn index_depends_on_negotiated_features() {
        assert_eq!(queue_index(0, 8), Some(2));
        assert_eq!(queue_index(1 << VIRTIO_NET_F_MQ, 8), Some(16));
        assert_eq!(queue_index(1 << VIRTIO_NET_F_RSS, 1), Some(2));
        assert_eq!(queue_index(1 << VIRTIO_NET_F_MQ, 0), None);
        assert_eq!(queue_index(1 << VIRTIO_NET_F_MQ, 0x8000), None);
    }
}

//! The caller's options, and the features that follow from them.

use virtio_bindings::virtio_config as config;
use virtio_bindings::virtio_net as net;
use virtio_bindings::virtio_ring as ring;

/// The layout of a packet in descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Chains {
    /// Header and frame in one descriptor.
    #[default]
    Single,
    /// A descriptor for the header and one for the frame.
    Pair,
    /// As [`Chains::Pair`], in an indirect table; without INDIRECT_DESC the same as that.
    Indirect,
}

/// How a queue is kicked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Kick {
    /// By a store to the queue's doorbell if it has one, else by eventfd.
    #[default]
    Doorbell,
    /// By eventfd.
    Eventfd,
}

/// The driver's requirements for a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Queue pairs; more than one needs MQ and a control queue.
    pub pairs: u16,
    /// Maximum entries of each ring; rounded down to a power of two that the device accepts.
    pub ring_size: u16,
    /// Mask of features not to negotiate although the device offers them.
    pub withhold: u64,
    /// The layout of packets in descriptors.
    pub chains: Chains,
    /// How queues are kicked.
    pub kick: Kick,
}

impl Default for Options {
    /// One pair, 256 entries, all features, one descriptor for each packet, doorbells.
    fn default() -> Self {
        Self {
            pairs: 1,
            ring_size: 256,
            withhold: 0,
            chains: Chains::default(),
            kick: Kick::default(),
        }
    }
}

/// The features that this driver supports. MRG_RXBUF and offloads are not among them.
const SUPPORTED: u64 = 1 << config::VIRTIO_F_VERSION_1
    | 1 << config::VIRTIO_F_RING_PACKED
    | 1 << config::VIRTIO_F_IN_ORDER
    | 1 << ring::VIRTIO_RING_F_EVENT_IDX
    | 1 << ring::VIRTIO_RING_F_INDIRECT_DESC
    | 1 << net::VIRTIO_NET_F_MAC
    | 1 << net::VIRTIO_NET_F_MTU
    | 1 << net::VIRTIO_NET_F_STATUS
    | 1 << net::VIRTIO_NET_F_CTRL_VQ
    | 1 << net::VIRTIO_NET_F_CTRL_MAC_ADDR
    | 1 << net::VIRTIO_NET_F_MQ;

impl Options {
    /// The features to negotiate with a device that offers `offered`.
    #[must_use]
    pub fn features(&self, offered: u64) -> u64 {
        let mut features = offered & SUPPORTED & !self.withhold;
        let control = features & (1 << net::VIRTIO_NET_F_CTRL_VQ) != 0;
        if self.pairs < 2 || !control {
            features &= !(1 << net::VIRTIO_NET_F_MQ);
        }
        if !control {
            features &= !(1 << net::VIRTIO_NET_F_CTRL_MAC_ADDR);
        }
        features
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_set_by_control_commands_need_the_control_queue() {
        let mq = 1 << net::VIRTIO_NET_F_MQ;
        let mac = 1 << net::VIRTIO_NET_F_CTRL_MAC_ADDR;
        let control = 1 << net::VIRTIO_NET_F_CTRL_VQ;
        let mut options = Options::default();
        assert_eq!(options.features(u64::MAX) & mq, 0);
        options.pairs = 2;
        assert_eq!(options.features(u64::MAX), SUPPORTED);
        options.withhold = control;
        assert_eq!(options.features(u64::MAX) & (mq | mac | control), 0);
    }
}

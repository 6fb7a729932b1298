//! Compares the properties of a network device that a guest has seen with those of another device.
//!
//! Owns these rules. It must not know rings, nor which device is next.

use serde::{Deserialize, Serialize};
use vdpa::device::Device;
use vdpa::netdev::VirtioNetConfig;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_HASH_REPORT, VIRTIO_NET_F_MQ, VIRTIO_NET_F_MTU, VIRTIO_NET_F_RSS,
};

use crate::Error;
use crate::virtio::backend::SavedState;
use crate::virtio::saved_state;

/// Name and version of an identity.
pub(super) const IDENTITY_NAME: &str = "virtio-vdpa-identity";
pub(super) const IDENTITY_VERSION: u32 = 1;

/// The properties of a network device that the guest has seen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NetIdentity {
    /// The MAC address that the guest finds after each reset.
    pub(super) mac: Option<[u8; 6]>,
    /// The beginning of the device configuration; zero beyond its length.
    pub(super) config: [u8; VirtioNetConfig::LEN],
}

/// Checks that a driver that relies on `features` and has read `old` can continue with `new`.
fn check_config(old: &VirtioNetConfig, new: &VirtioNetConfig, features: u64) -> Result<(), Error> {
    let relies = |bit: u32| features & (1 << bit) != 0;
    let hashes = relies(VIRTIO_NET_F_RSS) || relies(VIRTIO_NET_F_HASH_REPORT);
    // With several pairs the control queue follows the last one (virtio 1.3, 5.1.2).
    if (relies(VIRTIO_NET_F_MQ) || hashes) && new.max_virtqueue_pairs != old.max_virtqueue_pairs {
        let (needs, has) = (old.max_virtqueue_pairs, new.max_virtqueue_pairs);
        return Err(Error::other(format!(
            "the guest uses up to {needs} queue pairs, but the device has {has}: create the device \
             with max_vqp {needs}"
        )));
    }
    let (needs, has) = (old.mtu.get(), new.mtu.get());
    if relies(VIRTIO_NET_F_MTU) && has < needs {
        return Err(Error::other(format!(
            "the guest has seen an MTU of {needs}, but the device has {has}: create the device \
             with mtu {needs}"
        )));
    }
    let table = |config: &VirtioNetConfig| config.rss_max_indirection_table_length.get();
    let less = new.rss_max_key_size < old.rss_max_key_size
        || table(new) < table(old)
        || (old.supported_hash_types & !new.supported_hash_types).get() != 0;
    if hashes && less {
        return Err(Error::other(
            "the device hashes less than it offered to the guest (RSS key, table or hash types)",
        ));
    }
    Ok(())
}

impl NetIdentity {
    /// Checks that a driver that relies on `features` and has seen this identity can continue with
    /// a device that has the configuration `new`. Its address is ignored unless it is `addressed`.
    /// `settable`: the VMM can set it.
    pub(super) fn check(
        &self,
        mut new: [u8; VirtioNetConfig::LEN],
        addressed: bool,
        settable: bool,
        features: u64,
    ) -> Result<(), Error> {
        let old = VirtioNetConfig::of(self.config);
        check_config(&old, &VirtioNetConfig::of(new), features)?;
        if !addressed {
            new[..6].fill(0);
        }
        let differs = self.mac.is_some_and(|mac| mac != new[..6]);
        if features != 0 && differs && !settable {
            return Err(Error::other(
                "the device has another MAC address, which cannot be set without the features \
                 CTRL_VQ and CTRL_MAC_ADDR: create the device with the guest's address (`bellhop \
                 dev add … mac ADDRESS`)",
            ));
        }
        Ok(())
    }
    pub(super) fn encode(&self) -> Result<SavedState, Error> {
        saved_state::encode(IDENTITY_NAME, IDENTITY_VERSION, self)
    }

    pub(super) fn decode(state: &SavedState) -> Result<Self, Error> {
        saved_state::decode(state, IDENTITY_NAME, IDENTITY_VERSION)
    }
}

/// Reads the current beginning of the device configuration.
pub(super) fn read_net_config(device: &Device) -> Result<[u8; VirtioNetConfig::LEN], Error> {
    let mut config = [0; VirtioNetConfig::LEN];
    let len = usize::try_from(device.config_size()).unwrap_or(usize::MAX);
    device.read_config(0, &mut config[..len.min(VirtioNetConfig::LEN)])?;
    Ok(config)
}

/// The error for a device that is not a network device.
#[must_use]
pub fn not_replaceable() -> Error {
    Error::other("only network devices can be replaced while the machine runs")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net_config(queue_pairs: u16, mtu: u16) -> VirtioNetConfig {
        let mut config = VirtioNetConfig::of([0; VirtioNetConfig::LEN]);
        config.max_virtqueue_pairs = queue_pairs.into();
        config.mtu = mtu.into();
        config.rss_max_key_size = 40;
        config.rss_max_indirection_table_length = 128_u16.into();
        config.supported_hash_types = 0b11_u32.into();
        config
    }

    #[test]
    fn properties_that_the_guest_relies_on_must_stay() {
        const MQ: u64 = 1 << VIRTIO_NET_F_MQ;
        const MTU: u64 = 1 << VIRTIO_NET_F_MTU;
        const RSS: u64 = 1 << VIRTIO_NET_F_RSS;
        let old = net_config(4, 9000);
        for (new, features, fits) in [
            (net_config(4, 9000), MQ | MTU | RSS, true),
            (net_config(2, 9000), MQ, false),
            // The index of the control queue would change.
            (net_config(8, 9000), MQ, false),
            (net_config(8, 9000), RSS, false),
            (net_config(8, 1500), 0, true),
            (net_config(4, 1500), MQ, true),
            (net_config(4, 1500), MTU, false),
            (net_config(4, 9216), MTU, true),
        ] {
            assert_eq!(
                check_config(&old, &new, features).is_ok(),
                fits,
                "{new:?} {features:#x}"
            );
        }
        let changes: [fn(&mut VirtioNetConfig); 3] = [
            |new| new.rss_max_key_size = 39,
            |new| new.rss_max_indirection_table_length = 64_u16.into(),
            |new| new.supported_hash_types = 0b101_u32.into(),
        ];
        for change in changes {
            let mut new = old;
            change(&mut new);
            let error = check_config(&old, &new, RSS).unwrap_err();
            assert!(error.to_string().contains("hashes less"), "{error}");
            check_config(&old, &new, MQ).unwrap();
        }
    }

    #[test]
    fn later_negotiated_features_count() {
        const MTU: u64 = 1 << VIRTIO_NET_F_MTU;
        let mac = [2, 0, 0, 0, 0, 1];
        let config = |mac: [u8; 6], mtu: u16| {
            let mut config = [0; VirtioNetConfig::LEN];
            config[..6].copy_from_slice(&mac);
            config[10..12].copy_from_slice(&mtu.to_le_bytes());
            config
        };
        let identity = NetIdentity {
            mac: Some(mac),
            config: config(mac, 9000),
        };
        let smaller = config(mac, 1500);
        // No driver; then a driver that does not rely on the MTU; then one that does.
        identity.check(smaller, true, true, 0).unwrap();
        identity.check(smaller, true, true, 1).unwrap();
        let error = identity.check(smaller, true, true, MTU).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("an MTU of 9000, but the device has 1500"),
            "{text}"
        );
        for (new, addressed) in [([2, 0, 0, 0, 0, 2], true), (mac, false)] {
            let new = config(new, 9000);
            identity.check(new, addressed, false, 0).unwrap();
            identity.check(new, addressed, true, 1).unwrap();
            let error = identity.check(new, addressed, false, MTU).unwrap_err();
            assert!(error.to_string().contains("another MAC address"), "{error}");
        }
    }

    #[test]
    fn an_identity_of_another_kind_is_refused() {
        let identity = NetIdentity {
            mac: Some([2, 0, 0, 0, 0, 1]),
            config: [7; VirtioNetConfig::LEN],
        };
        let state = identity.encode().unwrap();
        assert_eq!(NetIdentity::decode(&state).unwrap(), identity);
        let mut foreign = state.clone();
        foreign.name = "virtio-vdpa".to_owned();
        NetIdentity::decode(&foreign).unwrap_err();
        for len in 0..state.payload.len() {
            let mut cut = state.clone();
            cut.payload.truncate(len);
            NetIdentity::decode(&cut).unwrap_err();
        }
    }
}

//! The properties of a device to be added. Each setter rejects wrong values; combinations are
//! checked before sending.

use netlink_packet_core::DefaultNla;
use virtio_bindings::virtio_net::{VIRTIO_NET_F_MAC, VIRTIO_NET_F_MQ, VIRTIO_NET_F_MTU};

use super::error::{self, Error, ErrorKind};
use super::name::{MgmtDeviceName, is_name};
use super::netlink::message::{string, value};
use super::uapi::*;

/// Maximum length of a name, in bytes: the limit of iproute2's `vdpa`.
const NAME_MAX: usize = 63;

/// The smallest MTU, in bytes (virtio 1.3, 5.1.4.1).
const MTU_MIN: u16 = 68;

/// Maximum number of queue pairs (VIRTIO_NET_CTRL_MQ_VQ_PAIRS_MAX).
const MAX_VQP_MAX: u16 = 0x8000;

/// A device to be added (`VDPA_CMD_DEV_NEW`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewDevice {
    name: String,
    mgmtdev: MgmtDeviceName,
    mac: Option<[u8; 6]>,
    mtu: Option<u16>,
    max_vqp: Option<u16>,
    device_features: Option<u64>,
}

impl NewDevice {
    /// A device called `name` on a management device, which chooses everything else.
    ///
    /// # Errors
    /// `Invalid`.
    pub fn new(name: &str, mgmtdev: MgmtDeviceName) -> Result<Self, Error> {
        check_name(name)?;
        Ok(Self {
            name: name.to_owned(),
            mgmtdev,
            mac: None,
            mtu: None,
            max_vqp: None,
            device_features: None,
        })
    }

    /// Sets its address; `None`, here and below: the management device chooses.
    ///
    /// # Errors
    /// `Invalid` if it is not unicast.
    pub fn mac(self, mac: Option<[u8; 6]>) -> Result<Self, Error> {
        let mac = mac.map(unicast).transpose()?;
        Ok(Self { mac, ..self })
    }

    /// Sets its MTU, in bytes.
    ///
    /// # Errors
    /// `Invalid` below 68.
    pub fn mtu(self, mtu: Option<u16>) -> Result<Self, Error> {
        if let Some(mtu) = mtu.filter(|mtu| *mtu < MTU_MIN) {
            let message = format!("mtu {mtu} is too small: virtio allows 68 to 65535 bytes");
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        Ok(Self { mtu, ..self })
    }

    /// Sets its number of queue pairs.
    ///
    /// # Errors
    /// `Invalid` for 0 or more than 32768.
    pub fn max_vqp(self, max_vqp: Option<u16>) -> Result<Self, Error> {
        if let Some(max_vqp) = max_vqp.filter(|pairs| !(1..=MAX_VQP_MAX).contains(pairs)) {
            let message =
                format!("cannot use max_vqp {max_vqp}: virtio allows 1 to 32768 queue pairs");
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        Ok(Self { max_vqp, ..self })
    }

    /// Sets its virtio feature bits, exactly these.
    #[must_use]
    pub fn device_features(self, device_features: Option<u64>) -> Self {
        Self {
            device_features,
            ..self
        }
    }

    /// The device's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The management device for it.
    #[must_use]
    pub fn mgmtdev(&self) -> &MgmtDeviceName {
        &self.mgmtdev
    }

    /// The request's attributes.
    pub(super) fn attributes(&self) -> Result<Vec<DefaultNla>, Error> {
        self.check_features()?;
        let mut list = self.mgmtdev.attributes();
        list.push(string(VDPA_ATTR_DEV_NAME, &self.name));
        let number =
            |kind, number: Option<u16>| number.map(|number| value(kind, &number.to_ne_bytes()));
        list.extend(
            self.mac
                .map(|mac| value(VDPA_ATTR_DEV_NET_CFG_MACADDR, &mac)),
        );
        list.extend(number(VDPA_ATTR_DEV_NET_CFG_MTU, self.mtu));
        list.extend(number(VDPA_ATTR_DEV_NET_CFG_MAX_VQP, self.max_vqp));
        let features = self.device_features.map(u64::to_ne_bytes);
        list.extend(features.map(|bits| value(VDPA_ATTR_DEV_FEATURES, &bits)));
        Ok(list)
    }

    fn check_features(&self) -> Result<(), Error> {
        let Some(features) = self.device_features else {
            return Ok(());
        };
        let several = self.max_vqp.is_some_and(|pairs| pairs > 1);
        for (given, attribute, feature, bit) in [
            (self.mac.is_some(), "mac", "MAC", VIRTIO_NET_F_MAC),
            (self.mtu.is_some(), "mtu", "MTU", VIRTIO_NET_F_MTU),
            (several, "max_vqp", "MQ", VIRTIO_NET_F_MQ),
        ] {
            if given && features & 1 << bit == 0 {
                let message = format!(
                    "{attribute} needs the feature {feature} (bit {bit}), which device_features \
                     lacks: add {:#x}",
                    1_u64 << bit
                );
                return Err(Error::new(ErrorKind::Invalid, message));
            }
        }
        Ok(())
    }
}

/// Fails for an invalid name of a new vDPA device.
pub(super) fn check_name(name: &str) -> Result<(), Error> {
    if is_name(name) && name.len() <= NAME_MAX && !name.contains(char::is_whitespace) {
        return Ok(());
    }
    let message = format!(
        "{name:?} is not a name for a vDPA device: use 1 to 63 bytes without slashes, spaces and \
         control characters"
    );
    Err(Error::new(ErrorKind::Invalid, message))
}

/// Returns the address if a NIC can have it.
pub(super) fn unicast(mac: [u8; 6]) -> Result<[u8; 6], Error> {
    let [first, ..] = mac;
    if first & 1 == 1 || mac == [0; 6] {
        let message = format!(
            "mac {} is not a unicast address: the first byte must be even, and not all bytes zero",
            error::mac(mac)
        );
        return Err(Error::new(ErrorKind::Invalid, message));
    }
    Ok(mac)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device() -> NewDevice {
        NewDevice::new("nic0", "pci/0000:01:00.1".parse().unwrap()).unwrap()
    }

    #[test]
    fn all_that_is_given_is_sent() {
        let mac = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
        let full = device()
            .mac(Some(mac))
            .and_then(|device| device.mtu(Some(9000)))
            .and_then(|device| device.max_vqp(Some(4)))
            .unwrap()
            .device_features(Some(u64::MAX));
        assert_eq!((full.name(), full.mgmtdev().bus()), ("nic0", Some("pci")));
        let expected = [
            value(1, b"pci\0"),
            value(2, b"0000:01:00.1\0"),
            value(4, b"nic0\0"),
            value(10, &mac),
            value(13, &9000_u16.to_ne_bytes()),
            value(12, &4_u16.to_ne_bytes()),
            value(20, &u64::MAX.to_ne_bytes()),
        ];
        assert_eq!(full.attributes().unwrap(), expected);
        assert_eq!(device().attributes().unwrap(), expected[..3]);
    }

    #[test]
    fn wrong_values_are_refused_with_the_right_ones() {
        for name in ["", "a b", "a/b", ".", "a\tb", &"x".repeat(64)] {
            let error = NewDevice::new(name, "m".parse().unwrap()).unwrap_err();
            assert!(error.to_string().contains("63 bytes"), "{error}");
        }
        for mac in [[0; 6], [0xff; 6], [1, 0, 0, 0, 0, 0]] {
            let error = device().mac(Some(mac)).unwrap_err();
            assert!(error.to_string().contains("unicast"), "{error}");
        }
        assert!(device().mtu(Some(67)).is_err());
        assert!(device().mtu(Some(68)).is_ok());
        assert!(device().max_vqp(Some(0)).is_err());
        assert!(device().max_vqp(Some(0x8001)).is_err());
    }

    #[test]
    fn attributes_need_their_features() {
        let missing = |device: NewDevice, bit: u32| {
            assert!(
                device
                    .clone()
                    .device_features(Some(1 << bit))
                    .attributes()
                    .is_ok()
            );
            let error = device
                .device_features(Some(!(1_u64 << bit)))
                .attributes()
                .unwrap_err();
            assert!(
                error.to_string().contains(&format!("{:#x}", 1_u64 << bit)),
                "{error}"
            );
        };
        missing(device().mac(Some([2, 0, 0, 0, 0, 1])).unwrap(), 5);
        missing(device().mtu(Some(1500)).unwrap(), 3);
        missing(device().max_vqp(Some(2)).unwrap(), 22);
        // One pair needs no MQ.
        let one = device().max_vqp(Some(1)).unwrap().device_features(Some(0));
        assert!(one.attributes().is_ok());
    }
}

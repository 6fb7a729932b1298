//! The VMM's overlay on a network device: the features, the MAC address and the configuration that
//! the guest sees.
//!
//! It must not know rings, nor how a command reaches the device.

use vdpa::control_queue::{Command, RxMode};
use vdpa::device::{Device, Operation};
use vdpa::netdev::VirtioNetConfig;
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_GUEST_ANNOUNCE, VIRTIO_NET_F_MAC, VIRTIO_NET_F_STANDBY,
};

use super::announce::Announcement;
use super::identity::{NetIdentity, not_replaceable, read_net_config};
use super::mac::MacOverlay;
use super::offer::{Negotiation, Offer, Settings};
use crate::Error;
use crate::virtio::backend::ReplacedDevice;

/// The overlay of one device; see the module.
#[derive(Debug)]
pub(super) struct NetOverlay {
    pub(super) offer: Offer,
    pub(super) mac: Option<MacOverlay>,
    pub(super) announcement: Announcement,
    /// The device's configuration at the negotiation. A device that has failed may report any
    /// value.
    pub(super) negotiated_config: Option<[u8; VirtioNetConfig::LEN]>,
    /// The identity of the device that this one has replaced, until the driver continues or
    /// starts here.
    pub(super) replaced: Option<NetIdentity>,
}

impl NetOverlay {
    /// Creates the overlay of a device that was reset, with the configured address of the guest.
    pub(super) fn new(
        device: &Device,
        id: &str,
        mac: Option<[u8; 6]>,
        settings: Settings,
    ) -> Result<Self, Error> {
        let offer = Offer::new(device, id, settings)?;
        Ok(Self {
            offer,
            mac: configured_mac(device, offer, mac)?,
            announcement: Announcement::default(),
            negotiated_config: None,
            replaced: None,
        })
    }

    /// Returns the properties of `device` that the guest knows. `failed`: the device may report any
    /// value now.
    pub(super) fn identify(&self, device: &Device, failed: bool) -> Result<NetIdentity, Error> {
        if device.device_id() != VIRTIO_ID_NET {
            return Err(not_replaceable());
        }
        Ok(NetIdentity {
            mac: self.mac.as_ref().map(MacOverlay::configured),
            config: match self.negotiated_config {
                Some(config) if failed => config,
                _ => read_net_config(device)?,
            },
        })
    }

    /// See [`Hardware::adopt`](crate::virtio::backend::Hardware::adopt).
    pub(super) fn adopt(
        &mut self,
        device: &Device,
        id: &str,
        identity: &NetIdentity,
        replaced: &ReplacedDevice,
    ) -> Result<(), Error> {
        device.check(Operation::Probe)?;
        if device.device_id() != VIRTIO_ID_NET {
            return Err(not_replaceable());
        }
        let config = read_net_config(device)?;
        // An address that the VMM assigns changes the possible offer.
        let settings = Settings {
            mac_given: identity.mac.is_some(),
            mac_lock: self.offer.mac_lock,
            standby: self.offer.has(VIRTIO_NET_F_STANDBY),
            translated: self.offer.is_translated(),
        };
        let offer = Offer::new(device, id, settings)?;
        check_identity(identity, config, offer, replaced.features)?;
        self.mac = configured_mac(device, offer, identity.mac)?;
        self.offer = offer;
        self.replaced = Some(identity.clone());
        Ok(())
    }

    /// See [`Hardware::check_adopted`](crate::virtio::backend::Hardware::check_adopted).
    pub(super) fn check_replaced(&self, device: &Device, features: u64) -> Result<(), Error> {
        match &self.replaced {
            Some(identity) => {
                check_identity(identity, read_net_config(device)?, self.offer, features)
            }
            None => Ok(()),
        }
    }

    /// Resets the overlay after a reset by the driver.
    pub(super) fn reset(&mut self) {
        self.announcement.set(false);
        if let Some(mac) = &mut self.mac {
            mac.reset();
        }
    }

    /// Lays the VMM's fields over data read from device configuration at `offset`.
    pub(super) fn cover(&self, offset: u32, data: &mut [u8]) {
        if let Some(mac) = &self.mac {
            mac.cover(offset, data);
        }
        if self.offer.has(VIRTIO_NET_F_GUEST_ANNOUNCE) {
            self.announcement.cover(offset, data);
        }
    }

    /// Records a command that was carried out.
    pub(super) fn note(&mut self, command: &Command) {
        if *command == Command::AnnounceAck {
            self.announcement.set(false);
        }
        if let Some(mac) = &mut self.mac {
            mac.note(command);
        }
    }

    /// Returns the command that sets the guest's address in the device, if the device has another
    /// one now.
    pub(super) fn mac_command(
        &self,
        device: &Device,
        id: &str,
        negotiation: &Negotiation,
    ) -> Result<Option<Command>, Error> {
        let Some(mac) = self.mac.as_ref().filter(|_| !self.offer.is_unfiltered()) else {
            return Ok(None);
        };
        let mut shown = [0u8; 6];
        device.read_config(0, &mut shown)?;
        // Without the feature MAC the field has no meaning (virtio 1.3, 5.1.4).
        if self.offer.passes(VIRTIO_NET_F_MAC) && shown == mac.current() {
            return Ok(None);
        }
        let settable = self.settable_mac(negotiation);
        if settable.is_none() {
            tracing::warn!(
                device = %id,
                "the guest's driver does not negotiate CTRL_MAC_ADDR: the device keeps a MAC \
                 address other than the guest's and may filter its unicast frames"
            );
        }
        Ok(settable.map(Command::MacAddrSet))
    }

    /// Returns the commands that set the receive filter of a locked NIC: its own address, multicast
    /// and broadcast. Devices may be promiscuous after a reset.
    pub(super) fn filter_commands(&self, negotiation: &Negotiation) -> Vec<Command> {
        if negotiation.control_queue.is_none() || !self.offer.sets_filter() {
            return Vec::new();
        }
        let modes = [(RxMode::AllMulticast, true), (RxMode::Promiscuous, false)];
        modes.map(|(mode, on)| Command::Rx { mode, on }).to_vec()
    }

    /// Returns the address that the guest sees, if the device accepts it.
    pub(super) fn settable_mac(&self, negotiation: &Negotiation) -> Option<[u8; 6]> {
        let able = negotiation.control_queue.is_some() && self.offer.sets_mac(negotiation.features);
        let mac = self.mac.as_ref().filter(|_| able)?;
        Some(mac.current())
    }
}

/// Checks that a driver that negotiated `features` and knows `identity` can continue with a device
/// that has the configuration `config`.
fn check_identity(
    identity: &NetIdentity,
    config: [u8; VirtioNetConfig::LEN],
    offer: Offer,
    features: u64,
) -> Result<(), Error> {
    let addressed = offer.passes(VIRTIO_NET_F_MAC);
    identity.check(config, addressed, offer.sets_mac(features), features)
}

/// Returns the address for the guest, if this is a network device with one.
fn configured_mac(
    device: &Device,
    offer: Offer,
    wanted: Option<[u8; 6]>,
) -> Result<Option<MacOverlay>, Error> {
    if device.device_id() != VIRTIO_ID_NET || !offer.has(VIRTIO_NET_F_MAC) {
        return match wanted {
            Some(_) => Err(Error::other(
                "a MAC address is given, but the device has none (it is not a network device, or \
                 does not offer the feature MAC)",
            )),
            None => Ok(None),
        };
    }
    let mut own = [0u8; 6];
    device.read_config(0, &mut own)?;
    match wanted {
        Some(wanted) if wanted != own && !offer.sets_mac(offer.all()) => Err(Error::other(
            "the device has another MAC address and accepts no command to change it: create it \
                 with the address (`bellhop dev add … mac ADDRESS`)",
        )),
        wanted => Ok(Some(MacOverlay::new(wanted.unwrap_or(own)))),
    }
}

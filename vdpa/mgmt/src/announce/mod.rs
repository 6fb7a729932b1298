//! Announces the new place of a guest's address, on behalf of a guest that has arrived and cannot
//! announce itself.
//!
//! ```text
//!   vDPA device ─> its function ─> its place
//!     representor on a bridge   the bridge learns the address
//!                               ─> a frame out of each other port that forwards
//!     legacy mode               a frame out of the physical function's interface:
//!                               the NIC's switch passes it on
//!     neither                   an error: the network learns from the guest's own first frame
//! ```
//!
//! The frame is not sent on the bridge interface itself. That interface is in the VLANs of its
//! ports only if configured so, and its ports would flood the guest with its own address. The tag
//! is that of the port or the NIC.
//!
//! This module selects the receivers and the frame. Its callers decide when to announce a guest.

mod frame;
mod socket;

use std::fs;
use std::path::Path;

use self::frame::{Tag, reverse_arp};
use super::Connection;
use super::MgmtDeviceName;
use super::connectivity::{ConnectivityError, Place};
use super::devlink::Devlink;
use super::error::{self, Error, ErrorKind};
use super::link::{Link, Links, PortVlan, VlanId};
use super::pci::{Address, Pci};
use super::sriov;

/// The directory of network interfaces in sysfs.
const INTERFACES: &str = "/sys/class/net";

/// Frames that announce the place of an address to a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Announcement {
    frames: Vec<Frame>,
}

/// A frame and its outgoing interface.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Frame {
    /// The interface's index.
    index: u32,
    /// The interface's name.
    interface: String,
    bytes: Vec<u8>,
}

impl Frame {
    fn of(index: u32, interface: &str, mac: [u8; 6], tag: Option<Tag>) -> Self {
        Self {
            index,
            interface: interface.to_owned(),
            bytes: reverse_arp(mac, tag),
        }
    }
}

impl Announcement {
    /// Collects the frames that announce `mac` behind the vDPA device of this name, and makes the
    /// bridge learn the address. Sends nothing yet.
    ///
    /// # Errors
    /// `Unusable`: nothing can be announced. Or the kernel did not answer, or refused.
    pub fn prepare(device: &str, mac: [u8; 6]) -> Result<Self, Error> {
        // A group address, or none.
        if mac[0] & 1 != 0 || mac == [0; 6] {
            let mac = error::mac(mac);
            return Err(nowhere(format!("{mac} cannot be the address of one guest")));
        }
        let mgmtdev = Connection::open()?.device(device)?.mgmtdev;
        let links = Links::open()?;
        let frames = match place(&links, &mgmtdev)? {
            Place::Link(port) => from_bridge(&links, &port, mac)?,
            Place::VirtualFunction { physical, number } => {
                vec![from_physical(&links, &physical, number, mac)?]
            }
        };
        Ok(Self { frames })
    }

    /// The outgoing interfaces of the frames.
    pub fn interfaces(&self) -> impl Iterator<Item = &str> {
        self.frames.iter().map(|frame| frame.interface.as_str())
    }

    /// Sends each frame once, even if one of them fails.
    ///
    /// # Errors
    /// `Failed` for the first frame that could not be sent.
    pub fn send(&self) -> Result<(), Error> {
        let mut failed = None;
        for frame in &self.frames {
            if let Err(source) = socket::send(frame.index, &frame.bytes) {
                failed.get_or_insert_with(|| {
                    let message = format!("cannot send a frame out of {}", frame.interface);
                    Error::new(ErrorKind::Failed, message).because(source)
                });
            }
        }
        failed.map_or(Ok(()), Err)
    }
}

/// Nothing can be announced.
fn nowhere(message: String) -> Error {
    Error::new(ErrorKind::Unusable, message)
}

/// The place where the function of this management device is connected.
fn place(links: &Links, mgmtdev: &MgmtDeviceName) -> Result<Place, Error> {
    let none = || {
        nowhere(format!(
            "{mgmtdev} has neither a representor nor a physical function here"
        ))
    };
    match mgmtdev.bus() {
        Some("pci") => {
            let address: Address = mgmtdev.name().parse().map_err(|_| none())?;
            let place = Place::of_virtual_function(links, &Pci::default(), address);
            place.map_err(|error| match error {
                ConnectivityError::Mgmt(error) => error,
                error => nowhere(error.to_string()),
            })
        }
        Some("auxiliary") => {
            let instance = mgmtdev.to_string();
            let ports = Devlink::open()?.ports()?;
            let port = ports.into_iter().find(|port| {
                let nested = port
                    .function
                    .as_ref()
                    .and_then(|function| function.devlink.as_ref());
                nested.is_some_and(|nested| {
                    nested.namespace.is_none() && nested.handle.to_string() == instance
                })
            });
            let netdev = port.and_then(|port| port.netdev).ok_or_else(none)?;
            let representor = match netdev.index {
                Some(index) => links.link_at(index)?,
                None => links.link(&netdev.name)?,
            };
            Ok(Place::Link(representor))
        }
        _ => Err(none()),
    }
}

/// Makes a port's bridge learn the address, and returns the frames for its other ports.
fn from_bridge(links: &Links, port: &Link, mac: [u8; 6]) -> Result<Vec<Frame>, Error> {
    let master = port.master.map(|index| links.link_at(index)).transpose()?;
    let bridge = master.filter(Link::is_bridge);
    let bridge =
        bridge.ok_or_else(|| nowhere(format!("{} is not a port of a Linux bridge", port.name)))?;
    let mut others = links.links()?;
    others.retain(|link| link.master == Some(bridge.index) && link.index != port.index);
    let (vlan, others) = match bridge.vlan_filtering {
        Some(true) => {
            others.push(port.clone());
            let mut vlans = links.vlans_of_all(&others)?;
            others.pop();
            let own = vlans.pop().unwrap_or_default();
            let pvid = own.iter().find(|one| one.pvid).map(|one| one.vlan);
            let vlan = pvid.ok_or_else(|| {
                let port = &port.name;
                nowhere(format!("untagged frames have no VLAN at {port}"))
            })?;
            (Some(vlan), others.into_iter().zip(vlans).collect())
        }
        Some(false) | None => {
            let others = others.into_iter().map(|link| (link, Vec::new()));
            (None, others.collect::<Vec<_>>())
        }
    };
    links.learn(port, mac, vlan)?;
    let interfaces = Path::new(INTERFACES);
    Ok(others
        .iter()
        .filter(|(link, _)| link.up && link.carrier && forwards(&interfaces.join(&link.name)))
        .filter_map(|(link, vlans)| {
            let tag = tag(vlan, vlans)?;
            Some(Frame::of(link.index, &link.name, mac, tag))
        })
        .collect())
}

/// The tag of frames of this VLAN that leave through a port with the VLANs `of_port`; `None` if
/// they do not leave through it.
fn tag(vlan: Option<VlanId>, of_port: &[PortVlan]) -> Option<Option<Tag>> {
    let Some(vlan) = vlan else {
        return Some(None);
    };
    let there = of_port.iter().find(|one| one.vlan == vlan)?;
    Some((!there.untagged).then(|| Tag::of(vlan)))
}

/// Whether a bridge's port forwards frames. A spanning tree may have blocked it, and hosts behind
/// it would learn a path that does not exist. `BR_STATE_FORWARDING`
/// (include/uapi/linux/if_bridge.h).
fn forwards(port: &Path) -> bool {
    fs::read_to_string(port.join("brport/state")).is_ok_and(|state| state.trim() == "3")
}

/// The frame from a physical function for one of its virtual functions.
fn from_physical(links: &Links, physical: &str, number: u32, mac: [u8; 6]) -> Result<Frame, Error> {
    let index = links.link(physical)?.index;
    let functions = sriov::Links::from(links.clone()).link(physical)?;
    let mut functions = functions.virtual_functions.into_iter();
    let function = functions.find(|function| function.index == number);
    let vlan = function.and_then(|function| function.vlan);
    Ok(Frame::of(
        index,
        physical,
        mac,
        vlan.and_then(Tag::of_function),
    ))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn a_frame_leaves_by_the_ports_of_its_vlan_as_those_have_it() {
        let vlan = |number| VlanId::try_from(number).unwrap();
        let access = PortVlan::access(vlan(100));
        let trunk = PortVlan {
            pvid: false,
            untagged: false,
            ..access
        };
        let other = PortVlan::access(vlan(1));
        for (of_bridge, of_port, expected) in [
            (None, vec![], Some(None)),
            (Some(vlan(100)), vec![], None),
            (Some(vlan(100)), vec![other], None),
            (Some(vlan(100)), vec![other, access], Some(None)),
            (
                Some(vlan(100)),
                vec![other, trunk],
                Some(Some(Tag::of(vlan(100)))),
            ),
        ] {
            assert_eq!(tag(of_bridge, &of_port), expected, "{of_port:?}");
        }
    }

    #[test]
    fn only_a_port_that_forwards_is_sent_by() {
        let port = std::env::temp_dir().join(format!("bellhop-out-{}", std::process::id()));
        fs::create_dir_all(port.join("brport")).unwrap();
        assert!(!forwards(&port));
        for (state, expected) in [("0\n", false), ("4\n", false), ("3\n", true)] {
            fs::write(port.join("brport/state"), state).unwrap();
            assert_eq!(forwards(&port), expected, "{state}");
        }
        fs::remove_dir_all(&port).unwrap();
    }

    #[test]
    fn an_address_of_no_single_guest_is_not_announced() {
        for mac in [[0; 6], [0xff; 6], [1, 0, 0x5e, 0, 0, 1]] {
            let refused = Announcement::prepare("any", mac);
            assert!(refused.unwrap_err().to_string().contains("one guest"));
        }
    }
}

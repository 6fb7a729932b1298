//! Network interfaces: their state and changes to it; ports of bridges and their VLANs; network
//! namespaces.
//!
//! ```text
//!   Links (with its own thread, in its network namespace)
//!     ── RTM_GETLINK ────────────> Link: state, master, port and switch of a NIC
//!     ── RTM_SETLINK ────────────> up, down, MTU, master, name, another Namespace
//!     ── the same for AF_BRIDGE ─> PortVlan: a VLAN of a bridge's port
//!     ── RTM_NEWNEIGH ───────────> the port of a bridge that an address is behind
//! ```
//!
//! A change names its interface by index, so a concurrent renaming by udev does no harm. This
//! module owns rtnetlink; [`super::sriov`] sends the settings of virtual functions through the same
//! connection. It does not depend on vDPA or on the use of an interface.

mod decode;
mod links;
mod namespace;
mod port_name;
pub(super) mod request;
mod vlan;

pub use links::Links;
pub use namespace::Namespace;
pub use port_name::PhysPortName;
pub use vlan::{PortVlan, VlanId};

pub(super) use decode::header;
pub(super) use links::{TEXTS, is_interface_name, only};

/// For the fuzz target.
#[cfg(any(test, feature = "fuzz"))]
pub(super) fn decode_anything(message: &super::netlink::message::Message) {
    let _ = Link::of(message);
    let _ = vlan::of_message(&message.attributes);
}

/// A network interface, at the time of the query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Its index in its network namespace.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Its alternative names.
    pub alternative_names: Vec<String>,
    /// Its kind of software interface, such as `bridge`, `veth`, `dummy`; none for a NIC's.
    pub kind: Option<String>,
    /// Whether it was set up (IFF_UP).
    pub up: bool,
    /// Whether frames can pass now: there is a carrier, and the layer below is up (IFF_LOWER_UP).
    pub carrier: bool,
    /// The largest payload of a frame, in bytes.
    pub mtu: u32,
    /// Its Ethernet address; none for another kind of network.
    pub mac: Option<[u8; 6]>,
    /// The index of its master: a bridge, a bond, …
    pub master: Option<u32>,
    /// The driver's name for its port of a NIC: `p0`, `pf0vf1`, `pf0sf88`.
    pub phys_port_name: Option<String>,
    /// The id of its switch: the same for a NIC in switchdev mode and all its representors.
    pub phys_switch_id: Option<Vec<u8>>,
    /// Bus and name of its parent device, such as `pci` and `0000:01:00.0`.
    pub parent: Option<(String, String)>,
    /// Whether a bridge filters VLANs; `None` for other interfaces.
    pub vlan_filtering: Option<bool>,
}

impl Link {
    /// Whether it is a Linux bridge.
    #[must_use]
    pub fn is_bridge(&self) -> bool {
        self.kind.as_deref() == Some("bridge")
    }

    /// Whether it has this name, also as an alternative one.
    #[must_use]
    pub fn is_called(&self, name: &str) -> bool {
        self.name == name || self.alternative_names.iter().any(|other| other == name)
    }
}

#[cfg(test)]
mod tests;

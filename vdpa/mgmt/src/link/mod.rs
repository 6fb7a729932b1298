//! Network interfaces: what they are, and changes to them; ports of bridges and their VLANs; network
//! namespaces.
//!
//! ```text
//!   Links (a thread of its own, in its network namespace)
//!     ── RTM_GETLINK ────────────> Link: state, master, which port of which switch
//!     ── RTM_SETLINK ────────────> up, down, MTU, master, name, another Namespace
//!     ── the same for AF_BRIDGE ─> PortVlan: which VLANs a bridge's port is in
//!     ── RTM_NEWNEIGH ───────────> which port of a bridge an address is behind
//! ```
//!
//! A change names its interface by index, so a renaming by udev meanwhile does no harm. Owns rtnetlink; [`super::sriov`]
//! sends the settings of virtual functions through the same connection. Must not know what an interface
//! is used for, nor vDPA.

mod decode;
mod forwarding;
mod links;
mod namespace;
mod port_name;
pub(super) mod uapi;
mod vlan;

pub use links::Links;
pub use namespace::Namespace;
pub use port_name::PhysPortName;
pub use vlan::{PortVlan, VlanId};

pub(super) use links::{TEXTS, header, is_interface_name, only};

/// For the fuzz target.
#[cfg(any(test, feature = "fuzz"))]
pub(super) fn decode_anything(message: &super::netlink::message::Message) {
    let _ = Link::of(message);
    let _ = vlan::of_message(&message.attributes);
}

/// A network interface, as it was when it was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Its index in its network namespace.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Other names that it has.
    pub alternative_names: Vec<String>,
    /// What kind of software interface it is, such as `bridge`, `veth`, `dummy`; none for a NIC's.
    pub kind: Option<String>,
    /// Whether it was set up (IFF_UP).
    pub up: bool,
    /// Whether frames can pass now: there is a carrier, and what is below is up (IFF_LOWER_UP).
    pub carrier: bool,
    /// The largest payload of a frame, in bytes.
    pub mtu: u32,
    /// Its Ethernet address; none if it is of another kind of network.
    pub mac: Option<[u8; 6]>,
    /// The index of what it is a port of: a bridge, a bond, …
    pub master: Option<u32>,
    /// Which port of a NIC it is, in the driver's words: `p0`, `pf0vf1`, `pf0sf88`.
    pub phys_port_name: Option<String>,
    /// The switch that it is a port of: the same for a NIC in switchdev mode and all its representors.
    pub phys_switch_id: Option<Vec<u8>>,
    /// Bus and name of the device that it belongs to, such as `pci` and `0000:01:00.0`.
    pub parent: Option<(String, String)>,
    /// Of a bridge: whether it looks at VLANs.
    pub vlan_filtering: Option<bool>,
}

impl Link {
    /// Whether it is a bridge of Linux.
    #[must_use]
    pub fn is_bridge(&self) -> bool {
        self.kind.as_deref() == Some("bridge")
    }

    /// Whether it is called so, by its name or another one.
    #[must_use]
    pub fn is_called(&self, name: &str) -> bool {
        self.name == name || self.alternative_names.iter().any(|other| other == name)
    }
}

#[cfg(test)]
mod tests;

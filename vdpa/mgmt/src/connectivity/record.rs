//! The record of the changes that connected a function. Any process can undo them later.
//!
//! The record is kept in files between processes, so it is untrusted: its content is compared with
//! the current state.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::link::{Link, PortVlan, VlanId};
use crate::sriov::{Vlan, VlanProtocol};

/// The changes that connected a function. The record holds for this boot of the machine and for the
/// network namespace in which it was created.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attached {
    /// The kernel's id of this boot (`/proc/sys/kernel/random/boot_id`); after another boot nothing
    /// is left to undo.
    pub(super) boot: Option<String>,
    /// The interface or function that was changed.
    pub(super) subject: Subject,
    /// The changes, in order.
    pub(super) changes: Vec<Change>,
}

/// The interface or function that a record is about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Subject {
    Link {
        index: u32,
        name: String,
        phys_port_name: Option<String>,
        phys_switch_id: Option<Vec<u8>>,
    },
    VirtualFunction {
        physical: String,
        number: u32,
    },
}

impl Subject {
    pub(super) fn of(link: &Link) -> Self {
        Self::Link {
            index: link.index,
            name: link.name.clone(),
            phys_port_name: link.phys_port_name.clone(),
            phys_switch_id: link.phys_switch_id.clone(),
        }
    }

    /// Whether a link with the same index is the same one: udev may have renamed a port of a NIC,
    /// but not another interface.
    pub(super) fn is(&self, link: &Link) -> bool {
        match self {
            Self::Link {
                name,
                phys_port_name,
                phys_switch_id,
                ..
            } => {
                (phys_port_name, phys_switch_id) == (&link.phys_port_name, &link.phys_switch_id)
                    && (phys_port_name.is_some() || link.is_called(name))
            }
            Self::VirtualFunction { .. } => false,
        }
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Link { name, .. } => f.write_str(name),
            Self::VirtualFunction { physical, number } => {
                write!(f, "virtual function {number} of {physical}")
            }
        }
    }
}

/// One change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Change {
    /// Another MTU, in bytes.
    Mtu {
        /// The former MTU.
        before: u32,
        /// The new MTU.
        after: u32,
    },
    /// It became a port of this bridge, and had no master before.
    Bridge {
        /// The bridge's index.
        index: u32,
    },
    /// It was added to a VLAN of this bridge.
    VlanAdded {
        /// The bridge's index.
        bridge: u32,
        /// Its former state in that VLAN, if it was in it.
        before: Option<PortVlan>,
        /// Its new state in that VLAN.
        after: PortVlan,
        /// The former VLAN of untagged frames, which the change replaced.
        former_pvid: Option<PortVlan>,
    },
    /// It was removed from a VLAN of this bridge.
    VlanRemoved {
        /// The bridge's index.
        bridge: u32,
        /// Its former state in that VLAN.
        before: PortVlan,
    },
    /// It was set up.
    Up,
    /// The NIC assigns another VLAN to the virtual function.
    FunctionVlan {
        /// The former VLAN; none if the driver did not report it.
        before: Option<FunctionVlan>,
        /// The new VLAN.
        after: FunctionVlan,
    },
}

/// A virtual function's VLAN in the record's format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionVlan {
    id: u16,
    qos: u8,
    ether_type: u16,
}

impl From<Vlan> for FunctionVlan {
    /// Without a VLAN drivers report any protocol, or none.
    fn from(vlan: Vlan) -> Self {
        let vlan = if vlan.id() == 0 { Vlan::NONE } else { vlan };
        Self {
            id: vlan.id(),
            qos: vlan.qos(),
            ether_type: vlan.protocol().ether_type(),
        }
    }
}

impl TryFrom<FunctionVlan> for Vlan {
    type Error = Error;

    fn try_from(kept: FunctionVlan) -> Result<Self, Error> {
        Self::new(kept.id, kept.qos, VlanProtocol::of(kept.ether_type))
    }
}

/// A change that was not undone, because others have changed the setting since.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeftAlone {
    /// The interface is gone, or the machine was rebooted: there is nothing to undo.
    Gone(String),
    /// It has another MTU.
    Mtu {
        /// The interface.
        link: String,
        /// The MTU now, in bytes.
        now: u32,
    },
    /// It is a port of another master.
    Master {
        /// The interface.
        link: String,
        /// The index of that master.
        now: u32,
    },
    /// Its state in a VLAN is different.
    Vlan {
        /// The interface.
        link: String,
        /// The VLAN.
        vlan: VlanId,
    },
    /// The NIC assigns another VLAN to it.
    FunctionVlan {
        /// The interface of the physical function.
        physical: String,
        /// The virtual function's number.
        number: u32,
        /// The VLAN now.
        now: u16,
    },
}

impl fmt::Display for LeftAlone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gone(link) => write!(f, "{link} is gone and needs no undoing"),
            Self::Mtu { link, now } => write!(
                f,
                "the MTU of {link} has changed to {now} since and stays so"
            ),
            Self::Master { link, now } => write!(
                f,
                "{link} has since become a port of another interface (index {now}) and stays there"
            ),
            Self::Vlan { link, vlan } => write!(
                f,
                "VLAN {vlan} of {link} has changed since and stays as it is"
            ),
            Self::FunctionVlan {
                physical,
                number,
                now,
            } => write!(
                f,
                "the VLAN of virtual function {number} of {physical} has changed to {now} since \
                 and stays so"
            ),
        }
    }
}

impl Attached {
    pub(super) fn of(subject: Subject) -> Self {
        Self {
            boot: boot(),
            subject,
            changes: Vec::new(),
        }
    }

    /// The changes, in order. Empty if nothing had to be changed.
    #[must_use]
    pub fn changes(&self) -> &[Change] {
        &self.changes
    }

    /// The attached interface; none for a virtual function in legacy mode.
    #[must_use]
    pub fn interface(&self) -> Option<&str> {
        match &self.subject {
            Subject::Link { name, .. } => Some(name),
            Subject::VirtualFunction { .. } => None,
        }
    }
}

/// The kernel's id of this boot.
pub(super) fn boot() -> Option<String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(text.trim().to_owned())
}

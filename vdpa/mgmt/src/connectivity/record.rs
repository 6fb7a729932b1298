//! The record of what was changed to connect a function, for its undoing by anybody and at any later time.
//!
//! It is kept in files between processes, so nothing in it is trusted: whatever it says is compared with what is there.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::link::{Link, PortVlan, VlanId};
use crate::sriov::{Vlan, VlanProtocol};

/// What was changed to connect a function. It describes this boot of the machine and the network namespace in which it was
/// made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attached {
    /// The kernel's number of this boot (`/proc/sys/kernel/random/boot_id`); after another one nothing is left to undo.
    pub(super) boot: Option<String>,
    /// What was changed.
    pub(super) subject: Subject,
    /// In the order in which it was done.
    pub(super) changes: Vec<Change>,
}

/// Which interface or function was changed.
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

    /// Whether a link with the same index is the same one: udev may have renamed a port of a NIC, but not another interface.
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
        /// As it was.
        before: u32,
        /// As it was made.
        after: u32,
    },
    /// It became a port of this bridge, and was one of none before.
    Bridge {
        /// The bridge's index.
        index: u32,
    },
    /// It came into a VLAN of this bridge.
    VlanAdded {
        /// The bridge's index.
        bridge: u32,
        /// As it was in that VLAN before, if it was.
        before: Option<PortVlan>,
        /// As it is in it.
        after: PortVlan,
        /// The VLAN of frames without a tag before, which is that no longer.
        former_pvid: Option<PortVlan>,
    },
    /// It was taken out of a VLAN of this bridge.
    VlanRemoved {
        /// The bridge's index.
        bridge: u32,
        /// As it was in it.
        before: PortVlan,
    },
    /// It was set up.
    Up,
    /// The NIC puts the virtual function into another VLAN.
    FunctionVlan {
        /// As it was; none if the driver did not tell.
        before: Option<FunctionVlan>,
        /// As it was made.
        after: FunctionVlan,
    },
}

/// A virtual function's VLAN as it is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionVlan {
    id: u16,
    qos: u8,
    ether_type: u16,
}

impl From<Vlan> for FunctionVlan {
    /// Without a VLAN drivers tell any protocol, or none.
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

/// What was not undone, because it is no longer as it was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeftAlone {
    /// It is gone, or the machine was booted since: there is nothing to undo.
    Gone(String),
    /// It has another MTU.
    Mtu {
        /// The interface.
        link: String,
        /// The MTU now, in bytes.
        now: u32,
    },
    /// It is a port of something else.
    Master {
        /// The interface.
        link: String,
        /// The index of that.
        now: u32,
    },
    /// It is in a VLAN in another way.
    Vlan {
        /// The interface.
        link: String,
        /// The VLAN.
        vlan: VlanId,
    },
    /// The NIC puts it into another VLAN.
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
            Self::Gone(link) => write!(f, "{link} is gone, so nothing of it is to be undone"),
            Self::Mtu { link, now } => write!(
                f,
                "the MTU of {link} was changed to {now} since, and stays so"
            ),
            Self::Master { link, now } => write!(
                f,
                "{link} became a port of another interface (index {now}) since, and stays there"
            ),
            Self::Vlan { link, vlan } => write!(
                f,
                "VLAN {vlan} of {link} was changed since, and stays as it is"
            ),
            Self::FunctionVlan {
                physical,
                number,
                now,
            } => write!(
                f,
                "the VLAN of virtual function {number} of {physical} was changed to {now} since, and stays so"
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

    /// What was changed, in the order in which it was done. Empty if all was so already.
    #[must_use]
    pub fn changes(&self) -> &[Change] {
        &self.changes
    }

    /// The interface that was attached; none for a virtual function in legacy mode.
    #[must_use]
    pub fn interface(&self) -> Option<&str> {
        match &self.subject {
            Subject::Link { name, .. } => Some(name),
            Subject::VirtualFunction { .. } => None,
        }
    }
}

/// The kernel's number of this boot.
pub(super) fn boot() -> Option<String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(text.trim().to_owned())
}

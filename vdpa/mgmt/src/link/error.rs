//! What can go wrong with network interfaces, and what the user can do about it.

use std::fmt;
use std::io;
use std::time::Duration;

use super::namespace::NamespaceError;
use super::vlan::VlanId;
use crate::netlink::exchange::{Malformed, Refusal};

/// What was asked for, as part of a sentence: "cannot …".
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LinkOperation {
    /// All interfaces.
    List,
    /// One interface.
    Show(String),
    /// The VLANs of a port.
    ShowVlans(String),
    /// A change.
    Change {
        /// The interface.
        link: String,
        /// What was to be done with it.
        change: LinkChange,
    },
}

/// A change of an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LinkChange {
    /// Set it up.
    Up,
    /// Set it down.
    Down,
    /// Another MTU.
    Mtu(u32),
    /// Make it a port of this one.
    Join(String),
    /// Make it a port of nothing.
    Leave,
    /// Another name.
    Rename(String),
    /// Another network namespace.
    Move {
        /// Where to.
        namespace: String,
        /// Its name there.
        name: String,
    },
    /// Put a port into a VLAN.
    AddVlan(VlanId),
    /// Take a port out of a VLAN.
    RemoveVlan(VlanId),
    /// Have the bridge of a port know that an address is behind it.
    Learn([u8; 6]),
}

impl fmt::Display for LinkOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (link, change) = match self {
            Self::List => return f.write_str("list network interfaces"),
            Self::Show(name) => return write!(f, "show the network interface {name}"),
            Self::ShowVlans(name) => return write!(f, "show the VLANs of {name}"),
            Self::Change { link, change } => (link, change),
        };
        match change {
            LinkChange::Up => write!(f, "set {link} up"),
            LinkChange::Down => write!(f, "set {link} down"),
            LinkChange::Mtu(mtu) => write!(f, "set the MTU of {link} to {mtu}"),
            LinkChange::Join(master) => write!(f, "make {link} a port of {master}"),
            LinkChange::Leave => write!(f, "take {link} out of what it is a port of"),
            LinkChange::Rename(name) => write!(f, "rename {link} to {name}"),
            LinkChange::Move { namespace, name } if name == link => {
                write!(f, "move {link} into the network namespace {namespace}")
            }
            LinkChange::Move { namespace, name } => write!(
                f,
                "move {link} into the network namespace {namespace} as {name}"
            ),
            LinkChange::AddVlan(vlan) => write!(f, "put {link} into VLAN {vlan}"),
            LinkChange::RemoveVlan(vlan) => write!(f, "take {link} out of VLAN {vlan}"),
            LinkChange::Learn(mac) => {
                let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
                write!(f, "have the bridge of {link} know {mac}")
            }
        }
    }
}

/// Why a request about network interfaces failed.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// No interface can be called so.
    #[error(
        "{0:?} does not name a network interface: names have 1 to 15 bytes, without slashes, colons and spaces"
    )]
    BadName(String),
    /// There is no such interface there.
    #[error("there is no network interface {name} in {place}; `ip link` lists them there")]
    NoLink {
        /// Its name.
        name: String,
        /// "this network namespace", or which one.
        place: String,
        /// The kernel's answer.
        #[source]
        source: Refusal,
    },
    /// The name is another interface's.
    #[error("cannot {operation}: {place} has another interface of that name; choose another name")]
    NameTaken {
        /// What was asked for.
        operation: LinkOperation,
        /// "this network namespace", or which one.
        place: String,
    },
    /// The caller may not do that.
    #[error("cannot {operation}: this needs CAP_NET_ADMIN; run it as root")]
    NotPermitted {
        /// What was asked for.
        operation: LinkOperation,
        /// The kernel's answer.
        #[source]
        source: Refusal,
    },
    /// The kernel or the interface's driver refused.
    #[error("cannot {operation}")]
    Refused {
        /// What was asked for.
        operation: LinkOperation,
        /// The kernel's answer.
        #[source]
        source: Refusal,
    },
    /// The kernel did not answer in time.
    #[error(
        "cannot {operation}: no answer in {} s; {}. Something holds the kernel's lock of network interfaces; its log (`dmesg`) may say what",
        patience.as_secs(),
        if *sent { "it may still be done later" } else { "it will not be done" }
    )]
    Timeout {
        /// What was asked for.
        operation: LinkOperation,
        /// How long the answer was waited for.
        patience: Duration,
        /// Whether the kernel has the request.
        sent: bool,
    },
    /// A list changed each time that it was read.
    #[error("cannot {operation}: interfaces come and go too fast; try again")]
    Interrupted {
        /// What was asked for.
        operation: LinkOperation,
    },
    /// The kernel's answer makes no sense.
    #[error("cannot {operation}: the kernel's answer is malformed")]
    Malformed {
        /// What was asked for.
        operation: LinkOperation,
        /// What is wrong with it.
        #[source]
        source: Malformed,
    },
    /// A network namespace that is not there or cannot be entered.
    #[error(transparent)]
    Namespace(#[from] NamespaceError),
    /// There is no netlink to talk through.
    #[error("cannot talk to the kernel through netlink")]
    Socket(#[source] io::Error),
}

impl LinkError {
    /// Whether the interface that was asked for is not there.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::NoLink { .. })
    }
}

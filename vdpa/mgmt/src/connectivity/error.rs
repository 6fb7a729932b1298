//! Errors of connecting a function, with the remedy for the user.

use crate::error::Error;
use crate::link::VlanId;
use crate::pci::Address;

/// Why a function could not be connected, or its connection not undone.
#[derive(Debug, thiserror::Error)]
pub enum ConnectivityError {
    /// There is no such bridge in this network namespace.
    #[error("there is no bridge {0}; `ip link add {0} type bridge` creates it")]
    NoBridge(String),
    /// The interface of that name is not a Linux bridge.
    #[error(
        "{name} is not a Linux bridge (it is {}); `ip link show type bridge` lists them",
        kind.as_deref().unwrap_or("a NIC's interface")
    )]
    NotABridge {
        /// Its name.
        name: String,
        /// Its kind.
        kind: Option<String>,
    },
    /// A bridge that is down forwards nothing.
    #[error("the bridge {0} is down and forwards nothing; run `ip link set {0} up`")]
    BridgeDown(String),
    /// The bridge does not filter VLANs.
    #[error(
        "the bridge {bridge} does not filter VLANs, so VLAN {vlan} would isolate nothing; `ip link \
         set {bridge} type bridge vlan_filtering 1` fixes that"
    )]
    NoVlanFiltering {
        /// The bridge.
        bridge: String,
        /// The requested VLAN.
        vlan: VlanId,
    },
    /// The interface is a port of another master.
    #[error(
        "{link} is already a port of {master}; if that is not needed, run `ip link set {link} \
         nomaster`"
    )]
    OtherMaster {
        /// The interface.
        link: String,
        /// Its master.
        master: String,
    },
    /// A representor needs a bridge for a VLAN.
    #[error("{link} can be in VLAN {vlan} only as a port of a bridge: give `bridge=NAME` too")]
    VlanWithoutBridge {
        /// The interface.
        link: String,
        /// The requested VLAN.
        vlan: VlanId,
    },
    /// There is no representor that could be a port of a bridge.
    #[error(
        "virtual function {number} of {physical} has no representor, so it can have no {what}: the \
         NIC's own switch connects it (legacy mode). `devlink dev eswitch set pci/ADDRESS mode \
         switchdev` creates representors if the NIC supports them; otherwise leave {what} out"
    )]
    LegacyMode {
        /// The interface of the physical function.
        physical: String,
        /// The virtual function's number.
        number: u32,
        /// The unsupported setting: `bridge` or `mtu`.
        what: &'static str,
    },
    /// The interface is not a port of a NIC's switch.
    #[error(
        "{interface} is not a port of a NIC's switch, so its functions have no representors: \
         `devlink dev eswitch show` shows the NIC's mode, which must be switchdev"
    )]
    NotSwitchdev {
        /// The interface.
        interface: String,
    },
    /// No interface represents the port.
    #[error(
        "no network interface here represents the port {port} of {interface}; `ip -d link` lists \
         the representors (portname); this one may be in another network namespace"
    )]
    NoRepresentor {
        /// The interface.
        interface: String,
        /// The port's name.
        port: String,
    },
    /// Two interfaces represent the port.
    #[error("both {one} and {other} claim to represent the port {port}; name one of them")]
    Ambiguous {
        /// The port's name.
        port: String,
        /// An interface.
        one: String,
        /// Another one.
        other: String,
    },
    /// The function is no virtual one.
    #[error("{0} is not a virtual function; `bellhop vf show` lists them")]
    NotVirtual(Address),
    /// The physical function has no interface.
    #[error(
        "the physical function {0} has no network interface in this network namespace: bind it to \
         its NIC's driver, or run this in the interface's namespace"
    )]
    NoInterface(Address),
    /// A request to the kernel failed, or sysfs could not be read.
    #[error(transparent)]
    Mgmt(#[from] Error),
    /// The record of the next change could not be stored.
    #[error("cannot store the record of the change")]
    NotNoted(#[source] std::io::Error),
    /// A change failed, and so did the roll-back of the changes before it.
    #[error("cannot roll back all changes to {link}: {problems}")]
    NotTakenBack {
        /// The interface.
        link: String,
        /// The failures of the roll-back.
        problems: String,
        /// The reason for the roll-back.
        #[source]
        source: Box<ConnectivityError>,
    },
    /// Some changes could not be undone. The record still describes them: a retry is possible.
    #[error("cannot undo all changes to {link}: {problems}")]
    NotUndone {
        /// The interface.
        link: String,
        /// The failures.
        problems: String,
    },
}

//! What connects a function of a NIC with a network: its representor on a bridge, in a VLAN.
//!
//! In switchdev mode a virtual function or subfunction reaches nothing before its representor is up and attached. In legacy
//! mode there is no representor: the NIC's own switch connects its functions, and a VLAN is a setting of the
//! virtual function.
//!
//! ```text
//!   Connectivity "bridge=br0,vlan=100"     Place: the representor, or a virtual function in legacy mode
//!        └──────────────┬───────────────────────┘
//!   attach: bridge fit? ──> MTU ──> master ──> VLAN in, others out ──> up ──> Attached (a record, serde)
//!                            └─────────┴─────────────┴─fails───────────┘
//!                                      v
//!   Attached::detach, here or in another process: down ──> VLANs ──> master ──> MTU
//!        what others changed since is left alone, and said
//! ```
//!
//! Each change is in the record before it is made, and is undone only while what it made is still there; so a change of
//! unknown outcome is undone as well, and a record can be used twice. Owns the record and the
//! order of steps. Must not know how a request looks ([`super::link`], [`super::sriov`]), nor devlink.

mod attach;
mod detach;
mod error;
mod kernel;
mod place;
mod record;
mod words;

pub use error::ConnectivityError;
pub use place::{Place, representor};
pub use record::{Attached, Change, FunctionVlan, LeftAlone};

use super::link::VlanId;

/// How a function is to be connected. Written as `bridge=br0,vlan=100,mtu=9000`, each at most once.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Connectivity {
    /// The bridge of Linux that the representor becomes a port of.
    pub bridge: Option<String>,
    /// The VLAN that the function is in, without seeing tags.
    pub vlan: Option<VlanId>,
    /// The representor's MTU, in bytes. That of the function itself is set where that is made.
    pub mtu: Option<u32>,
}

#[cfg(test)]
mod tests;

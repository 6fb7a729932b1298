//! Connects a function of a NIC to a network: its representor on a bridge, in a VLAN.
//!
//! In switchdev mode a virtual function or subfunction reaches nothing before its representor is up
//! and attached. In legacy mode there is no representor: the NIC's own switch connects its
//! functions, and the VLAN is a setting of the virtual function.
//!
//! ```text
//!   Connectivity "bridge=br0,vlan=100"     Place: the representor, or a VF in legacy mode
//!        └──────────────┬───────────────────────┘
//!   attach: bridge fit? ──> MTU ──> master ──> VLAN in, others out ──> up ──> Attached (a record)
//!                            └─────────┴─────────────┴─fails───────────┘
//!                                      v
//!   Attached::detach, here or in another process: down ──> VLANs ──> master ──> MTU
//!        changes that others have overridden stay, and are reported
//! ```
//!
//! Each change is recorded before it is done, and undone only while its effect is unchanged. So a
//! change of unknown outcome is undone as well, and a record can be used twice. This module owns
//! the record (a serde type) and the order of steps. The requests are in [`super::link`] and
//! [`super::sriov`]; devlink is not used.

mod attach;
mod detach;
mod error;
mod kernel;
mod locate;
mod parse;
mod record;

pub use error::ConnectivityError;
pub use locate::{Place, representor};
pub use record::{Attached, Change, FunctionVlan, LeftAlone};

use serde::{Deserialize, Serialize};

use super::link::VlanId;

/// How to connect a function. Written as `bridge=br0,vlan=100,mtu=9000`, each at most once.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Connectivity {
    /// The Linux bridge that gets the representor as a port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bridge: Option<String>,
    /// The VLAN of the function, which itself sees no tags.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan: Option<VlanId>,
    /// The representor's MTU, in bytes. The function's own MTU is set when it is created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
}

#[cfg(test)]
mod tests;

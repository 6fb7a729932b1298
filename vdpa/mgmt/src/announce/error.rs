//! Why the host cannot say where a guest is.

use std::io;

use crate::connectivity::ConnectivityError;
use crate::devlink::DevlinkError;
use crate::link::LinkError;
use crate::{MgmtDeviceName, MgmtError, sriov};

/// Why an address was not announced. The network learns of its guest with the guest's first frame then.
#[derive(Debug, thiserror::Error)]
pub enum AnnounceError {
    /// It is a group's address, or none.
    #[error("{} is no address that one guest can have", .0.map(|byte| format!("{byte:02x}")).join(":"))]
    NotOfOne([u8; 6]),
    /// The device is on no function of a NIC that would have a place in a network of this host.
    #[error("{0} has neither a representor nor a physical function here")]
    NoPlace(MgmtDeviceName),
    /// The representor is connected in another way.
    #[error("{0} is a port of no bridge of Linux")]
    NoBridge(String),
    /// Frames without a tag go nowhere.
    #[error("frames without a tag are in no VLAN at {0}")]
    NoVlan(String),
    /// The vDPA device.
    #[error(transparent)]
    Mgmt(#[from] MgmtError),
    /// Where the function is.
    #[error(transparent)]
    Place(Box<ConnectivityError>),
    /// The port of a subfunction.
    #[error(transparent)]
    Devlink(#[from] DevlinkError),
    /// The bridge and its ports.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The VLAN of a virtual function.
    #[error(transparent)]
    VirtualFunction(#[from] sriov::LinkError),
    /// The frame was not taken.
    #[error("cannot send a frame out of {interface}")]
    Send {
        /// The interface.
        interface: String,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

impl From<ConnectivityError> for AnnounceError {
    fn from(error: ConnectivityError) -> Self {
        Self::Place(Box::new(error))
    }
}

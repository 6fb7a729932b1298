//! What can go wrong with management, and what the user can do about it.

use std::fmt;
use std::io;
use std::time::Duration;

use super::in_use::InUse;
use super::name::BadName;
use super::netlink::exchange::{Malformed, Refusal};
use super::new_device::InvalidDevice;

/// What was asked for, as part of a sentence: "cannot …".
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// The kernel's vDPA management itself.
    Connect,
    /// All management devices.
    ListMgmtDevices,
    /// One management device.
    ShowMgmtDevice(String),
    /// All devices.
    ListDevices,
    /// One device.
    ShowDevice(String),
    /// All configurations.
    ListConfigs,
    /// One device's configuration.
    ShowConfig(String),
    /// A queue's counters.
    ShowVendorStats {
        /// The device.
        name: String,
        /// The queue.
        queue_index: u32,
    },
    /// A new device.
    Add {
        /// Its name.
        name: String,
        /// What it was to be made on.
        mgmtdev: String,
    },
    /// A device's end.
    Delete(String),
    /// A device's attributes.
    Set(String),
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect => f.write_str("find the kernel's vDPA management"),
            Self::ListMgmtDevices => f.write_str("list management devices"),
            Self::ShowMgmtDevice(name) => write!(f, "show the management device {name}"),
            Self::ListDevices => f.write_str("list vDPA devices"),
            Self::ShowDevice(name) => write!(f, "show {name}"),
            Self::ListConfigs => f.write_str("list configurations of vDPA devices"),
            Self::ShowConfig(name) => write!(f, "show the configuration of {name}"),
            Self::ShowVendorStats { name, queue_index } => {
                write!(f, "show the counters of queue {queue_index} of {name}")
            }
            Self::Add { name, mgmtdev } => write!(f, "add {name} on {mgmtdev}"),
            Self::Delete(name) => write!(f, "delete {name}"),
            Self::Set(name) => write!(f, "change {name}"),
        }
    }
}

/// Why a request to the kernel's vDPA management failed.
#[derive(Debug, thiserror::Error)]
pub enum MgmtError {
    /// The kernel has no vDPA.
    #[error(
        "this kernel has no vDPA management: load it with `modprobe vdpa`, then a parent driver such as \
         mlx5_vdpa, vp_vdpa or vdpa_sim_net"
    )]
    NoFamily,
    /// The kernel has it, in another network namespace.
    #[error(
        "vDPA management exists in the initial network namespace only: run this with \
         `nsenter --net=/proc/1/ns/net`"
    )]
    OtherNamespace,
    /// The caller may not do that.
    #[error(
        "cannot {operation}: this needs CAP_NET_ADMIN in the initial user namespace; run it as root"
    )]
    NotPermitted {
        /// What was asked for.
        operation: Operation,
        /// The kernel's answer.
        #[source]
        source: Refusal,
    },
    /// There is no such management device.
    #[error(
        "there is no management device {name}; `bellhop mgmtdev show` lists them \
         (a NIC has one once its vDPA driver is loaded)"
    )]
    NoMgmtDevice {
        /// Its name.
        name: String,
        /// The kernel's answer.
        #[source]
        source: Refusal,
    },
    /// There is no such vDPA device.
    #[error("there is no vDPA device {name}; `bellhop dev show` lists them")]
    NoDevice {
        /// Its name.
        name: String,
        /// The kernel's answer.
        #[source]
        source: Refusal,
    },
    /// There is a device of that name already.
    #[error("the name {name} is taken; `bellhop dev show {name}` shows by what")]
    NameTaken {
        /// The name.
        name: String,
        /// The kernel's answer.
        #[source]
        source: Refusal,
    },
    /// Somebody has the device open. Deleting it now would block all vDPA management of
    /// this machine until it is closed.
    #[error(transparent)]
    InUse(#[from] InUse),
    /// The management device takes no such attributes.
    #[error("cannot {operation}: it does not take {attributes}; leave that out")]
    NotTaken {
        /// What was asked for.
        operation: Operation,
        /// The attributes by name.
        attributes: String,
        /// The kernel's answer.
        #[source]
        source: Refusal,
    },
    /// The kernel's driver would mix up two devices on this management device.
    #[error(
        "{mgmtdev} has the device {device} already, and the kernel's vp_vdpa mixes up two: delete \
         it first, or use another function"
    )]
    OneDeviceOnly {
        /// The management device.
        mgmtdev: String,
        /// The device that it has.
        device: String,
    },
    /// No driver has negotiated features yet, so there is nothing to count.
    #[error(
        "cannot {operation}: no driver uses the device yet (feature negotiation is not complete)"
    )]
    NotNegotiated {
        /// What was asked for.
        operation: Operation,
        /// The kernel's answer.
        #[source]
        source: Refusal,
    },
    /// The kernel refused for another reason.
    #[error("cannot {operation}")]
    Refused {
        /// What was asked for.
        operation: Operation,
        /// The kernel's answer.
        #[source]
        source: Refusal,
    },
    /// The kernel says that it did it, and explains why not.
    #[error("cannot {operation}: the kernel says \"{explanation}\"")]
    NotDone {
        /// What was asked for.
        operation: Operation,
        /// The kernel's words.
        explanation: String,
    },
    /// A name that no device can have.
    #[error(transparent)]
    BadName(#[from] BadName),
    /// A device that cannot be made.
    #[error(transparent)]
    InvalidDevice(#[from] InvalidDevice),
    /// The kernel did not answer in time.
    #[error(
        "cannot {operation}: no answer in {} s; {}. Something holds the kernel's vDPA lock, mostly \
         a `dev del` of a device that is still open: `ls -l /proc/[0-9]*/fd | grep vhost-vdpa` \
         as root finds it",
        patience.as_secs(),
        if *sent { "it may still be done later" } else { "it will not be done" }
    )]
    Timeout {
        /// What was asked for.
        operation: Operation,
        /// How long the answer was waited for.
        patience: Duration,
        /// Whether the kernel has the request.
        sent: bool,
    },
    /// A list changed each time that it was read.
    #[error("cannot {operation}: devices come and go too fast; try again")]
    Interrupted {
        /// What was asked for.
        operation: Operation,
    },
    /// The kernel's answer makes no sense.
    #[error("cannot {operation}: the kernel's answer is malformed")]
    Malformed {
        /// What was asked for.
        operation: Operation,
        /// What is wrong with it.
        #[source]
        source: Malformed,
    },
    /// There is no netlink to talk through.
    #[error("cannot talk to the kernel through netlink")]
    Socket(#[source] io::Error),
}

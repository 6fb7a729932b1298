//! Errors of creating and removing a NIC, with the remedy for the user.

use std::fmt;
use std::io;
use std::time::Duration;

use vdpa::vduse::nic::PAIRS_MAX;

use super::phase::Phase;
use super::record::BadOwner;
use super::step::Step;
use super::store::StoreError;
use super::taken::Taken;
use crate::connectivity::ConnectivityError;
use crate::devlink::{Handle, PortHandle};
use crate::error::Error;
use crate::pci::Address;

/// Why a step failed.
#[derive(Debug, thiserror::Error)]
pub enum NicError {
    /// A request to the kernel, or a file of sysfs, failed.
    #[error(transparent)]
    Mgmt(#[from] Error),
    /// Connecting failed.
    #[error(transparent)]
    Connectivity(Box<ConnectivityError>),
    /// No record can hold this owner.
    #[error(transparent)]
    Owner(#[from] BadOwner),
    /// The source of the NIC does not exist.
    #[error(
        "{0:?} is neither a network interface, nor a PCI function, nor a devlink instance, nor a \
         management device: `ip link`, `bellhop vf show`, `bellhop port show` and `bellhop mgmtdev \
         show` list them"
    )]
    NoOrigin(String),
    /// The interface is not on a PCI function.
    #[error(
        "{0} is not an interface of a NIC with virtual functions or subfunctions; name one, or a \
         management device (`bellhop mgmtdev show`)"
    )]
    NotPci(String),
    /// The name is taken.
    #[error("there is a vDPA device {0} already; `bellhop dev show {0}` describes it")]
    NameTaken(String),
    /// There is a record with that name.
    #[error(
        "there is a NIC {0} already; `bellhop nic list` shows it, `bellhop nic delete {0}` deletes \
         it"
    )]
    RecordTaken(String),
    /// The physical function shows no interface.
    #[error(
        "{0} has no network interface in this network namespace: bind it to its NIC's driver, or \
         run this in the interface's namespace"
    )]
    NoInterface(Address),
    /// The source does not have the requested kind of function.
    #[error("{0} has no {1}: leave the kind out, or name a NIC that has")]
    NoSuchKind(String, &'static str),
    /// Only a NIC with virtual functions supports the setting.
    #[error("devices of {from} have no {what} to set: leave that out")]
    NoSettings {
        /// The source of the NIC.
        from: String,
        /// The requested setting.
        what: &'static str,
    },
    /// A software NIC cannot have so many queue pairs.
    #[error("a software NIC has 1 to {PAIRS_MAX} queue pairs, not {0}")]
    QueuePairs(u16),
    /// A NIC at a queue of a port has one pair.
    #[error(
        "a software NIC at a port has one queue pair, not {0}: leave the queue pairs out, or \
         connect it to a bridge"
    )]
    PortPairs(u16),
    /// Subfunctions are created in switchdev mode only. The mode is not changed here, because links
    /// of virtual functions would go down meanwhile.
    #[error(
        "{0} creates subfunctions only in switchdev mode: run `devlink dev eswitch set {0} mode \
         switchdev` (links of its functions go down meanwhile), or ask for a virtual function"
    )]
    NotSwitchdev(Handle),
    /// Without switchdev mode there is no representor.
    #[error(
        "virtual functions of {0} have no representor, so they can have no bridge and no mtu \
         there: the NIC's own switch connects them (legacy mode). `devlink dev eswitch set pci/{0} \
         mode switchdev` creates representors if the NIC supports them; otherwise leave `bridge` \
         and `mtu` out"
    )]
    LegacyMode(Address),
    /// All numbers of subfunctions are taken.
    #[error("{0} has no free subfunction number")]
    NoSfnum(Handle),
    /// The answer about a port has no subfunction.
    #[error(
        "the port {0} has lost its subfunction; another program changes this NIC at the same time"
    )]
    NoSubfunction(PortHandle),
    /// The subfunction's device is in another network namespace.
    #[error("the device of the port {0} is in another network namespace")]
    Elsewhere(PortHandle),
    /// The management device does not support network devices.
    #[error("{0} creates no network devices; `bellhop mgmtdev show` lists the classes of each")]
    NotNetwork(String),
    /// All virtual functions are used.
    #[error("no virtual function of {physical} is free{}", listed("", taken))]
    NoneFree {
        /// The physical function.
        physical: Address,
        /// The reason for each.
        taken: Vec<Taken>,
    },
    /// Zero virtual functions were requested.
    #[error("cannot choose one of 0 virtual functions: ask for at least 1")]
    NoCount,
    /// No vDPA driver is known for a function.
    #[error(
        "{function} is not a virtio device, and its driver {} creates no vDPA devices on it: load \
         the NIC's vDPA driver (such as `modprobe mlx5_vdpa`)",
        driver.as_deref().unwrap_or("(none)")
    )]
    NoParent {
        /// The function.
        function: Address,
        /// Its driver.
        driver: Option<String>,
    },
    /// A bus driver other than vhost_vdpa has the device.
    #[error("{0} has no character device; `bellhop bind {0} vhost_vdpa` gives it one")]
    NoCharacterDevice(String),
    /// An interface has the name of the tap.
    #[error("there is an interface {0} already: choose another name for the NIC")]
    TapTaken(String),
    /// Another interface has the name of the tap, which was deleted.
    #[error("the interface {0} is not the NIC's tap, which was deleted: rename or delete it")]
    OtherTap(String),
    /// The process of a software NIC cannot be started, found or ended.
    #[error(transparent)]
    Server(io::Error),
    /// A software NIC's device or tap cannot be used.
    #[error(transparent)]
    Device(#[from] vdpa::Error),
    /// The kernel did not finish its own work in time.
    #[error("timed out after {} s waiting for {what}; the kernel log (`dmesg`) may show \
             why", patience.as_secs())]
    NotInTime {
        /// The awaited event.
        what: String,
        /// The time limit.
        patience: Duration,
    },
    /// The observer interrupted the operation.
    #[error("interrupted")]
    Interrupted,
    /// The record could not be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The record could not be stored.
    #[error("cannot store the record of the steps")]
    Record(#[source] io::Error),
}

// Boxed, so that errors are small enough to return by value.
impl From<ConnectivityError> for NicError {
    fn from(error: ConnectivityError) -> Self {
        Self::Connectivity(Box::new(error))
    }
}

/// Joins them in one line.
pub(super) fn joined(all: &[impl fmt::Display]) -> String {
    let all: Vec<String> = all.iter().map(ToString::to_string).collect();
    all.join("; ")
}

/// The same after this text; empty if there are none.
fn listed(before: &str, all: &[impl fmt::Display]) -> String {
    if all.is_empty() {
        String::new()
    } else {
        format!("{before}: {}", joined(all))
    }
}

/// A step that could not be undone.
#[derive(Debug)]
pub struct NotUndone {
    /// The step.
    pub step: Step,
    /// The command that undoes it by hand.
    pub by_hand: String,
    /// The reason; `None` if it was not tried, because a later step must be undone first.
    pub error: Option<NicError>,
}

impl fmt::Display for NotUndone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (by hand: `{}`", self.step, self.by_hand)?;
        if let Some(error) = &self.error {
            write!(f, "; {}", vdpa::causes::in_one_line(error))?;
        }
        f.write_str(")")
    }
}

/// Why a NIC was not created.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot create {name}: cannot {phase}{}",
    listed(". Not undone", not_undone)
)]
pub struct MakeError {
    /// The NIC.
    pub name: String,
    /// The phase that failed.
    pub phase: Phase,
    /// The reason.
    #[source]
    pub source: Box<NicError>,
    /// Earlier steps that could not be undone, the last one first.
    pub not_undone: Vec<NotUndone>,
}

/// Why a NIC was not removed.
#[derive(Debug, thiserror::Error)]
pub enum RemoveError {
    /// A process has the device open; nothing was changed.
    #[error(transparent)]
    InUse(Error),
    /// The device is in use by this machine or a container; nothing was changed.
    #[error(
        "{name} is bound to {driver}, so this host or a container uses it: `bellhop bind {name} \
         vhost_vdpa` reclaims it"
    )]
    NotForGuests {
        /// The NIC.
        name: String,
        /// The bus driver that has its device.
        driver: String,
    },
    /// Some steps could not be undone. They are still in the record.
    #[error("cannot delete {name} completely. Not undone: {}", joined(not_undone))]
    Incomplete {
        /// The NIC.
        name: String,
        /// These steps, the last one first.
        not_undone: Vec<NotUndone>,
    },
}

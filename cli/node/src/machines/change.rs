//! What becomes of machines, in words: what clients are told as events, what they ask for, and what that came to.
//!
//! Owns those words. It must not know how anything of it is done.

use bellhop_api::machine::{End, VmState};
use bellhop_api::node::{DeviceId, NicId};

/// What became of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Change {
    /// It was made.
    Created,
    /// It is another one by the same name.
    Replaced,
    /// It runs.
    Started,
    /// It was found running by this daemon.
    Adopted,
    /// What it does has changed, by its own account.
    State(VmState),
    /// Its guest was asked to power off.
    Stopping,
    /// It has ended.
    Ended(End),
    /// Its process is gone, and its guest may run elsewhere: why.
    MayBeElsewhere(String),
    /// Somebody has said where its guest is.
    Settled {
        /// It is here.
        here: bool,
    },
    /// It is waited for: where.
    Awaited(String),
    /// It has come from another node, and runs.
    Arrived,
    /// It has not come: why.
    NotArrived(String),
    /// It could not be started; it is tried again later.
    NotStarted(String),
    /// It has a NIC more.
    NicAdded(NicId),
    /// One of its NICs is on another device.
    NicMoved(NicId),
    /// One of its NICs has failed, and is on the device that stood by; why it was moved, if not by the machine itself.
    NicFailedOver(NicId, Option<String>),
    /// One of its NICs has failed as devlink says, and stays where it is: why.
    NicNotFailedOver(NicId, String),
    /// It has a NIC less.
    NicRemoved(NicId),
    /// It has one more disk.
    DiskAdded(DeviceId),
    /// It has one disk less.
    DiskRemoved(DeviceId),
    /// It is gone.
    Deleted,
}

impl Change {
    /// As an event: a word, and a sentence where there is more to say.
    pub(crate) fn as_event(&self) -> Option<(&'static str, Option<String>)> {
        match self {
            Self::Created => Some(("created", None)),
            Self::Replaced => Some(("replaced", None)),
            Self::Started => Some(("started", None)),
            Self::Adopted => Some(("adopted", None)),
            Self::State(VmState::Paused) => Some(("paused", None)),
            Self::State(VmState::Running) => Some(("running", None)),
            Self::State(VmState::NotStarted | VmState::Starting | VmState::Stopped) => None,
            Self::Stopping => Some(("stopping", None)),
            Self::Ended(end) => Some(("ended", Some(end.detail.clone()))),
            Self::MayBeElsewhere(why) => Some(("may_be_elsewhere", Some(why.clone()))),
            Self::Settled { here: true } => Some(("settled", Some("its guest is here".to_owned()))),
            Self::Settled { here: false } => {
                Some(("settled", Some("its guest runs elsewhere".to_owned())))
            }
            Self::Awaited(listen) => Some(("awaited", Some(format!("at {listen}")))),
            Self::Arrived => Some(("arrived", None)),
            Self::NotArrived(why) => Some(("not_arrived", Some(why.clone()))),
            Self::NotStarted(why) => Some(("not_started", Some(why.clone()))),
            Self::NicAdded(id) => Some(("nic_added", Some(format!("NIC {id}")))),
            Self::NicMoved(id) => Some(("nic_moved", Some(format!("NIC {id}")))),
            Self::NicFailedOver(id, why) => {
                let why = why.as_ref().map(|why| format!(": {why}"));
                let why = why.unwrap_or_default();
                let detail = format!("NIC {id} is on the device that stood by{why}");
                Some(("nic_failed_over", Some(detail)))
            }
            Self::NicNotFailedOver(id, why) => {
                Some(("nic_not_failed_over", Some(format!("NIC {id}: {why}"))))
            }
            Self::NicRemoved(id) => Some(("nic_removed", Some(format!("NIC {id}")))),
            Self::DiskAdded(id) => Some(("disk_added", Some(format!("disk {id}")))),
            Self::DiskRemoved(id) => Some(("disk_removed", Some(format!("disk {id}")))),
            Self::Deleted => Some(("deleted", None)),
        }
    }
}

/// What `PUT` came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Put {
    /// There was none of this name.
    Created,
    /// It was there, as it is to be.
    Same,
    /// It was stopped, and is another one now.
    Replaced,
}

/// What the removal of a NIC or a disk came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Removed {
    /// It is gone.
    Gone,
    /// The guest was asked to give it up, and has not yet.
    Asked,
}

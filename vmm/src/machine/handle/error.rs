//! Why a machine does not do what it is asked.
//!
//! Owns the words. Which status a client of the API gets for them is the API's to say.

use std::io;

use super::WAITING_MAX;
use crate::Error;
use crate::machine::End;
use crate::machine::migration::NotMovable;
use crate::machine::pluggable::DeviceKind;
use crate::machine::snapshot::SnapshotError;
use crate::vcpu::VcpuReport;

/// Why a request was not carried out. The machine is as before.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// The machine is gone.
    #[error("the machine has ended")]
    Ended,
    /// The machine is gone, and it is known why.
    #[error("the machine has ended: {}", .0.detail)]
    EndedBy(End),
    /// Too many requests wait already.
    #[error("the machine has {WAITING_MAX} requests waiting; try again later")]
    Busy,
    /// A device of the machine has this name.
    #[error("the machine has a device {0} already; choose another id")]
    IdInUse(String),
    /// No device of the machine has this name.
    #[error("the machine has no device {0}")]
    NoSuchDevice(String),
    /// The device is there, but is none of the kind that was asked for.
    #[error("device {id} is not a {wanted}")]
    OtherKind {
        /// Its name.
        id: String,
        /// What it should be.
        wanted: DeviceKind,
    },
    /// What is to take the place of a NIC's device is that device.
    #[error("the NIC {0} is on that device: name another one that can take its place")]
    OwnFailover(String),
    /// The NIC's driver does not run, or did not negotiate GUEST_ANNOUNCE.
    #[error(
        "the guest's driver of {0} cannot announce it: it is not running, or does not know how"
    )]
    NoAnnouncement(String),
    /// What a device writes can't be recorded, or the device not be brought back from that.
    #[error("the memory that device {id} writes cannot be followed")]
    DirtyLog {
        /// Its name.
        id: String,
        /// Why.
        source: devices::Error,
    },
    /// A NIC's device was not replaced.
    #[error("network device {id} is not moved")]
    Swap {
        /// The NIC's name.
        id: String,
        /// Why, and what became of it.
        source: devices::Error,
    },
    /// The machine cannot do it: the device cannot be opened or shown to the guest, or KVM refuses.
    #[error(transparent)]
    Device(#[from] Error),
    /// A snapshot is being written: what would change guest memory has to wait.
    #[error("a snapshot of the machine is being written; try again when it is done")]
    Saving,
    /// It is being sent: no device may come or go, and nothing else may save it.
    #[error(
        "the machine is being sent to another host; try again when that is over (DELETE /v1/vm/migration ends it)"
    )]
    Migrating,
    /// It stands still for a migration.
    #[error(
        "the machine stands still for a migration; if GET /v1/vm/migration says that it is not settled where the guest \
         is, say it: PATCH /v1/vm/migration {{\"settle\": \"Here\"}} or {{\"settle\": \"There\"}}"
    )]
    StandsStill,
    /// There is nothing to settle.
    #[error("the machine does not stand still for a migration: it is settled where its guest is")]
    Settled,
    /// It cannot leave this host.
    #[error("the machine cannot be sent to another host")]
    NotMovable(#[from] NotMovable),
    /// A device cannot be saved. The machine goes on.
    #[error("device {id} cannot be saved")]
    Save {
        /// Its name.
        id: String,
        /// Why.
        source: devices::Error,
    },
    /// The snapshot cannot be written. The machine goes on.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// A vCPU cannot go on, so there is nothing to save: the machine ends.
    #[error("the guest crashed: {0}")]
    Crashed(VcpuReport),
    /// The machine cannot be woken.
    #[error("cannot reach the machine's thread")]
    Wake(#[source] io::Error),
}

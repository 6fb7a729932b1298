//! Why something could not be done with a virtual machine, and which status that is for a client.
//!
//! Owns the errors and the table. It must not know what was asked.

use std::fmt;
use std::io;
use std::path::PathBuf;

use axum::http::StatusCode;
use vdpa::causes::in_one_line;
use vdpa_mgmt::nic::{self, MakeError, NicError, RemoveError};
use vmm::migration::endpoint::BadEndpoint;

use super::departure::remedy;
use super::spec::{BadNicId, BadSpec, BadVmName, NicId, VmName};
use super::vmm::VmmError;
use crate::node::peers::PeerError;
use crate::node::store::StoreError;

/// Why a step could not be done, or undone.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StepError {
    /// The record could not be kept, so the step was not done.
    #[error("the record of what is done cannot be kept")]
    Record(#[source] Box<StoreError>),
    /// A directory or a file in it.
    #[error("cannot use {}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The records of NICs.
    #[error(transparent)]
    NicStore(#[from] Box<nic::StoreError>),
    /// The management of NICs.
    #[error(transparent)]
    Nic(#[from] Box<NicError>),
    /// A NIC could not be made.
    #[error(transparent)]
    Make(#[from] Box<MakeError>),
    /// What is to stand by for a NIC could not be made.
    #[error("the device that is to stand by for NIC {id} cannot be made")]
    StandBy {
        /// The NIC.
        id: NicId,
        /// Why not.
        #[source]
        source: Box<StepError>,
    },
    /// A NIC could not be taken back.
    #[error(transparent)]
    Remove(#[from] Box<RemoveError>),
    /// The vDPA device of a NIC.
    #[error(transparent)]
    Device(#[from] vdpa_mgmt::Error),
    /// A vDPA device that guests cannot have.
    #[error("{0} has no character device; `bellhop bind {0} vhost_vdpa` gives it one")]
    NoCharacterDevice(String),
    /// A device cannot be opened for the machine.
    #[error("cannot open {}; has somebody else got it open?", path.display())]
    Open {
        /// Its character device.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// No process could be started.
    #[error("cannot start a process for the machine; its log is {}", log.display())]
    Start {
        /// Where its messages are.
        log: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The process ended before it ran the machine.
    #[error("the machine's process ended at its start: {said}")]
    EndedEarly {
        /// The end of its log.
        said: String,
    },
    /// The process is another one than was started.
    #[error("another process (pid {found}) answers for the machine's (pid {expected})")]
    Stranger {
        /// Who answers.
        found: u32,
        /// Who was started.
        expected: u32,
    },
    /// Not a place where a machine can be waited for, in a record.
    #[error("there is no place where it is waited for")]
    Place(#[source] BadEndpoint),
    /// The process does not end.
    #[error("cannot end the machine's process")]
    End(#[source] io::Error),
    /// The machine refuses.
    #[error(transparent)]
    Vmm(#[from] VmmError),
}

/// A step that could not be undone.
#[derive(Debug)]
pub(crate) struct NotUndone {
    /// What is left of the machine.
    part: String,
    error: StepError,
}

impl NotUndone {
    pub(crate) fn new(part: impl Into<String>, error: StepError) -> Self {
        let part = part.into();
        Self { part, error }
    }
}

impl fmt::Display for NotUndone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.part, in_one_line(&self.error))
    }
}

fn list(not_undone: &[NotUndone]) -> String {
    let all: Vec<String> = not_undone.iter().map(ToString::to_string).collect();
    all.join("; ")
}

fn rest(not_undone: &[NotUndone]) -> String {
    if not_undone.is_empty() {
        String::new()
    } else {
        format!("; not undone: {}", list(not_undone))
    }
}

/// Why a machine could not be made, started, stopped or taken away.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LifeError {
    /// It is not there.
    #[error("the machine cannot be made{}", rest(not_undone))]
    Create {
        /// What failed.
        #[source]
        source: Box<StepError>,
        /// What is left of it, in the record.
        not_undone: Vec<NotUndone>,
    },
    /// It is there and does not run.
    #[error("the machine cannot be started{}", rest(not_undone))]
    Start {
        /// What failed.
        #[source]
        source: Box<StepError>,
        /// What is left of it.
        not_undone: Vec<NotUndone>,
    },
    /// It still runs.
    #[error("the machine cannot be stopped")]
    Stop(#[source] Box<StepError>),
    /// Nothing was begun.
    #[error("the machine cannot be deleted")]
    Delete(#[source] Box<StepError>),
    /// Parts of it are left.
    #[error("the machine is not deleted completely; not undone: {}", list(.0))]
    Remains(Vec<NotUndone>),
    /// It stays, as far as is known.
    #[error("the machine cannot be sent elsewhere")]
    Send(#[source] Box<StepError>),
    /// It is as open as before where its guest is.
    #[error("what was said of where the guest is cannot be kept")]
    Settle(#[source] Box<StepError>),
    /// A NIC.
    #[error("NIC {id} cannot be {what}")]
    Nic {
        /// Which.
        id: NicId,
        /// What was to be done.
        what: &'static str,
        /// Why.
        #[source]
        source: Box<StepError>,
    },
}

/// Why a request about a virtual machine was not carried out.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VmError {
    /// Not a name.
    #[error(transparent)]
    Name(#[from] BadVmName),
    /// Not a name of a NIC.
    #[error(transparent)]
    NicName(#[from] BadNicId),
    /// It cannot be so.
    #[error(transparent)]
    Spec(#[from] BadSpec),
    /// There is none.
    #[error("there is no virtual machine {0}")]
    NoVm(VmName),
    /// There is no such NIC.
    #[error("{vm} has no NIC {id}")]
    NoNic {
        /// The machine.
        vm: VmName,
        /// The NIC.
        id: NicId,
    },
    /// Another NIC of this name.
    #[error("{vm} has another NIC {id}: take it away first, or give this one another name")]
    OtherNic {
        /// The machine.
        vm: VmName,
        /// The NIC.
        id: NicId,
    },
    /// Another one of this name runs.
    #[error(
        "there is another virtual machine {0}, and it runs: stop it before it is replaced, or give this one \
         another name"
    )]
    OtherRuns(VmName),
    /// There is one of this name, where another is to come.
    #[error(
        "this node has a virtual machine {0} already: have the one that comes get another name (--as), or delete that one on this node"
    )]
    NameTaken(VmName),
    /// A file that it needs is not here.
    #[error("its {what} {} is not on this host: copy it there", path.display())]
    NoFile {
        /// What it is to it.
        what: &'static str,
        /// Where it should be.
        path: PathBuf,
    },
    /// Its guest is still to come.
    #[error(
        "{0} is still coming from another node: wait until it has, or call it off (DELETE /v1/vms/{0}/migration)"
    )]
    Arriving(VmName),
    /// It cannot be called off any more.
    #[error("{0} has come, or may have: it is not taken back")]
    HasCome(VmName),
    /// Another node.
    #[error(transparent)]
    Peer(#[from] PeerError),
    /// It is being taken away.
    #[error("{0} is being deleted: try again when it is gone")]
    Deleting(VmName),
    /// A device that another machine has.
    #[error("{device} is a NIC of the virtual machine {by} already: a device is for one machine")]
    DeviceTaken {
        /// The device.
        device: String,
        /// Who has it.
        by: VmName,
    },
    /// It does not run.
    #[error("{0} does not run: start it first")]
    NotRunning(VmName),
    /// Its guest may run elsewhere.
    #[error("{vm} is not started: {reason}; {}", remedy(vm.as_str()))]
    MayBeElsewhere {
        /// The machine.
        vm: VmName,
        /// Why.
        reason: String,
    },
    /// There is no doubt.
    #[error("it is settled where the guest of {0} is")]
    Settled(VmName),
    /// Its process speaks another level of the API.
    #[error(
        "the process of {vm} is of Bellhop {version} with API level {level}, which this daemon does not speak: use \
         the daemon of that version, or stop the process"
    )]
    OtherLevel {
        /// The machine.
        vm: VmName,
        /// The version of its process.
        version: String,
        /// The level of its API.
        level: u32,
    },
    /// Something failed.
    #[error(transparent)]
    Life(#[from] LifeError),
    /// The machine refuses, or does not answer.
    #[error(transparent)]
    Vmm(#[from] VmmError),
    /// The record cannot be kept.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The daemon ends.
    #[error("this daemon ends")]
    Ending,
    /// A worker failed.
    #[error("the request was not finished")]
    Worker(#[source] tokio::task::JoinError),
}

const CONFLICT: StatusCode = StatusCode::CONFLICT;
const UNUSABLE: StatusCode = StatusCode::UNPROCESSABLE_ENTITY;
const FAILED: StatusCode = StatusCode::INTERNAL_SERVER_ERROR;

impl VmError {
    /// The status and the word for programs. The one place that decides it.
    pub(crate) fn kind(&self) -> (StatusCode, &'static str) {
        match self {
            Self::Name(_) | Self::NicName(_) => (StatusCode::BAD_REQUEST, "bad_name"),
            // Each of them is right by itself.
            Self::Spec(BadSpec::OneDevice) => (UNUSABLE, "one_device"),
            Self::Spec(_) => (UNUSABLE, "invalid_body"),
            Self::NoVm(_) => (StatusCode::NOT_FOUND, "no_such_vm"),
            Self::NoNic { .. } => (StatusCode::NOT_FOUND, "no_such_device"),
            Self::OtherNic { .. } => (CONFLICT, "id_in_use"),
            Self::OtherRuns(_) => (CONFLICT, "other_vm_runs"),
            Self::NameTaken(_) => (CONFLICT, "name_taken"),
            Self::NoFile { .. } => (UNUSABLE, "unusable"),
            Self::Arriving(_) => (CONFLICT, "arriving"),
            Self::HasCome(_) => (CONFLICT, "has_come"),
            Self::Peer(error) => peer(error),
            Self::Deleting(_) => (CONFLICT, "deleting"),
            Self::DeviceTaken { .. } => (CONFLICT, "device_taken"),
            Self::NotRunning(_) => (CONFLICT, "not_running"),
            Self::MayBeElsewhere { .. } => (CONFLICT, "may_be_elsewhere"),
            Self::Settled(_) => (CONFLICT, "settled"),
            Self::OtherLevel { .. } => (CONFLICT, "other_api_level"),
            Self::Life(error) => life(error),
            Self::Vmm(error) => vmm(error),
            Self::Store(_) => (FAILED, "store_failed"),
            Self::Ending => (StatusCode::SERVICE_UNAVAILABLE, "ending"),
            Self::Worker(_) => (FAILED, "internal"),
        }
    }

    /// What the client can do, where it is not in the message.
    pub(crate) fn hint(&self) -> Option<&'static str> {
        match self {
            Self::NoVm(_) => Some("GET /v1/vms lists them"),
            Self::Life(LifeError::Remains(_)) => Some("mend the cause and delete it again"),
            Self::Vmm(VmmError::Connect { .. } | VmmError::NotInTime(_)) => {
                Some("GET the virtual machine: it may have ended")
            }
            _ => None,
        }
    }
}

/// Another node that does not answer is not to blame this one for.
fn peer(error: &PeerError) -> (StatusCode, &'static str) {
    match error {
        PeerError::Address(_) => (UNUSABLE, "invalid_body"),
        PeerError::Refused { .. } => (CONFLICT, "refused_there"),
        PeerError::NoCertificates => (CONFLICT, "no_certificates"),
        PeerError::Client { .. } => (StatusCode::BAD_GATEWAY, "no_answer"),
        PeerError::Endpoint { .. } | PeerError::Strange { .. } => {
            (StatusCode::BAD_GATEWAY, "bad_answer")
        }
        PeerError::Port { .. } => (FAILED, "host_failed"),
    }
}

fn life(error: &LifeError) -> (StatusCode, &'static str) {
    match error {
        LifeError::Create { source, .. }
        | LifeError::Start { source, .. }
        | LifeError::Send(source)
        | LifeError::Settle(source)
        | LifeError::Nic { source, .. } => step(source),
        LifeError::Stop(_) | LifeError::Delete(_) | LifeError::Remains(_) => {
            (FAILED, "host_failed")
        }
    }
}

/// What of a step's failure is the client's: what it named cannot be used.
fn step(error: &StepError) -> (StatusCode, &'static str) {
    match error {
        StepError::Make(error) => nic(&error.source),
        StepError::Nic(error) => nic(error),
        StepError::StandBy { source, .. } => step(source),
        StepError::Remove(error) => match **error {
            RemoveError::InUse(_) | RemoveError::NotForGuests { .. } => (CONFLICT, "in_use"),
            RemoveError::Incomplete { .. } => (FAILED, "host_failed"),
        },
        StepError::Device(_) | StepError::NoCharacterDevice(_) | StepError::Open { .. } => {
            (UNUSABLE, "unusable")
        }
        StepError::Vmm(error) => vmm(error),
        StepError::Record(_) => (FAILED, "store_failed"),
        StepError::File { .. }
        | StepError::NicStore(_)
        | StepError::Start { .. }
        | StepError::EndedEarly { .. }
        | StepError::Stranger { .. }
        | StepError::Place(_)
        | StepError::End(_) => (FAILED, "host_failed"),
    }
}

fn nic(error: &NicError) -> (StatusCode, &'static str) {
    match error {
        NicError::NoneFree { .. } | NicError::NoSfnum(_) => (CONFLICT, "no_room"),
        NicError::NameTaken(_) | NicError::RecordTaken(_) => (CONFLICT, "name_taken"),
        NicError::Record(_) | NicError::NotInTime { .. } => (FAILED, "host_failed"),
        // All that is left is about what was named in the request.
        _ => (UNUSABLE, "unusable"),
    }
}

/// A refusal passes as it is; a machine that does not answer is the host's failure.
fn vmm(error: &VmmError) -> (StatusCode, &'static str) {
    match error {
        VmmError::Refused(status, body, _) => {
            let code = CODES.iter().find(|code| **code == body.code);
            (*status, code.copied().unwrap_or("refused"))
        }
        VmmError::Connect { .. } | VmmError::Http(_) | VmmError::Client(_) | VmmError::Cut(_) => {
            (StatusCode::BAD_GATEWAY, "no_answer")
        }
        VmmError::NotInTime(_) => (StatusCode::GATEWAY_TIMEOUT, "no_answer"),
        VmmError::Malformed(_) | VmmError::Request(_) => (StatusCode::BAD_GATEWAY, "bad_answer"),
    }
}

/// Words of the machine's API that pass as they are.
const CODES: [&str; 19] = [
    "unusable",
    "no_room",
    "host_failed",
    "wrong_state",
    "no_configuration",
    "ended",
    "busy",
    "id_in_use",
    "no_such_device",
    "not_a_nic",
    "incompatible",
    "cannot_hand_over",
    "nic_lost",
    "bad_descriptor",
    "invalid_body",
    "ending",
    "settled",
    "no_migration",
    "migrating",
];

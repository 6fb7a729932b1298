//! Virtual machines of a node.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::machine::{AlarmInfo, End};

/// What a virtual machine does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum VmPhase {
    /// It is being made.
    Creating,
    /// It is to run, and does not yet.
    Starting,
    /// Its process waits for it to come from another node, or it is on its way.
    Receiving,
    /// Its vCPUs run.
    Running,
    /// Its vCPUs are parked.
    Paused,
    /// It has no process.
    Stopped,
    /// It has no process, was being sent elsewhere when that ended, and its guest may run there: nobody starts it until somebody
    /// says where the guest is.
    MayBeElsewhere,
    /// It is being taken away, or what is left of it is.
    Deleting,
    /// It has a process that does not say what it does, or in words of another version.
    #[serde(other)]
    Unknown,
}

impl VmPhase {
    /// Each of them.
    pub const ALL: [Self; 9] = [
        Self::Creating,
        Self::Starting,
        Self::Receiving,
        Self::Running,
        Self::Paused,
        Self::Stopped,
        Self::MayBeElsewhere,
        Self::Deleting,
        Self::Unknown,
    ];
}

impl fmt::Display for VmPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// Whether a machine should run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum Desired {
    /// It runs, also after the host's reboot.
    #[default]
    Running,
    /// It is there with its NICs, and does not run.
    Stopped,
}

impl fmt::Display for Desired {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// What happens when a machine ends without having been told to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum Restart {
    /// It stays stopped.
    Never,
    /// It is started again if it crashed; not if its guest powered off.
    #[default]
    OnFailure,
    /// It is started again in any case.
    Always,
}

impl fmt::Display for Restart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// A virtual machine at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmInfo {
    /// Its name.
    pub name: String,
    /// What it does.
    pub phase: VmPhase,
    /// What it is to do.
    pub state: Desired,
    /// What happens when it ends by itself.
    pub restart: Restart,
    /// The process that runs it.
    pub pid: Option<u32>,
    /// How long that process has run, in seconds.
    pub uptime_s: Option<u64>,
    /// The version of Bellhop that runs it.
    pub version: Option<String>,
    /// The level of that one's API.
    pub api: Option<u32>,
    /// Whether an earlier daemon has started its process.
    #[serde(default)]
    #[schema(required)]
    pub adopted: bool,
    /// How often it was started again by its restart policy.
    #[serde(default)]
    #[schema(required)]
    pub restarts: u64,
    /// How it ended the last time.
    pub last_end: Option<End>,
    /// Why it is not started, in the phase MayBeElsewhere; null in all others.
    #[schema(required)]
    pub may_be_elsewhere: Option<MayBeElsewhere>,
    /// Its NICs.
    pub nics: Vec<VmNic>,
    /// Queues of its devices that hang, as its process reported last.
    #[serde(default)]
    #[schema(required)]
    pub alarms: Vec<AlarmInfo>,
    /// Its serial console.
    pub console: ConsolePaths,
    /// What its process has to say.
    #[schema(value_type = String)]
    pub log: PathBuf,
}

/// A NIC of a virtual machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmNic {
    /// Its name.
    pub id: String,
    /// The vDPA device that was made for it, and that it is on.
    pub device: Option<String>,
    /// The character device that it is on, if there is one now.
    #[schema(value_type = Option<String>)]
    pub path: Option<PathBuf>,
    /// The character device that stands by for that one, if there is one now.
    #[schema(value_type = Option<String>)]
    pub failover: Option<PathBuf>,
    /// Whether it is on the device that stood by, until it is moved back, or the machine was stopped.
    #[serde(default)]
    #[schema(required)]
    pub failed_over: bool,
}

/// Where a virtual machine's console is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConsolePaths {
    /// The Unix socket on which one client at a time reads and writes; it is there while the machine has a process.
    #[schema(value_type = String)]
    pub socket: PathBuf,
    /// What the guest has written.
    #[schema(value_type = String)]
    pub log: PathBuf,
}

/// Why a virtual machine may be elsewhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MayBeElsewhere {
    /// Where it was being sent.
    pub destination: String,
    /// What is known, in a sentence.
    pub reason: String,
    /// What somebody has to do, in a sentence.
    pub remedy: String,
}

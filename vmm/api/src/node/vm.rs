//! Virtual machines of a node.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::machine::{AlarmInfo, End, WantedState};

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
    /// Its guest was asked to power off, and the grace period is not over.
    Stopping,
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
    pub const ALL: [Self; 10] = [
        Self::Creating,
        Self::Starting,
        Self::Receiving,
        Self::Running,
        Self::Paused,
        Self::Stopping,
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

/// A change of a virtual machine's state. All members but `state` belong to `Stopped`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmStateChange {
    /// What it is to do.
    pub state: WantedState,
    /// How it is stopped: `graceful` where it is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<StopMode>,
    /// How long its guest may take to power off, in seconds: 60 where it is not given. Only for
    /// `graceful`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 86400)]
    pub grace_period_s: Option<u32>,
    /// What happens to a guest that has not powered off by then: `fail` where it is not given. Only
    /// for `graceful`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub then: Option<AfterGrace>,
    /// It stays stopped until the host's next boot only, for a shutdown of the host: a VM that was
    /// to run starts again then.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub until_reboot: bool,
}

/// How long a guest may take to power off, in seconds, where a request does not say it.
pub const GRACE_PERIOD_S: u32 = 60;
/// The longest such time, in seconds.
pub const GRACE_PERIOD_MAX_S: u32 = 86_400;

impl From<WantedState> for VmStateChange {
    fn from(state: WantedState) -> Self {
        Self {
            state,
            mode: None,
            grace_period_s: None,
            then: None,
            until_reboot: false,
        }
    }
}

/// How a virtual machine is stopped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum StopMode {
    /// Its guest is asked to power off, by the ACPI power button.
    #[default]
    Graceful,
    /// It ends at once, as if its power was cut.
    Hard,
}

/// What happens to a guest that does not power off within the grace period.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum AfterGrace {
    /// The request fails and the guest continues to run. If it powers off later, it stays stopped.
    #[default]
    Fail,
    /// It ends, as if its power was cut.
    Hard,
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
    /// Grows with each change of its spec, and of whether it should run.
    #[serde(default)]
    #[schema(required)]
    pub generation: u64,
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

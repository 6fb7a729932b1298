//! The machine as a whole.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::{AlarmInfo, DiskSummary, NicSummary};

/// What the machine does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum VmState {
    /// There is no machine yet: it can be configured, then started.
    NotStarted,
    /// It is being built and booted.
    Starting,
    /// Its vCPUs run.
    Running,
    /// Its vCPUs are parked; devices go on.
    Paused,
    /// It has ended, and with it this process, soon.
    Stopped,
}

impl fmt::Display for VmState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotStarted => "not started",
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Stopped => "stopped",
        })
    }
}

/// The kind of an end. Killed and HostRebooted are the node daemon's words: no machine says them of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum EndReason {
    /// The guest switched the power off.
    PoweredOff,
    /// Somebody outside the guest asked for it.
    Stopped,
    /// Its guest runs elsewhere.
    Moved,
    /// Its guest may run elsewhere, or nowhere: it ended before it knew whether the process that it was sent to has it.
    Unsettled,
    /// A vCPU could not go on.
    Crashed,
    /// The process that ran it was killed, or ended without a word.
    Killed,
    /// The host was rebooted.
    HostRebooted,
    /// The host could not go on: a vDPA device or KVM failed, or the kernel's file was gone at a reset. And what later
    /// versions may say.
    #[serde(other)]
    Failed,
}

impl fmt::Display for EndReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// Why a machine is over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct End {
    /// For programs.
    pub reason: EndReason,
    /// For people: a sentence with the cause, in which nothing is to be searched.
    #[serde(default)]
    #[schema(required)]
    pub detail: String,
}

impl End {
    /// An end for this reason, in more words.
    #[must_use]
    pub fn new(reason: EndReason, detail: impl Into<String>) -> Self {
        Self {
            reason,
            detail: detail.into(),
        }
    }
}

/// The machine at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmStatus {
    /// What it does.
    pub state: VmState,
    /// Grows with each change: for `GET /v1/vm/watch`.
    pub generation: u64,
    /// How often it was powered on: 1 after the first boot, one more after each reset.
    pub boots: u64,
    /// The process that runs it.
    pub pid: u32,
    /// The version of Bellhop that runs it.
    pub version: String,
    /// The level of this API: it grows when something changes that a client has to know of. What is only
    /// added leaves it. A node daemon talks to machines of its own level and of the one before.
    #[schema(minimum = 1)]
    pub api: u32,
    /// Its NICs, once it is built.
    #[serde(default)]
    #[schema(required)]
    pub nics: Vec<NicSummary>,
    /// Why it is over: in the state Stopped, and then always; null in all others.
    #[schema(required)]
    pub end: Option<End>,
    /// Its disks, once it is built.
    #[serde(default)]
    #[schema(required)]
    pub disks: Vec<DiskSummary>,
    /// Queues of its devices that hang: what is wrong now, for `ring_watch`'s time already.
    #[serde(default)]
    #[schema(required)]
    pub alarms: Vec<AlarmInfo>,
    /// How often another program has gone on with the machine: `POST /v1/vm/upgrade`.
    #[serde(default)]
    #[schema(required)]
    pub upgrades: u64,
    /// Why the last program that was to go on with it did not; null once another upgrade is asked for.
    #[schema(required)]
    pub upgrade_error: Option<String>,
    /// For how many milliseconds the guest stood still for the last program that went on with it, from when its state was saved
    /// until its vCPUs ran; null if none has, or the machine was paused.
    #[schema(required)]
    pub upgrade_downtime_ms: Option<f64>,
}

/// What of [`VmStatus`] machines of all API levels say alike.
#[derive(Debug, Clone, Deserialize)]
pub struct Handshake {
    /// The process that runs it.
    pub pid: u32,
    /// The version of Bellhop that runs it.
    pub version: String,
    /// The level of its API. The first programs did not say it.
    #[serde(default = "first_level")]
    pub api: u32,
}

fn first_level() -> u32 {
    1
}

/// What the machine can be told to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum WantedState {
    /// Build it and boot it, if it does not run yet. From Paused: let its vCPUs go on.
    Running,
    /// Park its vCPUs. Devices go on with what they have to do; interrupts wait.
    Paused,
    /// End the machine, and with it its process. The machine's own API does not ask the guest:
    /// `POST …/power-button` does. The node daemon asks it, unless `mode` is `hard`.
    Stopped,
}

/// A change of state.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmChange {
    /// What it is to do.
    pub state: WantedState,
}

/// What is waited for.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct Watch {
    /// The generation that the client has seen; without, the answer comes at once.
    pub since: Option<u64>,
    /// How long to wait, in seconds: 30 where it is not given, at most 60.
    #[param(maximum = 60)]
    pub timeout_s: Option<u64>,
}

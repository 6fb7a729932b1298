//! The VM as a whole.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::{AlarmInfo, DiskSummary, NicSummary, VfioSummary};

described! {
    /// State of the machine.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    pub enum VmState {
        /// Not built yet: it can be configured and started.
        NotStarted,
        /// The machine is being built and booted.
        Starting,
        /// Its vCPUs run.
        Running,
        /// Its vCPUs are parked; its devices run.
        Paused,
        /// It has ended, and this process is about to exit.
        Stopped,
    }
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

described! {
    /// Why a machine ended. Only the node daemon reports Killed and HostRebooted.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    pub enum EndReason {
        /// The guest powered off.
        PoweredOff,
        /// A client stopped it.
        Stopped,
        /// Its guest was migrated to another host.
        Moved,
        /// It ended before the destination confirmed the guest, which may run there or nowhere.
        #[serde(alias = "Unsettled")]
        Indeterminate,
        /// A vCPU stopped with an error.
        Crashed,
        /// Its process was killed, or exited without a reason.
        Killed,
        /// The host was rebooted.
        HostRebooted,
        /// The host failed: a vDPA device or KVM, or the kernel image was missing at a reset.
        /// Also any reason of a later version.
        #[serde(other)]
        Failed,
    }
}

impl fmt::Display for EndReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// Why a machine ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct End {
    /// The reason, for programs.
    pub reason: EndReason,
    /// The cause, for people.
    #[serde(default)]
    #[schema(required)]
    pub detail: String,
}

impl End {
    /// An end for this reason, with details.
    #[must_use]
    pub fn new(reason: EndReason, detail: impl Into<String>) -> Self {
        Self {
            reason,
            detail: detail.into(),
        }
    }
}

/// The state of the machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmStatus {
    /// State of the machine.
    pub state: VmState,
    /// Increases with each change; used by `GET /v1/vm/watch`.
    pub generation: u64,
    /// How often it was powered on: 1 after the first boot, one more after each reset.
    pub boots: u64,
    /// The process that runs it.
    pub pid: u32,
    /// The version of Bellhop that runs it.
    pub version: String,
    /// The level of this API. It increases for changes that clients must know about, not for
    /// additions. A node daemon supports VMs of its own level and of the one before.
    #[schema(minimum = 1)]
    pub api: u32,
    /// Its NICs, once it is built.
    #[serde(default)]
    #[schema(required)]
    pub nics: Vec<NicSummary>,
    /// Why the machine ended; null in all states but Stopped.
    #[schema(required)]
    pub end: Option<End>,
    /// Its disks, once it is built.
    #[serde(default)]
    #[schema(required)]
    pub disks: Vec<DiskSummary>,
    /// The PCI functions of the host that it has, once it is built.
    #[serde(default)]
    #[schema(required)]
    pub vfio: Vec<VfioSummary>,
    /// Queues with an alarm, which is announced after the time in `ring_watch`.
    #[serde(default)]
    #[schema(required)]
    pub alarms: Vec<AlarmInfo>,
    /// How often its program was replaced: `POST /v1/vm/upgrade`.
    #[serde(default)]
    #[schema(required)]
    pub upgrades: u64,
    /// Why the last upgrade failed; null after a success or a new request.
    #[schema(required)]
    pub upgrade_error: Option<String>,
    /// Downtime of the guest in the last upgrade, in milliseconds. Null without an upgrade, and if
    /// the machine was paused.
    #[schema(required)]
    pub upgrade_downtime_ms: Option<f64>,
}

/// The part of [`VmStatus`] that is the same in all API levels.
#[derive(Debug, Clone, Deserialize)]
pub struct Handshake {
    /// The process of the VM.
    pub pid: u32,
    /// The version of Bellhop in that process.
    pub version: String,
    /// The level of its API. The first versions did not report it.
    #[serde(default = "first_level")]
    pub api: u32,
}

fn first_level() -> u32 {
    1
}

described! {
    /// State that a client can ask for.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    pub enum WantedState {
        /// Build and boot the machine; if it is paused, resume its vCPUs.
        #[serde(alias = "running")]
        Running,
        /// Park its vCPUs. Devices finish their work; interrupts wait.
        #[serde(alias = "paused")]
        Paused,
        /// End the machine and its process. The VM's own API does not ask the guest:
        /// `POST …/power-button` does. The node daemon asks the guest, unless `mode` is `hard`.
        #[serde(alias = "stopped")]
        Stopped,
    }
}

/// A change of state.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmChange {
    /// The requested state.
    pub state: WantedState,
}

/// Which change to wait for.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct Watch {
    /// The last generation that the client has seen. Without it the response is immediate.
    pub since: Option<u64>,
    /// The longest wait, in seconds: 30 by default, at most 60.
    #[param(maximum = 60)]
    pub timeout_s: Option<u64>,
}

//! VMs of a node.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;
use utoipa::openapi::schema::Ref;

use super::Labels;
use crate::machine::{AlarmInfo, End, WantedState};

described! {
    /// Phase of a virtual machine.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    pub enum VmPhase {
        /// It is being created.
        Creating,
        /// It should run, and does not run yet.
        Starting,
        /// Its process waits for it or receives it from another node.
        Receiving,
        /// Its vCPUs run.
        Running,
        /// Its vCPUs are parked.
        Paused,
        /// Its guest was asked to power off, and the grace period runs. Or its process was killed,
        /// and has not ended.
        Stopping,
        /// It has no process, as desired.
        Stopped,
        /// Its process ended during a migration, and the guest may run at the destination. It stays
        /// stopped until `PATCH …/migration` resolves this.
        #[serde(alias = "MayBeElsewhere")]
        MigrationUnknown,
        /// It, or the rest of it after a failure, is being deleted.
        Deleting,
        /// The state of its process is unknown, or a word of a later version.
        #[serde(other)]
        Unknown,
    }
}

impl VmPhase {
    /// All phases.
    pub const ALL: [Self; 10] = [
        Self::Creating,
        Self::Starting,
        Self::Receiving,
        Self::Running,
        Self::Paused,
        Self::Stopping,
        Self::Stopped,
        Self::MigrationUnknown,
        Self::Deleting,
        Self::Unknown,
    ];
}

impl fmt::Display for VmPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// A text that is not a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no such phase: give Running, Paused, Stopped or another one that `vm list` shows")]
pub struct BadPhase;

impl FromStr for VmPhase {
    type Err = BadPhase;

    /// Parses a phase; case-insensitive.
    fn from_str(text: &str) -> Result<Self, BadPhase> {
        let named = |phase: &Self| phase.to_string().eq_ignore_ascii_case(text);
        let found = Self::ALL.into_iter().find(named);
        // The earlier word.
        let former = || text.eq_ignore_ascii_case("MayBeElsewhere");
        found
            .or_else(|| former().then_some(Self::MigrationUnknown))
            .ok_or(BadPhase)
    }
}

described! {
    /// Whether a virtual machine should run.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
    pub enum Desired {
        /// It runs, also after a reboot of the host.
        #[default]
        #[serde(alias = "running")]
        Running,
        /// It exists with its NICs and does not run.
        #[serde(alias = "stopped")]
        Stopped,
    }
}

impl fmt::Display for Desired {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// A state for a virtual machine. All members but `state` belong to `Stopped`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmStateChange {
    /// The requested state.
    pub state: WantedState,
    /// How to stop it; `graceful` by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<StopMode>,
    /// The time for the guest to power off, in seconds: 60 by default. Only for `graceful`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 86400)]
    pub grace_period_s: Option<u32>,
    /// What to do with a guest that has not powered off by then; `fail` by default. Only for
    /// `graceful`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub then: Option<AfterGrace>,
    /// Stop it only until the host's next boot, for a shutdown of the host. A VM that should run
    /// starts again then.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub until_reboot: bool,
}

/// The default time for a guest to power off, in seconds.
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

described! {
    /// How a virtual machine is stopped.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    pub enum StopMode {
        /// Its guest is asked to power off, by the ACPI power button.
        #[default]
        #[serde(alias = "Graceful")]
        Graceful,
        /// It ends at once, like a power failure.
        #[serde(alias = "Hard")]
        Hard,
    }
}

described! {
    /// What happens to a guest that does not power off within the grace period.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    pub enum AfterGrace {
        /// The request fails and the guest continues to run. If it powers off later, it stays
        /// stopped.
        #[default]
        #[serde(alias = "Fail")]
        Fail,
        /// It ends, like a power failure.
        #[serde(alias = "Hard")]
        Hard,
    }
}

described! {
    /// What the daemon does when a virtual machine ends by itself.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
    pub enum Restart {
        /// It stays stopped.
        #[serde(alias = "never")]
        Never,
        /// It is started again after a crash, not after the guest powered off.
        #[default]
        #[serde(alias = "on-failure", alias = "on_failure")]
        OnFailure,
        /// It is always started again.
        #[serde(alias = "always")]
        Always,
    }
}

impl fmt::Display for Restart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// A virtual machine: its desired configuration (`labels`, `annotations`, `spec`) and its observed
/// state (`status`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Vm {
    /// Its name.
    pub name: String,
    /// Its labels, for selectors.
    #[serde(default)]
    #[schema(required, schema_with = super::labels_schema)]
    pub labels: Labels,
    /// Its annotations.
    #[serde(default)]
    #[schema(required, schema_with = super::annotations_schema)]
    pub annotations: Labels,
    /// Increases with each change of its labels, annotations and spec.
    #[serde(default)]
    #[schema(required)]
    pub generation: u64,
    /// Its desired configuration.
    #[schema(schema_with = spec_schema)]
    pub spec: Map<String, Value>,
    /// Its observed state.
    pub status: VmObserved,
}

/// The node describes it: this crate does not know the sources of NICs.
fn spec_schema() -> Ref {
    Ref::from_schema_name("VmSpec")
}

impl Vm {
    /// A member of its spec; none if it is absent or of another type.
    #[must_use]
    pub fn desired<T: DeserializeOwned>(&self, member: &str) -> Option<T> {
        T::deserialize(self.spec.get(member)?).ok()
    }
}

/// The observed state of a virtual machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmObserved {
    /// Its phase.
    pub phase: VmPhase,
    /// Members of the machine, as JSON pointers, with changes that take effect at the next start of
    /// its process.
    #[serde(default)]
    #[schema(required)]
    pub pending: Vec<String>,
    /// Its process; null while it has none.
    #[schema(required)]
    pub pid: Option<u32>,
    /// How long that process has run, in seconds; null without one.
    #[schema(required)]
    pub uptime_s: Option<u64>,
    /// The version of Bellhop that runs it; null if unknown.
    #[schema(required)]
    pub version: Option<String>,
    /// The level of its API; null if unknown.
    #[schema(required)]
    pub api: Option<u32>,
    /// Whether an earlier daemon started its process.
    #[serde(default)]
    #[schema(required)]
    pub adopted: bool,
    /// How often its restart policy started it again.
    #[serde(default)]
    #[schema(required)]
    pub restarts: u64,
    /// How it last ended; null if it never did.
    #[schema(required)]
    pub last_end: Option<End>,
    /// Why its process has not ended although the node has killed it; null otherwise. The stop or
    /// deletion is complete once the process ends.
    #[serde(default)]
    #[schema(required)]
    pub not_ended: Option<String>,
    /// Why it is not started, in the phase MigrationUnknown; null otherwise.
    #[serde(alias = "may_be_elsewhere")]
    #[schema(required)]
    pub migration_unknown: Option<MigrationUnknown>,
    /// The devices of its NICs.
    #[serde(default)]
    #[schema(required)]
    pub nic_devices: Vec<VmNicDevice>,
    /// Its queues with an alarm, as its process last reported them.
    #[serde(default)]
    #[schema(required)]
    pub alarms: Vec<AlarmInfo>,
    /// Its serial console.
    pub console: ConsolePaths,
    /// The log of its process.
    #[schema(value_type = String)]
    pub log: PathBuf,
}

/// The devices of a virtual machine's NIC.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmNicDevice {
    /// The NIC's name in the spec.
    pub id: String,
    /// The vDPA device that was created for it; null for an existing device.
    #[schema(required)]
    pub vdpa_device: Option<String>,
    /// Its character device; null while there is none.
    #[schema(required, value_type = Option<String>)]
    pub character_device: Option<PathBuf>,
    /// The character device of its backup; null without one.
    #[schema(required, value_type = Option<String>)]
    pub backup_device: Option<PathBuf>,
    /// Whether it runs on its backup. This ends when the NIC is moved back or the machine stops.
    #[serde(default)]
    #[schema(required)]
    pub failed_over: bool,
}

/// The files of a virtual machine's console.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConsolePaths {
    /// The Unix socket on which one client at a time reads and writes. It exists while the machine
    /// has a process. The daemon uses it while it has clients of this console.
    #[schema(value_type = String)]
    pub socket: PathBuf,
    /// The guest's output.
    #[schema(value_type = String)]
    pub log: PathBuf,
}

/// Why the location of a virtual machine is unknown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MigrationUnknown {
    /// The destination of its migration.
    pub destination: String,
    /// The known facts, for people.
    pub reason: String,
    /// The remedy, for people.
    pub remedy: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_in_both_cases_and_written_in_one() {
        for word in ["OnFailure", "on-failure", "on_failure"] {
            let restart: Restart = serde_json::from_value(word.into()).unwrap();
            assert_eq!(
                (restart, restart.to_string().as_str()),
                (Restart::OnFailure, "OnFailure")
            );
        }
        for state in ["Stopped", "stopped"] {
            let change = serde_json::json!({"state": state, "mode": "Hard", "then": "Fail"});
            let change: VmStateChange = serde_json::from_value(change).unwrap();
            assert_eq!(change.state, WantedState::Stopped);
            assert_eq!(serde_json::to_value(change).unwrap()["mode"], "hard");
        }
        assert!(serde_json::from_value::<Restart>("sometimes".into()).is_err());
    }
}

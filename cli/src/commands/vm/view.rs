//! What the daemon tells of a machine, as far as commands need it.
//!
//! Daemons of other versions tell more or less: what is not there is not known.

use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use crate::client::ClientError;
use crate::listing::printable;

/// A machine.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct VmView {
    pub(crate) name: String,
    /// What it does: `Running`, `Stopped`, …
    pub(crate) phase: String,
    /// What it is to do.
    pub(crate) state: Option<String>,
    pub(crate) restart: Option<String>,
    pub(crate) pid: Option<u32>,
    pub(crate) version: Option<String>,
    pub(crate) cpus: Option<u64>,
    pub(crate) memory: Option<String>,
    pub(crate) uptime_s: Option<u64>,
    #[serde(default)]
    pub(crate) adopted: bool,
    #[serde(default)]
    pub(crate) restarts: u64,
    pub(crate) last_end: Option<EndView>,
    pub(crate) may_be_elsewhere: Option<ElsewhereView>,
    #[serde(default)]
    pub(crate) nics: Vec<NicView>,
    pub(crate) console: Option<ConsoleView>,
    pub(crate) log: Option<String>,
}

/// How a machine ended.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct EndView {
    pub(crate) reason: String,
    #[serde(default)]
    pub(crate) detail: String,
}

/// Why a machine may be elsewhere, and what somebody has to do.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct ElsewhereView {
    pub(crate) reason: String,
    #[serde(default)]
    pub(crate) remedy: String,
}

/// A NIC of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct NicView {
    pub(crate) id: String,
    pub(crate) device: Option<String>,
    pub(crate) path: Option<String>,
    /// What stands by for that one.
    #[serde(default)]
    pub(crate) failover: Option<String>,
    /// It is on what stood by.
    #[serde(default)]
    pub(crate) failed_over: bool,
}

/// A machine's console.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct ConsoleView {
    pub(crate) socket: Option<String>,
    pub(crate) log: Option<String>,
}

impl VmView {
    /// # Errors
    /// The answer is not a machine.
    pub(crate) fn read(answer: &Value) -> Result<Self, ClientError> {
        Self::deserialize(answer).map_err(ClientError::Answer)
    }

    /// It has a process that runs it.
    pub(crate) fn runs(&self) -> bool {
        self.pid.is_some()
    }

    /// In a few words.
    pub(crate) fn line(&self) -> String {
        let pid = self.pid.map(|pid| format!(", pid {pid}"));
        let (name, phase) = (printable(&self.name), printable(&self.phase));
        format!("{name}: {phase}{}", pid.unwrap_or_default())
    }

    pub(crate) fn uptime(&self) -> Option<String> {
        Some(time(Duration::from_secs(self.uptime_s?)))
    }
}

/// A time in its two largest units: `3h12m`.
pub(crate) fn time(time: Duration) -> String {
    let seconds = time.as_secs();
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m{}s", seconds % 60),
        (0, _, _) => format!("{hours}h{}m", minutes % 60),
        _ => format!("{days}d{}h", hours % 24),
    }
}

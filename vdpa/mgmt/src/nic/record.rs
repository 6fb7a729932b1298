//! The record of a NIC: the data that another process needs to remove it.

use std::fs;

use serde::{Deserialize, Deserializer, Serialize};

use super::server::{self, Service};
use super::step::Step;
use crate::connectivity::{Attached, Connectivity};
use crate::new_device::check_name;
use crate::{Error, MgmtDeviceName};

/// The version of records that this program writes and reads.
pub(super) const VERSION: u32 = 1;

/// The kernel returns another random UUID at each read.
const UUID: &str = "/proc/sys/kernel/random/uuid";

/// More steps than any NIC has.
const STEPS_MAX: usize = 32;

/// The progress of a NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Its steps are being done, or were when the process that did them ended.
    Making,
    /// It is complete.
    Made,
    /// Its steps are being undone, or were when the process that did that ended or failed.
    Removing,
}

/// A NIC and its steps. Reading checks the record: another version, an impossible device name, and
/// unknown fields are rejected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MadeNic {
    version: u32,
    name: String,
    from: String,
    /// Random, to tell it from a later NIC of the same name. Records of older programs have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    owner: Option<String>,
    state: State,
    /// In the order in which they were begun. The last one may not have been done.
    steps: Vec<Step>,
}

impl MadeNic {
    pub(super) fn new(name: &str, from: &str, owner: Option<&str>) -> Self {
        Self {
            version: VERSION,
            name: name.to_owned(),
            from: from.to_owned(),
            id: None,
            owner: owner.map(str::to_owned),
            state: State::Making,
            steps: Vec::new(),
        }
    }

    /// Gives it a new identity.
    pub(super) fn identify(&mut self) {
        let id = fs::read_to_string(UUID).ok();
        self.id = id.map(|id| id.trim().to_owned());
    }

    /// Whether `other` is a record of the same NIC, not of another one with its name.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        (&self.name, &self.id) == (&other.name, &other.id)
    }

    /// Its name, which is also the vDPA device's.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its source, as requested.
    #[must_use]
    pub fn from(&self) -> &str {
        &self.from
    }

    /// The owner's own name for itself. `None`: created by `bellhop nic create`.
    #[must_use]
    pub fn owner(&self) -> Option<&str> {
        self.owner.as_deref()
    }

    /// Its progress.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// Its steps, in order. The last one may not have been done if its state is not
    /// [`State::Made`].
    #[must_use]
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// The management device of its vDPA device, if that was added.
    #[must_use]
    pub fn mgmtdev(&self) -> Option<&MgmtDeviceName> {
        self.steps.iter().find_map(|step| match step {
            Step::AddDevice { mgmtdev } => Some(mgmtdev),
            _ => None,
        })
    }

    /// Whether a process of this host serves it.
    #[must_use]
    pub fn is_software(&self) -> bool {
        self.service().is_some()
    }

    pub(super) fn service(&self) -> Option<&Service> {
        self.steps.iter().find_map(|step| match step {
            Step::Serve { service } => Some(service),
            _ => None,
        })
    }

    /// Whether a complete software NIC has no process that runs, or a tap that is not connected.
    #[must_use]
    pub fn needs_repair(&self) -> bool {
        let is_running = || server::is_served(&self.name).is_ok_and(|served| served);
        let service = self.service().filter(|_| self.state == State::Made);
        service.is_some_and(|service| !service.is_connected() || !is_running())
    }

    /// Notes the index of the tap, if that is connected.
    pub(super) fn set_tap_index(&mut self, index: Option<u32>) {
        self.change_service(|service| service.tap_index = index);
    }

    /// Notes the connection of the tap.
    pub(super) fn set_connectivity(&mut self, wanted: Connectivity) {
        self.change_service(|service| service.connectivity = Some(wanted));
    }

    fn change_service(&mut self, change: impl FnOnce(&mut Service)) {
        let service = self.steps.iter_mut().find_map(|step| match step {
            Step::Serve { service } => Some(service),
            _ => None,
        });
        if let Some(service) = service {
            change(service);
        }
    }

    pub(super) fn connection(&self) -> Option<&Attached> {
        self.steps.iter().find_map(|step| match step {
            Step::Connect { attached } => Some(attached),
            _ => None,
        })
    }

    pub(super) fn set_state(&mut self, state: State) {
        self.state = state;
    }

    pub(super) fn steps_mut(&mut self) -> &mut Vec<Step> {
        &mut self.steps
    }

    /// Stores the connection: a step, if anything was changed for it.
    pub(super) fn set_connection(&mut self, attached: &Attached) {
        self.steps
            .retain(|step| !matches!(step, Step::Connect { .. }));
        if !attached.changes().is_empty() {
            let attached = attached.clone();
            self.steps.push(Step::Connect { attached });
        }
    }
}

/// The reason why a record is unusable.
#[derive(Debug, thiserror::Error)]
enum BadRecord {
    #[error("it has version {0}, and this program knows version {VERSION}")]
    Version(u32),
    #[error(transparent)]
    Name(#[from] Error),
    #[error(transparent)]
    Owner(#[from] BadOwner),
    #[error("it has {0} steps, more than any NIC")]
    Steps(usize),
}

impl<'de> Deserialize<'de> for MadeNic {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Raw {
            version: u32,
            name: String,
            from: String,
            #[serde(default)]
            id: Option<String>,
            #[serde(default)]
            owner: Option<String>,
            state: State,
            steps: Vec<Step>,
        }
        let raw = Raw::deserialize(deserializer)?;
        let check = || -> Result<(), BadRecord> {
            if raw.version != VERSION {
                return Err(BadRecord::Version(raw.version));
            }
            check_name(&raw.name)?;
            if let Some(owner) = &raw.owner {
                check_owner(owner)?;
            }
            match raw.steps.len() {
                0..=STEPS_MAX => Ok(()),
                count => Err(BadRecord::Steps(count)),
            }
        };
        check().map_err(serde::de::Error::custom)?;
        Ok(Self {
            version: raw.version,
            name: raw.name,
            from: raw.from,
            id: raw.id,
            owner: raw.owner,
            state: raw.state,
            steps: raw.steps,
        })
    }
}

/// Maximum length of an owner, in bytes.
const OWNER_MAX: usize = 256;

/// The text is no valid owner.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("an owner has 1 to {OWNER_MAX} bytes without control characters")]
pub struct BadOwner;

/// Fails for an invalid owner.
pub(super) fn check_owner(owner: &str) -> Result<(), BadOwner> {
    let fits = (1..=OWNER_MAX).contains(&owner.len());
    if fits && !owner.contains(char::is_control) {
        Ok(())
    } else {
        Err(BadOwner)
    }
}

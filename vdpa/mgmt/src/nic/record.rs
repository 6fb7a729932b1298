//! The record of a NIC: what another process needs to take it back.

use serde::{Deserialize, Deserializer, Serialize};

use super::step::Step;
use crate::connectivity::Attached;
use crate::new_device::check_name;
use crate::{Error, MgmtDeviceName};

/// The version of records that this program writes and reads.
pub(super) const VERSION: u32 = 1;

/// More steps than any NIC has.
const STEPS_MAX: usize = 32;

/// How far a NIC is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Its steps are being done, or were when the process that did them ended.
    Making,
    /// It is there.
    Made,
    /// Its steps are being undone, or were when the process that did that ended or failed.
    Removing,
}

/// A NIC and the steps that made it. It is checked when it is read: another version, a name that
/// no device can have, and more than is known here are refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MadeNic {
    version: u32,
    name: String,
    from: String,
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
            owner: owner.map(str::to_owned),
            state: State::Making,
            steps: Vec::new(),
        }
    }

    /// Its name, which is the vDPA device's.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it was made of, as it was asked for.
    #[must_use]
    pub fn from(&self) -> &str {
        &self.from
    }

    /// The owner's own name for itself. None: `bellhop nic create` made it.
    #[must_use]
    pub fn owner(&self) -> Option<&str> {
        self.owner.as_deref()
    }

    /// How far it is.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// What was done, in that order. The last step may not have been done if its state is
    /// not [`State::Made`].
    #[must_use]
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// The management device that its vDPA device is on, if it came so far.
    #[must_use]
    pub fn mgmtdev(&self) -> Option<&MgmtDeviceName> {
        self.steps.iter().find_map(|step| match step {
            Step::AddDevice { mgmtdev } => Some(mgmtdev),
            _ => None,
        })
    }

    pub(super) fn set_state(&mut self, state: State) {
        self.state = state;
    }

    pub(super) fn steps_mut(&mut self) -> &mut Vec<Step> {
        &mut self.steps
    }

    /// It is connected so: a step, if anything was changed for that.
    pub(super) fn set_connection(&mut self, attached: &Attached) {
        self.steps
            .retain(|step| !matches!(step, Step::Connect { .. }));
        if !attached.changes().is_empty() {
            let attached = attached.clone();
            self.steps.push(Step::Connect { attached });
        }
    }
}

/// Why a record cannot be used.
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
            owner: raw.owner,
            state: raw.state,
            steps: raw.steps,
        })
    }
}

/// The longest owner, in bytes.
const OWNER_MAX: usize = 256;

/// What cannot stand for an owner.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("an owner has 1 to {OWNER_MAX} bytes without control characters")]
pub struct BadOwner;

/// Fails for what cannot stand for an owner.
pub(super) fn check_owner(owner: &str) -> Result<(), BadOwner> {
    let fits = (1..=OWNER_MAX).contains(&owner.len());
    if fits && !owner.contains(char::is_control) {
        Ok(())
    } else {
        Err(BadOwner)
    }
}

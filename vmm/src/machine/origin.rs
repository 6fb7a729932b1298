//! The origin of a machine, and how it is brought up from there.
//!
//! Owns the choice. It must not know how a machine is built, restored or received.

use super::build::Given;
use super::hand_over::HandedOver;
use super::migration::{Arriving, Migration};
use super::parts::Machine;
use super::saving::Past;
use super::signals::StopHandle;
use super::snapshot::Snapshot;
use super::status_publisher::UpgradeStatus;
use crate::Error;
use crate::config::VmConfig;
use crate::console::Console;
use crate::sandbox::rings;

/// The origin of a machine.
#[derive(Debug)]
pub enum Origin {
    /// A boot.
    Boot(VmConfig),
    /// A snapshot, from which the guest continues.
    Snapshot(Box<Snapshot>),
    /// Another program, from which the guest continues.
    HandedOver(Box<HandedOver>),
    /// A migration from another process, on this host or another one.
    Migration(Box<Arriving>),
}

impl Origin {
    /// Returns the machine's configuration; `None` while only the source knows it.
    #[must_use]
    pub fn config(&self) -> Option<&VmConfig> {
        match self {
            Self::Boot(config) => Some(config),
            Self::Snapshot(snapshot) => Some(snapshot.config()),
            Self::HandedOver(handed_over) => Some(handed_over.config()),
            Self::Migration(_) => None,
        }
    }

    /// Returns the migration, if the machine arrives by one.
    #[must_use]
    pub fn migration(&self) -> Option<&Migration> {
        match self {
            Self::Migration(arriving) => Some(arriving.migration()),
            Self::Boot(_) | Self::Snapshot(_) | Self::HandedOver(_) => None,
        }
    }

    pub(crate) fn into_config(self) -> Option<VmConfig> {
        match self {
            Self::Boot(config) => Some(config),
            Self::Snapshot(snapshot) => Some(snapshot.machine.config),
            Self::HandedOver(handed_over) => Some(handed_over.machine.config),
            Self::Migration(_) => None,
        }
    }
}

impl Machine {
    /// Builds a machine and boots it, or continues it from its origin. Afterwards it is ready for
    /// [`Machine::run`].
    ///
    /// # Errors
    /// See [`Error`]; nothing stays allocated.
    pub fn bring_up(origin: &Origin, console: Console, stop: &StopHandle) -> Result<Self, Error> {
        let machine = Self::from_origin(origin, console, stop)?;
        rings::release();
        Ok(machine)
    }

    fn from_origin(origin: &Origin, console: Console, stop: &StopHandle) -> Result<Self, Error> {
        match origin {
            Origin::Boot(config) => {
                let mut machine = Self::new(config, console, stop)?;
                machine.power_on()?;
                Ok(machine)
            }
            Origin::Snapshot(snapshot) => {
                let saved = &snapshot.machine;
                let given = Given {
                    slots: saved.slots()?,
                    ram: None,
                };
                let mut machine = Self::build(&saved.config, &given, console, stop)?;
                // Before the long part.
                machine.device_manager.adopt_functions(&saved.views)?;
                snapshot.read_memory(&machine.ram)?;
                machine.restore(saved, Past::Shared, snapshot.paused)?;
                Ok(machine)
            }
            Origin::Migration(arriving) => arriving.receive(console, stop),
            Origin::HandedOver(handed_over) => {
                let saved = &handed_over.machine;
                let given = Given {
                    slots: saved.slots()?,
                    ram: Some(&handed_over.ram),
                };
                let before = saved.vm.clock.age();
                let mut machine = Self::build(&saved.config, &given, console, stop)?;
                // Another driver may have one of them by now.
                machine.device_manager.adopt_functions(&saved.views)?;
                let built = saved.vm.clock.age();
                let past = match handed_over.failed {
                    None => Past::Own,
                    Some(_) => Past::Returned,
                };
                machine.restore(saved, past, !saved.ran)?;
                let downtime = saved.vm.clock.age();
                tracing::info!(
                    ?downtime,
                    execution = ?before,
                    construction = ?built.saturating_sub(before),
                    restoration = ?downtime.saturating_sub(built),
                    "the machine continues in this program"
                );
                machine.upgrade = UpgradeStatus {
                    count: saved.upgrades,
                    error: handed_over.failed.clone(),
                    downtime: (saved.ran && past == Past::Own).then_some(downtime),
                };
                machine.requests.publish_upgrade(&machine.upgrade);
                Ok(machine)
            }
        }
    }
}

//! A running machine goes over to another program, in the same process: a new version of Bellhop takes
//! the place of the one that runs it, by `execve`.
//!
//! Owns what is carried over: the machine's state in a memfd, and guest RAM, which stays where it is; nothing is
//! copied. It must not know how the other program is started, nor how it finds the two descriptors.
//!
//! ```text
//!   running ── Handle::hand_over ──> saved, Machine::run returns Exit::HandedOver
//!                                       │                │
//!                                       │ execve         │ it cannot be executed
//!                                       v                v
//!   the other program: Origin::HandedOver     Machine::take_back, run again: goes on
//! ```
//! KVM's part of it is of no use to the other program, which has another address space, and is handed over only so that nobody
//! waits for its end.
//! vDPA devices are closed by the `execve` and opened again by their paths: a device knows the memory of
//! the program that owns it (VHOST_SET_OWNER, linux/vhost.h), so that its descriptor is of no use to another.

use std::fs::File;
use std::io::Seek as _;
use std::path::Path;

use rustix::fs::MemfdFlags;
use vdpa::causes::in_one_line;

use super::error::{RequestError, SnapshotError};
use super::held::{HandOver, HeldFor};
use super::parts::Machine;
use super::saved::SavedMachine;
use crate::config::VmConfig;
use crate::snapshot::directory::STATE_FILE_MAX;
use crate::snapshot::format::Sections;

/// A machine that another program has handed over, read but for the memory, which is there.
#[derive(Debug)]
pub struct HandedOver {
    pub(super) machine: SavedMachine,
    pub(super) ram: File,
    pub(super) failed: Option<String>,
}

impl HandedOver {
    /// Reads the state, from its beginning. `failed`: why another program did not go on with it, if it
    /// is back where it was.
    ///
    /// # Errors
    /// [`SnapshotError`]: it is damaged, or of a version that is not understood.
    pub fn read(
        mut state: &File,
        ram: File,
        failed: Option<String>,
    ) -> Result<Self, SnapshotError> {
        state.rewind().map_err(SnapshotError::Descriptor)?;
        let mut sections = Sections::read(&mut state, STATE_FILE_MAX)?;
        let mut machine = SavedMachine::take(&mut sections)?;
        sections.finish()?;
        if failed.is_none() {
            machine.upgrades = machine.upgrades.saturating_add(1);
        }
        Ok(Self {
            machine,
            ram,
            failed,
        })
    }

    /// The configuration of the machine.
    #[must_use]
    pub fn config(&self) -> &VmConfig {
        &self.machine.config
    }
}

impl Machine {
    /// Saves the machine for `program`. It stands still from here on.
    pub(super) fn prepare_hand_over(&mut self, program: &Path) -> Result<(), RequestError> {
        self.unless_migrating()?;
        let saved = self.save(HeldFor::Snapshot)?;
        match self.write_hand_over(&saved, program) {
            Ok(hand_over) => {
                self.hand_over = Some(hand_over);
                Ok(())
            }
            Err(error) => {
                self.go_on()?;
                Err(error.into())
            }
        }
    }

    fn write_hand_over(
        &self,
        saved: &SavedMachine,
        program: &Path,
    ) -> Result<HandOver, SnapshotError> {
        let memfd = rustix::fs::memfd_create("machine-state", MemfdFlags::CLOEXEC);
        let state = File::from(memfd.map_err(|error| SnapshotError::Descriptor(error.into()))?);
        saved.sections()?.write(&mut &state)?;
        let ram = self.ram.file().try_clone();
        Ok(HandOver {
            program: program.to_owned(),
            state,
            ram: ram.map_err(SnapshotError::Descriptor)?,
            vm: self.vm.keep().map_err(SnapshotError::Descriptor)?,
        })
    }

    /// What the other program needs, after [`Machine::run`] said
    /// [`Exit::HandedOver`](super::Exit::HandedOver).
    pub fn take_hand_over(&mut self) -> Option<HandOver> {
        self.hand_over.take()
    }

    /// Goes on with a machine that the other program did not take: [`Machine::run`] is to serve it again.
    /// `reason` is shown as the upgrade's error.
    pub fn take_back(&mut self, reason: &str) {
        let mut reason = reason.to_owned();
        if let Err(error) = self.go_on() {
            reason.push_str("; and the machine does not go on: ");
            reason.push_str(&in_one_line(&error));
        }
        // Who sees it finds the machine as it was.
        self.upgrade.error = Some(reason);
        self.requests.publish_upgrade(&self.upgrade);
    }
}

//! Hands a running machine to another program in the same process: a new version of Bellhop
//! replaces the running one by `execve`.
//!
//! Owns the content of the hand-over: the machine's state in a memfd, and guest RAM, which stays in
//! place and is not copied. It must not know how the other program is started, nor how it finds the
//! two descriptors.
//!
//! ```text
//!   running ── Handle::hand_over ──> saved, Machine::run returns Exit::HandedOver
//!                                       │                │
//!                                       │ execve         │ it cannot be executed
//!                                       v                v
//!   the other program: Origin::HandedOver     Machine::roll_back, run again: resumes
//! ```
//! KVM's descriptors are of no use to the other program, which has another address space. They are
//! handed over only to avoid waiting for their teardown. vDPA devices are closed by the `execve`
//! and opened again by path. A device is bound to the address space of its owner (VHOST_SET_OWNER,
//! linux/vhost.h), so another program cannot use its descriptor.
//!
//! Functions of the host are closed and opened again, too, and their states are part of the
//! machine's. KVM's VM keeps them open (KVM_DEV_VFIO_FILE), so it is not handed over with them.

use std::fs::File;
use std::io::Seek as _;
use std::path::Path;

use rustix::fs::MemfdFlags;
use vdpa::causes::in_one_line;

use super::error::{RequestError, SnapshotError};
use super::parts::Machine;
use super::quiesced::{HandOver, QuiescedFor};
use super::saved::SavedMachine;
use crate::config::VmConfig;
use crate::snapshot::directory::STATE_FILE_MAX;
use crate::snapshot::format::Sections;

/// A machine that another program handed over: its state is read, its memory is in place.
#[derive(Debug)]
pub struct HandedOver {
    pub(super) machine: SavedMachine,
    pub(super) ram: File,
    pub(super) failed: Option<String>,
}

impl HandedOver {
    /// Reads the state from its beginning. `failed` is the reason for which another program did not
    /// take over, if the machine is back in its previous program.
    ///
    /// # Errors
    /// [`SnapshotError`]: the state is damaged, or of an unknown version.
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

    /// Returns the configuration of the machine.
    #[must_use]
    pub fn config(&self) -> &VmConfig {
        &self.machine.config
    }
}

impl Machine {
    /// Saves and holds the machine for `program`.
    pub(super) fn prepare_hand_over(&mut self, program: &Path) -> Result<(), RequestError> {
        self.ensure_not_migrating()?;
        self.device_manager.ensure_functions_continue()?;
        self.ensure_none_removed()?;
        let saved = self.save(QuiescedFor::Snapshot)?;
        match self.write_hand_over(&saved, program) {
            Ok(hand_over) => {
                self.hand_over = Some(hand_over);
                Ok(())
            }
            Err(error) => {
                self.unquiesce()?;
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
        let vm = saved.functions.is_empty().then(|| self.vm.keep());
        Ok(HandOver {
            program: program.to_owned(),
            state,
            ram: ram.map_err(SnapshotError::Descriptor)?,
            vm: vm.transpose().map_err(SnapshotError::Descriptor)?,
        })
    }

    /// Takes the state for the other program, after [`Machine::run`] returned
    /// [`Exit::HandedOver`](super::Exit::HandedOver).
    pub fn take_hand_over(&mut self) -> Option<HandOver> {
        self.hand_over.take()
    }

    /// Resumes a machine that the other program did not take over; [`Machine::run`] must be called
    /// again. `reason` is shown as the upgrade's error.
    pub fn roll_back(&mut self, reason: &str) {
        let mut reason = reason.to_owned();
        if let Err(error) = self.unquiesce() {
            reason.push_str("; the machine does not resume: ");
            reason.push_str(&in_one_line(&error));
        }
        // Published last, so that an observer of the error finds the machine as it was.
        self.upgrade.error = Some(reason);
        self.requests.publish_upgrade(&self.upgrade);
    }
}

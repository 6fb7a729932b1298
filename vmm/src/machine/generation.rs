//! The generation ID: 16 random bytes that tell a guest whether it is still the only one with its past.
//!
//! Owns when they change, which is when a snapshot is restored: what the guest holds to be unique, random numbers to come and
//! keys among it, another guest may have too. A reboot, a migration and another program that goes on with the machine keep
//! them: there is one guest as before. Owns the bytes' place in guest memory and the event that tells of a change; it must not
//! know who restores.
//!
//! ```text
//!   power on: made once, written ──> restored from a snapshot: new ones written, event raised
//! ```
//! A machine that a version without them saved has none until it reboots: its guest was not told to leave that page alone.
//!
//! Source: Microsoft, "Virtual Machine Generation ID" (2012).

use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::sync::Arc;

use devices::legacy::event::{AcpiEvent, AcpiEventState};
use serde::{Deserialize, Serialize};
use vdpa::memory::GuestMemory;
use vm_memory::{Bytes as _, GuestAddress};

use crate::layout::GENERATION_ID;

/// The bytes.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct GenerationId([u8; 16]);

impl GenerationId {
    fn random() -> io::Result<Self> {
        let mut id = [0; 16];
        File::open("/dev/urandom")?.read_exact(&mut id)?;
        Ok(Self(id))
    }
}

/// Not the bytes: a guest may make keys of them.
impl fmt::Debug for GenerationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GenerationId")
    }
}

/// Saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct GenerationState {
    id: GenerationId,
    changed: AcpiEventState,
}

/// A machine's generation ID.
#[derive(Debug)]
pub(super) struct Generation {
    /// `None`: the guest knows of none.
    id: Option<GenerationId>,
    changed: Arc<AcpiEvent>,
}

impl Generation {
    /// Of a machine that was not powered on, and what is raised when it changes.
    pub(super) fn new(changed: Arc<AcpiEvent>) -> Self {
        Self { id: None, changed }
    }

    /// The guest boots, maybe not for the first time.
    ///
    /// # Errors
    /// The host has no random bytes, or guest memory refuses them.
    pub(super) fn power_on(&mut self, memory: &GuestMemory) -> io::Result<()> {
        let id = match self.id {
            Some(id) => id,
            None => GenerationId::random()?,
        };
        self.changed.reset();
        self.write(memory, id)
    }

    /// The guest is one of two with the same past. Interrupt controllers have been restored.
    ///
    /// # Errors
    /// As [`Generation::power_on`].
    pub(super) fn renew(&mut self, memory: &GuestMemory) -> io::Result<()> {
        if self.id.is_some() {
            self.write(memory, GenerationId::random()?)?;
            self.changed.raise();
        }
        Ok(())
    }

    fn write(&mut self, memory: &GuestMemory, id: GenerationId) -> io::Result<()> {
        memory
            .write_slice(&id.0, GuestAddress(GENERATION_ID))
            .map_err(io::Error::other)?;
        self.id = Some(id);
        Ok(())
    }

    pub(super) fn save(&self) -> Option<GenerationState> {
        let changed = self.changed.save();
        self.id.map(|id| GenerationState { id, changed })
    }

    /// Takes what was saved; guest memory has the bytes already.
    ///
    /// # Errors
    /// The event's interrupt cannot be set.
    pub(super) fn restore(
        &mut self,
        saved: Option<&GenerationState>,
    ) -> Result<(), devices::Error> {
        self.id = saved.map(|saved| saved.id);
        self.changed
            .restore(&saved.map_or(AcpiEventState { raised: false }, |saved| saved.changed))
    }
}

#[cfg(test)]
mod tests {
    use devices::hypervisor::LevelInterrupt;

    use super::*;
    use crate::layout::Layout;
    use crate::memory::GuestRam;

    #[derive(Debug)]
    struct Line;

    impl LevelInterrupt for Line {
        fn set(&self, _asserted: bool) -> io::Result<()> {
            Ok(())
        }
    }

    fn generation() -> Generation {
        Generation::new(Arc::new(AcpiEvent::new("generation", Box::new(Line))))
    }

    fn ram() -> GuestRam {
        GuestRam::new(&Layout::new(16 << 20, 40).unwrap(), None).unwrap()
    }

    fn there(ram: &GuestRam) -> [u8; 16] {
        ram.memory().read_obj(GuestAddress(GENERATION_ID)).unwrap()
    }

    #[test]
    fn only_a_restored_snapshot_changes_it_and_says_so() {
        let ram = ram();
        let mut first = generation();
        first.power_on(ram.memory()).unwrap();
        let id = there(&ram);
        assert_ne!(id, [0; 16]);
        // A reboot, for which a guest may have overwritten it.
        ram.memory()
            .write_obj([7_u8; 16], GuestAddress(GENERATION_ID))
            .unwrap();
        first.power_on(ram.memory()).unwrap();
        assert_eq!(there(&ram), id);
        let saved = first.save();
        assert!(!saved.unwrap().changed.raised);

        // A migration, or another program.
        let mut moved = generation();
        moved.restore(saved.as_ref()).unwrap();
        assert_eq!((moved.save(), there(&ram)), (saved, id));

        // Two guests of one snapshot.
        let mut ids = vec![id];
        for _ in 0..2 {
            let mut restored = generation();
            restored.restore(saved.as_ref()).unwrap();
            restored.renew(ram.memory()).unwrap();
            let state = restored.save().unwrap();
            assert!(state.changed.raised && state.id.0 == there(&ram));
            assert!(!ids.contains(&there(&ram)));
            ids.push(there(&ram));
            // It has not taken note when it is saved once more.
            let mut again = generation();
            again.restore(Some(&state)).unwrap();
            assert!(again.changed.save().raised);
            again.power_on(ram.memory()).unwrap();
            assert!(!again.changed.save().raised);
        }
    }

    #[test]
    fn a_guest_that_knows_of_none_keeps_its_memory() {
        let ram = ram();
        ram.memory()
            .write_obj([7_u8; 16], GuestAddress(GENERATION_ID))
            .unwrap();
        let mut old = generation();
        old.restore(None).unwrap();
        old.renew(ram.memory()).unwrap();
        assert_eq!((there(&ram), old.save()), ([7; 16], None));
        assert!(!old.changed.save().raised);
        // It is told of it at its next boot.
        old.power_on(ram.memory()).unwrap();
        assert!(there(&ram) != [7; 16] && old.save().is_some());
    }
}

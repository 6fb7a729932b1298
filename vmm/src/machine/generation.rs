//! The generation ID: 16 random bytes that tell a guest whether another guest shares its past.
//!
//! Owns the rule for a change: the ID changes when a snapshot is restored. Another guest may then
//! have values that this guest takes for unique, such as keys and future random numbers. A reboot,
//! a migration and an upgrade keep the ID, because there is still one guest. Owns the bytes' place
//! in guest memory and the event that reports a change. It must not know who restores.
//!
//! ```text
//!   power on: created once, written ──> snapshot restored: new bytes written, event raised
//! ```
//! A machine that an older version saved without an ID has none until it reboots: its guest does
//! not know that the page is reserved.
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

/// The 16 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct GenerationId([u8; 16]);

impl GenerationId {
    fn random() -> io::Result<Self> {
        let mut id = [0; 16];
        File::open("/dev/urandom")?.read_exact(&mut id)?;
        Ok(Self(id))
    }
}

/// Omits the bytes: a guest may derive keys from them.
impl fmt::Debug for GenerationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GenerationId")
    }
}

/// The saved state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct GenerationState {
    id: GenerationId,
    changed: AcpiEventState,
}

/// A machine's generation ID.
#[derive(Debug)]
pub(super) struct Generation {
    /// `None`: the guest knows of no ID.
    id: Option<GenerationId>,
    changed: Arc<AcpiEvent>,
}

impl Generation {
    /// For a machine that was not powered on; `changed` is raised when the ID changes.
    pub(super) fn new(changed: Arc<AcpiEvent>) -> Self {
        Self { id: None, changed }
    }

    /// The guest boots, possibly not for the first time.
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

    /// The guest is one of several with the same past. Interrupt controllers are restored already.
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

    /// Takes the saved state; guest memory already has the bytes.
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
    fn only_a_restored_snapshot_changes_it_and_notifies() {
        let ram = ram();
        let mut first = generation();
        first.power_on(ram.memory()).unwrap();
        let id = there(&ram);
        assert_ne!(id, [0; 16]);
        // A reboot, before which a guest may have overwritten the ID.
        ram.memory()
            .write_obj([7_u8; 16], GuestAddress(GENERATION_ID))
            .unwrap();
        first.power_on(ram.memory()).unwrap();
        assert_eq!(there(&ram), id);
        let saved = first.save();
        assert!(!saved.unwrap().changed.raised);

        // A migration or an upgrade.
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
            // A guest that has not handled the event when it is saved again.
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
        // The guest learns of the ID at its next boot.
        old.power_on(ram.memory()).unwrap();
        assert!(there(&ram) != [7; 16] && old.save().is_some());
    }
}

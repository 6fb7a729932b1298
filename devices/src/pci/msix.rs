//! MSI-X (PCI 3.0, section 6.8.2): capability, table and Pending Bit Array.
//!
//! Owns the table as the guest programmed it and converts it into routes of [`MsiVector`]s. It must
//! not know who signals a vector.
//!
//! ```text
//!             enabled, function mask clear, entry's mask clear
//!   masked  ----------------------------------------------------> routed(message)
//!           <----------------------------------------------------    |  ^
//!             any of the three is not met, or reset                    +--+
//!                                                          another message written
//! ```
//! A trigger of a masked vector stays pending in the vector's eventfd.

use std::fmt;
use std::io;
use std::sync::Arc;

use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use tracing::warn;
use vmm_sys_util::eventfd::EventFd;

use crate::Error;
use crate::hypervisor::{MsiMessage, MsiVector};

/// Capability ID (PCI 3.0, appendix H).
pub const MSIX_CAPABILITY_ID: u8 = 0x11;
/// Offset of Message Control from the start of the capability.
pub const MSIX_CONTROL_OFFSET: u16 = 2;
/// Maximum number of vectors.
pub const MAX_VECTORS: usize = 2048;
/// Length of a table entry in bytes: address low and high, data, vector control; 4 each.
pub const TABLE_ENTRY_SIZE: u64 = 16;
/// Length of a word of the Pending Bit Array in bytes; bit *n* of word *w* is for vector 64 *w* +
/// *n*.
pub const PBA_WORD_SIZE: u64 = 8;

const CONTROL_FUNCTION_MASK: u16 = 1 << 14;
const CONTROL_ENABLE: u16 = 1 << 15;
const VECTOR_MASK: u32 = 1;

/// A saved table entry, as the guest programmed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MsixEntryState {
    /// Message address.
    pub address: u64,
    /// Message data.
    pub data: u32,
    /// The entry's mask bit.
    pub masked: bool,
    /// A trigger waits for the vector to be unmasked (the Pending Bit).
    pub pending: bool,
}

/// A saved MSI-X table. Message Control is part of configuration space.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MsixState {
    /// One per vector.
    #[serde(deserialize_with = "entries")]
    pub entries: Vec<MsixEntryState>,
}

/// No more entries than a table has: the state is untrusted.
fn entries<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<MsixEntryState>, D::Error> {
    struct Entries;

    impl<'de> Visitor<'de> for Entries {
        type Value = Vec<MsixEntryState>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "at most {MAX_VECTORS} entries")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
            let mut entries = Vec::new();
            while let Some(entry) = seq.next_element()? {
                if entries.len() == MAX_VECTORS {
                    return Err(A::Error::invalid_length(MAX_VECTORS + 1, &self));
                }
                entries.push(entry);
            }
            Ok(entries)
        }
    }

    deserializer.deserialize_seq(Entries)
}

#[derive(Debug)]
struct Entry {
    message: MsiMessage,
    masked: bool,
    vector: Arc<dyn MsiVector>,
    /// The current route of the vector; `None`: masked.
    routed: Option<MsiMessage>,
}

impl Entry {
    /// Returns the entry's four registers.
    fn registers(&self) -> [u32; 4] {
        let low_high = self.message.address.to_le_bytes();
        let [a, b, c, d, e, f, g, h] = low_high;
        [
            u32::from_le_bytes([a, b, c, d]),
            u32::from_le_bytes([e, f, g, h]),
            self.message.data,
            u32::from(self.masked),
        ]
    }

    fn set_register(&mut self, register: u64, value: u32) {
        let address = self.message.address;
        match register {
            0 => self.message.address = (address & !0xffff_ffff) | u64::from(value),
            1 => self.message.address = (address & 0xffff_ffff) | (u64::from(value) << 32),
            2 => self.message.data = value,
            _ => self.masked = value & VECTOR_MASK != 0,
        }
    }

    /// Sets the route according to the registers.
    fn update(&mut self, number: usize, deliver: bool) {
        let wanted = (deliver && !self.masked).then_some(self.message);
        if wanted == self.routed {
            return;
        }
        let done: io::Result<()> = match wanted {
            Some(message) => self.vector.unmask(message),
            None => self.vector.mask(),
        };
        match done {
            Ok(()) => self.routed = wanted,
            // The route stays unchanged, and the next change retries it.
            Err(error) => warn!(vector = number, %error, "cannot route an MSI-X vector"),
        }
    }

    fn pending(&self) -> bool {
        self.routed.is_none() && self.vector.pending()
    }
}

/// The MSI-X state of one function.
#[derive(Debug)]
pub struct Msix {
    enabled: bool,
    function_masked: bool,
    entries: Vec<Entry>,
}

impl Msix {
    /// Creates a table of masked entries, one per vector.
    ///
    /// # Errors
    /// The number of vectors is not between 1 and 2048.
    pub fn new(vectors: Vec<Arc<dyn MsiVector>>) -> Result<Self, Error> {
        if vectors.is_empty() || vectors.len() > MAX_VECTORS {
            return Err(Error::other(format!(
                "{} MSI-X vectors: must be 1 to 2048",
                vectors.len()
            )));
        }
        let entry = |vector| Entry {
            message: MsiMessage {
                address: 0,
                data: 0,
            },
            masked: true,
            vector,
            routed: None,
        };
        Ok(Self {
            enabled: false,
            function_masked: false,
            entries: vectors.into_iter().map(entry).collect(),
        })
    }

    /// Returns the number of vectors, 1 to 2048.
    #[must_use]
    pub fn vectors(&self) -> u16 {
        u16::try_from(self.entries.len()).unwrap_or(u16::MAX)
    }

    /// Returns the body of the capability and the mask of its writable bits, for
    /// [`ConfigSpace::add_capability`](super::ConfigSpace::add_capability). The body is Message
    /// Control, then the places of table and Pending Bit Array. Each is a BAR (0 to 5) and an
    /// offset in bytes, a multiple of 8.
    #[must_use]
    pub fn capability(&self, table: (u8, u32), pending: (u8, u32)) -> ([u8; 10], [u8; 10]) {
        let mut body = [0; 10];
        let place = |(bar, offset): (u8, u32)| (offset & !7) | u32::from(bar & 7);
        body[..2].copy_from_slice(&(self.vectors() - 1).to_le_bytes());
        body[2..6].copy_from_slice(&place(table).to_le_bytes());
        body[6..].copy_from_slice(&place(pending).to_le_bytes());
        let mut mask = [0; 10];
        mask[..2].copy_from_slice(&(CONTROL_ENABLE | CONTROL_FUNCTION_MASK).to_le_bytes());
        (body, mask)
    }

    /// Returns how many vectors, from the first, the guest can receive now: those up to its last
    /// unmasked one, if it has enabled MSI-X. The function mask counts as none.
    #[must_use]
    pub fn unmasked(&self) -> Option<usize> {
        let last = self.entries.iter().rposition(|entry| !entry.masked);
        self.enabled.then(|| last.map_or(0, |last| last + 1))
    }

    /// Returns the eventfds of all vectors.
    pub fn eventfds(&self) -> impl Iterator<Item = &EventFd> {
        self.entries.iter().map(|entry| entry.vector.eventfd())
    }

    /// Takes the guest's write of Message Control.
    pub fn set_control(&mut self, control: u16) {
        self.enabled = control & CONTROL_ENABLE != 0;
        self.function_masked = control & CONTROL_FUNCTION_MASK != 0;
        self.update_all();
    }

    fn update_all(&mut self) {
        let deliver = self.enabled && !self.function_masked;
        for (number, entry) in self.entries.iter_mut().enumerate() {
            entry.update(number, deliver);
        }
    }

    /// Reads the table at `offset` bytes. Only aligned accesses of 4 and 8 bytes inside the table
    /// are valid; all others read zero.
    pub fn read_table(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let Some((number, register, count)) = self.locate(offset, data.len()) else {
            return;
        };
        let Some(entry) = self.entries.get(number) else {
            return;
        };
        let registers = entry.registers();
        let shown = registers.iter().skip(register).take(count);
        for (bytes, value) in data.chunks_exact_mut(4).zip(shown) {
            bytes.copy_from_slice(&value.to_le_bytes());
        }
    }

    /// Writes the table at `offset` bytes; valid accesses are as in [`Msix::read_table`], others
    /// are ignored.
    pub fn write_table(&mut self, offset: u64, data: &[u8]) {
        let deliver = self.enabled && !self.function_masked;
        let Some((number, register, _)) = self.locate(offset, data.len()) else {
            return;
        };
        let Some(entry) = self.entries.get_mut(number) else {
            return;
        };
        for (register, bytes) in (register..).zip(data.chunks_exact(4)) {
            if let (Ok(bytes), Ok(register)) = (bytes.try_into(), u64::try_from(register)) {
                entry.set_register(register, u32::from_le_bytes(bytes));
            }
        }
        entry.update(number, deliver);
    }

    /// Returns the entry, the first register in it and the number of registers of an access.
    fn locate(&self, offset: u64, len: usize) -> Option<(usize, usize, usize)> {
        if !matches!(len, 4 | 8) || !offset.is_multiple_of(u64::try_from(len).ok()?) {
            return None;
        }
        let number = usize::try_from(offset / TABLE_ENTRY_SIZE).ok()?;
        let register = usize::try_from(offset % TABLE_ENTRY_SIZE / 4).ok()?;
        Some((number, register, len / 4))
    }

    /// Reads the Pending Bit Array at `offset` bytes; valid accesses are as in
    /// [`Msix::read_table`]. It cannot be written.
    pub fn read_pending(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if self.locate(offset, data.len()).is_none() {
            return;
        }
        let first = offset.checked_mul(8).and_then(|n| usize::try_from(n).ok());
        let Some(first) = first else { return };
        for (index, entry) in self.entries.iter().enumerate().skip(first) {
            let bit = index - first;
            let Some(byte) = data.get_mut(bit / 8) else {
                return;
            };
            if entry.pending() {
                *byte |= 1 << (bit % 8);
            }
        }
    }

    /// Triggers `vector`; a number beyond the table (such as "no vector") has no effect.
    pub fn signal(&self, vector: u16) {
        if let Some(entry) = self.entries.get(usize::from(vector))
            && let Err(error) = entry.vector.eventfd().write(1)
        {
            warn!(vector, %error, "cannot signal an MSI-X vector");
        }
    }

    /// Masks everything, clears the table and drops pending triggers.
    pub fn reset(&mut self) {
        self.enabled = false;
        self.function_masked = false;
        for entry in &mut self.entries {
            entry.message = MsiMessage {
                address: 0,
                data: 0,
            };
            entry.masked = true;
        }
        self.update_all();
        for (number, entry) in self.entries.iter().enumerate() {
            // Only a non-zero counter is read: the eventfd may block.
            if entry.pending()
                && let Err(error) = entry.vector.eventfd().read()
            {
                warn!(vector = number, %error, "cannot clear a pending MSI-X vector");
            }
        }
    }

    /// Returns the table as the guest programmed it.
    #[must_use]
    pub fn save(&self) -> MsixState {
        let state = |entry: &Entry| MsixEntryState {
            address: entry.message.address,
            data: entry.message.data,
            masked: entry.masked,
            pending: entry.pending(),
        };
        MsixState {
            entries: self.entries.iter().map(state).collect(),
        }
    }

    /// Checks whether [`Msix::restore`] accepts `state`.
    ///
    /// # Errors
    /// The saved table has another number of entries.
    pub fn check(&self, state: &MsixState) -> Result<(), Error> {
        let (saved, expected) = (state.entries.len(), self.entries.len());
        if saved == expected {
            return Ok(());
        }
        Err(Error::other(format!(
            "saved MSI-X table has {saved} entries instead of {expected}"
        )))
    }

    /// Restores a saved table and Message Control, sets the routes accordingly, and repeats pending
    /// triggers.
    ///
    /// # Errors
    /// As [`Msix::check`]; nothing has changed then.
    pub fn restore(&mut self, state: &MsixState, control: u16) -> Result<(), Error> {
        self.check(state)?;
        for (entry, saved) in self.entries.iter_mut().zip(&state.entries) {
            entry.message = MsiMessage {
                address: saved.address,
                data: saved.data,
            };
            entry.masked = saved.masked;
        }
        self.set_control(control);
        for (number, (entry, saved)) in self.entries.iter().zip(&state.entries).enumerate() {
            // Delivered now, or pending again if the vector is masked.
            if saved.pending
                && let Err(error) = entry.vector.eventfd().write(1)
            {
                warn!(vector = number, %error, "cannot restore a pending MSI-X vector");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;

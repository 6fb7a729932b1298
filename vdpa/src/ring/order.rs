//! Checks, from the rings alone, whether a split ring's device works in order. Then the chains that
//! it has taken and not used are the entries after its used index.
//!
//! That holds if the device completes in the order in which it takes. The last `size` entries of
//! the avail ring are still there. Those before the used index must name the same heads as the same
//! entries of the used ring. A device that completed out of order shows it there until those
//! entries are overwritten.
//!
//! In a full ring all of them are overwritten. If the entries from the used index on name each head
//! once, they are all that exist. If they name a head twice, that chain was completed ahead of its
//! turn and made available again. The rings show nothing more; only IN_ORDER gives certainty.
//!
//! **The driver continues meanwhile**, and the entries it adds overwrite the oldest of those, first
//! the entry, then the index:
//! ```text
//!   available - size      used                 available
//!   | completed, compared | taken or waiting   |
//!   | <- overwritten by entries that are published later
//! ```
//! So an entry that differs is a sign of disorder, or a head that the driver has written and not
//! published yet. One look cannot distinguish them, but the outcome does. Once the
//! driver publishes, the entry is visible at its new position. If that entry has the head that was
//! found, the overwrite came before the look: **the driver cannot offer a head that the device
//! holds**. Any other head means that the found one was the old entry, and a sign.
//!
//! So the check looks at the ring again for a few milliseconds. A driver may not publish in that
//! time: its vCPU is parked between the two stores, or the entry is indeed the old one. The result
//! is then undecided and counts as disorder. The caller may try again, whereas a chain that a
//! device writes to by mistake is lost for good.

use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use vm_memory::{Bytes, GuestAddress};

use super::Violation;
use super::guest::access;
use super::split::GuestRing;
use crate::{Error, ErrorKind};

/// Maximum number of looks at a ring, and the time for its driver between two.
const LOOKS: u32 = 32;
const BETWEEN_LOOKS: Duration = Duration::from_micros(100);

/// Chains were completed out of order and others are in flight, or the ring does not rule that out.
fn out_of_order() -> Error {
    let message = "the device completed chains out of order and still holds some, and the ring \
                   does not show which: try again when it has used them";
    Error::new(ErrorKind::InFlightUnknown, message)
}

/// The fields of a ring, each read at a different moment.
trait Fields {
    fn used_index(&self) -> Result<u16, Error>;
    fn avail_index(&self) -> Result<u16, Error>;
    /// The head at a free-running position of the avail ring.
    fn given(&self, position: u16) -> Result<u16, Error>;
    /// The id at a free-running position of the used ring.
    fn done(&self, position: u16) -> Result<u32, Error>;
}

impl Fields for GuestRing {
    fn used_index(&self) -> Result<u16, Error> {
        let index = Self::used_index(self);
        fence(Ordering::SeqCst);
        index
    }

    fn avail_index(&self) -> Result<u16, Error> {
        // The fences also order it after reads of entries: the index shows which of them may have
        // been overwritten.
        fence(Ordering::SeqCst);
        let index = Self::avail_index(self);
        fence(Ordering::SeqCst);
        index
    }

    fn given(&self, position: u16) -> Result<u16, Error> {
        self.avail_entry(position)
    }

    fn done(&self, position: u16) -> Result<u32, Error> {
        let element = 8 * u64::from(position % self.size());
        let address = self.addresses().device + 4 + element;
        let id = self.memory().read_obj::<u32>(GuestAddress(address.0));
        // The entry of the avail ring is read after this: see `find`.
        fence(Ordering::SeqCst);
        id.map(u32::from_le).map_err(access(address))
    }
}

impl GuestRing {
    /// Checks whether the chains that the device has taken and not used are the entries after its
    /// used index. Another device that begins there then takes each once. See the module. Driver
    /// and device may continue; the result then covers the chains completed by that time. Takes a
    /// few milliseconds at most.
    ///
    /// # Errors
    /// The kind is [`ErrorKind::InFlightUnknown`], or the ring cannot be read or is broken.
    pub fn check_order(&self) -> Result<(), Error> {
        check(self, Window::whole(self.size()), pause)
    }

    /// As [`GuestRing::check_order`], for chains completed from the used index `begin` on. At that
    /// index the chains in flight were those that the entries from there on named.
    ///
    /// # Errors
    /// The kind is [`ErrorKind::InFlightUnknown`], or the ring cannot be read or is broken.
    pub fn check_order_since(&self, begin: u16) -> Result<(), Error> {
        let size = self.size();
        let begin = Some(begin);
        check(self, Window { size, begin }, pause)
    }
}

fn pause() {
    std::thread::sleep(BETWEEN_LOOKS);
}

/// The entries to check.
#[derive(Debug, Clone, Copy)]
struct Window {
    /// Entries of the ring.
    size: u16,
    /// The used index at which the check begins.
    begin: Option<u16>,
}

impl Window {
    fn whole(size: u16) -> Self {
        Self { size, begin: None }
    }
}

/// An entry that differs, as it was found.
#[derive(Debug, Clone, Copy)]
struct Suspect {
    position: u16,
    head: u16,
}

/// The judgement of a suspect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// It was overwritten before it was found, or so often since that the order is unknown.
    New,
    /// It was the old entry: the head that the driver had made available at its position.
    Old,
    /// Still undecided.
    Open,
}

fn check(rings: &impl Fields, window: Window, mut wait: impl FnMut()) -> Result<(), Error> {
    let size = window.size;
    let mut suspects: Vec<Suspect> = Vec::new();
    let mut jump = None;
    for look in 0..LOOKS {
        if look > 0 {
            wait();
        }
        // Judge earlier suspects first: a driver that fills its ring leaves no other entries to
        // check.
        let mut open = Vec::new();
        for suspect in suspects {
            match judge(rings, size, suspect)? {
                Verdict::New => {}
                Verdict::Old => return Err(out_of_order()),
                Verdict::Open => open.push(suspect),
            }
        }
        suspects = open;
        // In this order the difference is never too small. It is too large only if the device moved
        // in between.
        let used = rings.used_index()?;
        let available = rings.avail_index()?;
        let waiting = available.wrapping_sub(used);
        jump = waiting.checked_sub(size).filter(|&beyond| beyond > 0);
        if jump.is_some() {
            continue;
        }
        if waiting == 0 && suspects.is_empty() {
            return Ok(());
        }
        if waiting > 0 {
            find(rings, window, (used, available), &mut suspects)?;
        }
        if suspects.is_empty() {
            return if repeats(rings, size)? {
                Err(out_of_order())
            } else {
                Ok(())
            };
        }
    }
    match jump {
        Some(beyond) => {
            let ahead = size.saturating_add(beyond);
            Err(Violation::AvailJump { ahead, size }.into())
        }
        None => Err(out_of_order()),
    }
}

/// Adds the completed entries that differ.
fn find(
    rings: &impl Fields,
    window: Window,
    (used, available): (u16, u16),
    suspects: &mut Vec<Suspect>,
) -> Result<(), Error> {
    let left = window.size.saturating_sub(available.wrapping_sub(used));
    let since = window.begin.map(|begin| used.wrapping_sub(begin));
    let left = since.map_or(left, |since| left.min(since));
    for back in 1..=left {
        let position = used.wrapping_sub(back);
        if overwritten(rings.avail_index()?, position, window.size) {
            // It was overwritten since the indices were read, perhaps already twice.
            continue;
        }
        // Read the used ring first. A device overwrites an element only after the driver has
        // overwritten the entry and published it. So if the entry is still the old one, the element
        // was too.
        let done = rings.done(position)?;
        let head = rings.given(position)?;
        let known = suspects.iter().any(|known| known.position == position);
        if done != u32::from(head) && !known {
            suspects.push(Suspect { position, head });
        }
    }
    Ok(())
}

/// Whether two unused entries name the same head.
fn repeats(rings: &impl Fields, size: u16) -> Result<bool, Error> {
    let used = rings.used_index()?;
    let waiting = rings.avail_index()?.wrapping_sub(used);
    // By head: the distance from the used index at which it was last named.
    let mut named: Vec<Option<u16>> = vec![None; usize::from(size)];
    let mut furthest = None;
    for ahead in 0..waiting.min(size) {
        let head = usize::from(rings.given(used.wrapping_add(ahead))?);
        // An invalid head is reported elsewhere.
        let before = named.get_mut(head).and_then(|last| last.replace(ahead));
        furthest = furthest.max(before);
    }
    // Entries that the device has used since may have been overwritten before they were read.
    let passed = rings.used_index()?.wrapping_sub(used);
    Ok(furthest.is_some_and(|first| first >= passed))
}

/// Whether a published entry has overwritten the one of `position`.
fn overwritten(available: u16, position: u16, size: u16) -> bool {
    available.wrapping_sub(position) > size
}

fn judge(rings: &impl Fields, size: u16, suspect: Suspect) -> Result<Verdict, Error> {
    let Suspect { position, head } = suspect;
    if !overwritten(rings.avail_index()?, position, size) {
        return Ok(Verdict::Open);
    }
    // The driver overwrites the entry again only after the device has used it. The device has then
    // recorded its head at the same place in the used ring.
    let lapped = |used: u16| used.wrapping_sub(position) > size;
    let before = lapped(rings.used_index()?);
    let (given, done) = (rings.given(position)?, rings.done(position)?);
    let after = lapped(rings.used_index()?);
    // Two laps of a working device between two looks: nothing is left of the suspect, nor of
    // anything older.
    if u32::from(rings.avail_index()?.wrapping_sub(position)) > 2 * u32::from(size) {
        return Ok(Verdict::New);
    }
    let was_new = match (before, after) {
        (_, false) => given == head,
        (true, true) => done == u32::from(head),
        (false, true) => return Ok(Verdict::Open),
    };
    Ok(if was_new { Verdict::New } else { Verdict::Old })
}

#[cfg(test)]
mod tests;

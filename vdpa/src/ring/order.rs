//! Whether what the device of a split ring has taken and not used are the entries behind
//! its used index, as far as the rings tell.
//!
//! It is so if the device completes in the order in which it takes. The last `size` entries of the
//! avail ring are still there; those before the used index must name the same heads as the same
//! entries of the used ring. A device that has completed out of order shows it there as long as
//! those entries are not written over. Of a full ring all of them are: there those from the used index on
//! name each head once, and then they are all that there are, or one of them twice: that one was completed
//! ahead of its turn and made available again. Nothing in the rings says more: who wants certainty
//! negotiates IN_ORDER.
//!
//! **The driver goes on meanwhile**, and what it makes available next overwrites the oldest of those
//! entries, first the entry, then the index:
//! ```text
//!   available - size      used                 available
//!   | completed, compared | taken or waiting   |
//!   | <- overwritten by entries that are published later
//! ```
//! So an entry that differs is one of two things: a sign of disorder, or a head that the driver has
//! written and not published yet. A look alone does not tell them apart. What comes of it does:
//! the driver publishes at last, and then the entry is at its new position for all to see. If that is the
//! head that was found, it had been overwritten before the look, for **a head that the device
//! holds cannot be made available again**; any other was the old one, and a sign. So the ring is looked at
//! again for a few milliseconds. A driver that does not publish in that time (its vCPU is parked between the two
//! stores, or the entry is indeed the old one) leaves it undecided, which counts as disorder: whoever asked
//! may ask again, and a chain that a device writes to by mistake is lost for good.
//!
//! Must not know who asks, nor what is done with the answer.

use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use vm_memory::{Bytes, GuestAddress};

use super::Violation;
use super::guest::access;
use super::split::GuestRing;
use crate::{Error, ErrorKind};

/// How often a ring is looked at, and how long its driver gets in between.
const LOOKS: u32 = 32;
const BETWEEN_LOOKS: Duration = Duration::from_micros(100);

/// Chains were completed out of order and others are in flight, or the ring does not tell that this
/// is not so.
fn out_of_order() -> Error {
    let message = "the device has completed chains out of order and still holds some, and the ring \
                   does not say which: try again when it has used them";
    Error::new(ErrorKind::InFlightUnknown, message)
}

/// What is read of a ring, each at a moment of its own.
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
        // After entries were read, too: the index says which of them may have been overwritten.
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
        let id = self.memory().read_obj::<u32>(GuestAddress(address));
        // The entry of the avail ring is read after it: see `Look::take`.
        fence(Ordering::SeqCst);
        id.map(u32::from_le).map_err(access(address))
    }
}

impl GuestRing {
    /// Looks whether what the device has taken and not used are the entries behind its used index, so that
    /// another one that begins there takes each once. See the module. Driver and device may go on; while
    /// the device does, the answer is about what it had completed by then. Takes a few milliseconds at most.
    ///
    /// # Errors
    /// The kind is [`ErrorKind::InFlightUnknown`], or the ring cannot be read or is broken.
    pub fn check_order(&self) -> Result<(), Error> {
        check(self, Window::whole(self.size()), pause)
    }

    /// As [`GuestRing::check_order`] of what was completed from the used index `begin` on, where nothing was in
    /// flight but what the entries from there on name.
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

/// What is looked at.
#[derive(Debug, Clone, Copy)]
struct Window {
    /// Entries of the ring.
    size: u16,
    /// The used index before which nothing is.
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

/// What has become of a suspect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// It was overwritten before it was found, or so often since that nobody can say.
    New,
    /// It was what the driver had made available at its position.
    Old,
    /// Nobody knows yet.
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
        // What was found before comes first: a driver that fills its ring leaves nothing else to look at.
        let mut open = Vec::new();
        for suspect in suspects {
            match judge(rings, size, suspect)? {
                Verdict::New => {}
                Verdict::Old => return Err(out_of_order()),
                Verdict::Open => open.push(suspect),
            }
        }
        suspects = open;
        // In this order the difference is never too small, and too large only if the device moved in between.
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
            // Since the indices were read, and maybe for the second time by now.
            continue;
        }
        // The used ring first: a device overwrites an element only after the driver has overwritten the entry
        // and published it, so if the entry is still the old one the element was, too.
        let done = rings.done(position)?;
        let head = rings.given(position)?;
        let known = suspects.iter().any(|known| known.position == position);
        if done != u32::from(head) && !known {
            suspects.push(Suspect { position, head });
        }
    }
    Ok(())
}

/// Whether two of the entries that nobody has used name the same head.
fn repeats(rings: &impl Fields, size: u16) -> Result<bool, Error> {
    let used = rings.used_index()?;
    let waiting = rings.avail_index()?.wrapping_sub(used);
    // By head: how far behind the used index it was named last.
    let mut named: Vec<Option<u16>> = vec![None; usize::from(size)];
    let mut furthest = None;
    for ahead in 0..waiting.min(size) {
        let head = usize::from(rings.given(used.wrapping_add(ahead))?);
        // One that is none is somebody else's business.
        let before = named.get_mut(head).and_then(|last| last.replace(ahead));
        furthest = furthest.max(before);
    }
    // What the device has used since may have been written over before it was read.
    let passed = rings.used_index()?.wrapping_sub(used);
    Ok(furthest.is_some_and(|first| first >= passed))
}

/// Whether an entry that is published lies where the one of `position` was.
fn overwritten(available: u16, position: u16, size: u16) -> bool {
    available.wrapping_sub(position) > size
}

fn judge(rings: &impl Fields, size: u16, suspect: Suspect) -> Result<Verdict, Error> {
    let Suspect { position, head } = suspect;
    if !overwritten(rings.avail_index()?, position, size) {
        return Ok(Verdict::Open);
    }
    // The driver writes over it once more only after the device has used it, and then it is the device that has put
    // it on record, in the same place of the used ring.
    let lapped = |used: u16| used.wrapping_sub(position) > size;
    let before = lapped(rings.used_index()?);
    let (given, done) = (rings.given(position)?, rings.done(position)?);
    let after = lapped(rings.used_index()?);
    // Two laps of a device that works, between two looks: nothing is left of what was found, as of all that is
    // longer ago.
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

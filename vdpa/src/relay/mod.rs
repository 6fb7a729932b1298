//! Relays between a guest's rings and a device, so that every page that the device writes is known.
//! A relay can be removed again.
//!
//! ```text
//!   Direct       guest ring ============================== device
//!   UsedShadow   guest ring == descriptors, avail ring === device     (buffers: zero-copy
//!                used ring <-- UsedShadow <-- private used ring --+  in all three)
//!   FullShadow   guest ring <--> FullShadow <--> private ring ===== device
//!
//!   Direct <--> UsedShadow <--> FullShadow      each arrow: SvqSet::change on a device that
//!      ^------------------------------^         suspends, SvqSet::start on any other
//! ```
//! A device that can begin only at the start of a ring stays shadowed until its driver resets it.
//! Split rings get a used shadow or a full shadow. **A packed ring can only get a full shadow**:
//! its used descriptors lie in the ring itself, so there is no used ring to replace.
//!
//! Only the relay shows used elements to the guest. Before that it reports to a [`Dirty`] all
//! memory that the device may have written for the chain. It **polls**: the guest's interrupt
//! suppression is in memory that the device still reads, so a call eventfd is only a hint. The
//! module has no thread; [`SvqSet::poll`] does a bounded amount of work and returns when to call
//! it again.
//!
//! All device-writable bytes of the chain count as written, whatever length the device reports. The
//! relay reads the descriptors when it finds the used element. A device may write more than it
//! reports (virtio 1.3, 2.7.8.2), and a driver must leave descriptors alone until they are used
//! (2.7.13). A guest that changes them in flight can only lose parts of its own memory.
//!
//! The module does not read frames, and does not depend on migration.

mod choice;
mod dirty;
mod full_shadow;
mod pace;
mod ring;
mod set;
#[cfg(any(test, feature = "fuzz"))]
#[allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "code of tests, which fuzz targets use"
)]
mod tests;
mod used_shadow;

use std::fmt;

pub use self::choice::{Reason, choose};
pub use self::dirty::{Dirty, mark_ram};
pub use self::full_shadow::FullShadow;
pub use self::pace::{Pace, Pause, Signals};
pub use self::set::{Prepared, Progress, RelayedQueue, SvqSet};
#[cfg(any(test, feature = "fuzz"))]
pub use self::tests::relay_anything;
pub use self::used_shadow::UsedShadow;
use crate::device::{VringAddresses, VringBase};
use crate::{Error, ErrorKind};

/// Maximum number of elements that one pass relays in each direction.
pub const PASS_LIMIT: u16 = 256;

/// The path between a queue and the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// The device works on the guest's ring; its writes are not seen.
    Direct,
    /// The device's used ring is private, the rest is the guest's.
    UsedShadow,
    /// The device's ring is private.
    FullShadow,
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Direct => "direct",
            Self::UsedShadow => "used shadow",
            Self::FullShadow => "full shadow",
        })
    }
}

/// The result of one pass, and the work that it requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pass {
    /// Chains forwarded to the device (shadow only).
    pub forwarded: u16,
    /// Used chains shown to the guest.
    pub used: u16,
    /// The guest must be interrupted.
    pub interrupt: bool,
    /// The device must be kicked.
    pub kick: bool,
    /// There is more work at once.
    pub more: bool,
    /// The future events that will be signalled.
    pub signals: Signals,
}

/// The position of a queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Position {
    /// A split ring; indices are free-running.
    Split {
        /// The used index that the guest sees.
        used: u16,
        /// First avail entry that no device ever took.
        available: u16,
        /// Heads of the chains that a device took and did not use, in the order of the avail
        /// entries from `used` to `available`.
        in_flight: Vec<u16>,
    },
    /// A packed ring.
    Packed {
        /// The guest's position for the next used descriptor, and the first entry that no device
        /// ever took; [`VringBase::Packed`].
        ring_position: VringBase,
        /// Buffer ids of the chains that a device took and did not use, in the order of the entries
        /// between the two positions.
        in_flight: Vec<u16>,
    },
}

impl Position {
    /// The position for a device that takes over the ring, so that it takes each chain in flight
    /// once.
    #[must_use]
    pub fn base(&self) -> VringBase {
        match self {
            Self::Split { used, .. } => VringBase::Split { index: *used },
            Self::Packed { ring_position, .. } => ring_position.at_used(),
        }
    }

    /// The chains that a device took and did not use.
    #[must_use]
    pub fn in_flight(&self) -> &[u16] {
        match self {
            Self::Split { in_flight, .. } | Self::Packed { in_flight, .. } => in_flight,
        }
    }
}

/// The chains that the device holds are unknown: it took some before it was relayed, and may
/// complete them in any order. Its used ring must be shadowed until they are used.
fn in_flight_unknown(unknown: u16) -> Error {
    let message = format!(
        "the device still holds {unknown} chains from before its used ring was shadowed, and may \
         use them in any order: try again when traffic on the queue has used them"
    );
    Error::new(ErrorKind::InFlightUnknown, message)
}

/// One relayed queue, for any strategy and ring format.
pub trait Svq: fmt::Debug + Send {
    /// The queue's strategy.
    fn strategy(&self) -> Strategy;

    /// The addresses of the device's ring.
    fn addresses(&self) -> VringAddresses;

    /// Entries of that ring.
    fn size(&self) -> u16;

    /// One bounded pass. All memory that the device wrote for a chain is marked before the guest
    /// can see that the chain is used.
    ///
    /// # Errors
    /// The queue is broken until the guest's driver resets the device; other queues continue.
    fn pass(&mut self, dirty: &dyn Dirty) -> Result<Pass, Error>;

    /// Shows the guest all remaining used chains, after the device stopped. The relay can continue
    /// afterwards if the device does.
    ///
    /// # Errors
    /// As [`Svq::pass`].
    fn finish(&mut self, dirty: &dyn Dirty) -> Result<Pass, Error> {
        let mut sum = Pass::default();
        loop {
            let pass = self.pass(dirty)?;
            sum.used = sum.used.saturating_add(pass.used);
            sum.forwarded = sum.forwarded.saturating_add(pass.forwarded);
            sum.interrupt |= pass.interrupt;
            sum.kick |= pass.kick;
            if pass.used == 0 {
                return Ok(sum);
            }
        }
    }

    /// Prepares the guest's ring for the next device, after [`Svq::finish`] and with the device
    /// still stopped. A device that begins at [`Position::base`] then takes each chain in flight
    /// once.
    ///
    /// # Errors
    /// The kind is [`ErrorKind::InFlightUnknown`], or the ring cannot be accessed.
    fn settle(&mut self) -> Result<Position, Error>;
}

//! Standing between a guest's rings and a device, so that every page that the
//! device writes is known; and getting out of the way again.
//!
//! ```text
//!   Direct       guest ring ============================== device
//!   Mediated     guest ring == descriptors, avail ring === device     (buffers: zero-copy
//!                used ring <-- MediatedQueue <-- private used ring --+  in all three)
//!   Shadowed     guest ring <--> ShadowQueue <--> private ring ===== device
//!
//!   Direct <----> Mediated <----> Shadowed      each arrow: RelaySet::change on a device that
//!      ^------------------------------^         suspends, RelaySet::start on any other
//! ```
//! A device that begins at the start of a ring only stays shadowed until its driver resets it.
//! Split rings are mediated or shadowed. **A packed ring can only be shadowed**: its used
//! descriptors lie in the ring itself, so there is no used ring to take away.
//!
//! A relay is the only one who shows the guest a used element, after it has told
//! a [`Dirty`] of all that the device may have written for it. It **polls**: the guest's
//! wish for interrupts is in memory that the device still reads, so a call
//! eventfd is only a hint. There is no thread here; [`RelaySet::poll`] does a
//! bounded amount of work and says when it wants to be called again.
//!
//! What counts as written: all device-writable bytes of the chain, as its
//! descriptors are when the relay meets the used element, whatever length the device
//! gives. A device may write more than it says (virtio 1.3, 2.7.8.2), and a
//! driver must leave descriptors alone until they are used (2.7.13); a guest that
//! changes them in flight can only keep itself from getting all of its own memory.
//!
//! This module must not know what frames are, nor who migrates.

mod choice;
mod dirty;
mod mediate;
mod pace;
mod ring;
mod set;
mod shadow;
#[cfg(test)]
mod tests;

use std::fmt;

pub use self::choice::{Reason, choose};
pub use self::dirty::Dirty;
pub use self::mediate::MediatedQueue;
pub use self::pace::{Pace, Pause, Signals};
pub use self::set::{Prepared, Progress, RelaySet, RelayedQueue};
pub use self::shadow::ShadowQueue;
use crate::device::{VringAddresses, VringBase};
use crate::{Error, ErrorKind};

/// Most elements that one pass relays in each direction.
pub const PASS_LIMIT: u16 = 256;

/// How a queue reaches the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// The device works on the guest's ring; nobody sees what it writes.
    Direct,
    /// The device's used ring is ours, the rest is the guest's.
    Mediated,
    /// The device's ring is ours.
    Shadowed,
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Direct => "direct",
            Self::Mediated => "mediated",
            Self::Shadowed => "shadowed",
        })
    }
}

/// What one pass did, and what is to be done for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pass {
    /// Chains handed to the device (shadow only).
    pub forwarded: u16,
    /// Used chains shown to the guest.
    pub used: u16,
    /// The guest is to be interrupted.
    pub interrupt: bool,
    /// The device is to be kicked.
    pub kick: bool,
    /// There is more to do at once.
    pub more: bool,
    /// What of all that may come next is signalled.
    pub signals: Signals,
}

/// Where a queue stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Position {
    /// A split ring; indices are free-running.
    Split {
        /// The used index that the guest sees.
        used: u16,
        /// First avail entry that no device was ever given.
        available: u16,
        /// Heads of the chains that a device was given and did not use, as the
        /// entries from `used` to `available` name them.
        in_flight: Vec<u16>,
    },
    /// A packed ring.
    Packed {
        /// Where the guest looks for the next used descriptor, and the first entry that no device
        /// was ever given; [`VringBase::Packed`].
        stands: VringBase,
        /// Buffer ids of the chains that a device was given and did not use, in
        /// the order of the entries between.
        in_flight: Vec<u16>,
    },
}

impl Position {
    /// Where a device begins that takes the ring over, so that it takes each
    /// chain in flight once.
    #[must_use]
    pub fn base(&self) -> VringBase {
        match self {
            Self::Split { used, .. } => VringBase::Split { index: *used },
            Self::Packed { stands, .. } => stands.at_used(),
        }
    }

    /// The chains that a device was given and did not use.
    #[must_use]
    pub fn in_flight(&self) -> &[u16] {
        match self {
            Self::Split { in_flight, .. } | Self::Packed { in_flight, .. } => in_flight,
        }
    }
}

/// Which chains the device holds is not known: it took some before it was relayed, and may complete
/// them in any order. The queue is to be mediated until they are used.
fn in_flight_unknown(unknown: u16) -> Error {
    let message = format!(
        "the device still holds {unknown} chains from before its used ring was mediated, and may \
         use them in any order: try again when traffic on the queue has used them"
    );
    Error::new(ErrorKind::InFlightUnknown, message)
}

/// One queue that is relayed, whichever way and whatever its format.
pub trait Relay: fmt::Debug + Send {
    /// How.
    fn strategy(&self) -> Strategy;

    /// The ring as the device is to see it.
    fn addresses(&self) -> VringAddresses;

    /// Entries of that ring.
    fn size(&self) -> u16;

    /// One bounded pass. Everything that the device wrote for a chain is
    /// marked before the guest can see that the chain is used.
    ///
    /// # Errors
    /// The queue is broken until the guest's driver resets the device; other queues go on.
    fn pass(&mut self, dirty: &dyn Dirty) -> Result<Pass, Error>;

    /// After the device stopped: shows the guest all that it left. The relay
    /// can go on afterwards if the device does.
    ///
    /// # Errors
    /// As [`Relay::pass`].
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

    /// After [`Relay::finish`], with the device still stopped: brings the guest's
    /// ring into a state in which a device that begins at [`Position::base`]
    /// takes each chain that is in flight once.
    ///
    /// # Errors
    /// The kind is [`ErrorKind::InFlightUnknown`], or the ring can't be accessed.
    fn settle(&mut self) -> Result<Position, Error>;
}

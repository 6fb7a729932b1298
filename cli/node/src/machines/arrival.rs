//! A machine that is to come from another node: whether its guest is here yet, as far as can be known from here.
//!
//! Its record is marked with an [`Arrival`] from before a process waits for it until that process says that the guest is here.
//! Until then the guest is the source's, so whatever goes wrong here takes all of it back; but for one case, in which nobody here
//! can know ([`at_end`]):
//!
//! ```text
//!   process                                        the guest
//!   lives: waits, under way, not settled, silent   is not here, as far as is known: the mark stays
//!   lives: stayed                                  is not here, and is not waited for any more: all is taken back
//!   lives: moved                                   is here: the mark goes
//!   gone: sent away                                is not here any more: all is taken back
//!   gone: guest powered off or crashed             was here: the mark goes
//!   gone: in any other way                         may have been here: somebody has to say it
//! ```
//! Owns that table. It must not know how a process is asked, nor what follows from the answer.

use std::time::Duration;

use bellhop_api::machine::{Direction, EndReason, MigrationPhase, MigrationStatus};
use serde::{Deserialize, Serialize};

/// How long a source may take to come: it does so at once, and then opens devices and pins memory, some GiB in a second.
const PATIENCE: Duration = Duration::from_secs(300);

/// That a machine is to come, in its record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Arrival {
    /// Where its process waits for it: an `Endpoint`.
    pub(crate) listen: String,
}

/// What the process says that waits for a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Coming {
    /// No source has come yet, for so long.
    Waits(Duration),
    /// A source is there.
    UnderWay,
    /// The guest is here.
    Arrived,
    /// The guest stayed where it was, and is not waited for any more.
    Stayed,
    /// Nobody here can know.
    Unsettled,
    /// It does not answer, or not so that it is understood.
    Silent,
}

impl Coming {
    /// Whether nobody will come any more.
    pub(crate) fn is_vain(self) -> bool {
        matches!(self, Self::Waits(time) if time >= PATIENCE) || self == Self::Stayed
    }
}

impl From<&MigrationStatus> for Coming {
    fn from(status: &MigrationStatus) -> Self {
        match (status.direction, status.phase) {
            (Direction::Receive, MigrationPhase::Offer) => {
                Self::Waits(Duration::from_millis(status.elapsed_ms))
            }
            (Direction::Receive, MigrationPhase::Moved) => Self::Arrived,
            // It leaves again already.
            (Direction::Send, _) => Self::Arrived,
            (Direction::Receive, MigrationPhase::Stayed) => Self::Stayed,
            (Direction::Receive, MigrationPhase::Unsettled) => Self::Unsettled,
            (Direction::Receive, _) => Self::UnderWay,
        }
    }
}

/// What the end of a process comes to that waited for a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AtEnd {
    /// The guest is not here, and nobody needs what was made for it.
    TakeBack,
    /// It was, and this is its own end.
    WasHere,
    /// Nobody here knows.
    Open,
}

/// What this end of such a process comes to.
pub(crate) fn at_end(because: EndReason) -> AtEnd {
    match because {
        EndReason::Moved => AtEnd::TakeBack,
        EndReason::PoweredOff | EndReason::Crashed => AtEnd::WasHere,
        // It fails only once there is a machine: one that does not come is said, and the process lives. Who calls it off
        // takes all back at once.
        EndReason::Stopped
        | EndReason::Unsettled
        | EndReason::Failed
        | EndReason::Killed
        | EndReason::HostRebooted => AtEnd::Open,
    }
}

#[cfg(test)]
mod tests {
    use super::super::departure::migration_status;
    use super::*;

    fn coming(direction: &str, phase: &str, elapsed_ms: u64) -> Coming {
        Coming::from(&migration_status(direction, phase, elapsed_ms))
    }

    #[test]
    fn only_a_guest_that_has_moved_is_taken_for_one_that_is_here() {
        for phase in ["Join", "Copy", "Stop", "Ready", "Go", "Done", "later"] {
            assert_eq!(coming("Receive", phase, 1), Coming::UnderWay, "{phase}");
        }
        assert_eq!(coming("Receive", "Stayed", 1), Coming::Stayed);
        assert_eq!(coming("Receive", "Moved", 1), Coming::Arrived);
        assert_eq!(coming("Send", "Copy", 1), Coming::Arrived);
        assert_eq!(coming("Receive", "Unsettled", 1), Coming::Unsettled);
    }

    #[test]
    fn a_source_is_not_waited_for_for_ever_and_one_that_is_there_is() {
        let limit = u64::try_from(PATIENCE.as_millis()).unwrap();
        assert!(!coming("Receive", "Offer", limit - 1).is_vain());
        assert!(coming("Receive", "Offer", limit).is_vain());
        for phase in ["Join", "Copy", "Ready", "Moved", "Unsettled"] {
            assert!(!coming("Receive", phase, u64::MAX).is_vain(), "{phase}");
        }
        assert!(Coming::Stayed.is_vain());
        assert!(!Coming::Silent.is_vain());
    }
}

//! An incoming VM: whether its guest runs here yet, as far as this host can know.
//!
//! Its record has an [`IncomingMigration`] mark from before the receiving process waits until that
//! process reports that the guest is here. Until then the guest belongs to the source, so any
//! failure here rolls everything back. There is one exception, in which this host cannot know
//! ([`incoming_outcome`]):
//!
//! ```text
//!   process                                        the guest
//!   lives: waits, underway, indeterminate, silent  is not here, as far as is known: the mark stays
//!   lives: stayed                                  is not here, nor awaited: all is rolled back
//!   lives: moved                                   is here: the mark goes
//!   gone: sent away                                is no longer here: all is rolled back
//!   gone: guest powered off or crashed             was here: the mark goes
//!   gone: in any other way                         may have been here: the source reports that it
//!                                                  has the guest, or an operator decides
//! ```
//! Owns that table.

use std::time::Duration;

use bellhop_api::machine::{Direction, EndReason, MigrationPhase, MigrationStatus};
use serde::{Deserialize, Serialize};

/// The time limit for the source to connect. It connects at once, and then opens devices and pins
/// memory, at some GiB per second.
const PATIENCE: Duration = Duration::from_secs(300);

/// The mark in the record of a VM that is to arrive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct IncomingMigration {
    /// The address at which its process listens for the source: an `Endpoint`.
    pub(crate) listen: String,
}

/// The report of a process that waits for an incoming VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IncomingReport {
    /// No source has connected yet, for this long.
    Waits(Duration),
    /// A source is connected.
    UnderWay,
    /// The guest is here.
    Arrived,
    /// The guest stayed at the source, and the process no longer waits for it.
    Stayed,
    /// This host cannot know where the guest is.
    Indeterminate,
    /// The process does not answer, or its answer cannot be decoded.
    Silent,
}

impl IncomingReport {
    /// Whether the VM will not arrive any more.
    pub(crate) fn has_failed(self) -> bool {
        matches!(self, Self::Waits(time) if time >= PATIENCE) || self == Self::Stayed
    }
}

impl From<&MigrationStatus> for IncomingReport {
    fn from(status: &MigrationStatus) -> Self {
        match (status.direction, status.phase) {
            (Direction::Receive, MigrationPhase::Offer) => {
                Self::Waits(Duration::from_millis(status.elapsed_ms))
            }
            (Direction::Receive, MigrationPhase::Moved) => Self::Arrived,
            // It already leaves again.
            (Direction::Send, _) => Self::Arrived,
            (Direction::Receive, MigrationPhase::Stayed) => Self::Stayed,
            (Direction::Receive, MigrationPhase::Indeterminate) => Self::Indeterminate,
            (Direction::Receive, _) => Self::UnderWay,
        }
    }
}

/// The result of the end of a process that waited for an incoming VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IncomingOutcome {
    /// The guest is not here: delete all that was created for it.
    RollBack,
    /// The guest was here, and this is its own end.
    WasHere,
    /// This host does not know.
    Unknown,
}

/// The result of this end of such a process.
pub(crate) fn incoming_outcome(because: EndReason) -> IncomingOutcome {
    match because {
        EndReason::Moved => IncomingOutcome::RollBack,
        EndReason::PoweredOff | EndReason::Crashed => IncomingOutcome::WasHere,
        // This reason needs a running VM. A process whose VM does not arrive reports that and stays
        // alive. A client that cancels the migration rolls everything back at once.
        EndReason::Stopped
        | EndReason::Indeterminate
        | EndReason::Failed
        | EndReason::Killed
        | EndReason::HostRebooted => IncomingOutcome::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::super::outgoing::migration_status;
    use super::*;

    fn incoming_report(direction: &str, phase: &str, elapsed_ms: u64) -> IncomingReport {
        IncomingReport::from(&migration_status(direction, phase, elapsed_ms))
    }

    #[test]
    fn only_a_guest_that_has_moved_is_taken_for_one_that_is_here() {
        for phase in ["Join", "Copy", "Stop", "Ready", "Go", "Done", "later"] {
            assert_eq!(
                incoming_report("Receive", phase, 1),
                IncomingReport::UnderWay,
                "{phase}"
            );
        }
        assert_eq!(
            incoming_report("Receive", "Stayed", 1),
            IncomingReport::Stayed
        );
        assert_eq!(
            incoming_report("Receive", "Moved", 1),
            IncomingReport::Arrived
        );
        assert_eq!(incoming_report("Send", "Copy", 1), IncomingReport::Arrived);
        assert_eq!(
            incoming_report("Receive", "Indeterminate", 1),
            IncomingReport::Indeterminate
        );
    }

    #[test]
    fn a_source_is_not_waited_for_for_ever_and_one_that_is_there_is() {
        let limit = u64::try_from(PATIENCE.as_millis()).unwrap();
        assert!(!incoming_report("Receive", "Offer", limit - 1).has_failed());
        assert!(incoming_report("Receive", "Offer", limit).has_failed());
        for phase in ["Join", "Copy", "Ready", "Moved", "Indeterminate"] {
            assert!(
                !incoming_report("Receive", phase, u64::MAX).has_failed(),
                "{phase}"
            );
        }
        assert!(IncomingReport::Stayed.has_failed());
        assert!(!IncomingReport::Silent.has_failed());
    }
}

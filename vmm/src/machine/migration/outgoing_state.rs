//! The progress of an outgoing migration, and the requests that each state permits.
//!
//! Owns the transitions. It must not know how anything is stopped or sent.
//!
//! ```text
//!          begin              commit, standing still          moved         depart
//!    No ───────────> Sending ─────────────────────> Committed ────────> Moved ──────> Departed
//!    ^ │               │ end                          │   │ depart, resolved by a user ^
//!    │ └── depart, of an arrived, quiesced machine ───┼───┴────────────────────────────┘
//!    └─────────────────┴──────────────────────────────┘ stay
//! ```

use crate::Error;
use crate::machine::end::{self, Exit};
use crate::machine::error::RequestError;

/// The state of an outgoing migration; see the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::machine) enum OutgoingState {
    /// Not being sent. A machine that arrived is quiesced in this state until the guest's location
    /// is known.
    #[default]
    No,
    /// No device may be added or removed, and no other operation may save the machine.
    Sending,
    /// GO may have been sent: the guest may run elsewhere.
    Committed,
    /// The guest runs elsewhere, and this process waits for a client to read the result.
    Moved,
    /// The guest runs elsewhere, and the run of the machine is over.
    Departed,
}

impl OutgoingState {
    /// Starts sending.
    pub(super) fn begin(&mut self) -> Result<(), RequestError> {
        match self {
            Self::No => {
                *self = Self::Sending;
                Ok(())
            }
            Self::Sending | Self::Committed | Self::Moved | Self::Departed => {
                Err(RequestError::Migrating)
            }
        }
    }

    /// GO is about to be sent; the machine must be quiesced for that (`quiesced`).
    pub(super) fn commit(&mut self, quiesced: bool) -> Result<(), RequestError> {
        match self {
            Self::Sending if quiesced => {
                *self = Self::Committed;
                Ok(())
            }
            _ => Err(RequestError::Resolved),
        }
    }

    /// Whether the source may resume a quiesced machine (`quiesced`), since GO was not sent.
    pub(super) fn may_resume(self, quiesced: bool) -> bool {
        quiesced && self == Self::Sending
    }

    /// Whether a user may declare that the guest of a quiesced machine (`quiesced`) is here. Not
    /// during sending, when the source relies on the machine being quiesced, and not once the guest
    /// is declared to be elsewhere.
    pub(super) fn may_stay(self, quiesced: bool) -> bool {
        quiesced && matches!(self, Self::No | Self::Committed)
    }

    /// The destination has confirmed that the guest runs there.
    pub(super) fn moved(&mut self) -> Result<(), RequestError> {
        match self {
            Self::Committed => {
                *self = Self::Moved;
                Ok(())
            }
            _ => Err(RequestError::Resolved),
        }
    }

    /// The guest runs elsewhere, and no client waits for the result any more.
    pub(super) fn depart(&mut self, quiesced: bool) -> Result<(), RequestError> {
        match self {
            Self::No | Self::Committed | Self::Moved if quiesced => {
                *self = Self::Departed;
                Ok(())
            }
            _ => Err(RequestError::Resolved),
        }
    }

    /// The machine stays.
    pub(super) fn end(&mut self) {
        if !matches!(self, Self::Moved | Self::Departed) {
            *self = Self::No;
        }
    }

    /// Returns how the run ended, for supervisors that restart stopped, crashed or failed machines.
    /// However this process ended, they must not restart a machine whose guest may run elsewhere.
    pub(in crate::machine) fn ends(self, run: Result<Exit, Error>) -> Result<Exit, Error> {
        match (self, &run) {
            (Self::No | Self::Sending, _) | (_, Ok(Exit::Moved | Exit::HandedOver)) => run,
            (Self::Committed, _) => {
                let how = end::of_run(&run).detail;
                tracing::error!(
                    how,
                    "the machine ends while its guest's location is unknown: check the other host"
                );
                Ok(Exit::Indeterminate)
            }
            (Self::Moved | Self::Departed, _) => {
                let how = end::of_run(&run).detail;
                tracing::warn!(
                    how,
                    "the machine ends after its guest has moved: it counts as moved"
                );
                Ok(Exit::Moved)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vcpu::{VcpuFailure, VcpuReport};

    const ALL: [OutgoingState; 5] = [
        OutgoingState::No,
        OutgoingState::Sending,
        OutgoingState::Committed,
        OutgoingState::Moved,
        OutgoingState::Departed,
    ];

    #[test]
    fn it_leaves_step_by_step() {
        let mut outgoing = OutgoingState::default();
        assert!(outgoing.commit(true).is_err());
        outgoing.begin().unwrap();
        assert!(matches!(outgoing.begin(), Err(RequestError::Migrating)));
        // The machine still runs.
        assert!(outgoing.commit(false).is_err() && outgoing == OutgoingState::Sending);
        outgoing.commit(true).unwrap();
        assert!(outgoing.commit(true).is_err());
        outgoing.moved().unwrap();
        assert!(outgoing.moved().is_err());
        outgoing.depart(true).unwrap();
        assert_eq!(outgoing, OutgoingState::Departed);
        // Resolved by a user, without confirmation from the destination.
        let mut outgoing = OutgoingState::Committed;
        outgoing.depart(true).unwrap();
        assert_eq!(outgoing, OutgoingState::Departed);
    }

    #[test]
    fn a_machine_that_has_departed_never_comes_back() {
        for gone in [OutgoingState::Moved, OutgoingState::Departed] {
            let mut outgoing = gone;
            assert!(!outgoing.may_stay(true) && !outgoing.may_resume(true));
            assert!(outgoing.begin().is_err() && outgoing.commit(true).is_err());
            outgoing.end();
            assert_eq!(outgoing, gone);
        }
        assert!(OutgoingState::Departed.depart(true).is_err());
    }

    #[test]
    fn only_the_source_itself_may_resume_before_go_and_only_a_user_may_settle_after_it() {
        let resume = ALL.map(|outgoing| outgoing.may_resume(true));
        let stay = ALL.map(|outgoing| outgoing.may_stay(true));
        assert_eq!(resume, [false, true, false, false, false]);
        assert_eq!(stay, [true, false, true, false, false]);
        for mut outgoing in ALL {
            assert!(!outgoing.may_resume(false) && !outgoing.may_stay(false));
            assert!(outgoing.depart(false).is_err(), "it runs");
        }
    }

    #[test]
    fn a_machine_with_an_unknown_guest_location_reports_it_however_it_ends() {
        let crashed = || {
            Exit::Crashed(VcpuReport {
                index: 0,
                instruction_pointer: None,
                failure: VcpuFailure::TripleFault,
            })
        };
        for (outgoing, end) in [
            (OutgoingState::Committed, Exit::Indeterminate),
            (OutgoingState::Moved, Exit::Moved),
            (OutgoingState::Departed, Exit::Moved),
        ] {
            for exit in [Exit::Stopped, Exit::PoweredOff, crashed()] {
                assert_eq!(outgoing.ends(Ok(exit)).unwrap(), end);
            }
            assert_eq!(outgoing.ends(Ok(Exit::Moved)).unwrap(), Exit::Moved);
            let failed = Error::host("it failed");
            assert_eq!(outgoing.ends(Err(failed)).unwrap(), end);
        }
        for outgoing in [OutgoingState::No, OutgoingState::Sending] {
            for exit in [Exit::Stopped, Exit::PoweredOff, crashed(), Exit::HandedOver] {
                assert_eq!(outgoing.ends(Ok(exit.clone())).unwrap(), exit);
            }
        }
    }
}

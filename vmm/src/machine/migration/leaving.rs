//! The progress of an outgoing migration, and the requests that each state permits.
//!
//! Owns the transitions. It must not know how anything is stopped or sent.
//!
//! ```text
//!          begin              commit, standing still          moved         depart
//!    No ───────────> Sending ─────────────────────> Committed ────────> Moved ──────> Departed
//!    ^ │               │ end                          │   │ depart, resolved by a user ^
//!    │ └── depart, of a machine that came and is held ┼───┴────────────────────────────┘
//!    └─────────────────┴──────────────────────────────┘ stay
//! ```

use crate::Error;
use crate::machine::end::{self, Exit};
use crate::machine::error::RequestError;

/// The state of an outgoing migration; see the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::machine) enum Leaving {
    /// Not being sent. A machine that arrived is held in this state until the guest's location is
    /// known.
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

impl Leaving {
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

    /// GO is about to be sent; the machine must be held for that (`held`).
    pub(super) fn commit(&mut self, held: bool) -> Result<(), RequestError> {
        match self {
            Self::Sending if held => {
                *self = Self::Committed;
                Ok(())
            }
            _ => Err(RequestError::Settled),
        }
    }

    /// Whether the source may resume a held machine (`held`), since GO was not sent.
    pub(super) fn may_resume(self, held: bool) -> bool {
        held && self == Self::Sending
    }

    /// Whether a user may declare that the guest of a held machine (`held`) is here. Not during
    /// sending, when the source relies on the machine being held, and not once the guest is
    /// declared to be elsewhere.
    pub(super) fn may_stay(self, held: bool) -> bool {
        held && matches!(self, Self::No | Self::Committed)
    }

    /// The destination has confirmed that the guest runs there.
    pub(super) fn moved(&mut self) -> Result<(), RequestError> {
        match self {
            Self::Committed => {
                *self = Self::Moved;
                Ok(())
            }
            _ => Err(RequestError::Settled),
        }
    }

    /// The guest runs elsewhere, and no client waits for the result any more.
    pub(super) fn depart(&mut self, held: bool) -> Result<(), RequestError> {
        match self {
            Self::No | Self::Committed | Self::Moved if held => {
                *self = Self::Departed;
                Ok(())
            }
            _ => Err(RequestError::Settled),
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
                Ok(Exit::Unsettled)
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

    const ALL: [Leaving; 5] = [
        Leaving::No,
        Leaving::Sending,
        Leaving::Committed,
        Leaving::Moved,
        Leaving::Departed,
    ];

    #[test]
    fn it_leaves_step_by_step() {
        let mut leaving = Leaving::default();
        assert!(leaving.commit(true).is_err());
        leaving.begin().unwrap();
        assert!(matches!(leaving.begin(), Err(RequestError::Migrating)));
        // The machine still runs.
        assert!(leaving.commit(false).is_err() && leaving == Leaving::Sending);
        leaving.commit(true).unwrap();
        assert!(leaving.commit(true).is_err());
        leaving.moved().unwrap();
        assert!(leaving.moved().is_err());
        leaving.depart(true).unwrap();
        assert_eq!(leaving, Leaving::Departed);
        // Resolved by a user, without confirmation from the destination.
        let mut leaving = Leaving::Committed;
        leaving.depart(true).unwrap();
        assert_eq!(leaving, Leaving::Departed);
    }

    #[test]
    fn a_machine_that_has_departed_never_comes_back() {
        for gone in [Leaving::Moved, Leaving::Departed] {
            let mut leaving = gone;
            assert!(!leaving.may_stay(true) && !leaving.may_resume(true));
            assert!(leaving.begin().is_err() && leaving.commit(true).is_err());
            leaving.end();
            assert_eq!(leaving, gone);
        }
        assert!(Leaving::Departed.depart(true).is_err());
    }

    #[test]
    fn only_the_source_itself_may_resume_before_go_and_only_a_user_may_settle_after_it() {
        let resume = ALL.map(|leaving| leaving.may_resume(true));
        let stay = ALL.map(|leaving| leaving.may_stay(true));
        assert_eq!(resume, [false, true, false, false, false]);
        assert_eq!(stay, [true, false, true, false, false]);
        for mut leaving in ALL {
            assert!(!leaving.may_resume(false) && !leaving.may_stay(false));
            assert!(leaving.depart(false).is_err(), "it runs");
        }
    }

    #[test]
    fn a_machine_whose_guest_may_run_elsewhere_says_so_however_it_ends() {
        let crashed = || {
            Exit::Crashed(VcpuReport {
                index: 0,
                instruction_pointer: None,
                failure: VcpuFailure::TripleFault,
            })
        };
        for (leaving, end) in [
            (Leaving::Committed, Exit::Unsettled),
            (Leaving::Moved, Exit::Moved),
            (Leaving::Departed, Exit::Moved),
        ] {
            for exit in [Exit::Stopped, Exit::PoweredOff, crashed()] {
                assert_eq!(leaving.ends(Ok(exit)).unwrap(), end);
            }
            assert_eq!(leaving.ends(Ok(Exit::Moved)).unwrap(), Exit::Moved);
            let failed = Error::host("it failed");
            assert_eq!(leaving.ends(Err(failed)).unwrap(), end);
        }
        for leaving in [Leaving::No, Leaving::Sending] {
            for exit in [Exit::Stopped, Exit::PoweredOff, crashed(), Exit::HandedOver] {
                assert_eq!(leaving.ends(Ok(exit.clone())).unwrap(), exit);
            }
        }
    }
}

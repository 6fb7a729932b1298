//! The states of a vhost-vdpa device and the operations that each allows, as one table.
//!
//! ```text
//!            own            negotiate              start
//!   Opened ------> Owned -------------> Negotiated ------> Running
//!    (status 0)     ^ ^    FEATURES_OK   | set_vring        |  ^ |
//!                   | |                  | enable_vring     |  | | set_call, set_kick
//!                   | +----- reset ------+         suspend  |  | resume
//!                   |                                       v  |
//!                   +---------------- reset ------------ Suspended
//!                                    (from Running too)    vring_base, switch_vring
//!
//!   Lost: a reset failed, and the state of the device is not known
//! ```

use crate::Error;

/// The state of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Open, reset, without an owner.
    Opened,
    /// Owned by this process and reset.
    Owned,
    /// FEATURES_OK: features are fixed, rings can be set up.
    Negotiated,
    /// DRIVER_OK: the device works on its enabled queues.
    Running,
    /// Stopped with its ring state kept.
    Suspended,
    /// A reset failed. Only closing the device helps.
    Lost,
}

/// An operation that only some states allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Read and write the status and the configuration.
    Access,
    /// Take ownership.
    Own,
    /// Read ring positions before a driver uses the rings.
    Probe,
    /// Put a queue group into an address space.
    AssignGroup,
    /// Negotiate features.
    Negotiate,
    /// Set up a queue.
    SetUp,
    /// Enable a queue.
    Enable,
    /// Map a doorbell.
    MapDoorbell,
    /// Set DRIVER_OK.
    Start,
    /// Bind other eventfds to a queue.
    Rebind,
    /// Suspend.
    Suspend,
    /// Read or switch rings in place.
    Switch,
    /// Resume.
    Resume,
    /// Reset.
    Reset,
}

/// The effect of a failed operation on the device's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OnFailure {
    /// The state stays as before.
    Keep,
    /// The device is reset.
    Reset,
    /// The device is lost.
    Lose,
}

/// A row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Transition {
    from: State,
    operation: Operation,
    pub(super) to: State,
    pub(super) on_failure: OnFailure,
}

/// An operation that leaves the state as it is.
const fn stays(from: State, operation: Operation) -> Transition {
    transition(from, operation, from, OnFailure::Keep)
}

const fn transition(
    from: State,
    operation: Operation,
    to: State,
    on_failure: OnFailure,
) -> Transition {
    Transition {
        from,
        operation,
        to,
        on_failure,
    }
}

/// All operations of a device.
const TRANSITIONS: [Transition; 26] = {
    use OnFailure as Failure;
    use Operation as Do;
    use State::{Negotiated, Opened, Owned, Running, Suspended};
    [
        stays(Opened, Do::Access),
        transition(Opened, Do::Own, Owned, Failure::Keep),
        transition(Opened, Do::Reset, Opened, Failure::Lose),
        stays(Owned, Do::Access),
        stays(Owned, Do::Probe),
        stays(Owned, Do::AssignGroup),
        transition(Owned, Do::Negotiate, Negotiated, Failure::Reset),
        transition(Owned, Do::Reset, Owned, Failure::Lose),
        stays(Negotiated, Do::Access),
        stays(Negotiated, Do::AssignGroup),
        stays(Negotiated, Do::SetUp),
        stays(Negotiated, Do::Enable),
        stays(Negotiated, Do::MapDoorbell),
        transition(Negotiated, Do::Start, Running, Failure::Reset),
        transition(Negotiated, Do::Reset, Owned, Failure::Lose),
        stays(Running, Do::Access),
        stays(Running, Do::Enable),
        stays(Running, Do::MapDoorbell),
        stays(Running, Do::Rebind),
        transition(Running, Do::Suspend, Suspended, Failure::Keep),
        transition(Running, Do::Reset, Owned, Failure::Lose),
        stays(Suspended, Do::Access),
        stays(Suspended, Do::MapDoorbell),
        stays(Suspended, Do::Switch),
        transition(Suspended, Do::Resume, Running, Failure::Keep),
        transition(Suspended, Do::Reset, Owned, Failure::Lose),
    ]
};

impl State {
    /// The row of an operation.
    ///
    /// # Errors
    /// This state does not allow the operation.
    pub(super) fn allow(self, operation: Operation) -> Result<Transition, Error> {
        let allows = |known: &&Transition| known.from == self && known.operation == operation;
        let known = TRANSITIONS.iter().find(allows).copied();
        known.ok_or_else(|| unable(operation.refusal()))
    }
}

/// The feature was not acknowledged, or the device's state does not allow the operation.
pub(super) fn unable(ability: &str) -> Error {
    Error::other(format!("the device cannot {ability}"))
}

impl Operation {
    /// The end of the sentence "the device cannot …" for a state that does not allow the operation.
    const fn refusal(self) -> &'static str {
        match self {
            Self::Access | Self::Reset => "be used: an earlier reset of it failed",
            Self::Own => "get an owner: it has one",
            Self::Probe => "be prepared for a guest: it was not reset",
            Self::AssignGroup | Self::SetUp | Self::Enable | Self::MapDoorbell => {
                "be set up: its features are not negotiated"
            }
            Self::Negotiate => "negotiate features: it was not reset",
            Self::Start => "start: its features are not negotiated",
            Self::Rebind => "be changed: it does not run",
            Self::Suspend => "be suspended: it does not run",
            Self::Switch => "show or change its rings: it is not suspended",
            Self::Resume => "be resumed: it is not suspended",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [State; 6] = [
        State::Opened,
        State::Owned,
        State::Negotiated,
        State::Running,
        State::Suspended,
        State::Lost,
    ];

    const OPERATIONS: [Operation; 14] = [
        Operation::Access,
        Operation::Own,
        Operation::Probe,
        Operation::AssignGroup,
        Operation::Negotiate,
        Operation::SetUp,
        Operation::Enable,
        Operation::MapDoorbell,
        Operation::Start,
        Operation::Rebind,
        Operation::Suspend,
        Operation::Switch,
        Operation::Resume,
        Operation::Reset,
    ];

    /// The rules as code, independent of the table. Returns the state after an operation; `None` if
    /// the state does not allow it.
    fn rule(state: State, operation: Operation) -> Option<State> {
        let (owned, negotiated) = (
            !matches!(state, State::Opened | State::Lost),
            matches!(state, State::Negotiated | State::Running | State::Suspended),
        );
        let started = matches!(state, State::Running | State::Suspended);
        let (to, allowed) = match operation {
            // Only a device whose reset failed is unusable.
            Operation::Access => (state, state != State::Lost),
            Operation::Reset if owned => (State::Owned, true),
            Operation::Reset => (state, state != State::Lost),
            Operation::Own => (State::Owned, state == State::Opened),
            // Without features there are no rings.
            Operation::Probe => (state, owned && !negotiated),
            Operation::Negotiate => (State::Negotiated, owned && !negotiated),
            // A started device keeps its groups and rings.
            Operation::AssignGroup => (state, owned && !started),
            Operation::SetUp => (state, negotiated && !started),
            Operation::MapDoorbell => (state, negotiated),
            Operation::Start => (State::Running, negotiated && !started),
            // A suspended device switches rings instead.
            Operation::Enable => (state, negotiated && state != State::Suspended),
            Operation::Rebind => (state, state == State::Running),
            Operation::Suspend => (State::Suspended, state == State::Running),
            // The ring positions of a running device are unknown.
            Operation::Switch => (state, state == State::Suspended),
            Operation::Resume => (State::Running, state == State::Suspended),
        };
        allowed.then_some(to)
    }

    #[test]
    fn all_operations_in_all_states() {
        for state in STATES {
            for operation in OPERATIONS {
                let allowed = state.allow(operation).ok().map(|known| known.to);
                assert_eq!(allowed, rule(state, operation), "{state:?}: {operation:?}");
            }
        }
    }

    #[test]
    fn each_row_counts_once() {
        for (index, row) in TRANSITIONS.iter().enumerate() {
            let found = row.from.allow(row.operation).unwrap();
            assert_eq!(found, *row, "row {index} is hidden by another one");
        }
        // An operation that changes nothing also fails without a change.
        for row in TRANSITIONS {
            let changes = row.from != row.to || row.operation == Operation::Reset;
            assert!(changes || row.on_failure == OnFailure::Keep, "{row:?}");
        }
    }
}

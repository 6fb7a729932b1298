//! A VM that was sent elsewhere: where its guest is, as far as this host can know.
//!
//! Before the daemon requests the VM to leave, it marks the record with a [`Departure`]. So no
//! daemon starts a VM again that may run elsewhere. One table decides when the mark goes
//! ([`judge`]):
//!
//! ```text
//!   mark        process                                              the guest is
//!   none        any, also gone by another code than 7 and 8          here
//!   none        gone with code 7 (moved)                             there
//!   none        gone with code 8 (unsettled)                         open: sent without the node
//!   sent        lives: was never sent, stayed, came back             here: the mark goes
//!   sent        lives: in progress, unsettled, no answer             open
//!   any         lives: moved                                         there: the mark knows it
//!   sent        gone with any code but 7, also 8 or unknown          open: an operator decides
//!   sent        gone with code 7                                     there
//!   moved       gone with any code                                   there
//! ```
//! Owns that table.

use bellhop_api::machine::{Direction, EndReason, MigrationPhase, MigrationStatus};
use serde::{Deserialize, Serialize};

use crate::peers::Peer;

/// The longest name of a destination in a record, in characters.
const DESTINATION_MAX: usize = 256;

/// The mark in the record of a VM that was requested to leave.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Departure {
    /// Its destination, as in the request.
    pub(crate) destination: String,
    /// Whether it reported that its guest runs there.
    pub(crate) moved: bool,
    /// The destination node, if a node waits for it.
    #[serde(default)]
    pub(crate) peer: Option<Peer>,
    /// It was incoming instead of outgoing: its process ended without a report. `destination` is
    /// the address at which that process waited.
    #[serde(default)]
    pub(crate) was_to_come: bool,
}

impl Departure {
    /// A departure to this destination, which may be any text.
    pub(crate) fn to(destination: &str) -> Self {
        Self {
            destination: destination.chars().take(DESTINATION_MAX).collect(),
            moved: false,
            peer: None,
            was_to_come: false,
        }
    }

    /// A departure to this node.
    pub(crate) fn to_node(peer: Peer) -> Self {
        Self {
            peer: Some(peer.clone()),
            ..Self::to(&peer.to_string())
        }
    }

    /// The departure of a VM that was sent without the node, and reported so only at its end.
    pub(crate) fn unknown() -> Self {
        Self::to("a process unknown to this node")
    }

    /// The mark of an incoming VM, expected at `listen`, whose fate is unknown.
    pub(crate) fn unheard_of(listen: &str) -> Self {
        Self {
            was_to_come: true,
            ..Self::to(listen)
        }
    }

    /// Why the guest's location is unknown.
    pub(crate) fn reason(&self) -> String {
        if self.was_to_come {
            return format!(
                "its process ended while receiving at {}: its guest may run at the source",
                self.destination
            );
        }
        format!(
            "its process ended while sending to {}: its guest may run there",
            self.destination
        )
    }
}

/// How the operator resolves a VM that may run elsewhere.
pub(crate) fn remedy(vm: &str) -> String {
    format!(
        "check the other host; if the guest runs there, run `bellhop vm migration settle {vm} \
         there`, otherwise `bellhop vm migration settle {vm} here`"
    )
}

/// The report of a VM's process about its last migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Account {
    /// There was no migration.
    None,
    /// It is in progress.
    UnderWay,
    /// It ended, and the guest is here: it stayed, or has arrived.
    Here,
    /// It ended, and this host cannot know where the guest is.
    Unsettled,
    /// It ended, and the guest runs elsewhere.
    There,
    /// The process does not answer, or its answer cannot be decoded.
    Silent,
}

impl From<&MigrationStatus> for Account {
    fn from(status: &MigrationStatus) -> Self {
        match (status.direction, status.phase) {
            (Direction::Send, MigrationPhase::Stayed)
            | (Direction::Receive, MigrationPhase::Moved) => Self::Here,
            (Direction::Send, MigrationPhase::Moved) => Self::There,
            (_, MigrationPhase::Unsettled) => Self::Unsettled,
            _ => Self::UnderWay,
        }
    }
}

/// The state of a VM's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Process {
    /// It runs, with this report.
    Lives(Account),
    /// It is gone, with this last report or exit code, if the daemon received one.
    Gone(EndReason),
}

/// The location of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// On this host, if it is anywhere.
    Here,
    /// Unknown to this host.
    Open,
    /// On another host, or in another process of this one.
    There,
}

/// The location of the guest of a VM with this mark.
pub(crate) fn judge(mark: Option<&Departure>, process: Process) -> Verdict {
    match (mark, process) {
        (_, Process::Gone(EndReason::Moved) | Process::Lives(Account::There)) => Verdict::There,
        (None, Process::Gone(EndReason::Unsettled)) => Verdict::Open,
        (None, Process::Gone(_) | Process::Lives(_)) => Verdict::Here,
        (Some(_), Process::Lives(Account::None | Account::Here)) => Verdict::Here,
        (Some(_), Process::Lives(Account::UnderWay | Account::Unsettled | Account::Silent)) => {
            Verdict::Open
        }
        (Some(mark), Process::Gone(_)) => {
            if mark.moved {
                Verdict::There
            } else {
                Verdict::Open
            }
        }
    }
}

/// The result of a request to leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answered {
    /// The migration is in progress.
    Accepted,
    /// The VM rejected it (a 4xx status), it was a `dry_run`, or it never reached the VM.
    Refused,
    /// Any other answer, or none.
    Unknown,
}

/// The mark after a request to leave, for a VM that had the mark `former`; `account` is the VM's
/// report afterwards.
pub(crate) fn after_request(
    former: Option<Departure>,
    asked: Departure,
    answered: Answered,
    account: Account,
) -> Option<Departure> {
    if answered == Answered::Accepted {
        return Some(asked);
    }
    match judge(Some(&asked), Process::Lives(account)) {
        Verdict::Here => None,
        Verdict::There => Some(Departure {
            moved: true,
            ..former.unwrap_or(asked)
        }),
        // This request changed nothing: only the state before it counts.
        Verdict::Open if answered == Answered::Refused && account == Account::Silent => former,
        // Another migration is in progress.
        Verdict::Open => Some(former.unwrap_or(asked)),
    }
}

/// A migration from a VM's report, which may be of a later version.
#[cfg(test)]
pub(super) fn migration_status(direction: &str, phase: &str, elapsed_ms: u64) -> MigrationStatus {
    let status = serde_json::json!({
        "direction": direction, "peer": "unix:/b", "phase": phase, "rounds": 1,
        "elapsed_ms": elapsed_ms, "ram_bytes": 1, "sent_bytes": 1, "pages": 1, "zero_pages": 1,
        "left_bytes": 1, "bytes_per_second": 1, "dirty_bytes_per_second": 1,
        "throttle_percent": 0, "of a later version": 1,
    });
    serde_json::from_value(status).unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ACCOUNTS: [Account; 6] = [
        Account::None,
        Account::UnderWay,
        Account::Here,
        Account::Unsettled,
        Account::There,
        Account::Silent,
    ];

    fn mark(moved: bool) -> Option<Departure> {
        let to = Departure::to("unix:/b");
        Some(Departure { moved, ..to })
    }

    #[test]
    fn the_table_of_marks_processes_and_what_they_say() {
        use Verdict::{Here, Open, There};
        let words = [EndReason::Killed, EndReason::Unsettled, EndReason::Moved];
        // In the order of ACCOUNTS, then gone for an unknown or other reason, with code 8, and with
        // code 7.
        for (mark, verdicts) in [
            (
                None,
                [Here, Here, Here, Here, There, Here, Here, Open, There],
            ),
            (
                mark(false),
                [Here, Open, Here, Open, There, Open, Open, Open, There],
            ),
            (
                mark(true),
                [Here, Open, Here, Open, There, Open, There, There, There],
            ),
        ] {
            let processes = ACCOUNTS.map(Process::Lives).into_iter();
            let processes = processes.chain(words.map(Process::Gone));
            for (process, verdict) in processes.zip(verdicts) {
                assert_eq!(
                    judge(mark.as_ref(), process),
                    verdict,
                    "{mark:?} {process:?}"
                );
            }
        }
    }

    #[test]
    fn a_request_that_was_not_accepted_leaves_what_was_before() {
        let (former, asked) = (Departure::to("unix:/a"), Departure::to("unix:/b"));
        for account in ACCOUNTS {
            for before in [None, Some(former.clone())] {
                let after =
                    |answered| after_request(before.clone(), asked.clone(), answered, account);
                assert_eq!(after(Answered::Accepted), Some(asked.clone()));
                let either = before.clone().unwrap_or(asked.clone());
                let (refused, unknown) = match account {
                    Account::None | Account::Here => (None, None),
                    Account::UnderWay | Account::Unsettled => (Some(either.clone()), Some(either)),
                    Account::There => {
                        let gone = Departure {
                            moved: true,
                            ..either
                        };
                        (Some(gone.clone()), Some(gone))
                    }
                    Account::Silent => (before.clone(), Some(either)),
                };
                assert_eq!(after(Answered::Refused), refused, "{before:?} {account:?}");
                assert_eq!(after(Answered::Unknown), unknown, "{before:?} {account:?}");
            }
        }
    }

    #[test]
    fn only_an_end_with_the_guest_here_is_taken_for_one() {
        for (direction, phase, account) in [
            ("Send", "Offer", Account::UnderWay),
            ("Send", "Go", Account::UnderWay),
            ("Send", "Done", Account::UnderWay),
            ("Send", "Stayed", Account::Here),
            ("Send", "Moved", Account::There),
            ("Send", "Unsettled", Account::Unsettled),
            ("Receive", "Moved", Account::Here),
            ("Receive", "Stayed", Account::UnderWay),
            ("Receive", "Unsettled", Account::Unsettled),
            ("Send", "of a later version", Account::UnderWay),
        ] {
            let status = migration_status(direction, phase, 0);
            assert_eq!(Account::from(&status), account, "{direction} {phase}");
        }
    }

    #[test]
    fn what_is_remembered_of_a_destination_has_an_end() {
        let mark = Departure::to(&"ä".repeat(10_000));
        assert_eq!(mark.destination.chars().count(), DESTINATION_MAX);
    }
}

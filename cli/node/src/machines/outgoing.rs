//! A VM that was sent elsewhere: where its guest is, as far as this host can know.
//!
//! Before the daemon requests a migration, it marks the record with an [`OutgoingMigration`]. So no
//! daemon starts a VM again that may run elsewhere. One table decides when the mark goes
//! ([`locate_guest`]):
//!
//! ```text
//!   mark        process                                           the guest is
//!   none        any, also gone by another code than 7 and 8       here
//!   none        gone with code 7 (moved)                          there
//!   none        gone with code 8 (indeterminate)                  unknown: sent without the node
//!   sent        lives: was never sent, stayed, came back          here: the mark goes
//!   sent        lives: in progress, indeterminate, no answer      unknown
//!   any         lives: moved                                      there: the mark knows it
//!   sent        gone with any code but 7, also 8 or unknown       unknown: an operator decides
//!   sent        gone with code 7                                  there
//!   moved       gone with any code                                there
//! ```
//! Owns that table.

use bellhop_api::machine::{Direction, EndReason, MigrationPhase, MigrationStatus};
use serde::{Deserialize, Serialize};

use crate::peers::Peer;

/// The longest name of a destination in a record, in characters.
const DESTINATION_MAX: usize = 256;

/// The mark in the record of a VM that was requested to leave.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OutgoingMigration {
    /// Its destination, as in the request.
    pub(crate) destination: String,
    /// Whether it reported that its guest runs there.
    pub(crate) moved: bool,
    /// The destination node, if a node waits for it.
    #[serde(default)]
    pub(crate) peer: Option<Peer>,
    /// It was incoming instead of outgoing: its process ended without a report. `destination` is
    /// the address at which that process waited.
    #[serde(default, rename = "was_to_come")]
    pub(crate) was_incoming: bool,
}

impl OutgoingMigration {
    /// A migration to this destination, which may be any text.
    pub(crate) fn to(destination: &str) -> Self {
        Self {
            destination: destination.chars().take(DESTINATION_MAX).collect(),
            moved: false,
            peer: None,
            was_incoming: false,
        }
    }

    /// A migration to this node.
    pub(crate) fn to_node(peer: Peer) -> Self {
        Self {
            peer: Some(peer.clone()),
            ..Self::to(&peer.to_string())
        }
    }

    /// The migration of a VM that was sent without the node, and reported so only at its end.
    pub(crate) fn unknown() -> Self {
        Self::to("a process unknown to this node")
    }

    /// The mark of an incoming VM, expected at `listen`, whose fate is unknown.
    pub(crate) fn lost_incoming(listen: &str) -> Self {
        Self {
            was_incoming: true,
            ..Self::to(listen)
        }
    }

    /// Why the guest's location is unknown.
    pub(crate) fn reason(&self) -> String {
        if self.was_incoming {
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
        "check the other host; if the guest runs there, run `bellhop vm migration resolve {vm} \
         there`, otherwise `bellhop vm migration resolve {vm} here`"
    )
}

/// The report of a VM's process about its last migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MigrationReport {
    /// There was no migration.
    None,
    /// It is in progress.
    UnderWay,
    /// It ended, and the guest is here: it stayed, or has arrived.
    Here,
    /// It ended, and this host cannot know where the guest is.
    Indeterminate,
    /// It ended, and the guest runs elsewhere.
    There,
    /// The process does not answer, or its answer cannot be decoded.
    Silent,
}

impl From<&MigrationStatus> for MigrationReport {
    fn from(status: &MigrationStatus) -> Self {
        match (status.direction, status.phase) {
            (Direction::Send, MigrationPhase::Stayed)
            | (Direction::Receive, MigrationPhase::Moved) => Self::Here,
            (Direction::Send, MigrationPhase::Moved) => Self::There,
            (_, MigrationPhase::Indeterminate) => Self::Indeterminate,
            _ => Self::UnderWay,
        }
    }
}

/// The state of a VM's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Process {
    /// It runs, with this report.
    Lives(MigrationReport),
    /// It is gone, with this last report or exit code, if the daemon received one.
    Gone(EndReason),
}

/// The location of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GuestLocation {
    /// On this host, if it is anywhere.
    Here,
    /// Unknown to this host.
    Unknown,
    /// On another host, or in another process of this one.
    There,
}

/// The location of the guest of a VM with this mark.
pub(crate) fn locate_guest(mark: Option<&OutgoingMigration>, process: Process) -> GuestLocation {
    match (mark, process) {
        (_, Process::Gone(EndReason::Moved) | Process::Lives(MigrationReport::There)) => {
            GuestLocation::There
        }
        (None, Process::Gone(EndReason::Indeterminate)) => GuestLocation::Unknown,
        (None, Process::Gone(_) | Process::Lives(_)) => GuestLocation::Here,
        (Some(_), Process::Lives(MigrationReport::None | MigrationReport::Here)) => {
            GuestLocation::Here
        }
        (
            Some(_),
            Process::Lives(
                MigrationReport::UnderWay
                | MigrationReport::Indeterminate
                | MigrationReport::Silent,
            ),
        ) => GuestLocation::Unknown,
        (Some(mark), Process::Gone(_)) => {
            if mark.moved {
                GuestLocation::There
            } else {
                GuestLocation::Unknown
            }
        }
    }
}

/// The result of a request to leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SendReply {
    /// The migration is in progress.
    Accepted,
    /// The VM rejected it (a 4xx status), it was a `dry_run`, or it never reached the VM.
    Refused,
    /// Any other answer, or none.
    Unknown,
}

/// The mark after a request to leave, for a VM that had the mark `former`; `report` is the VM's
/// report afterwards.
pub(crate) fn after_request(
    former: Option<OutgoingMigration>,
    asked: OutgoingMigration,
    reply: SendReply,
    report: MigrationReport,
) -> Option<OutgoingMigration> {
    if reply == SendReply::Accepted {
        return Some(asked);
    }
    match locate_guest(Some(&asked), Process::Lives(report)) {
        GuestLocation::Here => None,
        GuestLocation::There => Some(OutgoingMigration {
            moved: true,
            ..former.unwrap_or(asked)
        }),
        // This request changed nothing: only the state before it counts.
        GuestLocation::Unknown
            if reply == SendReply::Refused && report == MigrationReport::Silent =>
        {
            former
        }
        // Another migration is in progress.
        GuestLocation::Unknown => Some(former.unwrap_or(asked)),
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

    const REPORTS: [MigrationReport; 6] = [
        MigrationReport::None,
        MigrationReport::UnderWay,
        MigrationReport::Here,
        MigrationReport::Indeterminate,
        MigrationReport::There,
        MigrationReport::Silent,
    ];

    fn mark(moved: bool) -> Option<OutgoingMigration> {
        let to = OutgoingMigration::to("unix:/b");
        Some(OutgoingMigration { moved, ..to })
    }

    #[test]
    fn the_table_of_marks_and_process_reports() {
        use GuestLocation::{Here, There, Unknown};
        let words = [
            EndReason::Killed,
            EndReason::Indeterminate,
            EndReason::Moved,
        ];
        // In the order of REPORTS, then gone for an unknown or other reason, with code 8, and with
        // code 7.
        for (mark, verdicts) in [
            (
                None,
                [Here, Here, Here, Here, There, Here, Here, Unknown, There],
            ),
            (
                mark(false),
                [
                    Here, Unknown, Here, Unknown, There, Unknown, Unknown, Unknown, There,
                ],
            ),
            (
                mark(true),
                [
                    Here, Unknown, Here, Unknown, There, Unknown, There, There, There,
                ],
            ),
        ] {
            let processes = REPORTS.map(Process::Lives).into_iter();
            let processes = processes.chain(words.map(Process::Gone));
            for (process, verdict) in processes.zip(verdicts) {
                assert_eq!(
                    locate_guest(mark.as_ref(), process),
                    verdict,
                    "{mark:?} {process:?}"
                );
            }
        }
    }

    #[test]
    fn a_rejected_request_leaves_the_state_before_it() {
        let (former, asked) = (
            OutgoingMigration::to("unix:/a"),
            OutgoingMigration::to("unix:/b"),
        );
        for report in REPORTS {
            for before in [None, Some(former.clone())] {
                let after = |reply| after_request(before.clone(), asked.clone(), reply, report);
                assert_eq!(after(SendReply::Accepted), Some(asked.clone()));
                let either = before.clone().unwrap_or(asked.clone());
                let (refused, unknown) = match report {
                    MigrationReport::None | MigrationReport::Here => (None, None),
                    MigrationReport::UnderWay | MigrationReport::Indeterminate => {
                        (Some(either.clone()), Some(either))
                    }
                    MigrationReport::There => {
                        let gone = OutgoingMigration {
                            moved: true,
                            ..either
                        };
                        (Some(gone.clone()), Some(gone))
                    }
                    MigrationReport::Silent => (before.clone(), Some(either)),
                };
                assert_eq!(after(SendReply::Refused), refused, "{before:?} {report:?}");
                assert_eq!(after(SendReply::Unknown), unknown, "{before:?} {report:?}");
            }
        }
    }

    #[test]
    fn only_an_end_with_the_guest_here_is_taken_for_one() {
        for (direction, phase, report) in [
            ("Send", "Offer", MigrationReport::UnderWay),
            ("Send", "Go", MigrationReport::UnderWay),
            ("Send", "Done", MigrationReport::UnderWay),
            ("Send", "Stayed", MigrationReport::Here),
            ("Send", "Moved", MigrationReport::There),
            ("Send", "Indeterminate", MigrationReport::Indeterminate),
            ("Receive", "Moved", MigrationReport::Here),
            ("Receive", "Stayed", MigrationReport::UnderWay),
            ("Receive", "Indeterminate", MigrationReport::Indeterminate),
            ("Send", "of a later version", MigrationReport::UnderWay),
        ] {
            let status = migration_status(direction, phase, 0);
            assert_eq!(
                MigrationReport::from(&status),
                report,
                "{direction} {phase}"
            );
        }
    }

    #[test]
    fn a_stored_destination_is_bounded() {
        let mark = OutgoingMigration::to(&"ä".repeat(10_000));
        assert_eq!(mark.destination.chars().count(), DESTINATION_MAX);
    }
}

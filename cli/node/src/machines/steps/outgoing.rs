//! The steps of a VM that leaves for another process, or may have left.
//!
//! ```text
//!   send     marked in the record ─> asked ─> refused: the mark is as it was before
//!   look     asked for the result ─> the guest is here: the mark goes
//!   resolve  process gone, and a client reports where the guest is ─> the mark goes
//! ```
//! The mark is durable before the request to the VM. So if a daemon is killed at any point, the
//! next one knows that the guest may be elsewhere. [`super::super::outgoing`] has the full table.

use axum::http::StatusCode;
use bellhop_api::machine::{End, EndReason};

use super::super::outgoing::{
    GuestLocation, MigrationReport, OutgoingMigration, Process, SendReply, after_request,
    locate_guest,
};
use super::super::record::Record;
use super::super::spec::Desired;
use super::{Lifecycle, ProxiedResponse, SendRequest};
use crate::error::Error;
use crate::peers::Peer;

impl Lifecycle<'_> {
    /// Requests a running VM to leave. The answer is the VM's own.
    ///
    /// # Errors
    /// The mark cannot be stored, and the VM received no request; or it does not answer.
    pub(crate) fn send(
        &self,
        record: &mut Record,
        request: &SendRequest,
    ) -> Result<ProxiedResponse, Error> {
        let former = record.outgoing.clone();
        let asked = match &request.peer {
            Some(peer) => OutgoingMigration::to_node(peer.clone()),
            None => OutgoingMigration::to(&request.destination),
        };
        record.outgoing = Some(asked.clone());
        let failed = || Error::wrap("cannot migrate the VM");
        if let Err(error) = self.keep(record) {
            record.outgoing = former;
            self.note(record);
            return Err(failed()(error));
        }
        let passed = self.act("send", || self.host.send(self.vm, request));
        let reply = reply(&passed);
        let report = match reply {
            // The migration has not ended yet.
            SendReply::Accepted => MigrationReport::UnderWay,
            SendReply::Refused | SendReply::Unknown => self.report(record),
        };
        self.mark(record, after_request(former, asked, reply, report));
        passed.map_err(failed())
    }

    /// Queries the result of a migration from a running VM that was sent elsewhere. The mark goes
    /// if the guest is here.
    pub(crate) fn query_migration(&self, record: &mut Record) {
        let Some(mark) = record.outgoing.clone() else {
            return;
        };
        let report = self.report(record);
        match locate_guest(Some(&mark), Process::Lives(report)) {
            GuestLocation::Here => {
                self.mark(record, None);
                if let Some(peer) = &mark.peer {
                    self.host.withdraw(self.vm, peer);
                }
            }
            GuestLocation::Unknown => {}
            GuestLocation::There => self.mark_moved(record),
        }
    }

    /// Records that its guest runs elsewhere; its process ends.
    pub(crate) fn mark_moved(&self, record: &mut Record) {
        let moved = record.outgoing.clone().map(|mark| OutgoingMigration {
            moved: true,
            ..mark
        });
        self.mark(record, moved);
    }

    /// Handles a VM whose guest runs at another node: deletes all that was created for it here.
    /// Returns whether the VM itself is gone here, because the other node is known to have all of
    /// it.
    ///
    /// # Errors
    /// A step cannot be undone; it stays in the record.
    pub(crate) fn leave_for(&self, record: &mut Record, peer: &Peer) -> Result<bool, Error> {
        if self.host.is_at(self.vm, peer) {
            self.delete(record)?;
            return Ok(true);
        }
        self.delete_created(record);
        Ok(false)
    }

    /// Handles the end of a VM's process; the VM was sent to this node if to any. Returns nothing
    /// if the VM is at that node now, with all that it had.
    ///
    /// # Errors
    /// As [`Self::leave_for`].
    pub(super) fn left_for(
        &self,
        record: &mut Record,
        peer: Option<Peer>,
        end: End,
    ) -> Result<Option<End>, Error> {
        match peer.filter(|_| end.reason == EndReason::Moved) {
            Some(peer) if self.leave_for(record, &peer)? => Ok(None),
            _ => Ok(Some(end)),
        }
    }

    /// The process's report about its migration; none without a process.
    fn report(&self, record: &Record) -> MigrationReport {
        match record.process() {
            Some((Some(identity), boot)) if boot == self.host.boot() => {
                self.host.migration(self.vm, identity)
            }
            _ => MigrationReport::Silent,
        }
    }

    fn mark(&self, record: &mut Record, mark: Option<OutgoingMigration>) {
        if record.outgoing != mark {
            record.outgoing = mark;
            self.note(record);
        }
    }

    /// Records a client's report of where the guest of a VM without a process is.
    ///
    /// # Errors
    /// The record cannot be stored; the place stays unknown.
    pub(crate) fn resolve_migration(&self, record: &mut Record, here: bool) -> Result<(), Error> {
        let mut after = record.clone();
        after.outgoing = None;
        if here {
            after.arrives();
        } else {
            after.incoming = None;
            after.spec.state = Desired::Stopped;
            after.last_end = Some(End::new(
                EndReason::Moved,
                "a client reported that its guest runs elsewhere",
            ));
        }
        let unkept = "cannot record the guest's location";
        self.keep(&after).map_err(Error::wrap(unkept))?;
        *record = after;
        Ok(())
    }
}

fn reply(passed: &Result<ProxiedResponse, Error>) -> SendReply {
    match passed {
        Ok(passed) if passed.status == StatusCode::ACCEPTED => SendReply::Accepted,
        // With `dry_run` this was only a check.
        Ok(passed) if passed.status == StatusCode::OK || passed.status.is_client_error() => {
            SendReply::Refused
        }
        // No process listened, so none received the request.
        Err(error) if error.is_not_listening() => SendReply::Refused,
        Ok(_) | Err(_) => SendReply::Unknown,
    }
}

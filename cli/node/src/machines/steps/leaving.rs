//! The steps of a VM that leaves for another process, or may have left.
//!
//! ```text
//!   send     marked in the record ─> asked ─> refused: the mark is as it was before
//!   look     asked for the result ─> the guest is here: the mark goes
//!   settle   process gone, and a client reports where the guest is ─> the mark goes
//! ```
//! The mark is durable before the request to the VM. So if a daemon is killed at any point, the
//! next one knows that the guest may be elsewhere. [`super::super::departure`] has the full table.

use axum::http::StatusCode;
use bellhop_api::machine::{End, EndReason};

use super::super::departure::{
    Account, Answered, Departure, Process, Verdict, after_request, judge,
};
use super::super::record::Record;
use super::super::spec::Desired;
use super::{Life, Passed, SendRequest};
use crate::error::Error;
use crate::peers::Peer;

impl Life<'_> {
    /// Requests a running VM to leave. The answer is the VM's own.
    ///
    /// # Errors
    /// The mark cannot be stored, and the VM received no request; or it does not answer.
    pub(crate) fn send(&self, record: &mut Record, request: &SendRequest) -> Result<Passed, Error> {
        let former = record.departure.clone();
        let asked = match &request.peer {
            Some(peer) => Departure::to_node(peer.clone()),
            None => Departure::to(&request.destination),
        };
        record.departure = Some(asked.clone());
        let failed = || Error::wrap("cannot migrate the VM");
        if let Err(error) = self.keep(record) {
            record.departure = former;
            self.note(record);
            return Err(failed()(error));
        }
        let passed = self.act("send", || self.host.send(self.vm, request));
        let answered = answered(&passed);
        let account = match answered {
            // The migration has not ended yet.
            Answered::Accepted => Account::UnderWay,
            Answered::Refused | Answered::Unknown => self.account(record),
        };
        self.mark(record, after_request(former, asked, answered, account));
        passed.map_err(failed())
    }

    /// Queries the result of a migration from a running VM that was sent elsewhere. The mark goes
    /// if the guest is here.
    pub(crate) fn look_for_guest(&self, record: &mut Record) {
        let Some(mark) = record.departure.clone() else {
            return;
        };
        let account = self.account(record);
        match judge(Some(&mark), Process::Lives(account)) {
            Verdict::Here => {
                self.mark(record, None);
                if let Some(peer) = &mark.peer {
                    self.host.withdraw(self.vm, peer);
                }
            }
            Verdict::Open => {}
            Verdict::There => self.departed(record),
        }
    }

    /// Records that its guest runs elsewhere; its process ends.
    pub(crate) fn departed(&self, record: &mut Record) {
        let moved = record.departure.clone().map(|mark| Departure {
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
    pub(crate) fn leaves_to(&self, record: &mut Record, peer: &Peer) -> Result<bool, Error> {
        if self.host.is_at(self.vm, peer) {
            self.delete(record)?;
            return Ok(true);
        }
        self.drop_made(record);
        Ok(false)
    }

    /// Handles the end of a VM's process; the VM was sent to this node if to any. Returns nothing
    /// if the VM is at that node now, with all that it had.
    ///
    /// # Errors
    /// As [`Self::leaves_to`].
    pub(super) fn left_for(
        &self,
        record: &mut Record,
        peer: Option<Peer>,
        end: End,
    ) -> Result<Option<End>, Error> {
        match peer.filter(|_| end.reason == EndReason::Moved) {
            Some(peer) if self.leaves_to(record, &peer)? => Ok(None),
            _ => Ok(Some(end)),
        }
    }

    /// The process's report about its migration; none without a process.
    fn account(&self, record: &Record) -> Account {
        match record.process() {
            Some((Some(identity), boot)) if boot == self.host.boot() => {
                self.host.migration(self.vm, identity)
            }
            _ => Account::Silent,
        }
    }

    fn mark(&self, record: &mut Record, mark: Option<Departure>) {
        if record.departure != mark {
            record.departure = mark;
            self.note(record);
        }
    }

    /// Records a client's report of where the guest of a VM without a process is.
    ///
    /// # Errors
    /// The record cannot be stored; the place stays unknown.
    pub(crate) fn say_where(&self, record: &mut Record, here: bool) -> Result<(), Error> {
        let mut after = record.clone();
        after.departure = None;
        if here {
            after.arrives();
        } else {
            after.arrival = None;
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

fn answered(passed: &Result<Passed, Error>) -> Answered {
    match passed {
        Ok(passed) if passed.status == StatusCode::ACCEPTED => Answered::Accepted,
        // With `dry_run` this was only a check.
        Ok(passed) if passed.status == StatusCode::OK || passed.status.is_client_error() => {
            Answered::Refused
        }
        // No process listened, so none received the request.
        Err(error) if error.is_not_listening() => Answered::Refused,
        Ok(_) | Err(_) => Answered::Unknown,
    }
}

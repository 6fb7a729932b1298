//! The steps of a machine that leaves for another process, or may have.
//!
//! ```text
//!   send     marked in the record ─> asked ─> refused: the mark is as it was before
//!   look     asked how it went ─> the guest is here: the mark goes
//!   settle   process gone, and somebody says where the guest is ─> the mark goes
//! ```
//! The mark is in a safe place before the machine is asked. So a daemon that is killed anywhere is followed by one that knows
//! that the guest may be elsewhere; what it knows beyond that is in [`super::super::departure`].

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
    /// Asks a running machine to leave. The answer is the machine's, whatever it is.
    ///
    /// # Errors
    /// The mark cannot be kept, and the machine was not asked; or it does not answer.
    pub(crate) fn send(&self, record: &mut Record, request: &SendRequest) -> Result<Passed, Error> {
        let former = record.departure.clone();
        let asked = match &request.peer {
            Some(peer) => Departure::to_node(peer.clone()),
            None => Departure::to(&request.destination),
        };
        record.departure = Some(asked.clone());
        let failed = || Error::wrap("the machine cannot be sent elsewhere");
        if let Err(error) = self.keep(record) {
            record.departure = former;
            self.note(record);
            return Err(failed()(error));
        }
        let passed = self.act("send", || self.host.send(self.vm, request));
        let answered = answered(&passed);
        let account = match answered {
            // It is not over yet.
            Answered::Accepted => Account::UnderWay,
            Answered::Refused | Answered::Unknown => self.account(record),
        };
        self.mark(record, after_request(former, asked, answered, account));
        passed.map_err(failed())
    }

    /// Asks a machine that was sent elsewhere how that went, if it runs. The mark goes if its guest is here.
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

    /// Its guest runs elsewhere, and its process ends.
    pub(crate) fn departed(&self, record: &mut Record) {
        let moved = record.departure.clone().map(|mark| Departure {
            moved: true,
            ..mark
        });
        self.mark(record, moved);
    }

    /// Its guest runs at another node. What was made for it here goes; if the other node is known to have all of it, so does
    /// the machine, and this says so.
    ///
    /// # Errors
    /// What could not be undone; it stays in the record.
    pub(crate) fn leaves_to(&self, record: &mut Record, peer: &Peer) -> Result<bool, Error> {
        if self.host.is_at(self.vm, peer) {
            self.delete(record)?;
            return Ok(true);
        }
        self.drop_made(record);
        Ok(false)
    }

    /// The end of a machine's process, which was sent to this node if to any. Returns nothing if the machine is there now, with
    /// all that it had.
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

    /// What the process says of its migration; nothing, if there is none.
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

    /// Somebody says where the guest of a machine is that has no process any more.
    ///
    /// # Errors
    /// The record cannot be kept; then nothing is settled.
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
                "somebody said that its guest runs elsewhere",
            ));
        }
        let unkept = "what was said of where the guest is cannot be kept";
        self.keep(&after).map_err(Error::wrap(unkept))?;
        *record = after;
        Ok(())
    }
}

fn answered(passed: &Result<Passed, Error>) -> Answered {
    match passed {
        Ok(passed) if passed.status == StatusCode::ACCEPTED => Answered::Accepted,
        // With `dry_run` it was only asked.
        Ok(passed) if passed.status == StatusCode::OK || passed.status.is_client_error() => {
            Answered::Refused
        }
        // Nobody was there to get it.
        Err(error) if error.is_not_listening() => Answered::Refused,
        Ok(_) | Err(_) => Answered::Unknown,
    }
}

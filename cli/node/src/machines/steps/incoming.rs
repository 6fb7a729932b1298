//! The steps of a VM that arrives from another node.
//!
//! ```text
//!   receive   directories ─> a device for each NIC ─> process ─> it waits ─> Present, marked
//!   look      asked whether the guest is here ─> the mark goes ─> announced to the network
//!   call off  asked to stop waiting ─> gone: all is rolled back │ not gone: arrived, or may have
//! ```
//! The record remembers a VM of the same name that had left this node before, until the guest is
//! here. So a dry run, or a VM that does not arrive, loses nothing.
//!
//! The source receives the address of the waiting process only when the record says Present. So a
//! half created VM that a daemon finds never received anything. A waiting one may have received the
//! guest meanwhile: [`super::super::incoming`] is the table.

use bellhop_api::machine::End;

use super::super::incoming::{IncomingOutcome, IncomingReport, incoming_outcome};
use super::super::outgoing::OutgoingMigration;
use super::super::record::Record;
use super::{Lifecycle, NOT_STOPPED};
use crate::error::Error;

impl Lifecycle<'_> {
    /// Creates all of a VM but its guest, and a process that waits for the guest at the address in
    /// the record. `former` is the VM of this name that left this node, if any. Its devices are
    /// deleted, and the record keeps it until the guest is here.
    ///
    /// # Errors
    /// A step failed. All is rolled back, except parts that the error names; those are in the
    /// record.
    pub(crate) fn receive(
        &self,
        mut record: Record,
        former: Option<Record>,
    ) -> Result<Record, Error> {
        if let Some(former) = former {
            record.replaces(former);
        }
        self.create(record)
    }

    /// Queries the waiting process whether the guest is here. Returns its report.
    pub(crate) fn query_incoming(&self, record: &mut Record) -> IncomingReport {
        let incoming_report = match record.process() {
            Some((Some(identity), boot)) if boot == self.host.boot() => {
                self.host.incoming_report(self.vm, identity)
            }
            _ => IncomingReport::Silent,
        };
        if incoming_report == IncomingReport::Arrived && record.arrives() {
            self.note(record);
            self.host.announce(self.vm, record.spec.nics());
        }
        incoming_report
    }

    /// Makes the process stop waiting. Returns whether it is gone; if not, the guest has arrived,
    /// or may have.
    ///
    /// # Errors
    /// The process cannot be reached; it is as before.
    pub(crate) fn cancel_incoming(&self, record: &Record) -> Result<bool, Error> {
        let Some((identity, boot)) = record.process() else {
            return Ok(true);
        };
        match identity.filter(|_| boot == self.host.boot()) {
            Some(identity) => self
                .act("call off", || self.host.cancel_incoming(self.vm, identity))
                .map_err(Error::context(NOT_STOPPED)),
            None => Ok(true),
        }
    }

    /// Handles this end of the process that waited. Records the result, except for
    /// [`IncomingOutcome::RollBack`]: then the caller must roll back the whole VM.
    pub(crate) fn incoming_ended(&self, record: &mut Record, end: &End) -> IncomingOutcome {
        let Some(incoming) = &record.incoming else {
            return IncomingOutcome::WasHere;
        };
        let comes_to = incoming_outcome(end.reason);
        match comes_to {
            IncomingOutcome::RollBack => {}
            IncomingOutcome::WasHere => {
                record.arrives();
            }
            // The mark stays: the source knows whether it still has the guest, and may report it.
            IncomingOutcome::Unknown => {
                record.outgoing = Some(OutgoingMigration::lost_incoming(&incoming.listen))
            }
        }
        comes_to
    }
}

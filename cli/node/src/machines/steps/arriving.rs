//! The steps of a machine that comes from another node.
//!
//! ```text
//!   receive   directories ─> a device for each NIC ─> process ─> it waits ─> Present, marked
//!   look      asked whether the guest is here ─> the mark goes ─> the network is told where the guest is
//!   call off  asked to wait no more ─> gone: all is taken back │ not gone: the guest has come, or may have
//! ```
//! A machine of its name that had left this node before is remembered in its record until the guest is here, so that who only
//! asks whether it could come, or does not come, takes nothing away.
//!
//! The source hears where the process waits only when the record says that it is there. So what a daemon finds half made was
//! never sent anything, and what it finds waiting may have got the guest meanwhile: [`super::super::arrival`] is the table.

use bellhop_api::machine::End;

use super::super::arrival::{AtEnd, Coming, at_end};
use super::super::departure::Departure;
use super::super::record::Record;
use super::{Life, NOT_STOPPED};
use crate::error::Error;

impl Life<'_> {
    /// Makes all of a machine but its guest, and a process that waits for that, where the record
    /// says. `former` is the one of its name that left this node, if there is one: what was made for
    /// it goes, and it is remembered until the guest is here.
    ///
    /// # Errors
    /// What failed. All is undone then, but for what the error names; that is in the record.
    pub(crate) fn receive(
        &self,
        mut record: Record,
        former: Option<Record>,
    ) -> Result<Record, Error> {
        if let Some(former) = former {
            record.takes_place_of(former);
        }
        self.create(record)
    }

    /// Asks the process that waits whether the guest is here. Returns what it says.
    pub(crate) fn look_for_arrival(&self, record: &mut Record) -> Coming {
        let coming = match record.process() {
            Some((Some(identity), boot)) if boot == self.host.boot() => {
                self.host.coming(self.vm, identity)
            }
            _ => Coming::Silent,
        };
        if coming == Coming::Arrived && record.arrives() {
            self.note(record);
            self.host.announce(self.vm, record.spec.nics());
        }
        coming
    }

    /// Has the process wait no more. Returns whether it is gone; if not, the guest has come, or may have.
    ///
    /// # Errors
    /// It cannot be asked; then it is as before.
    pub(crate) fn call_off(&self, record: &Record) -> Result<bool, Error> {
        let Some((identity, boot)) = record.process() else {
            return Ok(true);
        };
        match identity.filter(|_| boot == self.host.boot()) {
            Some(identity) => self
                .act("call off", || self.host.call_off(self.vm, identity))
                .map_err(Error::context(NOT_STOPPED)),
            None => Ok(true),
        }
    }

    /// The process that waited has ended so. What that comes to is in the record, but for [`AtEnd::TakeBack`]: all that there
    /// is of the machine is to be taken back then.
    pub(crate) fn waited(&self, record: &mut Record, end: &End) -> AtEnd {
        let Some(arrival) = &record.arrival else {
            return AtEnd::WasHere;
        };
        let comes_to = at_end(end.reason);
        match comes_to {
            AtEnd::TakeBack => {}
            AtEnd::WasHere => {
                record.arrives();
            }
            // The mark stays: the source knows whether it still has the guest, and may say so.
            AtEnd::Open => record.departure = Some(Departure::unheard_of(&arrival.listen)),
        }
        comes_to
    }
}

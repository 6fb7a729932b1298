//! The machine of an outgoing migration, as [`crate::migration::send`] drives it.
//!
//! Owns the order in which the machine's parts log and stop. It must not know the protocol.

use std::io::Write;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use vdpa::causes::in_one_line;

use super::requests::{Offer, Stopped};
use super::{Direction, Migration, MigrationEnd, SendConfig};
use crate::machine::error::{RequestError, SnapshotError};
use crate::machine::handle::Handle;
use crate::machine::parts::Machine;
use crate::machine::queue::Request;
use crate::memory::RamSlot;
use crate::migration::convergence::Limits;
use crate::migration::dirty::{DirtyPages, DirtyTracker};
use crate::migration::endpoint::Route;
use crate::migration::{
    self, MachineError, Outcome, RamImage, SendOptions, SourceMachine, Timeouts,
};
use crate::snapshot::directory::STATE_FILE_MAX;
use crate::snapshot::memory_image::MemoryDigest;

/// How long the other host may take to accept a connection.
pub(super) const CONNECT: Duration = Duration::from_secs(10);
/// The part of the downtime that is not memory: devices stop and start, and the state is sent and
/// restored. An assumption, not a measurement. The forecast rests on it. The guest is stopped when
/// its remaining memory fits into the rest of the allowed downtime. `downtime_parts_ms` of a
/// migration reports the real time of each part.
pub(super) const SWITCH: Duration = Duration::from_millis(25);
/// How long the process of a guest that has moved waits for a client to read the result.
const RESULT_READ_TIMEOUT: Duration = Duration::from_secs(10);

/// A machine of this process that is being sent.
struct OutgoingMigration<'a> {
    handle: &'a Handle,
    migration: &'a Migration,
    offer: Offer,
    tracker: Option<DirtyTracker>,
    stopped: Option<Stopped>,
    /// Whether the destination compares all memory.
    verify: bool,
    digest: Option<MemoryDigest>,
    /// Bytes of the functions' early data.
    early_sent: usize,
}

impl Handle {
    /// Sends the machine to a waiting process
    /// ([`Machine::bring_up`](super::super::Machine::bring_up) with
    /// [`Origin::Migration`](super::super::Origin)). The machine runs meanwhile. Returns at the
    /// end, with the result in `migration`. If the machine has moved, it ends here with
    /// [`Exit::Moved`](super::super::Exit::Moved). `route` is the result of
    /// [`route`](super::route).
    ///
    /// Blocks until the end: give it a thread.
    pub fn migrate(&self, migration: &Migration, config: &SendConfig, route: &Route) {
        let end = self.send(migration, config, route);
        let moved = end == MigrationEnd::Moved;
        if moved {
            // Before the result is published: a client that then stops the machine sees it end as
            // moved. A machine that has ended meanwhile has already reported the location as
            // unknown.
            let _ = self.on_vmm_thread(|machine| machine.outgoing.moved());
        }
        migration.finish(end);
        if moved {
            migration.wait_seen(RESULT_READ_TIMEOUT);
            // A machine that has ended meanwhile needs no departure.
            let _ = self.depart();
        }
    }

    fn send(&self, migration: &Migration, config: &SendConfig, route: &Route) -> MigrationEnd {
        let primaries = match self.primaries() {
            Ok(primaries) => primaries,
            Err(error) => return stayed(&error),
        };
        let end = match self.eject(&primaries, &migration.monitor().cancel) {
            Ok(()) => self.send_without_primaries(migration, config, route),
            Err(error) => stayed(&error),
        };
        if let MigrationEnd::Stayed { .. } = end {
            self.plug_primaries(&primaries);
        }
        end
    }

    fn send_without_primaries(
        &self,
        migration: &Migration,
        config: &SendConfig,
        route: &Route,
    ) -> MigrationEnd {
        let connect = || route.connect(CONNECT);
        let first = match connect() {
            Ok(first) => first,
            Err(error) => return stayed(&error),
        };
        let mut outgoing = match OutgoingMigration::new(self, migration, config.verify_memory) {
            Ok(outgoing) => outgoing,
            Err(error) => return stayed(&error),
        };
        let ram = RamImage::new(&outgoing.offer.ram);
        let limits = Limits {
            downtime: Duration::from_millis(config.downtime_ms.into()),
            timeout: Duration::from_secs(config.timeout_s.into()),
            switch: SWITCH,
        };
        let options = SendOptions {
            connections: config.connections,
            limits,
            timeouts: Timeouts::default(),
            standstill: limits.standstill(),
            state_max: STATE_FILE_MAX,
            secret: config.secret(),
        };
        let outcome = migration::send(
            &mut outgoing,
            &ram,
            first,
            &mut || connect().map_err(std::io::Error::other),
            &options,
            migration.monitor(),
        );
        match outcome {
            Outcome::Destination => MigrationEnd::Moved,
            Outcome::Source { why, not_resumed } => {
                outgoing.stays();
                match not_resumed {
                    None => stayed(&why),
                    Some(error) => MigrationEnd::Stayed {
                        why: format!(
                            "{}; the machine does not resume: {error}",
                            in_one_line(&why)
                        ),
                    },
                }
            }
            Outcome::Indeterminate { why } => MigrationEnd::Indeterminate {
                why: in_one_line(&why),
            },
        }
    }

    /// Resolves a migration whose result is unknown. With `here` the machine resumes, else it ends
    /// with [`Exit::Moved`](super::super::Exit::Moved). A wrong answer runs the guest twice, or not
    /// at all.
    ///
    /// # Errors
    /// [`RequestError`]: no machine is quiesced for a migration; the devices cannot resume.
    pub fn resolve(&self, migration: &Migration, here: bool) -> Result<(), RequestError> {
        if !here {
            return self.depart();
        }
        self.on_vmm_thread(Machine::stay)??;
        let moved = migration.direction() == Direction::Receive;
        migration.finish(if moved {
            MigrationEnd::Moved
        } else {
            MigrationEnd::Stayed {
                why: "a client resolved the migration: the guest is here".to_owned(),
            }
        });
        Ok(())
    }

    fn depart(&self) -> Result<(), RequestError> {
        self.on_vmm_thread(Machine::depart)?
    }

    /// Has the vmm thread carry out `step`. Waits even if the queue is full: under load, a held
    /// machine must not stay quiesced for ever.
    pub(super) fn on_vmm_thread<T: Send + 'static>(
        &self,
        step: impl FnOnce(&mut Machine) -> T + Send + 'static,
    ) -> Result<T, RequestError> {
        self.ask_surely(|answer| {
            Request::Migration(Box::new(move |machine| {
                let _ = answer.send(step(machine));
            }))
        })
        .map_err(|error| match (error, self.status().end) {
            (RequestError::Ended, Some(end)) => RequestError::EndedBy(end),
            (error, _) => error,
        })
    }
}

fn stayed(why: &dyn std::error::Error) -> MigrationEnd {
    MigrationEnd::Stayed {
        why: in_one_line(why),
    }
}

impl<'a> OutgoingMigration<'a> {
    fn new(
        handle: &'a Handle,
        migration: &'a Migration,
        verify: bool,
    ) -> Result<Self, RequestError> {
        let offer = handle.on_vmm_thread(|machine| machine.offer(true))??;
        Ok(Self {
            handle,
            migration,
            offer,
            tracker: None,
            stopped: None,
            verify,
            digest: None,
            early_sent: 0,
        })
    }

    /// Starts or stops the recording of the pages that devices write.
    fn log_writes(&self, on: bool) -> Result<(), RequestError> {
        self.handle
            .on_vmm_thread(move |machine| machine.device_manager.log_writes(on))?
    }

    /// Allows changes to the machine again. A machine that has ended is skipped.
    fn stays(&mut self) {
        let _ = self.handle.on_vmm_thread(Machine::end_migration);
    }
}

impl SourceMachine for OutgoingMigration<'_> {
    fn compat(&mut self) -> Result<Value, MachineError> {
        if self.verify {
            self.offer.document.announce_digest();
        }
        Ok(serde_json::to_value(&self.offer.document)?)
    }

    fn start_logging(&mut self) -> Result<(), MachineError> {
        self.log_writes(true)?;
        let ram = &self.offer.ram;
        match DirtyTracker::start(Arc::clone(&self.offer.slots), ram.memory(), ram.slots()) {
            Ok(tracker) => {
                self.tracker = Some(tracker);
                Ok(())
            }
            Err(error) => {
                self.stop_logging();
                Err(error.into())
            }
        }
    }

    fn take_dirty(&mut self, pages: &mut DirtyPages) -> Result<(), MachineError> {
        let always = match &self.stopped {
            Some(stopped) => stopped.untracked_writes.clone(),
            None => self.handle.on_vmm_thread(Machine::device_writes)??,
        };
        let always = in_file(&always, self.offer.ram.slots());
        match &self.tracker {
            Some(tracker) => Ok(tracker.take(pages, &always)?),
            None => Err("the log of writes is off".into()),
        }
    }

    fn throttle(&mut self, percent: u8) {
        let asked = self
            .handle
            .on_vmm_thread(move |machine| machine.set_throttle(percent));
        if let Err(error) = asked {
            tracing::warn!(%error, "cannot throttle vCPUs");
        }
    }

    fn early(&mut self) -> Result<Option<Vec<u8>>, MachineError> {
        if self.offer.document.functions.is_empty() {
            return Ok(None);
        }
        let sent = self.early_sent;
        let early = move |machine: &mut Machine| machine.device_manager.early_state(sent);
        let state = self.handle.on_vmm_thread(early)??;
        // Also that of a function that was reset since: the destination has taken it.
        self.early_sent += state.as_ref().map_or(0, Vec::len);
        Ok(state)
    }

    fn stop(&mut self) -> Result<(), MachineError> {
        let stopped = self.handle.on_vmm_thread(Machine::stop_to_leave)??;
        self.migration.stopped(stopped.in_flight);
        self.stopped = Some(stopped);
        Ok(())
    }

    fn verifies_memory(&self) -> bool {
        self.verify
    }

    fn digest_memory(&mut self) -> Result<(), MachineError> {
        // Computed from all of memory, and now: a digest that used the dirty log would hide the
        // pages that the log missed.
        self.digest = Some(MemoryDigest::of(&self.offer.ram)?);
        Ok(())
    }

    fn save(&mut self, to: &mut dyn Write) -> Result<(), MachineError> {
        let Some(stopped) = &self.stopped else {
            return Err("the machine still runs".into());
        };
        let mut sections = stopped.saved.sections()?;
        if let Some(digest) = &self.digest {
            sections.put(digest).map_err(SnapshotError::from)?;
        }
        Ok(sections.write(to).map_err(SnapshotError::from)?)
    }

    fn commit(&mut self) -> Result<(), MachineError> {
        Ok(self.handle.on_vmm_thread(Machine::commit)??)
    }

    fn resume(&mut self) -> Result<(), MachineError> {
        // A machine that could not be stopped already runs.
        if self.stopped.take().is_some() {
            self.handle.on_vmm_thread(Machine::resume_after_stop)??;
        }
        Ok(())
    }

    fn stop_logging(&mut self) {
        self.tracker = None;
        match self.log_writes(false) {
            Ok(()) | Err(RequestError::Ended | RequestError::EndedBy(_)) => {}
            Err(error) => tracing::error!(
                error = &error as &dyn std::error::Error,
                "cannot stop recording the writes of a device"
            ),
        }
    }
}

/// Converts guest-physical ranges to offsets in the file behind guest RAM; skips parts that are not
/// RAM.
fn in_file(ranges: &[(u64, u64)], slots: &[RamSlot]) -> Vec<Range<u64>> {
    let mut found = Vec::new();
    for &(start, len) in ranges {
        let end = start.saturating_add(len);
        for slot in slots {
            let from = start.max(slot.guest.start);
            let to = end.min(slot.guest.end());
            if from < to {
                let offset = slot.file_offset + (from - slot.guest.start);
                found.push(offset..offset + (to - from));
            }
        }
    }
    found
}

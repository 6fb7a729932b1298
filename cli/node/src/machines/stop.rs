//! Stops a VM: requests its guest to power off and waits for that, or ends its process.
//!
//! ```text
//!   recorded ──> power button ──> waiting ──> powered off
//!                                    ├─ grace period over ──> the request fails, or the VM ends
//!                                    └─ another request ends it, or starts it again
//! ```
//! The record changes first, so no restart policy starts a guest that powers off late. This also
//! holds after the client disconnects, after the daemon ends, and after the grace period.
//!
//! Owns the wait, which holds neither the VM's lock nor a thread.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bellhop_api::machine::VmState;
use tokio::task::JoinHandle;

use super::condition::Condition;
use super::error::unfinished;
use super::process::Identity;
use super::record::Record;
use super::spec::VmName;
use super::vm_entry::VmEntry;
use super::{Change, Machines};
use crate::error::Error;

/// The parameters of a stop.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stop {
    /// How long the guest may take to power off; none: it receives no request.
    pub(crate) grace: Option<Duration>,
    /// Whether the VM ends if its guest takes longer.
    pub(crate) then_hard: bool,
    /// Whether it runs again after the host's next boot, if it should run before.
    pub(crate) until_reboot: bool,
}

/// A pending power-off of a guest.
#[derive(Debug)]
pub(crate) struct Stopping(JoinHandle<Result<(), Error>>);

impl Stopping {
    /// Waits until the guest has powered off, or was ended.
    ///
    /// # Errors
    /// The VM continues to run.
    pub(crate) async fn end(self) -> Result<(), Error> {
        self.0.await.map_err(unfinished)?
    }
}

impl Machines {
    /// Stops a VM. Returns at once: nothing if it is stopped, otherwise the wait for its guest.
    ///
    /// # Errors
    /// The guest cannot receive the request, or the process does not end.
    pub(crate) async fn stop(
        self: &Arc<Self>,
        vm: &VmName,
        condition: Condition,
        stop: Stop,
    ) -> Result<Option<Stopping>, Error> {
        let entry = self.find(vm)?;
        let work = move |machines: &Self, entry: &VmEntry| machines.stop_now(entry, stop);
        let Some((asked, grace)) = self.request_if(entry.clone(), condition, work).await? else {
            return Ok(None);
        };
        let machines = self.clone();
        let rest = self.runtime.spawn(async move {
            let end = machines.await_power_off(&entry, asked, grace, stop).await;
            machines.tidy(&entry);
            end
        });
        Ok(Some(Stopping(rest)))
    }

    /// Requests a VM's guest to power off, or ends the VM. Returns the process of the guest and its
    /// grace period.
    fn stop_now(&self, entry: &VmEntry, stop: Stop) -> Result<Option<(Identity, Duration)>, Error> {
        let vm = entry.name();
        let mut record = self.changeable(entry)?;
        let (Some(grace), Some((Some(identity), _))) = (stop.grace, record.process()) else {
            self.end_now(entry, record, stop.until_reboot)?;
            return Ok(None);
        };
        if let Some(live) = &entry.view().live {
            self.check_level(vm, live)?;
        }
        let status = self.runtime.block_on(self.api_of(vm).status());
        let asked = match status.map(|status| status.state) {
            Ok(VmState::Paused) => Err(paused(vm)),
            Ok(VmState::Stopped) => Ok(false),
            Err(error) if error.is_not_listening() => Ok(false),
            Err(error) => Err(error),
            Ok(_) => {
                let lifecycle = self.lifecycle(entry);
                lifecycle
                    .ask_to_power_off(&mut record, stop.until_reboot)
                    .map(|()| true)
            }
        };
        let asked = match asked {
            // The guest did not receive the request, so there is nothing to wait for.
            Err(error) if stop.then_hard => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(%vm, error, "cannot ask a guest to power off");
                false
            }
            asked => asked?,
        };
        if !asked {
            self.end_now(entry, record, stop.until_reboot)?;
            return Ok(None);
        }
        entry.update(identity, |live| {
            live.stopping_until = Instant::now().checked_add(grace);
        });
        self.publish(vm, Change::Stopping);
        Ok(Some((identity, grace)))
    }

    /// Waits until the guest of this process has powered off. After the grace period acts as `stop`
    /// says.
    async fn await_power_off(
        self: &Arc<Self>,
        entry: &Arc<VmEntry>,
        asked: Identity,
        grace: Duration,
        stop: Stop,
    ) -> Result<(), Error> {
        let vm = entry.name();
        let off = async {
            loop {
                // Before the check of the record, so that no change is missed.
                let changed = entry.record_changed.notified();
                let Some(record) = entry.record().filter(|record| is_of(record, asked)) else {
                    return Ok(());
                };
                if record.is_on() {
                    return Err(started_again(vm));
                }
                changed.await;
            }
        };
        if let Ok(off) = tokio::time::timeout(grace, off).await {
            // Then the record has the result of its end.
            drop(entry.steps.lock().await);
            return off;
        }
        if !stop.then_hard {
            return Err(still_runs(vm, grace));
        }
        let end = move |machines: &Self, entry: &VmEntry| {
            let record = entry.record().filter(|record| is_of(record, asked));
            match record.filter(|record| !record.is_on()) {
                Some(record) => machines.end_now(entry, record, stop.until_reboot),
                None => Ok(()),
            }
        };
        self.request(entry.clone(), end).await
    }

    /// Ends a VM without a request to its guest.
    pub(super) fn end_now(
        &self,
        entry: &VmEntry,
        mut record: Record,
        until_reboot: bool,
    ) -> Result<(), Error> {
        let vm = entry.name();
        let runs = record.process().is_some();
        // First: the VM must not restart if this daemon ends now.
        self.lifecycle(entry)
            .mark_stopped(&mut record, until_reboot)?;
        // Its process cannot be queried afterwards.
        self.lifecycle(entry).query_migration(&mut record);
        self.lifecycle(entry).stop(&mut record)?;
        if !runs {
            return Ok(());
        }
        let stopped = self.lifecycle(entry).stopped(&mut record);
        self.process_gone(entry);
        match stopped? {
            Some(end) => {
                self.publish(vm, Change::Ended(end));
                self.report_unknown_location(vm, &record);
            }
            // It had just left for another node.
            None => self.publish(vm, Change::Deleted),
        }
        Ok(())
    }

    /// Records that a running VM should run, despite a request to its guest to power off.
    pub(super) fn keep_on(&self, entry: &VmEntry, record: &mut Record) -> Result<(), Error> {
        record.turn_on();
        self.lifecycle(entry).keep(record)?;
        if let Some(live) = &mut entry.view().live {
            live.stopping_until = None;
        }
        Ok(())
    }
}

/// Whether this is the process of a VM.
fn is_of(record: &Record, which: Identity) -> bool {
    let process = record.process();
    process.is_some_and(|(identity, _)| identity == Some(which))
}

fn paused(vm: &VmName) -> Error {
    let message = format!("cannot stop {vm}: it is paused, so its guest cannot power off");
    Error::conflict("paused", message).hint("resume it first, or end it with `mode: hard`")
}

fn started_again(vm: &VmName) -> Error {
    let message = format!("cannot stop {vm}: another request wants it to run");
    Error::conflict("started_again", message)
}

fn still_runs(vm: &VmName, grace: Duration) -> Error {
    let seconds = grace.as_secs();
    let message = format!("cannot stop {vm}: its guest has not powered off within {seconds} s");
    let error = Error::conflict("still_runs", message);
    error.hint("it keeps running, and stays off once it powers off; `mode: hard` ends it now")
}

//! Watches one VM's process, reports why it ended, and restarts it if its policy says so.
//!
//! ```text
//!        ┌────────────── started again ────────────────┐
//!        v                                             │
//!   watching ── process ended ──> policy ── again ──> waiting (1 s, doubled up to 60 s;
//!     pidfd, GET /v1/vm/watch        │                 │      1 s again after 60 s of running)
//!                                    └─ stays away     └─ a request has started, stopped or
//!                                         v                 deleted it ──> (over)
//!                                       (over)
//! ```
//! The daemon queries a VM that was sent elsewhere for the result, until it reports that its guest
//! is here. If the process is gone before that, no policy restarts the VM ([`super::outgoing`]).
//!
//! A process that was killed and has not ended, because it waits in the kernel, is watched too. Its
//! end completes the stop or the deletion.
//!
//! No lock is held during a wait. If another task stops the VM, the record shows that this is no
//! longer its process.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::pin::pin;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::{Duration, Instant};

use std::os::fd::AsFd as _;
use std::os::unix::process::ExitStatusExt as _;

use bellhop_api::machine::{AlarmInfo, End, EndReason, NicSummary, PlugPhase, VmStatus};
use bellhop_common::log_rate::{LineSource, Rate};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use vdpa::causes::in_one_line;

use super::change::{ALARM_DETAIL_MAX, ALARMS_MAX, DEVICE_NAME_MAX};
use super::operations::cut;
use super::process::{Identity, Process};
use super::record::Phase;
use super::spec::{DeviceId, NicId, NicSpec, VmName};
use super::vm_entry::{Live, VmEntry};
use super::{Change, Machines, supports_api};
use crate::error::Error;

/// The first delay before a restart.
const FIRST: Duration = Duration::from_secs(1);
/// The longest delay.
const LONGEST: Duration = Duration::from_secs(60);
/// A run of at least this long resets the delay.
const CALM: Duration = Duration::from_secs(60);
/// How long the last report of an exited process may take to arrive.
const LAST_WORD: Duration = Duration::from_millis(500);
/// How long the watch pauses after a process did not answer.
const PAUSE: Duration = Duration::from_secs(1);

/// How many changes a VM may report. A captured VMM can report without end, which would use up the
/// daemon's processor and drop the events of other VMs from the history.
const REPORTS: Rate = Rate {
    burst: 200,
    interval: Duration::from_secs(1),
};

/// The interval of queries to a VM that was sent elsewhere.
const MIGRATION: Duration = Duration::from_secs(1);
/// The interval while its operation runs.
const OPERATION: Duration = Duration::from_millis(200);

/// Watches this process; without one, starts it first.
pub(super) fn begin(machines: &Arc<Machines>, entry: &Arc<VmEntry>, identity: Option<Identity>) {
    let (machines, entry) = (machines.clone(), entry.clone());
    let runtime = machines.runtime.clone();
    runtime.spawn(async move { run(&machines, &entry, identity).await });
}

impl Machines {
    /// Watches the process that was started for a VM, unless it is watched already.
    pub(super) fn supervise(self: &Arc<Self>, entry: &Arc<VmEntry>) {
        let Some(identity) = unwatched_process(entry, false) else {
            return;
        };
        let awaited = entry.record().and_then(|record| record.incoming);
        let change = awaited.map_or(Change::Started, |incoming| Change::Awaited(incoming.listen));
        self.publish(entry.name(), change);
        begin(self, entry, Some(identity));
    }

    /// Watches the process of a VM that was killed and has not ended, unless it is watched already.
    /// Then the VM is stopped or deleted without another request.
    pub(super) fn await_late_end(self: &Arc<Self>, entry: &Arc<VmEntry>, adopted: bool) {
        if let Some(identity) = late_process(entry, adopted) {
            begin(self, entry, Some(identity));
        }
    }

    /// Handles a client's report of where the guest of a VM is that was sent elsewhere. If the
    /// guest is here and should run, the VM starts.
    ///
    /// # Errors
    /// The place stays unknown.
    pub(crate) async fn resolve_migration(
        self: &Arc<Self>,
        vm: &VmName,
        here: bool,
    ) -> Result<(), Error> {
        let entry = self.find(vm)?;
        let work =
            move |machines: &Self, entry: &VmEntry| machines.resolve_migration_now(entry, here);
        self.request(entry.clone(), work).await?;
        if entry.record().is_some_and(|record| record.is_to_start()) {
            begin(self, &entry, None);
        }
        Ok(())
    }
}

/// The process of a VM, if none watches it yet. The caller must.
fn unwatched_process(entry: &VmEntry, adopted: bool) -> Option<Identity> {
    let mut view = entry.view();
    let identity = view.record.as_ref()?.process()?.0?;
    if view.live.is_some() {
        return None;
    }
    view.live = Some(Live::new(identity, adopted));
    Some(identity)
}

/// As [`unwatched_process`], if it was killed and has not ended.
fn late_process(entry: &VmEntry, adopted: bool) -> Option<Identity> {
    let is_late = entry.view().not_ended.is_some();
    is_late.then(|| unwatched_process(entry, adopted)).flatten()
}

/// The next action.
enum Next {
    Over,
    Again,
    Watch(Identity),
}

async fn run(machines: &Arc<Machines>, entry: &Arc<VmEntry>, mut process: Option<Identity>) {
    // Without a process there was no attempt yet.
    let mut wait = match process {
        Some(_) => FIRST,
        None => Duration::ZERO,
    };
    loop {
        if let Some(identity) = process {
            let since = Instant::now();
            let end = until_end(machines, entry, identity).await;
            if since.elapsed() >= CALM {
                wait = FIRST;
            }
            let next = machines
                .locked(entry, move |machines, entry| {
                    ended(machines, entry, identity, end)
                })
                .await;
            if !matches!(next, Ok(Next::Again)) {
                // Nothing may be left of the VM.
                machines.tidy(entry);
                return;
            }
        }
        tokio::time::sleep(wait).await;
        wait = wait.saturating_mul(2).clamp(FIRST, LONGEST);
        process = match machines.locked(entry, revive).await {
            Ok(Next::Watch(identity)) => Some(identity),
            Ok(Next::Again) => None,
            Ok(Next::Over) | Err(_) => return,
        };
    }
}

/// Removes an exited process from the record, unless another task has done so.
fn ended(machines: &Machines, entry: &VmEntry, identity: Identity, end: End) -> Next {
    let Some(mut record) = entry.record() else {
        return Next::Over;
    };
    let ours = record
        .process()
        .is_some_and(|(which, _)| which == Some(identity));
    let is_late = entry.view().not_ended.is_some();
    if !ours || (record.phase != Phase::Present && !is_late) {
        return Next::Over;
    }
    let awaited = record.incoming.is_some();
    let lifecycle = machines.lifecycle(entry);
    if record.phase != Phase::Present {
        match lifecycle.delete_or_restore(&mut record) {
            // The VM that it was to replace.
            Ok(true) if record.is_to_start() => return Next::Again,
            Ok(_) => machines.publish_deleted(entry),
            Err(error) => not_deleted(entry, &error),
        }
        return Next::Over;
    }
    let end = if is_late && !awaited {
        lifecycle.late_end(&record, end)
    } else {
        end
    };
    // Its leftover: the socket.
    if let Err(error) = lifecycle.stop(&mut record) {
        let error = &error as &dyn std::error::Error;
        tracing::warn!(vm = %entry.name(), error, "cannot remove the leftovers of a VM's process");
    }
    let why = end.detail.clone();
    let ended = lifecycle.ends(&mut record, end);
    machines.process_gone(entry);
    let end = match ended {
        Ok(Some(end)) => end,
        Ok(None) => {
            if awaited {
                machines.publish(entry.name(), Change::NotArrived(why));
            }
            machines.publish_deleted(entry);
            return Next::Over;
        }
        Err(error) => {
            not_deleted(entry, &error);
            return Next::Over;
        }
    };
    machines.publish(entry.name(), Change::Ended(end));
    machines.report_unknown_location(entry.name(), &record);
    if record.is_to_start() {
        Next::Again
    } else {
        Next::Over
    }
}

fn not_deleted(entry: &VmEntry, error: &Error) {
    let error = error as &dyn std::error::Error;
    tracing::error!(vm = %entry.name(), error, "cannot delete the rest of a VM");
}

/// Restarts a VM, unless another task has, or the VM should no longer run.
fn revive(machines: &Machines, entry: &VmEntry) -> Next {
    let Some(mut record) = entry.record() else {
        return Next::Over;
    };
    if !record.is_to_start() {
        return Next::Over;
    }
    record.restarts = record.restarts.saturating_add(1);
    match machines.lifecycle(entry).start(&mut record) {
        Ok(()) => {
            let Some(identity) = record.process().and_then(|process| process.0) else {
                return Next::Over;
            };
            entry.view().live = Some(Live::new(identity, false));
            machines.publish(entry.name(), Change::Started);
            Next::Watch(identity)
        }
        Err(error) => {
            tracing::warn!(
                vm = %entry.name(),
                error = &error as &dyn std::error::Error,
                "cannot restart a VM; retrying later"
            );
            machines.publish(entry.name(), Change::NotStarted(cut(&in_one_line(&error))));
            late_process(entry, false).map_or(Next::Again, Next::Watch)
        }
    }
}

/// A process whose exit can be awaited with other events.
struct Watched(Process);

impl AsRawFd for Watched {
    fn as_raw_fd(&self) -> RawFd {
        self.0.pidfd().as_fd().as_raw_fd()
    }
}

/// Waits for the end of a process, and returns the reason.
async fn until_end(machines: &Arc<Machines>, entry: &Arc<VmEntry>, identity: Identity) -> End {
    let killed = |detail: &str| End::new(EndReason::Killed, detail);
    let gone = || killed("its process ended without a report");
    let watched = match Process::open(identity) {
        Ok(Some(process)) => {
            // SAFETY: tokio has no safe API left to wait for a descriptor that is not a socket.
            // `Watched` owns the pidfd and always returns that one. It can be neither changed nor
            // taken apart while `AsyncFd` holds it: only `get_ref` reaches it.
            let watched =
                unsafe { AsyncFd::register_with_interest(Watched(process), Interest::READABLE) };
            watched.map_err(io::Error::from)
        }
        Ok(None) => return gone(),
        Err(error) => Err(error),
    };
    let watched = match watched {
        Ok(watched) => watched,
        Err(error) => return killed(&unwatched(entry, &error)),
    };
    let mut account = pin!(follow(machines, entry, identity));
    let said = tokio::select! {
        said = account.as_mut() => {
            // The process reports its end just before its exit.
            let _ = watched.readable().await;
            Some(said)
        }
        _ = watched.readable() => tokio::time::timeout(LAST_WORD, account).await.ok(),
        never = attend(machines, entry) => match never {},
    };
    let status = watched.get_ref().0.reap();
    let awaited = entry
        .record()
        .is_some_and(|record| record.incoming.is_some());
    let groups = machines.sandbox.groups();
    match (said, status) {
        (Some(end), _) => end,
        _ if groups.is_some_and(|groups| groups.ran_out_of_memory(entry.name().as_str())) => {
            killed(OUT_OF_MEMORY)
        }
        // 0 is also the code of a process that was stopped while it waited for its guest.
        (None, Some(status)) if status.success() && awaited => gone(),
        (None, Some(status)) => from_status(status),
        (None, None) => gone(),
    }
}

const OUT_OF_MEMORY: &str = "the kernel killed its process because memory ran out: that of its \
                             control group (memory.max), or that of the host (`journalctl -k` \
                             shows which)";

/// Without a free descriptor no process can be watched. This counts as its end, so the next check
/// decides.
fn unwatched(entry: &VmEntry, error: &io::Error) -> String {
    tracing::error!(vm = %entry.name(), %error, "cannot watch a VM's process");
    format!("cannot watch its process: {error}")
}

/// Follows the reports of a VM, until one has the reason of its end.
async fn follow(machines: &Arc<Machines>, entry: &Arc<VmEntry>, identity: Identity) -> End {
    let vmm = machines.api_of(entry.name());
    let mut last = None;
    loop {
        match vmm.handshake().await {
            Ok(who) if who.pid == identity.pid => {
                entry.is_of(identity, &who);
                if !supports_api(who.api) {
                    tracing::warn!(
                        vm = %entry.name(),
                        level = who.api,
                        "a VM has an unsupported API level; leaving it alone"
                    );
                    return std::future::pending().await;
                }
                break;
            }
            Ok(who) => {
                let (vm, pid) = (entry.name(), who.pid);
                tracing::warn!(%vm, pid, "another process answers instead of the VM's");
            }
            Err(error) => tracing::debug!(vm = %entry.name(), %error, "no answer"),
        }
        tokio::time::sleep(PAUSE).await;
    }
    let mut answer = vmm.status().await;
    let mut alarms: Vec<AlarmInfo> = Vec::new();
    let mut removed = BTreeSet::new();
    let mut reports = LineSource::new(Instant::now());
    loop {
        let since = match answer {
            Ok(mut status) => {
                status
                    .alarms
                    .retain(|alarm| alarm.device.len() <= DEVICE_NAME_MAX);
                status.alarms.truncate(ALARMS_MAX);
                for alarm in &mut status.alarms {
                    alarm.detail = alarm
                        .detail
                        .take()
                        .filter(|detail| detail.len() <= ALARM_DETAIL_MAX);
                }
                for change in alarm_changes(&alarms, &status) {
                    // The end must not wait: the process exits in a moment.
                    if status.end.is_none() {
                        admitted(&mut reports).await;
                    }
                    machines.publish(entry.name(), change);
                }
                alarms.clone_from(&status.alarms);
                let status = Arc::new(status);
                entry.update(identity, |live| {
                    live.state = Some(status.state);
                    live.said = Some(status.clone());
                });
                // An incoming VM has arrived, or is paused here.
                entry.migration.notify_one();
                if last.replace(status.state) != Some(status.state) {
                    machines.publish(entry.name(), Change::State(status.state));
                }
                given_up(machines, entry, &status).await;
                failed_over(machines, entry, &status.nics).await;
                removed = devices_removed(machines, entry, &status.nics, &removed).await;
                if let Some(end) = &status.end {
                    return End::new(end.reason, cut(&end.detail));
                }
                status.generation
            }
            Err(error) => {
                tracing::debug!(vm = %entry.name(), %error, "no answer");
                entry.update(identity, |live| {
                    live.state = None;
                    live.said = None;
                });
                last = None;
                tokio::time::sleep(PAUSE).await;
                // After an upgrade another program may run the VM.
                if let Ok(who) = vmm.handshake().await
                    && who.pid == identity.pid
                {
                    entry.is_of(identity, &who);
                }
                // Any generation except the current one.
                0
            }
        };
        admitted(&mut reports).await;
        answer = vmm.watch(since).await;
    }
}

/// Waits until the VM may cause another report.
async fn admitted(reports: &mut LineSource) {
    while reports.admit(REPORTS, Instant::now()).is_none() {
        tokio::time::sleep(REPORTS.interval).await;
    }
}

/// Queries a VM that was sent elsewhere, until it reports that its guest is here. Queries the
/// process of an incoming VM whether the guest has arrived.
async fn attend(machines: &Arc<Machines>, entry: &Arc<VmEntry>) -> Infallible {
    loop {
        let news = entry.migration.notified();
        let record = entry.record();
        let awaited = record
            .as_ref()
            .is_some_and(|record| record.incoming.is_some());
        let outgoing = record.and_then(|record| record.outgoing);
        if !awaited && outgoing.is_none_or(|outgoing| outgoing.moved) {
            news.await;
            continue;
        }
        // The same query follows both a notification and the interval.
        let period = match machines.operations.migration_of(entry.name()) {
            Some(_) => OPERATION,
            None => MIGRATION,
        };
        let _ = tokio::time::timeout(period, news).await;
        if awaited {
            let _ = machines.locked(entry, Machines::query_incoming).await;
        } else {
            // If this daemon ends first, the next one does it.
            let _ = machines.locked(entry, Machines::query_migration).await;
        }
    }
}

/// Alarms that were raised, and alarms that were cleared.
fn alarm_changes(before: &[AlarmInfo], now: &VmStatus) -> Vec<Change> {
    let change = |alarm: &AlarmInfo, raised| Change::Alarm {
        alarm: alarm.clone(),
        is_nic: now.nics.iter().any(|nic| nic.id == alarm.device),
        raised,
    };
    let cleared = before.iter().filter(|alarm| !now.alarms.contains(alarm));
    let raised = now.alarms.iter().filter(|alarm| !before.contains(alarm));
    cleared
        .map(|alarm| change(alarm, false))
        .chain(raised.map(|alarm| change(alarm, true)))
        .collect()
}

/// Deletes devices of NICs that the guest has released on request, and forgets such disks.
async fn given_up(machines: &Arc<Machines>, entry: &Arc<VmEntry>, there: &VmStatus) {
    let Some(record) = entry.record() else {
        return;
    };
    let no_nic = |id: &NicId| there.nics.iter().all(|nic| nic.id != id.as_str());
    let no_disk = |id: &DeviceId| there.disks.iter().all(|disk| disk.id != id.as_str());
    let nics = record.unwanted().iter().any(no_nic);
    let disks = record.removed_disks().iter().any(no_disk);
    let no_function = |id: &DeviceId| there.vfio.iter().all(|one| one.id != id.as_str());
    let functions = record.removed_functions().any(no_function);
    if !nics && !disks && !functions {
        return;
    }
    // If this daemon ends first, the next one does it.
    let _ = machines
        .locked(entry, move |machines, entry| {
            let Some(mut record) = entry
                .record()
                .filter(|record| record.phase == Phase::Present)
            else {
                return;
            };
            let lifecycle = machines.lifecycle(entry);
            if nics {
                for id in lifecycle.drop_given_up(&mut record) {
                    machines.publish(entry.name(), Change::NicRemoved(id));
                }
            }
            if functions && lifecycle.drop_removed_functions(&mut record) {
                machines.functions_changed(entry.name());
            }
            if disks {
                for id in lifecycle.drop_removed_disks(&mut record) {
                    machines.publish(entry.name(), Change::DiskRemoved(id));
                }
            }
        })
        .await;
}

/// Records which NICs the VM has moved by itself to their backup device.
async fn failed_over(machines: &Arc<Machines>, entry: &Arc<VmEntry>, there: &[NicSummary]) {
    let Some(record) = entry.record() else {
        return;
    };
    let vm = entry.name();
    let backup = |nic: &NicSpec| {
        let nic = nic.on_backup(vm)?;
        machines.character_device_of(vm, &nic).ok()
    };
    let nics = record.spec.nics().iter();
    let news = nics
        .filter(|nic| !record.is_on_backup(nic.id()))
        .any(|nic| {
            let says = there.iter().find(|one| one.id == nic.id().as_str());
            says.is_some_and(|says| {
                backup(nic).is_some_and(|path| path.as_os_str() == says.path.as_str())
            })
        });
    if news {
        // If this daemon ends first, the next one does it.
        let _ = machines.locked(entry, Machines::query_failovers).await;
    }
}

/// Reports NICs whose device the host has removed, unless they are in `before`, and rolls back the
/// rest of the device. Returns these NICs.
async fn devices_removed(
    machines: &Arc<Machines>,
    entry: &Arc<VmEntry>,
    there: &[NicSummary],
    before: &BTreeSet<NicId>,
) -> BTreeSet<NicId> {
    let Some(record) = entry.record() else {
        return BTreeSet::new();
    };
    let is_removed = |id: &&NicId| {
        let mut there = there.iter();
        there.any(|nic| nic.id == id.as_str() && nic.state == PlugPhase::DeviceRemoved)
    };
    let nics = record.spec.nics().iter().map(NicSpec::id);
    let removed: BTreeSet<NicId> = nics.filter(is_removed).cloned().collect();
    for id in removed.difference(before) {
        let vm = entry.name();
        tracing::error!(%vm, nic = %id, "the host has removed the device of a NIC");
        machines.publish(vm, Change::NicDeviceRemoved(id.clone()));
        // If this daemon ends first, the next start of the VM does it.
        let id = id.clone();
        let _ = machines
            .locked(entry, move |machines, entry| {
                machines.drop_vanished(entry, &id)
            })
            .await;
    }
    removed
}

/// The reason of the end of a child process that did not report one. See `bellhop --help` for the
/// codes.
pub(super) fn from_status(status: ExitStatus) -> End {
    match (status.code(), status.signal()) {
        (Some(0), _) => End::new(EndReason::PoweredOff, "its process ended"),
        (Some(7), _) => End::new(EndReason::Moved, "it was sent to another process"),
        (Some(8), _) => End::new(
            EndReason::Indeterminate,
            "its migration's outcome is unknown: the guest may run at the destination",
        ),
        (Some(3), _) => End::new(EndReason::Crashed, "its guest crashed"),
        (Some(code), _) => End::new(
            EndReason::Failed,
            format!("its process ended with code {code}"),
        ),
        (None, Some(signal)) => {
            let detail = if signal == libc::SIGSYS {
                "its process was ended by its seccomp filter: it made a system call that no VMM \
                 makes (`journalctl -k` shows it, type=1326); its guest may have taken it over"
                    .to_owned()
            } else {
                format!("its process was killed by signal {signal}")
            };
            End::new(EndReason::Killed, detail)
        }
        (None, None) => End::new(EndReason::Killed, "its process ended"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(alarms: &[(&str, u16)]) -> VmStatus {
        let alarms: Vec<_> = alarms
            .iter()
            .map(|(device, queue)| {
                serde_json::json!({ "device": device, "queue": queue, "alarm": "Stuck" })
            })
            .collect();
        serde_json::from_value(serde_json::json!({
            "state": "Running", "generation": 1, "boots": 1, "pid": 1, "version": "0", "api": 1,
            "nics": [{ "id": "net0", "state": "Plugged", "path": "/dev/vhost-vdpa-0" }],
            "alarms": alarms,
        }))
        .unwrap()
    }

    #[test]
    fn alarms_are_reported_at_their_begin_and_end() {
        let (before, now) = (
            status(&[("net0", 0), ("disk0", 0)]),
            status(&[("net0", 0), ("net0", 1)]),
        );
        assert_eq!(alarm_changes(&before.alarms, &before), Vec::new());
        let changes = alarm_changes(&before.alarms, &now);
        let [disk, nic] = [&before.alarms[1], &now.alarms[1]].map(AlarmInfo::clone);
        let expected = [
            Change::Alarm {
                alarm: disk,
                is_nic: false,
                raised: false,
            },
            Change::Alarm {
                alarm: nic,
                is_nic: true,
                raised: true,
            },
        ];
        assert_eq!(changes, expected);
    }

    #[test]
    fn a_process_that_its_filter_ended_has_that_reason() {
        let end = |signal| from_status(ExitStatus::from_raw(signal));
        let filtered = end(libc::SIGSYS);
        assert_eq!(filtered.reason, EndReason::Killed);
        assert!(filtered.detail.contains("seccomp filter"), "{filtered:?}");
        assert!(end(libc::SIGKILL).detail.contains("signal 9"));
    }
}

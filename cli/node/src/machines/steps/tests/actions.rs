//! The actions that change a VM, the daemon that does them, and the invariants between them.
//!
//! Owns the model: [`lives`] plays actions with their faults and checks each state.
//! [`super::sim_host`] has the faults of a host.

use std::collections::BTreeSet;

use super::*;

/// An action of a client, the guest or the host.
#[derive(Debug, Clone, Copy)]
pub(super) enum Action {
    Create {
        nics: usize,
        stopped: bool,
        restart: Restart,
    },
    /// Replaces a stopped VM by another one.
    Replace {
        nics: usize,
        stopped: bool,
    },
    Start,
    Stop,
    StopUntilReboot,
    /// Requests the guest to power off, which it does later with `PowerOff`.
    AskToPowerOff {
        until_reboot: bool,
    },
    Delete,
    /// The VM's process ends by itself, and a daemon notices.
    Crash,
    /// The same without a daemon that notices.
    CrashUnseen,
    PowerOff,
    AddNic(usize),
    AddFunction(usize),
    RemoveFunction {
        function: usize,
        stubborn: bool,
    },
    /// Moves a NIC to an existing device.
    Swap {
        nic: usize,
        to: usize,
    },
    RemoveNic {
        nic: usize,
        stubborn: bool,
    },
    AddDisk(usize),
    RemoveDisk {
        disk: usize,
        stubborn: bool,
    },
    /// A NIC's device fails: the VM moves the NIC to its backup device, and a daemon notices, or
    /// not yet.
    FailOver {
        nic: usize,
        seen: bool,
    },
    /// A client moves a NIC to its backup device, or back.
    Seat {
        nic: usize,
        on_backup: bool,
    },
    /// The guest releases a requested device.
    GiveUp,
    /// Requests the VM to leave for another process.
    Send {
        refused: bool,
    },
    /// The current migration ends this way.
    Migrated(Way),
    /// The process stops answering, or answers again.
    Silent(bool),
    /// A client reports truthfully where the guest is.
    Resolve,
    Reboot,
    /// The daemon is killed while it is idle.
    Kill,
}

/// The result of a migration.
#[derive(Debug, Clone, Copy)]
pub(super) enum Way {
    Stays,
    /// The guest runs elsewhere, and the source knows that.
    Moves,
    /// The guest runs elsewhere or nowhere, and the source does not know which.
    Indeterminate {
        away: bool,
    },
    /// The guest runs elsewhere before the source can report anything.
    Unreported,
}

pub(super) fn action() -> impl Strategy<Value = Action> {
    let restart = prop_oneof![
        Just(Restart::Never),
        Just(Restart::OnFailure),
        Just(Restart::Always)
    ];
    prop_oneof![
        3 => (0..4_usize, any::<bool>(), restart)
            .prop_map(|(nics, stopped, restart)| Action::Create { nics, stopped, restart }),
        2 => (0..4_usize, any::<bool>())
            .prop_map(|(nics, stopped)| Action::Replace { nics, stopped }),
        2 => Just(Action::Start),
        2 => Just(Action::Stop),
        1 => Just(Action::StopUntilReboot),
        2 => any::<bool>().prop_map(|until_reboot| Action::AskToPowerOff { until_reboot }),
        2 => Just(Action::Delete),
        1 => Just(Action::Crash),
        1 => Just(Action::CrashUnseen),
        1 => Just(Action::PowerOff),
        2 => (0..3_usize).prop_map(Action::AddNic),
        2 => (1..4_usize).prop_map(Action::AddFunction),
        2 => (1..4_usize, any::<bool>())
            .prop_map(|(function, stubborn)| Action::RemoveFunction { function, stubborn }),
        2 => (0..3_usize, 0..2_usize).prop_map(|(nic, to)| Action::Swap { nic, to }),
        2 => (0..3_usize, any::<bool>())
            .prop_map(|(nic, stubborn)|
            Action::RemoveNic { nic, stubborn }),
        2 => (0..3_usize).prop_map(Action::AddDisk),
        2 => (0..3_usize, any::<bool>())
            .prop_map(|(disk, stubborn)| Action::RemoveDisk { disk, stubborn }),
        2 => (0..3_usize, any::<bool>()).prop_map(|(nic, seen)| Action::FailOver { nic, seen }),
        2 => (0..3_usize, any::<bool>())
            .prop_map(|(nic, on_backup)|
            Action::Seat { nic, on_backup }),
        1 => Just(Action::GiveUp),
        3 => any::<bool>().prop_map(|refused| Action::Send { refused }),
        3 => way().prop_map(Action::Migrated),
        1 => any::<bool>().prop_map(Action::Silent),
        2 => Just(Action::Resolve),
        1 => Just(Action::Reboot),
        1 => Just(Action::Kill),
    ]
}

/// Possible results of a migration.
pub(super) fn way() -> impl Strategy<Value = Way> {
    prop_oneof![
        Just(Way::Stays),
        Just(Way::Moves),
        any::<bool>().prop_map(|away| Way::Indeterminate { away }),
        Just(Way::Unreported),
    ]
}

pub(super) fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        6 => Just(Fault::None),
        1 => Just(Fault::Fails),
        1 => Just(Fault::FailsDone),
        1 => Just(Fault::KilledBefore),
        1 => Just(Fault::KilledAfter),
    ]
}

/// The NIC of this number: one has no backup, one a created backup, one an existing backup.
pub(super) fn nic(number: usize) -> NicSpec {
    let mut nic = json!({ "id": format!("net{number}"), "from": "vdpasim_net" });
    match number {
        0 => {}
        1 => nic["backup"] = json!({ "from": "vdpasim_net" }),
        _ => nic["backup"] = json!({ "path": format!("/dev/spare{number}") }),
    }
    serde_json::from_value(nic).unwrap()
}

/// The name of the disk of this number, and the disk.
pub(super) fn disk(number: usize) -> (DeviceId, DiskConfig) {
    let id = format!("data{number}");
    let disk = format!("path=/{number}.img,id={id}");
    (id.parse().unwrap(), disk.parse().unwrap())
}

/// The name of the function of this number, and the function.
pub(super) fn function(number: usize) -> (DeviceId, VfioConfig) {
    let address = format!("0000:01:00.{number}");
    let function = format!("host={address},id={address}");
    (address.parse().unwrap(), function.parse().unwrap())
}

pub(super) fn spec(nics: usize, stopped: bool, restart: Restart) -> VmSpec {
    let nics: Vec<_> = (0..nics).map(nic).collect();
    let state = if stopped { "Stopped" } else { "Running" };
    let vfio = match nics.len() {
        3 => json!([{ "host": "0000:01:00.1" }, { "host": "0000:01:00.2" }]),
        _ => json!([]),
    };
    let spec = json!({
        "kernel": "/k", "nics": nics, "vfio": vfio, "state": state, "restart": restart
    });
    serde_json::from_value(spec).unwrap()
}

/// Whether a request may replace a VM in this state.
pub(super) fn can_be_replaced(record: &Record) -> bool {
    record.phase == Phase::Present && record.process().is_none() && record.outgoing.is_none()
}

/// The daemon: it knows only the contents of the store that it has read.
pub(super) struct Daemon<'a> {
    fake: &'a Fake,
    vm: &'a VmName,
    pub(super) record: Option<Record>,
}

impl<'a> Daemon<'a> {
    /// A daemon without any knowledge.
    pub(super) fn new(fake: &'a Fake, vm: &'a VmName) -> Self {
        Self {
            fake,
            vm,
            record: None,
        }
    }

    pub(super) fn lifecycle(&self) -> Lifecycle<'_> {
        Lifecycle {
            host: self.fake,
            vm: self.vm,
        }
    }

    pub(super) fn does(&mut self, action: Action) {
        let lifecycle = Lifecycle {
            host: self.fake,
            vm: self.vm,
        };
        match (action, &mut self.record) {
            (
                Action::Create {
                    nics,
                    stopped,
                    restart,
                },
                None,
            ) => {
                let made = lifecycle.create(Record::new(spec(nics, stopped, restart)));
                // The store contains the rest of the VM.
                self.record = made.ok().or_else(|| self.fake.stored(self.vm));
            }
            (Action::Replace { nics, stopped }, Some(record)) if can_be_replaced(record) => {
                // A later guest of this name is another one.
                self.fake.sim_host().away = false;
                let former = record.clone();
                let wanted = spec(nics, stopped, Restart::Never);
                match lifecycle.replace(record, Record::new(wanted.clone())) {
                    Ok(()) => assert_eq!(record.spec, wanted),
                    // A step that cannot be undone keeps the name occupied.
                    Err(_) if record.phase == Phase::Deleting => {
                        assert!(!record.steps().is_empty());
                    }
                    Err(_) => assert_eq!(
                        (&record.spec, &record.last_end, record.phase),
                        (&former.spec, &former.last_end, Phase::Present)
                    ),
                }
            }
            (Action::Start, Some(record)) if record.phase == Phase::Present => {
                // A client that starts a guest that is known to run elsewhere accepts two of it.
                let away = std::mem::take(&mut self.fake.sim_host().away);
                if record.migration_unknown().is_some() {
                    self.fake.sim_host().away = away;
                } else if record.process().is_none() {
                    record.turn_on();
                    let _ = lifecycle.start(record);
                } else {
                    self.fake.sim_host().away = away;
                }
            }
            (Action::AskToPowerOff { until_reboot }, Some(record))
                if record.phase == Phase::Present && record.process().is_some() =>
            {
                let before = record.clone();
                match lifecycle.ask_to_power_off(record, until_reboot) {
                    Ok(()) => assert!(record.asked_to_power_off && !record.is_on()),
                    Err(_) => assert_eq!(*record, before),
                }
            }
            (Action::Stop | Action::StopUntilReboot, Some(record))
                if record.phase == Phase::Present =>
            {
                let until_reboot = matches!(action, Action::StopUntilReboot);
                if lifecycle.mark_stopped(record, until_reboot).is_ok() {
                    lifecycle.query_migration(record);
                    let runs = record.process().is_some();
                    if lifecycle.stop(record).is_ok() && runs {
                        let _ = lifecycle.stopped(record);
                    }
                }
            }
            (Action::Send { refused }, Some(record)) if record.phase == Phase::Present => {
                if record.process().is_some() {
                    self.fake.sim_host().refuses = refused;
                    let request = SendRequest {
                        destination: "unix:/b".to_owned(),
                        body: Bytes::new(),
                        endpoint: None,
                        request_id: String::new(),
                        peer: None,
                    };
                    let sent = lifecycle.send(record, &request);
                    self.fake.sim_host().refuses = false;
                    if sent.is_ok_and(|passed| passed.status == StatusCode::ACCEPTED) {
                        assert!(record.outgoing.is_some(), "sent without a mark");
                    }
                }
            }
            (Action::Migrated(_), Some(record)) if record.phase == Phase::Present => {
                lifecycle.query_migration(record);
            }
            (Action::Resolve, Some(record)) if record.migration_unknown().is_some() => {
                let here = !self.fake.sim_host().away;
                let _ = lifecycle.resolve_migration(record, here);
            }
            (Action::Delete, Some(record)) => {
                // A later VM of this name is another one.
                self.fake.sim_host().away = false;
                record.forget_former();
                if lifecycle.delete(record).is_ok() {
                    self.record = None;
                }
            }
            (Action::Crash | Action::PowerOff, Some(record)) => {
                if record.phase == Phase::Present && record.process().is_some() {
                    let mut gone = std::mem::take(&mut self.fake.sim_host().processes);
                    let said = gone.pop().map(|one| one.migration);
                    if lifecycle.stop(record).is_ok() {
                        let reason = match action {
                            // It reported that at its end.
                            _ if said == Some(MigrationReport::There) => EndReason::Moved,
                            Action::Crash => EndReason::Crashed,
                            _ => EndReason::PoweredOff,
                        };
                        let detail = String::new();
                        lifecycle.ended(record, End { reason, detail });
                    }
                }
            }
            (Action::AddNic(number), Some(record)) if record.phase == Phase::Present => {
                let nic = nic(number);
                if record.spec.nic(nic.id()).is_none() && !record.has_created(nic.id()) {
                    let spec = record.spec.with_nic(nic.clone()).unwrap();
                    let before = record.spec.clone();
                    match lifecycle.add_nic(record, &nic, spec) {
                        Ok(()) => assert!(record.spec.nic(nic.id()).is_some()),
                        Err(_) => assert_eq!(record.spec, before),
                    }
                }
            }
            (Action::AddFunction(number), Some(record)) if record.phase == Phase::Present => {
                let (id, function) = function(number);
                let is_new = record.spec.function(&id).is_none()
                    && record.removed_functions().all(|one| *one != id);
                if is_new {
                    let spec = record.spec.with_function(function.clone());
                    let before = record.spec.clone();
                    match lifecycle.add_function(record, &id, &function, spec) {
                        Ok(()) => assert!(record.spec.function(&id).is_some()),
                        Err(_) => assert_eq!(record.spec, before),
                    }
                }
            }
            (
                Action::RemoveFunction {
                    function: number,
                    stubborn,
                },
                Some(record),
            ) if record.phase == Phase::Present => {
                let (id, _) = function(number);
                if record.spec.function(&id).is_some() {
                    self.fake.sim_host().stubborn = stubborn && record.process().is_some();
                    if lifecycle.remove_function(record, &id).unwrap_or(false) {
                        assert!(record.spec.function(&id).is_none());
                    }
                    self.fake.sim_host().stubborn = false;
                }
            }
            (Action::Swap { nic: number, to }, Some(record)) if record.phase == Phase::Present => {
                let Some(former) = record.spec.nic(nic(number).id()).cloned() else {
                    return;
                };
                let path = format!("/dev/vhost-vdpa-{number}{to}").into();
                let moved = former.moved_to(ExistingDevice::Path(path));
                let spec = record.spec.with_nic_replaced(&moved);
                match lifecycle.swap_nic(record, &moved, spec) {
                    Ok(()) => assert_eq!(record.spec.nic(moved.id()), Some(&moved)),
                    Err(_) => assert_eq!(record.spec.nic(moved.id()), Some(&former)),
                }
            }
            (
                Action::RemoveNic {
                    nic: number,
                    stubborn,
                },
                Some(record),
            ) if record.phase == Phase::Present => {
                let id = nic(number).id().clone();
                if record.spec.nic(&id).is_some() || record.has_created(&id) {
                    self.fake.sim_host().stubborn = stubborn && record.process().is_some();
                    if lifecycle.remove_nic(record, &id).unwrap_or(false) {
                        assert!(!record.has_created(&id));
                    }
                    self.fake.sim_host().stubborn = false;
                }
            }
            (Action::AddDisk(number), Some(record)) if record.phase == Phase::Present => {
                let (id, disk) = disk(number);
                if record.spec.disk(&id).is_none() && !record.removed_disks().contains(&id) {
                    let spec = record.spec.with_disk(disk.clone());
                    let before = record.spec.clone();
                    match lifecycle.add_disk(record, &id, &disk, spec) {
                        Ok(()) => assert_eq!(record.spec.disk(&id), Some(&disk)),
                        Err(_) => assert_eq!(record.spec, before),
                    }
                }
            }
            (
                Action::RemoveDisk {
                    disk: number,
                    stubborn,
                },
                Some(record),
            ) if record.phase == Phase::Present => {
                let (id, _) = disk(number);
                if record.spec.disk(&id).is_some() || record.removed_disks().contains(&id) {
                    self.fake.sim_host().stubborn = stubborn && record.process().is_some();
                    if lifecycle.remove_disk(record, &id).unwrap_or(false) {
                        assert!(record.spec.disk(&id).is_none());
                        assert!(!record.removed_disks().contains(&id));
                    }
                    self.fake.sim_host().stubborn = false;
                }
            }
            (Action::FailOver { nic: number, seen }, Some(record)) => {
                let backup = record.spec.nic(nic(number).id());
                let backup = backup.and_then(|nic| nic.on_backup(self.vm));
                // The backup is opened only now, and may be gone.
                if let Some(there) = backup.filter(|there| self.fake.is_there(self.vm, there)) {
                    let failed = device_of(self.vm, record.spec.nic(there.id()).unwrap());
                    for one in &mut self.fake.sim_host().processes {
                        if let Some(device) = one.nics.get_mut(there.id().as_str())
                            && one.booted
                            && *device == failed
                        {
                            *device = device_of(self.vm, &there);
                        }
                    }
                }
                if seen && record.phase == Phase::Present {
                    lifecycle.query_failovers(record);
                }
            }
            (
                Action::Seat {
                    nic: number,
                    on_backup,
                },
                Some(record),
            ) if record.phase == Phase::Present => {
                let id = nic(number).id().clone();
                let has = record
                    .spec
                    .nic(&id)
                    .is_some_and(|nic| nic.backup().is_some());
                lifecycle.query_failovers(record);
                if has && record.is_on_backup(&id) != on_backup {
                    let seated = lifecycle.seat(record, &id, on_backup);
                    assert_eq!(record.is_on_backup(&id), on_backup == seated.is_ok());
                }
            }
            (Action::GiveUp, Some(record)) if record.phase == Phase::Present => {
                lifecycle.drop_given_up(record);
                lifecycle.drop_removed_disks(record);
                lifecycle.drop_removed_functions(record);
            }
            _ => {}
        }
    }

    /// A daemon's start, without a fault.
    pub(super) fn reconciles(&mut self) -> Reconciled {
        self.record = self.fake.stored(self.vm);
        let Some(mut record) = self.record.take() else {
            return Reconciled::None;
        };
        self.fake.sim_host().stubborn = false;
        self.fake.sim_host().refuses = false;
        let reconciled = self.lifecycle().reconcile(&mut record).unwrap();
        if reconciled == Reconciled::Running {
            self.lifecycle().reconcile_nics(&mut record);
            self.lifecycle().reconcile_disks(&mut record);
            self.lifecycle().reconcile_functions(&mut record);
        }
        if reconciled != Reconciled::None {
            self.record = Some(record);
        }
        reconciled
    }
}

/// The invariant between steps: all that exists is in the store.
pub(super) fn holds(fake: &Fake, vm: &VmName) -> Result<(), TestCaseError> {
    let stored = fake.stored(vm);
    let sim_host = fake.sim_host().clone();
    prop_assert!(sim_host.processes.len() <= 1, "two processes: {sim_host:?}");
    let guests = sim_host.processes.iter().filter(|one| one.has_guest());
    prop_assert!(
        guests.count() + usize::from(sim_host.away) <= 1,
        "the guest runs twice: {sim_host:?} {stored:?}"
    );
    let Some(record) = stored else {
        let empty = SimHost {
            boot: sim_host.boot,
            started: sim_host.started,
            away: sim_host.away,
            silent: sim_host.silent,
            // The last report of a process that waited.
            incoming_report: sim_host.incoming_report,
            announced: sim_host.announced.clone(),
            ..SimHost::default()
        };
        prop_assert_eq!(sim_host, empty, "leftovers that no record has");
        return Ok(());
    };
    let has = |step: &dyn Fn(&Step) -> bool| record.steps().iter().any(step);
    if sim_host.directories {
        prop_assert!(has(&|step| *step == Step::Directories));
    }
    for device in &sim_host.devices {
        prop_assert!(
            record.has_device(device),
            "{device} of {vm} is in no record"
        );
    }
    for function in &sim_host.bound {
        prop_assert!(
            record.bound_function(*function).is_some(),
            "{function} is in no record"
        );
    }
    if !sim_host.processes.is_empty() {
        prop_assert!(record.process().is_some(), "a process is in no record");
    }
    Ok(())
}

pub(super) fn lives(actions: Vec<(Action, Vec<Fault>)>) -> Result<(), TestCaseError> {
    let fake = Fake::default();
    let vm: VmName = "web".parse().unwrap();
    let mut daemon = Daemon::new(&fake, &vm);
    for (action, faults) in actions {
        let mut killed = false;
        match action {
            Action::Kill => killed = true,
            Action::CrashUnseen => {
                fake.sim_host().processes.clear();
                killed = true;
            }
            Action::Silent(silent) => fake.sim_host().silent = silent,
            Action::Migrated(way) => {
                {
                    let mut sim_host = fake.sim_host();
                    let mut all = sim_host.processes.iter_mut();
                    if let Some(one) = all.find(|one| one.migration == MigrationReport::UnderWay) {
                        let (report, away) = match way {
                            Way::Stays => (MigrationReport::Here, false),
                            Way::Moves => (MigrationReport::There, true),
                            Way::Indeterminate { away } => (MigrationReport::Indeterminate, away),
                            // It is paused, and has not noticed yet.
                            Way::Unreported => (MigrationReport::Silent, true),
                        };
                        one.migration = report;
                        sim_host.away = away;
                    }
                }
                fake.plan(faults);
                let done = catch_unwind(AssertUnwindSafe(|| daemon.does(action)));
                fake.plan(Vec::new());
                if let Err(panic) = done {
                    if !panic.is::<Killed>() {
                        resume_unwind(panic);
                    }
                    killed = true;
                }
            }
            Action::Reboot => {
                let mut sim_host = fake.sim_host();
                sim_host.processes.clear();
                sim_host.devices.clear();
                sim_host.bound.clear();
                sim_host.boot += 1;
                killed = true;
            }
            action => {
                fake.plan(faults);
                let done = catch_unwind(AssertUnwindSafe(|| daemon.does(action)));
                fake.plan(Vec::new());
                if let Err(panic) = done {
                    if !panic.is::<Killed>() {
                        resume_unwind(panic);
                    }
                    killed = true;
                }
            }
        }
        holds(&fake, &vm)?;
        if killed {
            let reconciled = daemon.reconciles();
            holds(&fake, &vm)?;
            let once = fake.sim_host().clone();
            let runs = once.processes.iter().any(|one| one.booted);
            if let Some(record) = &daemon.record {
                // Its devices are the desired ones.
                let wanted = devices_of(&vm, record);
                for one in once.processes.iter() {
                    prop_assert_eq!(&one.nics, &wanted);
                    let disks = images_of(record);
                    prop_assert_eq!(&one.disks, &disks);
                    // Also an image that the guest released late is no longer in the sandbox.
                    let images: BTreeSet<String> = disks.into_values().collect();
                    prop_assert_eq!(&one.images, &images);
                }
                let removed = record.removed_disks();
                prop_assert!(removed.is_empty(), "{removed:?} stay");
                let rest = (record.unwanted_nics(), record.left());
                prop_assert!(!runs || rest == (Vec::new(), Vec::new()), "{rest:?} stays");
                let backup = record.spec.nics().iter().filter(|nic| nic.is_created(true));
                let mut backup = backup.map(|nic| vm.backup(nic.id()));
                prop_assert!(
                    !runs || backup.all(|device| once.devices.contains(&device)),
                    "there is no backup: {once:?}"
                );
            }
            prop_assert_eq!(reconciled == Reconciled::Running, runs);
            let here = |report| matches!(report, MigrationReport::None | MigrationReport::Here);
            let certain = !once.silent && once.processes.iter().all(|one| here(one.migration));
            if let Some(record) = daemon.record.as_ref().filter(|_| runs && certain) {
                prop_assert_eq!(&record.outgoing, &None, "the mark stays");
            }
            prop_assert_eq!(reconciled == Reconciled::None, fake.stored(&vm).is_none());
            // A second run changes nothing.
            let again = daemon.reconciles();
            prop_assert_eq!(again, reconciled);
            prop_assert_eq!(fake.sim_host().clone(), once);
            if reconciled == Reconciled::ToStart
                && let Some(record) = &mut daemon.record
            {
                let lifecycle = Lifecycle {
                    host: &fake,
                    vm: &vm,
                };
                lifecycle.start(record).unwrap();
                prop_assert!(fake.sim_host().processes.iter().all(|one| one.booted));
                holds(&fake, &vm)?;
            }
        }
        // A supervisor would do this now.
        if let Some(record) = daemon.record.as_mut().filter(|record| record.is_to_start()) {
            prop_assert!(
                !fake.sim_host().away,
                "it would be started, and runs elsewhere: {record:?}"
            );
        }
    }
    // In the end everything can be deleted.
    if let Some(mut record) = fake.stored(&vm) {
        let lifecycle = Lifecycle {
            host: &fake,
            vm: &vm,
        };
        record.forget_former();
        lifecycle.delete(&mut record).unwrap();
    }
    prop_assert!(fake.stored(&vm).is_none());
    holds(&fake, &vm)
}

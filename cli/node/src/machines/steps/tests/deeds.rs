//! The actions that change a VM, the daemon that does them, and the invariants between them.
//!
//! Owns the model: [`lives`] plays actions with their faults and checks each state.
//! [`super::world`] has the faults of a host.

use super::*;

/// An action of a client, the guest or the host.
#[derive(Debug, Clone, Copy)]
pub(super) enum Deed {
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
        on_stand_by: bool,
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
    SayWhere,
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
    Unsettled {
        away: bool,
    },
    /// The guest runs elsewhere before the source can report anything.
    Unsaid,
}

pub(super) fn deed() -> impl Strategy<Value = Deed> {
    let restart = prop_oneof![
        Just(Restart::Never),
        Just(Restart::OnFailure),
        Just(Restart::Always)
    ];
    prop_oneof![
        3 => (0..4_usize, any::<bool>(), restart)
            .prop_map(|(nics, stopped, restart)| Deed::Create { nics, stopped, restart }),
        2 => (0..4_usize, any::<bool>())
            .prop_map(|(nics, stopped)| Deed::Replace { nics, stopped }),
        2 => Just(Deed::Start),
        2 => Just(Deed::Stop),
        1 => Just(Deed::StopUntilReboot),
        2 => any::<bool>().prop_map(|until_reboot| Deed::AskToPowerOff { until_reboot }),
        2 => Just(Deed::Delete),
        1 => Just(Deed::Crash),
        1 => Just(Deed::CrashUnseen),
        1 => Just(Deed::PowerOff),
        2 => (0..3_usize).prop_map(Deed::AddNic),
        2 => (0..3_usize, 0..2_usize).prop_map(|(nic, to)| Deed::Swap { nic, to }),
        2 => (0..3_usize, any::<bool>())
            .prop_map(|(nic, stubborn)| Deed::RemoveNic { nic, stubborn }),
        2 => (0..3_usize).prop_map(Deed::AddDisk),
        2 => (0..3_usize, any::<bool>())
            .prop_map(|(disk, stubborn)| Deed::RemoveDisk { disk, stubborn }),
        2 => (0..3_usize, any::<bool>()).prop_map(|(nic, seen)| Deed::FailOver { nic, seen }),
        2 => (0..3_usize, any::<bool>())
            .prop_map(|(nic, on_stand_by)| Deed::Seat { nic, on_stand_by }),
        1 => Just(Deed::GiveUp),
        3 => any::<bool>().prop_map(|refused| Deed::Send { refused }),
        3 => way().prop_map(Deed::Migrated),
        1 => any::<bool>().prop_map(Deed::Silent),
        2 => Just(Deed::SayWhere),
        1 => Just(Deed::Reboot),
        1 => Just(Deed::Kill),
    ]
}

/// Possible results of a migration.
pub(super) fn way() -> impl Strategy<Value = Way> {
    prop_oneof![
        Just(Way::Stays),
        Just(Way::Moves),
        any::<bool>().prop_map(|away| Way::Unsettled { away }),
        Just(Way::Unsaid),
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
        1 => nic["failover"] = json!({ "from": "vdpasim_net" }),
        _ => nic["failover"] = json!({ "path": format!("/dev/spare{number}") }),
    }
    serde_json::from_value(nic).unwrap()
}

/// The name of the disk of this number, and the disk.
pub(super) fn disk(number: usize) -> (DeviceId, DiskConfig) {
    let id = format!("data{number}");
    let disk = format!("path=/{number}.img,id={id}");
    (id.parse().unwrap(), disk.parse().unwrap())
}

pub(super) fn spec(nics: usize, stopped: bool, restart: Restart) -> VmSpec {
    let nics: Vec<_> = (0..nics).map(nic).collect();
    let state = if stopped { "Stopped" } else { "Running" };
    let spec = json!({ "kernel": "/k", "nics": nics, "state": state, "restart": restart });
    serde_json::from_value(spec).unwrap()
}

/// Whether a request may replace a VM in this state.
pub(super) fn can_be_replaced(record: &Record) -> bool {
    record.phase == Phase::Present && record.process().is_none() && record.departure.is_none()
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

    pub(super) fn life(&self) -> Life<'_> {
        Life {
            host: self.fake,
            vm: self.vm,
        }
    }

    pub(super) fn does(&mut self, deed: Deed) {
        let life = Life {
            host: self.fake,
            vm: self.vm,
        };
        match (deed, &mut self.record) {
            (
                Deed::Create {
                    nics,
                    stopped,
                    restart,
                },
                None,
            ) => {
                let made = life.create(Record::new(spec(nics, stopped, restart)));
                // The store contains the rest of the VM.
                self.record = made.ok().or_else(|| self.fake.stored(self.vm));
            }
            (Deed::Replace { nics, stopped }, Some(record)) if can_be_replaced(record) => {
                // A later guest of this name is another one.
                self.fake.world().away = false;
                let former = record.clone();
                let wanted = spec(nics, stopped, Restart::Never);
                match life.replace(record, Record::new(wanted.clone())) {
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
            (Deed::Start, Some(record)) if record.phase == Phase::Present => {
                // A client that starts a guest that is known to run elsewhere accepts two of it.
                let away = std::mem::take(&mut self.fake.world().away);
                if record.may_be_elsewhere().is_some() {
                    self.fake.world().away = away;
                } else if record.process().is_none() {
                    record.turn_on();
                    let _ = life.start(record);
                } else {
                    self.fake.world().away = away;
                }
            }
            (Deed::AskToPowerOff { until_reboot }, Some(record))
                if record.phase == Phase::Present && record.process().is_some() =>
            {
                let before = record.clone();
                match life.ask_to_power_off(record, until_reboot) {
                    Ok(()) => assert!(record.asked_to_power_off && !record.is_on()),
                    Err(_) => assert_eq!(*record, before),
                }
            }
            (Deed::Stop | Deed::StopUntilReboot, Some(record))
                if record.phase == Phase::Present =>
            {
                let until_reboot = matches!(deed, Deed::StopUntilReboot);
                if life.wants_stopped(record, until_reboot).is_ok() {
                    life.look_for_guest(record);
                    let runs = record.process().is_some();
                    if life.stop(record).is_ok() && runs {
                        let _ = life.stopped(record);
                    }
                }
            }
            (Deed::Send { refused }, Some(record)) if record.phase == Phase::Present => {
                if record.process().is_some() {
                    self.fake.world().refuses = refused;
                    let request = SendRequest {
                        destination: "unix:/b".to_owned(),
                        body: Bytes::new(),
                        request_id: String::new(),
                        peer: None,
                    };
                    let sent = life.send(record, &request);
                    self.fake.world().refuses = false;
                    if sent.is_ok_and(|passed| passed.status == StatusCode::ACCEPTED) {
                        assert!(record.departure.is_some(), "sent without a mark");
                    }
                }
            }
            (Deed::Migrated(_), Some(record)) if record.phase == Phase::Present => {
                life.look_for_guest(record);
            }
            (Deed::SayWhere, Some(record)) if record.may_be_elsewhere().is_some() => {
                let here = !self.fake.world().away;
                let _ = life.say_where(record, here);
            }
            (Deed::Delete, Some(record)) => {
                // A later VM of this name is another one.
                self.fake.world().away = false;
                record.forget_former();
                if life.delete(record).is_ok() {
                    self.record = None;
                }
            }
            (Deed::Crash | Deed::PowerOff, Some(record)) => {
                if record.phase == Phase::Present && record.process().is_some() {
                    let mut gone = std::mem::take(&mut self.fake.world().processes);
                    let said = gone.pop().map(|one| one.migration);
                    if life.stop(record).is_ok() {
                        let reason = match deed {
                            // It reported that at its end.
                            _ if said == Some(Account::There) => EndReason::Moved,
                            Deed::Crash => EndReason::Crashed,
                            _ => EndReason::PoweredOff,
                        };
                        let detail = String::new();
                        life.ended(record, End { reason, detail });
                    }
                }
            }
            (Deed::AddNic(number), Some(record)) if record.phase == Phase::Present => {
                let nic = nic(number);
                if record.spec.nic(nic.id()).is_none() && !record.has_made(nic.id()) {
                    let spec = record.spec.with_nic(nic.clone()).unwrap();
                    let before = record.spec.clone();
                    match life.add_nic(record, &nic, spec) {
                        Ok(()) => assert!(record.spec.nic(nic.id()).is_some()),
                        Err(_) => assert_eq!(record.spec, before),
                    }
                }
            }
            (Deed::Swap { nic: number, to }, Some(record)) if record.phase == Phase::Present => {
                let Some(former) = record.spec.nic(nic(number).id()).cloned() else {
                    return;
                };
                let path = format!("/dev/vhost-vdpa-{number}{to}").into();
                let moved = former.moved_to(ExistingDevice::Path(path));
                let spec = record.spec.with_nic_replaced(&moved);
                match life.swap_nic(record, &moved, spec) {
                    Ok(()) => assert_eq!(record.spec.nic(moved.id()), Some(&moved)),
                    Err(_) => assert_eq!(record.spec.nic(moved.id()), Some(&former)),
                }
            }
            (
                Deed::RemoveNic {
                    nic: number,
                    stubborn,
                },
                Some(record),
            ) if record.phase == Phase::Present => {
                let id = nic(number).id().clone();
                if record.spec.nic(&id).is_some() || record.has_made(&id) {
                    self.fake.world().stubborn = stubborn && record.process().is_some();
                    if life.remove_nic(record, &id).unwrap_or(false) {
                        assert!(!record.has_made(&id));
                    }
                    self.fake.world().stubborn = false;
                }
            }
            (Deed::AddDisk(number), Some(record)) if record.phase == Phase::Present => {
                let (id, disk) = disk(number);
                if record.spec.disk(&id).is_none() && !record.removed_disks().contains(&id) {
                    let spec = record.spec.with_disk(disk.clone());
                    let before = record.spec.clone();
                    match life.add_disk(record, &id, &disk, spec) {
                        Ok(()) => assert_eq!(record.spec.disk(&id), Some(&disk)),
                        Err(_) => assert_eq!(record.spec, before),
                    }
                }
            }
            (
                Deed::RemoveDisk {
                    disk: number,
                    stubborn,
                },
                Some(record),
            ) if record.phase == Phase::Present => {
                let (id, _) = disk(number);
                if record.spec.disk(&id).is_some() || record.removed_disks().contains(&id) {
                    self.fake.world().stubborn = stubborn && record.process().is_some();
                    if life.remove_disk(record, &id).unwrap_or(false) {
                        assert!(record.spec.disk(&id).is_none());
                        assert!(!record.removed_disks().contains(&id));
                    }
                    self.fake.world().stubborn = false;
                }
            }
            (Deed::FailOver { nic: number, seen }, Some(record)) => {
                let stand_by = record.spec.nic(nic(number).id());
                let stand_by = stand_by.and_then(|nic| nic.on_stand_by(self.vm));
                // The backup is opened only now, and may be gone.
                if let Some(there) = stand_by.filter(|there| self.fake.is_there(self.vm, there)) {
                    let failed = device_of(self.vm, record.spec.nic(there.id()).unwrap());
                    for one in &mut self.fake.world().processes {
                        if let Some(device) = one.nics.get_mut(there.id().as_str())
                            && one.booted
                            && *device == failed
                        {
                            *device = device_of(self.vm, &there);
                        }
                    }
                }
                if seen && record.phase == Phase::Present {
                    life.look_for_failovers(record);
                }
            }
            (
                Deed::Seat {
                    nic: number,
                    on_stand_by,
                },
                Some(record),
            ) if record.phase == Phase::Present => {
                let id = nic(number).id().clone();
                let has = record
                    .spec
                    .nic(&id)
                    .is_some_and(|nic| nic.stand_by().is_some());
                life.look_for_failovers(record);
                if has && record.is_on_stand_by(&id) != on_stand_by {
                    let seated = life.seat(record, &id, on_stand_by);
                    assert_eq!(record.is_on_stand_by(&id), on_stand_by == seated.is_ok());
                }
            }
            (Deed::GiveUp, Some(record)) if record.phase == Phase::Present => {
                life.drop_given_up(record);
                life.drop_removed_disks(record);
            }
            _ => {}
        }
    }

    /// A daemon's start, without a fault.
    pub(super) fn settles(&mut self) -> Settled {
        self.record = self.fake.stored(self.vm);
        let Some(mut record) = self.record.take() else {
            return Settled::None;
        };
        self.fake.world().stubborn = false;
        self.fake.world().refuses = false;
        let settled = self.life().settle(&mut record).unwrap();
        if settled == Settled::Running {
            self.life().settle_nics(&mut record);
            self.life().settle_disks(&mut record);
        }
        if settled != Settled::None {
            self.record = Some(record);
        }
        settled
    }
}

/// The invariant between steps: all that exists is in the store.
pub(super) fn holds(fake: &Fake, vm: &VmName) -> Result<(), TestCaseError> {
    let stored = fake.stored(vm);
    let world = fake.world().clone();
    prop_assert!(world.processes.len() <= 1, "two processes: {world:?}");
    let guests = world.processes.iter().filter(|one| one.has_guest());
    prop_assert!(
        guests.count() + usize::from(world.away) <= 1,
        "the guest runs twice: {world:?} {stored:?}"
    );
    let Some(record) = stored else {
        let empty = World {
            boot: world.boot,
            started: world.started,
            away: world.away,
            silent: world.silent,
            // The last report of a process that waited.
            coming: world.coming,
            announced: world.announced.clone(),
            ..World::default()
        };
        prop_assert_eq!(world, empty, "leftovers that no record has");
        return Ok(());
    };
    let has = |step: &dyn Fn(&Step) -> bool| record.steps().iter().any(step);
    if world.directories {
        prop_assert!(has(&|step| *step == Step::Directories));
    }
    for device in &world.devices {
        prop_assert!(
            record.has_device(device),
            "{device} of {vm} is in no record"
        );
    }
    if !world.processes.is_empty() {
        prop_assert!(record.process().is_some(), "a process is in no record");
    }
    Ok(())
}

pub(super) fn lives(deeds: Vec<(Deed, Vec<Fault>)>) -> Result<(), TestCaseError> {
    let fake = Fake::default();
    let vm: VmName = "web".parse().unwrap();
    let mut daemon = Daemon::new(&fake, &vm);
    for (deed, faults) in deeds {
        let mut killed = false;
        match deed {
            Deed::Kill => killed = true,
            Deed::CrashUnseen => {
                fake.world().processes.clear();
                killed = true;
            }
            Deed::Silent(silent) => fake.world().silent = silent,
            Deed::Migrated(way) => {
                {
                    let mut world = fake.world();
                    let mut all = world.processes.iter_mut();
                    if let Some(one) = all.find(|one| one.migration == Account::UnderWay) {
                        let (account, away) = match way {
                            Way::Stays => (Account::Here, false),
                            Way::Moves => (Account::There, true),
                            Way::Unsettled { away } => (Account::Unsettled, away),
                            // It is paused, and has not noticed yet.
                            Way::Unsaid => (Account::Silent, true),
                        };
                        one.migration = account;
                        world.away = away;
                    }
                }
                fake.plan(faults);
                let done = catch_unwind(AssertUnwindSafe(|| daemon.does(deed)));
                fake.plan(Vec::new());
                if let Err(panic) = done {
                    if !panic.is::<Killed>() {
                        resume_unwind(panic);
                    }
                    killed = true;
                }
            }
            Deed::Reboot => {
                let mut world = fake.world();
                world.processes.clear();
                world.devices.clear();
                world.boot += 1;
                killed = true;
            }
            deed => {
                fake.plan(faults);
                let done = catch_unwind(AssertUnwindSafe(|| daemon.does(deed)));
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
            let settled = daemon.settles();
            holds(&fake, &vm)?;
            let once = fake.world().clone();
            let runs = once.processes.iter().any(|one| one.booted);
            if let Some(record) = &daemon.record {
                // Its devices are the desired ones.
                let wanted = devices_of(&vm, record);
                for one in once.processes.iter() {
                    prop_assert_eq!(&one.nics, &wanted);
                    prop_assert_eq!(&one.disks, &images_of(record));
                }
                let removed = record.removed_disks();
                prop_assert!(removed.is_empty(), "{removed:?} stay");
                let rest = (record.unwanted_nics(), record.left());
                prop_assert!(!runs || rest == (Vec::new(), Vec::new()), "{rest:?} stays");
                let stand_by = record.spec.nics().iter().filter(|nic| nic.is_made(true));
                let mut stand_by = stand_by.map(|nic| vm.stand_by(nic.id()));
                prop_assert!(
                    !runs || stand_by.all(|device| once.devices.contains(&device)),
                    "nothing stands by: {once:?}"
                );
            }
            prop_assert_eq!(settled == Settled::Running, runs);
            let here = |account| matches!(account, Account::None | Account::Here);
            let certain = !once.silent && once.processes.iter().all(|one| here(one.migration));
            if let Some(record) = daemon.record.as_ref().filter(|_| runs && certain) {
                prop_assert_eq!(&record.departure, &None, "the mark stays");
            }
            prop_assert_eq!(settled == Settled::None, fake.stored(&vm).is_none());
            // A second run changes nothing.
            let again = daemon.settles();
            prop_assert_eq!(again, settled);
            prop_assert_eq!(fake.world().clone(), once);
            if settled == Settled::ToStart
                && let Some(record) = &mut daemon.record
            {
                let life = Life {
                    host: &fake,
                    vm: &vm,
                };
                life.start(record).unwrap();
                prop_assert!(fake.world().processes.iter().all(|one| one.booted));
                holds(&fake, &vm)?;
            }
        }
        // A supervisor would do this now.
        if let Some(record) = daemon.record.as_mut().filter(|record| record.is_to_start()) {
            prop_assert!(
                !fake.world().away,
                "it would be started, and runs elsewhere: {record:?}"
            );
        }
    }
    // In the end everything can be deleted.
    if let Some(mut record) = fake.stored(&vm) {
        let life = Life {
            host: &fake,
            vm: &vm,
        };
        record.forget_former();
        life.delete(&mut record).unwrap();
    }
    prop_assert!(fake.stored(&vm).is_none());
    holds(&fake, &vm)
}

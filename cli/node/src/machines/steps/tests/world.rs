//! An in-memory host and store: their contents, and the call at which they fail or the daemon is
//! killed.
//!
//! Owns the state that a VM's steps change. It must not know the next action of a client, the guest
//! or the host.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::panic::resume_unwind;
use std::path::PathBuf;

use parking_lot::{Mutex, MutexGuard};

use super::*;

/// The fault at one call to the host or the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// No fault.
    None,
    /// The call fails without an effect.
    Fails,
    /// The call takes effect, and returns an error.
    FailsDone,
    /// The daemon is killed before the call takes effect.
    KilledBefore,
    /// The daemon is killed after the call took effect.
    KilledAfter,
}

/// A process of the VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Running {
    pub(super) identity: Identity,
    pub(super) booted: bool,
    /// Its report about its migration.
    pub(super) migration: Account,
    /// Its NICs, and their open devices.
    pub(super) nics: BTreeMap<String, String>,
    /// Its disks, and their images.
    pub(super) disks: BTreeMap<String, String>,
    /// The snapshot with which it began.
    pub(super) restored: Option<PathBuf>,
}

impl Running {
    /// Whether the guest runs in it.
    pub(super) fn has_guest(&self) -> bool {
        self.booted
            && matches!(
                self.migration,
                Account::None | Account::UnderWay | Account::Here
            )
    }
}

/// The device of a NIC.
pub(super) fn device_of(vm: &VmName, nic: &NicSpec) -> String {
    match nic.source() {
        NicSource::From(_) => vm.device(nic.id()),
        NicSource::There(ExistingDevice::Name(name)) => name.clone(),
        NicSource::There(ExistingDevice::Path(path)) => path.display().to_string(),
    }
}

/// All NICs and their current devices.
pub(super) fn devices_of(vm: &VmName, record: &Record) -> BTreeMap<String, String> {
    let nics = record.nics_now(vm);
    nics.map(|nic| (nic.id().to_string(), device_of(vm, &nic)))
        .collect()
}

/// All disks and their images.
pub(super) fn images_of(record: &Record) -> BTreeMap<String, String> {
    let disks = record.spec.machine().disks.iter();
    disks
        .map(|disk| (disk.id.clone().unwrap(), disk.path.display().to_string()))
        .collect()
}

/// The state of the host and the store.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct World {
    pub(super) directories: bool,
    pub(super) devices: BTreeSet<String>,
    pub(super) processes: Vec<Running>,
    /// The contents of the file.
    pub(super) stored: Option<String>,
    pub(super) boot: u32,
    pub(super) started: u32,
    /// The guest does not release the next NIC or disk on request.
    pub(super) stubborn: bool,
    /// The guest runs elsewhere.
    pub(super) away: bool,
    /// The next request to leave is refused.
    pub(super) refuses: bool,
    /// The process does not answer.
    pub(super) silent: bool,
    /// The report of a process that waits for the VM.
    pub(super) coming: Option<Coming>,
    /// The NICs that were announced to the network.
    pub(super) announced: Vec<String>,
    /// The number of cancellations sent to another node, and whether it has the VM.
    pub(super) withdrawn: u32,
    pub(super) there: bool,
}

#[derive(Debug, Default)]
pub(super) struct Fake {
    pub(super) world: Mutex<World>,
    /// The faults of the following calls, the next one last.
    pub(super) faults: Mutex<Vec<Fault>>,
}

/// The payload of a killed daemon: it leaves nothing.
pub(super) struct Killed;

fn broken() -> Error {
    Error::failed("cannot end the VM's process").because(io::Error::other("fault"))
}

impl Fake {
    pub(super) fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock()
    }

    pub(super) fn plan(&self, mut faults: Vec<Fault>) {
        faults.reverse();
        *self.faults.lock() = faults;
    }

    pub(super) fn call<T>(&self, work: impl FnOnce(&mut World) -> T) -> Result<T, Error> {
        let fault = self.faults.lock().pop();
        match fault.unwrap_or(Fault::None) {
            Fault::None => Ok(work(&mut self.world())),
            Fault::Fails => Err(broken()),
            Fault::FailsDone => {
                work(&mut self.world());
                Err(broken())
            }
            Fault::KilledBefore => resume_unwind(Box::new(Killed)),
            Fault::KilledAfter => {
                work(&mut self.world());
                resume_unwind(Box::new(Killed))
            }
        }
    }

    /// Whether a NIC's device exists. Devices that were not created for it always do.
    pub(super) fn is_there(&self, vm: &VmName, nic: &NicSpec) -> bool {
        let device = device_of(vm, nic);
        let made = device.starts_with(&format!("{vm}."));
        !made || self.world().devices.contains(&device)
    }

    /// The record as a starting daemon reads it: with the devices that have records of their own.
    pub(super) fn stored(&self, vm: &VmName) -> Option<Record> {
        let world = self.world();
        let mut record: Record = serde_json::from_str(world.stored.as_ref()?).unwrap();
        for device in &world.devices {
            let (_, nic) = device.split_once('.').unwrap();
            let id = nic.trim_end_matches('~').parse().unwrap();
            record.finds_device(vm, id, device);
        }
        Some(record)
    }
}

impl Host for Fake {
    fn keep(&self, _: &VmName, record: &Record) -> Result<(), Error> {
        let json = serde_json::to_string(record).unwrap();
        self.call(|world| world.stored = Some(json)).map_err(full)
    }

    fn forget(&self, _: &VmName) -> Result<(), Error> {
        self.call(|world| world.stored = None).map_err(full)
    }

    fn boot(&self) -> String {
        self.world().boot.to_string()
    }

    fn check(&self, _: &VmName, _: &VmSpec) -> Result<(), Error> {
        self.call(|_| ())
    }

    fn make_directories(&self, _: &VmName) -> Result<(), Error> {
        self.call(|world| world.directories = true)
    }

    fn remove_directories(&self, _: &VmName) -> Result<(), Error> {
        self.call(|world| world.directories = false)
    }

    fn make_nic(&self, vm: &VmName, nic: &NicSpec) -> Result<(), Error> {
        self.call(|world| {
            world.devices.insert(vm.device(nic.id()));
        })
    }

    fn make_stand_by(&self, vm: &VmName, nic: &NicSpec) -> Result<(), Error> {
        self.call(|world| {
            world.devices.insert(vm.stand_by(nic.id()));
        })
    }

    fn remove_nic(&self, _: &VmName, device: &str) -> Result<(), Error> {
        // The kernel waits without a limit for the process that has it open.
        let used = self
            .world()
            .processes
            .iter()
            .any(|one| one.nics.values().any(|open| open == device));
        assert!(!used, "a device in use is removed");
        self.call(|world| {
            world.devices.remove(device);
        })
    }

    fn start_process(&self, _: &VmName) -> Result<Identity, Error> {
        self.call(|world| {
            world.started += 1;
            let identity = Identity {
                pid: world.started,
                start_time: 7,
            };
            world.processes.push(Running {
                identity,
                booted: false,
                migration: Account::None,
                nics: BTreeMap::new(),
                disks: BTreeMap::new(),
                restored: None,
            });
            identity
        })
    }

    fn end_process(&self, _: &VmName, _: Option<Identity>) -> Result<(), Error> {
        self.call(|world| world.processes.clear())
    }

    fn boot_machine(&self, vm: &VmName, identity: Identity, record: &Record) -> Result<(), Error> {
        for nic in record.nics_now(vm) {
            assert!(self.is_there(vm, &nic), "started without a NIC");
        }
        self.call(|world| {
            let mut all = world.processes.iter_mut();
            let started = all.find(|one| one.identity == identity).unwrap();
            started.booted = true;
            started.nics = devices_of(vm, record);
            started.disks = images_of(record);
            started.restored.clone_from(&record.restore_from);
        })
    }

    fn plug(&self, vm: &VmName, nic: &NicSpec) -> Result<(), Error> {
        assert!(self.is_there(vm, nic), "plugged before its creation");
        self.call(|world| {
            for one in &mut world.processes {
                let there = one.nics.entry(nic.id().to_string());
                there.or_insert_with(|| device_of(vm, nic));
            }
        })
    }

    fn swap(&self, vm: &VmName, nic: &NicSpec) -> Result<(), Error> {
        assert!(self.is_there(vm, nic), "moved to a missing device");
        self.call(|world| {
            for one in &mut world.processes {
                if let Some(device) = one.nics.get_mut(nic.id().as_str()) {
                    *device = device_of(vm, nic);
                }
            }
        })
    }

    fn is_on(&self, vm: &VmName, nic: &NicSpec) -> bool {
        let world = self.world();
        let mut there = world
            .processes
            .iter()
            .map(|one| one.nics.get(nic.id().as_str()));
        there.any(|device| device == Some(&device_of(vm, nic)))
    }

    fn unplug(&self, _: &VmName, nic: &NicId) -> Result<bool, Error> {
        self.call(|world| {
            let stubborn = std::mem::take(&mut world.stubborn);
            if !stubborn {
                for one in &mut world.processes {
                    one.nics.remove(nic.as_str());
                }
            }
            !stubborn
        })
    }

    fn plug_disk(&self, _: &VmName, id: &DeviceId, disk: &DiskConfig) -> Result<(), Error> {
        self.call(|world| {
            for one in &mut world.processes {
                let image = disk.path.display().to_string();
                one.disks.insert(id.to_string(), image);
            }
        })
    }

    fn unplug_disk(&self, _: &VmName, id: &DeviceId) -> Result<bool, Error> {
        self.call(|world| {
            let stubborn = std::mem::take(&mut world.stubborn);
            if !stubborn {
                for one in &mut world.processes {
                    one.disks.remove(id.as_str());
                }
            }
            !stubborn
        })
    }

    fn announce(&self, _: &VmName, nics: &[NicSpec]) {
        let ids = nics.iter().map(|nic| nic.id().to_string());
        self.world().announced.extend(ids);
    }

    fn press_button(&self, _: &VmName) -> Result<(), Error> {
        self.call(|_| ())
    }

    fn send(&self, _: &VmName, _: &SendRequest) -> Result<Passed, Error> {
        self.call(|world| {
            let refuses = std::mem::take(&mut world.refuses);
            let sent = world
                .processes
                .iter_mut()
                .find(|one| one.has_guest() && one.migration != Account::UnderWay);
            let status = match sent {
                Some(one) if !refuses => {
                    one.migration = Account::UnderWay;
                    StatusCode::ACCEPTED
                }
                _ => StatusCode::CONFLICT,
            };
            Passed {
                status,
                body: Bytes::new(),
            }
        })
    }

    fn migration(&self, _: &VmName, identity: Identity) -> Account {
        let world = self.world();
        let one = world.processes.iter().find(|one| one.identity == identity);
        one.filter(|_| !world.silent)
            .map_or(Account::Silent, |one| one.migration)
    }

    fn await_machine(&self, vm: &VmName, identity: Identity, record: &Record) -> Result<(), Error> {
        assert!(record.arrival.is_some());
        self.call(|world| {
            world.coming = Some(Coming::UnderWay);
            let mut all = world.processes.iter_mut();
            let waits = all.find(|one| one.identity == identity).unwrap();
            waits.nics = devices_of(vm, record);
        })
    }

    fn coming(&self, _: &VmName, _: Identity) -> Coming {
        self.world().coming.unwrap_or(Coming::Silent)
    }

    fn call_off(&self, _: &VmName, _: Identity) -> Result<bool, Error> {
        self.call(|world| {
            let gone = world.coming != Some(Coming::Arrived);
            if gone {
                world.processes.clear();
            }
            gone
        })
    }

    fn withdraw(&self, _: &VmName, _: &Peer) {
        self.world().withdrawn += 1;
    }

    fn is_at(&self, _: &VmName, _: &Peer) -> bool {
        self.world().there
    }

    fn look(&self, _: &VmName, identity: Option<Identity>) -> Found {
        let world = self.world();
        let found = world.processes.iter().find(|one| match identity {
            Some(identity) => one.identity == identity,
            None => true,
        });
        match found {
            None => Found::Gone,
            Some(_) if identity.is_none() => Found::Unknown,
            Some(running) if running.booted && world.silent => Found::Unknown,
            Some(running) if running.booted => Found::Runs,
            Some(_) => Found::NotBooted,
        }
    }
}

fn full(_: Error) -> Error {
    let full = io::Error::from(io::ErrorKind::StorageFull);
    Error::failed("cannot use node.redb").because(full)
}

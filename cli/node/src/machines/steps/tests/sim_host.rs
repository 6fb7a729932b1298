//! An in-memory host and store: their contents, and the call at which they fail or the daemon is
//! killed.
//!
//! Owns the state that a VM's steps change. It must not know the next action of a client, the guest
//! or the host.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};

use parking_lot::{Mutex, MutexGuard};
use vdpa_mgmt::pci::Address;

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
    pub(super) migration: MigrationReport,
    /// Its NICs, and their open devices.
    pub(super) nics: BTreeMap<String, String>,
    /// Its disks, and their images.
    pub(super) disks: BTreeMap<String, String>,
    /// The images in its sandbox.
    pub(super) images: BTreeSet<String>,
    /// Its functions by VFIO.
    pub(super) functions: BTreeSet<Address>,
    /// The snapshot with which it began.
    pub(super) restored: Option<PathBuf>,
}

impl Running {
    /// Whether the guest runs in it.
    pub(super) fn has_guest(&self) -> bool {
        self.booted
            && matches!(
                self.migration,
                MigrationReport::None | MigrationReport::UnderWay | MigrationReport::Here
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
pub(super) struct SimHost {
    pub(super) directories: bool,
    pub(super) devices: BTreeSet<String>,
    /// Functions that are bound to vfio-pci.
    pub(super) bound: BTreeSet<Address>,
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
    pub(super) incoming_report: Option<IncomingReport>,
    /// The NICs that were announced to the network.
    pub(super) announced: Vec<String>,
    /// The number of cancellations sent to another node, and whether it has the VM.
    pub(super) withdrawn: u32,
    pub(super) there: bool,
}

#[derive(Debug, Default)]
pub(super) struct Fake {
    pub(super) sim_host: Mutex<SimHost>,
    /// The faults of the following calls, the next one last.
    pub(super) faults: Mutex<Vec<Fault>>,
}

/// The payload of a killed daemon: it leaves nothing.
pub(super) struct Killed;

fn broken() -> Error {
    Error::failed("cannot end the VM's process").because(io::Error::other("fault"))
}

impl Fake {
    pub(super) fn sim_host(&self) -> MutexGuard<'_, SimHost> {
        self.sim_host.lock()
    }

    pub(super) fn plan(&self, mut faults: Vec<Fault>) {
        faults.reverse();
        *self.faults.lock() = faults;
    }

    pub(super) fn call<T>(&self, work: impl FnOnce(&mut SimHost) -> T) -> Result<T, Error> {
        let fault = self.faults.lock().pop();
        match fault.unwrap_or(Fault::None) {
            Fault::None => Ok(work(&mut self.sim_host())),
            Fault::Fails => Err(broken()),
            Fault::FailsDone => {
                work(&mut self.sim_host());
                Err(broken())
            }
            Fault::KilledBefore => resume_unwind(Box::new(Killed)),
            Fault::KilledAfter => {
                work(&mut self.sim_host());
                resume_unwind(Box::new(Killed))
            }
        }
    }

    /// Whether a NIC's device exists. Devices that were not created for it always do.
    pub(super) fn is_there(&self, vm: &VmName, nic: &NicSpec) -> bool {
        let device = device_of(vm, nic);
        let made = device.starts_with(&format!("{vm}."));
        !made || self.sim_host().devices.contains(&device)
    }

    /// The record as a starting daemon reads it: with the devices that have records of their own.
    pub(super) fn stored(&self, vm: &VmName) -> Option<Record> {
        let sim_host = self.sim_host();
        let mut record: Record = serde_json::from_str(sim_host.stored.as_ref()?).unwrap();
        for device in &sim_host.devices {
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
        self.call(|sim_host| sim_host.stored = Some(json))
            .map_err(full)
    }

    fn forget(&self, _: &VmName) -> Result<(), Error> {
        self.call(|sim_host| sim_host.stored = None).map_err(full)
    }

    fn boot(&self) -> String {
        self.sim_host().boot.to_string()
    }

    fn check(&self, _: &VmName, _: &VmSpec) -> Result<(), Error> {
        self.call(|_| ())
    }

    fn make_directories(&self, _: &VmName) -> Result<(), Error> {
        self.call(|sim_host| sim_host.directories = true)
    }

    fn remove_directories(&self, _: &VmName) -> Result<(), Error> {
        self.call(|sim_host| sim_host.directories = false)
    }

    fn make_nic(&self, vm: &VmName, nic: &NicSpec) -> Result<(), Error> {
        self.call(|sim_host| {
            sim_host.devices.insert(vm.device(nic.id()));
        })
    }

    fn make_backup(&self, vm: &VmName, nic: &NicSpec) -> Result<(), Error> {
        self.call(|sim_host| {
            sim_host.devices.insert(vm.backup(nic.id()));
        })
    }

    fn remove_nic(&self, _: &VmName, device: &str) -> Result<(), Error> {
        // The kernel waits without a limit for the process that has it open.
        let used = self
            .sim_host()
            .processes
            .iter()
            .any(|one| one.nics.values().any(|open| open == device));
        assert!(!used, "a device in use is removed");
        self.call(|sim_host| {
            sim_host.devices.remove(device);
        })
    }

    fn check_function(&self, function: &VfioConfig) -> Result<Option<FormerDriver>, Error> {
        let function = function.host().unwrap().parse().unwrap();
        self.call(|sim_host| {
            (!sim_host.bound.contains(&function)).then(|| FormerDriver {
                function,
                driver: Some("nic".to_owned()),
                driver_override: None,
            })
        })
    }

    fn bind_function(&self, former: &FormerDriver) -> Result<(), Error> {
        self.call(|sim_host| {
            sim_host.bound.insert(former.function);
        })
    }

    fn has_function(&self, _: &VmName, function: &VfioConfig) -> Result<bool, Error> {
        let function = function.host().unwrap().parse().unwrap();
        self.call(|sim_host| {
            let mut all = sim_host.processes.iter();
            all.any(|one| one.functions.contains(&function))
        })
    }

    fn plug_function(&self, _: &VmName, function: &VfioConfig) -> Result<(), Error> {
        let function: Address = function.host().unwrap().parse().unwrap();
        assert!(self.sim_host().bound.contains(&function), "not bound");
        self.call(|sim_host| {
            for one in &mut sim_host.processes {
                one.functions.insert(function);
            }
        })
    }

    fn unplug_function(&self, _: &VmName, id: &DeviceId) -> Result<bool, Error> {
        let function = id.as_str().parse().unwrap();
        self.call(|sim_host| {
            let stubborn = std::mem::take(&mut sim_host.stubborn);
            if !stubborn {
                for one in &mut sim_host.processes {
                    one.functions.remove(&function);
                }
            }
            !stubborn
        })
    }

    fn release_function(&self, _: &VmName, former: &FormerDriver) -> Result<(), Error> {
        // The kernel waits without a limit for the process that has it open.
        let sim_host = self.sim_host().clone();
        let mut used = sim_host.processes.iter().flat_map(|one| &one.functions);
        assert!(used.all(|one| *one != former.function), "it is in use");
        self.call(|sim_host| {
            sim_host.bound.remove(&former.function);
        })
    }

    fn is_gone(&self, device: &str) -> bool {
        !self.sim_host().devices.contains(device)
    }

    fn start_process(&self, _: &VmName, _: &Record) -> Result<Identity, Error> {
        self.call(|sim_host| {
            sim_host.started += 1;
            let identity = Identity {
                pid: sim_host.started,
                start_time: 7,
            };
            sim_host.processes.push(Running {
                identity,
                booted: false,
                migration: MigrationReport::None,
                nics: BTreeMap::new(),
                disks: BTreeMap::new(),
                images: BTreeSet::new(),
                functions: BTreeSet::new(),
                restored: None,
            });
            identity
        })
    }

    fn end_process(&self, _: &VmName, _: Option<Identity>) -> Result<(), Error> {
        self.call(|sim_host| sim_host.processes.clear())
    }

    fn boot_machine(&self, vm: &VmName, identity: Identity, record: &Record) -> Result<(), Error> {
        for nic in record.nics_now(vm) {
            assert!(self.is_there(vm, &nic), "started without a NIC");
        }
        self.call(|sim_host| {
            let mut all = sim_host.processes.iter_mut();
            let started = all.find(|one| one.identity == identity).unwrap();
            started.booted = true;
            started.nics = devices_of(vm, record);
            started.disks = images_of(record);
            started.images = started.disks.values().cloned().collect();
            started.functions = record.spec.functions().collect();
            assert!(started.functions.is_subset(&sim_host.bound), "not bound");
            started.restored.clone_from(&record.restore_from);
        })
    }

    fn plug(&self, vm: &VmName, nic: &NicSpec) -> Result<(), Error> {
        assert!(self.is_there(vm, nic), "plugged before its creation");
        self.call(|sim_host| {
            for one in &mut sim_host.processes {
                let there = one.nics.entry(nic.id().to_string());
                there.or_insert_with(|| device_of(vm, nic));
            }
        })
    }

    fn swap(&self, vm: &VmName, nic: &NicSpec) -> Result<(), Error> {
        assert!(self.is_there(vm, nic), "moved to a missing device");
        self.call(|sim_host| {
            for one in &mut sim_host.processes {
                if let Some(device) = one.nics.get_mut(nic.id().as_str()) {
                    *device = device_of(vm, nic);
                }
            }
        })
    }

    fn is_on(&self, vm: &VmName, nic: &NicSpec) -> bool {
        let sim_host = self.sim_host();
        let mut there = sim_host
            .processes
            .iter()
            .map(|one| one.nics.get(nic.id().as_str()));
        there.any(|device| device == Some(&device_of(vm, nic)))
    }

    fn unplug(&self, _: &VmName, nic: &NicId) -> Result<bool, Error> {
        self.call(|sim_host| {
            let stubborn = std::mem::take(&mut sim_host.stubborn);
            if !stubborn {
                for one in &mut sim_host.processes {
                    one.nics.remove(nic.as_str());
                }
            }
            !stubborn
        })
    }

    fn plug_disk(&self, _: &VmName, id: &DeviceId, disk: &DiskConfig) -> Result<(), Error> {
        self.call(|sim_host| {
            for one in &mut sim_host.processes {
                let image = disk.path.display().to_string();
                one.images.insert(image.clone());
                one.disks.insert(id.to_string(), image);
            }
        })
    }

    fn unplug_disk(&self, _: &VmName, id: &DeviceId, image: Option<&Path>) -> Result<bool, Error> {
        let image = image.map(|image| image.display().to_string());
        self.call(|sim_host| {
            let stubborn = std::mem::take(&mut sim_host.stubborn);
            if !stubborn {
                for one in &mut sim_host.processes {
                    one.disks.remove(id.as_str());
                    one.images.retain(|shown| Some(shown) != image.as_ref());
                }
            }
            !stubborn
        })
    }

    fn announce(&self, _: &VmName, nics: &[NicSpec]) {
        let ids = nics.iter().map(|nic| nic.id().to_string());
        self.sim_host().announced.extend(ids);
    }

    fn press_button(&self, _: &VmName) -> Result<(), Error> {
        self.call(|_| ())
    }

    fn send(&self, _: &VmName, _: &SendRequest) -> Result<ProxiedResponse, Error> {
        self.call(|sim_host| {
            let refuses = std::mem::take(&mut sim_host.refuses);
            let sent = sim_host
                .processes
                .iter_mut()
                .find(|one| one.has_guest() && one.migration != MigrationReport::UnderWay);
            let status = match sent {
                Some(one) if !refuses => {
                    one.migration = MigrationReport::UnderWay;
                    StatusCode::ACCEPTED
                }
                _ => StatusCode::CONFLICT,
            };
            ProxiedResponse {
                status,
                body: Bytes::new(),
            }
        })
    }

    fn migration(&self, _: &VmName, identity: Identity) -> MigrationReport {
        let sim_host = self.sim_host();
        let one = sim_host
            .processes
            .iter()
            .find(|one| one.identity == identity);
        one.filter(|_| !sim_host.silent)
            .map_or(MigrationReport::Silent, |one| one.migration)
    }

    fn await_machine(&self, vm: &VmName, identity: Identity, record: &Record) -> Result<(), Error> {
        assert!(record.incoming.is_some());
        self.call(|sim_host| {
            sim_host.incoming_report = Some(IncomingReport::UnderWay);
            let mut all = sim_host.processes.iter_mut();
            let waits = all.find(|one| one.identity == identity).unwrap();
            waits.nics = devices_of(vm, record);
        })
    }

    fn incoming_report(&self, _: &VmName, _: Identity) -> IncomingReport {
        self.sim_host()
            .incoming_report
            .unwrap_or(IncomingReport::Silent)
    }

    fn cancel_incoming(&self, _: &VmName, _: Identity) -> Result<bool, Error> {
        self.call(|sim_host| {
            let gone = sim_host.incoming_report != Some(IncomingReport::Arrived);
            if gone {
                sim_host.processes.clear();
            }
            gone
        })
    }

    fn withdraw(&self, _: &VmName, _: &Peer) {
        self.sim_host().withdrawn += 1;
    }

    fn is_at(&self, _: &VmName, _: &Peer) -> bool {
        self.sim_host().there
    }

    fn look(&self, _: &VmName, identity: Option<Identity>) -> ProcessState {
        let sim_host = self.sim_host();
        let found = sim_host.processes.iter().find(|one| match identity {
            Some(identity) => one.identity == identity,
            None => true,
        });
        match found {
            None => ProcessState::Gone,
            Some(_) if identity.is_none() => ProcessState::Unknown,
            Some(running) if running.booted && sim_host.silent => ProcessState::Unknown,
            Some(running) if running.booted => ProcessState::Runs,
            Some(_) => ProcessState::NotBooted,
        }
    }
}

fn full(_: Error) -> Error {
    let full = io::Error::from(io::ErrorKind::StorageFull);
    Error::failed("cannot use node.redb").because(full)
}

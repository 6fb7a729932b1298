//! The virtual machines of this node: one process each, which outlives the daemon.
//!
//! ```text
//!   endpoints ──> Machines ── a slot for each name, a lock for its steps ──> Life (steps in order)
//!                    │  ^                                                        │
//!                    │  └── Host: records, devices, processes <──────────────────┘
//!                    │ supervisor: a task for each process
//!                    └── pidfd, GET /v1/vm/watch <── process "bellhop run"
//! ```
//! The life of one machine:
//!
//! ```text
//!   (none) ── Creating ──────────────> Present ───────────── Deleting ──> (none)
//!                │ a step fails, or a     │ ^                   ^
//!                │ daemon finds it so     │ │                   │
//!                └──> undone ──> (none)   │ └─ started again <──┤ DELETE
//!                                         v    by its policy    │
//!                     process ended: why? ┴───> stopped ────────┘
//! ```
//! A machine that was sent elsewhere is marked so in its record until it says that its guest is here; without a process it is
//! started by nobody then, until somebody says where the guest is ([`departure`]). One that is to come from another node is Present, too,
//! and marked until its guest is here ([`arrival`]); what two nodes do for that is in [`pairing`]. Where a guest is then that cannot say it
//! itself this host says ([`announce`]).
//!
//! A daemon that starts reads the store, looks what there is ([`steps::Life::settle`]), adopts processes that run,
//! undoes what was half made, starts what should run, and takes back what belongs to no machine of its own. It touches
//! nothing that is not marked as its own.
//!
//! Steps wait for the kernel and for other processes, so they are done on worker threads, to their end also if the
//! client goes. Owns which machines there are. It must not know HTTP's side of a request.

mod announce;
pub(crate) mod arrival;
mod change;
pub(crate) mod condition;
pub(crate) mod departure;
pub(crate) mod error;
mod failing;
pub(crate) mod health;
pub(crate) mod host;
pub(crate) mod observer;
pub(crate) mod operations;
pub(crate) mod pairing;
pub(crate) mod process;
pub(crate) mod record;
mod requests;
mod settle;
mod slot;
pub(crate) mod spec;
mod spec_patch;
pub(crate) mod steps;
pub(crate) mod stop;
mod supervisor;
pub(crate) mod vmm;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ::vmm::api::API_LEVEL;
use ::vmm::config::DiskConfig;
use bellhop_api::machine::{MigrationStatus, WantedState};
use parking_lot::{Mutex, MutexGuard};
use tokio::runtime::Handle;

pub(crate) use self::change::{Change, Put, Removed};
use self::condition::Condition;
use self::departure::Account;
use self::error::{no_vm, not_running, unfinished};
use self::health::InError;
use self::observer::StepObserver;
use self::operations::{Operations, Requested, Sent};
use self::process::Identity;
use self::record::Record;
use self::slot::Slot;
pub(crate) use self::slot::View;
use self::spec::{DeviceId, ExistingDevice, NicId, NicSpec, VmName, VmSpec, owned_by};
use self::steps::{Life, SendRequest};
use self::vmm::Vmm;
use super::error::Error;
use super::paths::Paths;
use super::peers::Peers;
use super::store::{Store, VMS};

/// Whether this daemon can talk to a process with this level of the API: its own, and the one before.
pub(crate) fn speaks(level: u32) -> bool {
    level == API_LEVEL || level.checked_add(1) == Some(API_LEVEL)
}

/// Hears what becomes of machines.
pub(crate) type Listener = Arc<dyn Fn(&VmName, Change) + Send + Sync>;

/// The virtual machines of this node, and the host that they run on.
pub(crate) struct Machines {
    paths: Paths,
    store: Store,
    /// Long work, and how it ended.
    pub(crate) operations: Operations,
    /// Which boot of the host this is.
    boot: String,
    /// What a machine's process logs at.
    log_level: String,
    observer: Option<StepObserver>,
    /// Other nodes.
    peers: Peers,
    /// Where requests to machines are waited for.
    runtime: Handle,
    listener: Listener,
    slots: Mutex<BTreeMap<VmName, Arc<Slot>>>,
    /// Held while it is looked whether a device is another machine's.
    reserving: Mutex<()>,
    /// One NIC at a time: so that machines wait for each other here, and not with
    /// limited patience for the records' lock.
    nics: Mutex<()>,
    ending: AtomicBool,
    /// Reporters of devlink that are in error.
    in_error: Mutex<InError>,
}

impl std::fmt::Debug for Machines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Machines")
            .field("slots", &self.slots)
            .finish_non_exhaustive()
    }
}

impl Machines {
    fn slots(&self) -> MutexGuard<'_, BTreeMap<VmName, Arc<Slot>>> {
        self.slots.lock()
    }

    fn tell(&self, vm: &VmName, change: Change) {
        (self.listener)(vm, change);
    }

    /// The life of a machine. The caller holds its lock.
    fn life<'a>(&'a self, slot: &'a Slot) -> Life<'a> {
        Life {
            host: self,
            vm: slot.name(),
        }
    }

    /// What owns the character devices that a NIC has: its own, and the one that stands by.
    fn devices_of(&self, vm: &VmName, nic: &NicSpec) -> impl Iterator<Item = PathBuf> {
        let stand_by = nic.on_stand_by(vm);
        let stand_by = stand_by.map(|nic| self.device_of(vm, &nic));
        std::iter::once(self.device_of(vm, nic)).chain(stand_by)
    }

    /// Fails if a device that `spec` names is another machine's, or is there twice. From now on it is this one's,
    /// until `pending` is taken away.
    fn reserve(&self, slot: &Slot, spec: &VmSpec) -> Result<(), Error> {
        let _one = self.reserving.lock();
        let mut taken: Vec<(PathBuf, VmName)> = Vec::new();
        let others: Vec<Arc<Slot>> = self.slots().values().cloned().collect();
        for other in others.iter().filter(|other| other.name() != slot.name()) {
            let view = other.view().clone();
            let specs = view.record.iter().flat_map(Record::specs);
            for nic in specs.chain(&view.pending).flat_map(VmSpec::nics) {
                for device in self.devices_of(other.name(), nic) {
                    taken.push((device, other.name().clone()));
                }
            }
        }
        let wanted = spec.nics().iter();
        for device in wanted.flat_map(|nic| self.devices_of(slot.name(), nic)) {
            if let Some((device, by)) = taken.iter().find(|(taken, _)| *taken == device) {
                let message = format!(
                    "{} is a NIC of the virtual machine {by} already: a device is for one machine",
                    device.display()
                );
                return Err(Error::conflict("device_taken", message));
            }
            taken.push((device, slot.name().clone()));
        }
        slot.view().pending = Some(spec.clone());
        Ok(())
    }

    /// All machines that the store tells of. Nothing is done about them yet: see [`Self::settle`].
    ///
    /// # Errors
    /// A record that cannot be read: then nothing was touched.
    pub(crate) fn open(
        store: Store,
        paths: Paths,
        boot: String,
        log_level: String,
        observer: Option<StepObserver>,
        peers: Peers,
        listener: Listener,
    ) -> Result<Arc<Self>, Error> {
        let mut slots = BTreeMap::new();
        for (name, record) in store.all::<Record>(VMS)? {
            let Ok(name) = name.parse::<VmName>() else {
                tracing::error!(name, "a record of no machine's name is left alone");
                continue;
            };
            slots.insert(name.clone(), Arc::new(Slot::new(name, Some(record))));
        }
        let operations = Operations::read(&store)?;
        let machines = Self {
            paths,
            store,
            operations,
            boot,
            log_level,
            observer,
            peers,
            runtime: Handle::current(),
            listener,
            slots: Mutex::new(slots),
            reserving: Mutex::default(),
            nics: Mutex::default(),
            ending: AtomicBool::new(false),
            in_error: Mutex::default(),
        };
        for (device, nic) in machines.made_nics() {
            let owner = nic.owner().and_then(owned_by);
            if let Some((vm, id)) = owner
                && let Ok(slot) = machines.find(&vm)
                && let Some(record) = &mut slot.view().record
            {
                record.finds_device(&vm, id, &device);
            }
        }
        machines.end_interrupted();
        Ok(Arc::new(machines))
    }

    /// From now on nothing new is begun. Machines go on.
    pub(crate) fn end(&self) {
        self.ending.store(true, Ordering::SeqCst);
    }

    /// Does something under a machine's lock, on a worker thread, to its end.
    async fn locked<T: Send + 'static>(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        work: impl FnOnce(&Self, &Slot) -> T + Send + 'static,
    ) -> Result<T, Error> {
        let guard = slot.steps.clone().lock_owned().await;
        if self.ending.load(Ordering::SeqCst) {
            return Err(Error::unavailable("ending", "this daemon ends"));
        }
        let (machines, slot) = (self.clone(), slot.clone());
        let done = tokio::task::spawn_blocking(move || {
            let _guard = guard;
            work(&machines, &slot)
        });
        done.await.map_err(unfinished)
    }

    /// Does what a request asks for, under a machine's lock. Watches the process that was started for that, and gives
    /// the place back if it is empty then.
    async fn request<T: Send + 'static>(
        self: &Arc<Self>,
        slot: Arc<Slot>,
        work: impl FnOnce(&Self, &Slot) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let done = self.locked(&slot, |machines, slot| {
            let done = work(machines, slot);
            slot.view().pending = None;
            done
        });
        let done = done.await;
        if let Ok(Ok(_)) = &done {
            self.supervise(&slot);
        }
        self.tidy(&slot);
        done?
    }

    fn find(&self, vm: &VmName) -> Result<Arc<Slot>, Error> {
        let slot = self.slots().get(vm).cloned();
        slot.filter(|slot| slot.view().record.is_some())
            .ok_or_else(|| no_vm(vm))
    }

    /// The place of a name, empty if there is no such machine.
    fn place(&self, vm: &VmName) -> Arc<Slot> {
        let mut slots = self.slots();
        let slot = slots
            .entry(vm.clone())
            .or_insert_with(|| Arc::new(Slot::new(vm.clone(), None)));
        slot.clone()
    }

    /// Gives an empty place back, unless somebody else waits for it.
    fn tidy(&self, slot: &Arc<Slot>) {
        let mut slots = self.slots();
        // The map's and the caller's: nobody gets another one but under this lock.
        const NOBODY_ELSE: usize = 2;
        if Arc::strong_count(slot) <= NOBODY_ELSE && slot.view().record.is_none() {
            slots.remove(slot.name());
        }
    }

    /// All machines, by name.
    pub(crate) fn list(&self) -> Vec<(VmName, View)> {
        let slots: Vec<Arc<Slot>> = self.slots().values().cloned().collect();
        let views = slots.iter().map(|slot| {
            let view = slot.view().clone();
            (slot.name().clone(), view)
        });
        views.filter(|(_, view)| view.record.is_some()).collect()
    }

    /// One machine.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn show(&self, vm: &VmName) -> Result<View, Error> {
        Ok(self.find(vm)?.view().clone())
    }

    /// As [`Self::request`], if the condition holds once the lock is held.
    async fn request_if<T: Send + 'static>(
        self: &Arc<Self>,
        slot: Arc<Slot>,
        condition: Condition,
        work: impl FnOnce(&Self, &Slot) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        self.request(slot, move |machines, slot| {
            condition.check(slot.name(), slot.record().as_ref())?;
            work(machines, slot)
        })
        .await
    }

    /// Makes a machine, or has the one that is there be like this.
    ///
    /// # Errors
    /// What was begun is undone then.
    pub(crate) async fn put(
        self: &Arc<Self>,
        vm: &VmName,
        condition: Condition,
        spec: VmSpec,
    ) -> Result<Put, Error> {
        spec.check(vm)?;
        let work = |machines: &Self, slot: &Slot| machines.put_now(slot, spec);
        self.request_if(self.place(vm), condition, work).await
    }

    /// Tells a machine what to do.
    pub(crate) async fn change(
        self: &Arc<Self>,
        vm: &VmName,
        condition: Condition,
        wanted: WantedState,
    ) -> Result<(), Error> {
        let work = move |machines: &Self, slot: &Slot| machines.change_now(slot, wanted);
        self.request_if(self.find(vm)?, condition, work).await
    }

    /// Takes a machine away with all that was made for it.
    ///
    /// # Errors
    /// It runs, and this is not forced. What could not be undone can be tried again.
    pub(crate) async fn delete(
        self: &Arc<Self>,
        vm: &VmName,
        condition: Condition,
        force: bool,
    ) -> Result<(), Error> {
        let work = move |machines: &Self, slot: &Slot| machines.delete_now(slot, force);
        self.request_if(self.find(vm)?, condition, work).await
    }

    /// Gives a machine a NIC.
    ///
    /// # Errors
    /// What was begun is undone then.
    pub(crate) async fn add_nic(self: &Arc<Self>, vm: &VmName, nic: NicSpec) -> Result<Put, Error> {
        let work = move |machines: &Self, slot: &Slot| machines.add_nic_now(slot, &nic);
        self.request(self.find(vm)?, work).await
    }

    /// Moves a NIC of a machine to another device.
    ///
    /// # Errors
    /// The NIC stays where it was then.
    pub(crate) async fn swap_nic(
        self: &Arc<Self>,
        vm: &VmName,
        id: &NicId,
        device: ExistingDevice,
    ) -> Result<(), Error> {
        let id = id.clone();
        let work = move |machines: &Self, slot: &Slot| machines.swap_nic_now(slot, &id, device);
        self.request(self.find(vm)?, work).await
    }

    /// Takes a NIC away from a machine.
    pub(crate) async fn remove_nic(
        self: &Arc<Self>,
        vm: &VmName,
        id: &NicId,
    ) -> Result<Removed, Error> {
        let id = id.clone();
        let work = move |machines: &Self, slot: &Slot| machines.remove_nic_now(slot, &id);
        self.request(self.find(vm)?, work).await
    }

    /// Gives a machine a disk, which has the name `id`.
    ///
    /// # Errors
    /// The machine is as before then.
    pub(crate) async fn add_disk(
        self: &Arc<Self>,
        vm: &VmName,
        id: &DeviceId,
        disk: DiskConfig,
    ) -> Result<Put, Error> {
        let id = id.clone();
        let work = move |machines: &Self, slot: &Slot| machines.add_disk_now(slot, &id, &disk);
        self.request(self.find(vm)?, work).await
    }

    /// Takes a disk away from a machine.
    pub(crate) async fn remove_disk(
        self: &Arc<Self>,
        vm: &VmName,
        id: &DeviceId,
    ) -> Result<Removed, Error> {
        let id = id.clone();
        let work = move |machines: &Self, slot: &Slot| machines.remove_disk_now(slot, &id);
        self.request(self.find(vm)?, work).await
    }

    /// Has a running machine leave for another process. From before it is asked until it says that its guest is here, nobody
    /// starts it again. A refusal is the machine's, whatever it is.
    pub(crate) async fn send(
        self: &Arc<Self>,
        vm: &VmName,
        request: SendRequest,
        by: Requested,
    ) -> Result<Sent, Error> {
        self.request(self.find(vm)?, move |machines, slot| {
            machines.send_as_operation(slot, by, || machines.send_now(slot, &request))
        })
        .await
    }

    /// The process of a machine.
    pub(crate) fn process_of(&self, vm: &VmName) -> Option<Identity> {
        self.find(vm).ok()?.record()?.process()?.0
    }

    /// A client is about to read how a machine's migration goes, by the account of this process.
    pub(crate) async fn hears_migration(
        self: &Arc<Self>,
        vm: &VmName,
        process: Option<Identity>,
        status: MigrationStatus,
    ) {
        let Ok(slot) = self.find(vm) else {
            return;
        };
        match Account::from(&status) {
            // It is asked again, so that an answer to an earlier request is not taken for one to a later.
            Account::Here => slot.migration.notify_one(),
            Account::There => {
                // It ends now, and this may have been its last word.
                let noted = self.locked(&slot, move |machines, slot| {
                    machines.hears_moved(slot, process, &status);
                });
                if let Err(error) = noted.await {
                    tracing::debug!(%vm, %error, "that it has moved is not noted");
                }
            }
            Account::None | Account::UnderWay | Account::Unsettled | Account::Silent => {}
        }
    }

    /// A machine's own API.
    ///
    /// # Errors
    /// There is no such machine, it does not run, or it speaks another level.
    pub(crate) fn vmm(&self, vm: &VmName) -> Result<Vmm, Error> {
        let slot = self.find(vm)?;
        let view = slot.view().clone();
        let running = view.record.as_ref().and_then(Record::process).is_some();
        match view.live {
            _ if !running => Err(not_running(vm)),
            Some(live) => self.check_level(vm, &live),
            None => Ok(()),
        }?;
        Ok(self.api_of(vm))
    }
}

//! The virtual machines of this node: one process each, which outlives the daemon.
//!
//! ```text
//!   endpoints ──> Machines ── a slot for each name, a lock for its steps ──> Life (steps in order)
//!                    │                                                          │        │
//!                    │ supervisor: a task for each process                      v        v
//!                    └── pidfd, GET /v1/vm/watch <── process "bellhop run"     Keep     Host
//!                                                                             (store)  (this host)
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
pub(crate) mod departure;
pub(crate) mod error;
mod failing;
pub(crate) mod health;
pub(crate) mod host;
pub(crate) mod observer;
pub(crate) mod pairing;
pub(crate) mod process;
pub(crate) mod record;
mod requests;
mod settle;
mod slot;
pub(crate) mod spec;
pub(crate) mod steps;
mod supervisor;
pub(crate) mod vmm;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ::vmm::api::API_LEVEL;
use tokio::runtime::Handle;

pub(crate) use self::change::{Change, Put, Removed, Wanted};
use self::departure::Account;
use self::error::VmError;
use self::host::RealHost;
use self::process::Identity;
use self::record::Record;
pub(crate) use self::slot::View;
use self::slot::{Live, Slot};
use self::spec::{ExistingDevice, NicId, NicSpec, VmName, VmSpec};
use self::steps::{Keep, Life, Moment, Passed, SendRequest};
use self::vmm::Vmm;
use super::paths::Paths;
use super::store::{Store, StoreError};

/// Whether this daemon can talk to a process with this level of the API: its own, and the one before.
pub(crate) fn speaks(level: u32) -> bool {
    level == API_LEVEL || level.checked_add(1) == Some(API_LEVEL)
}

/// Hears what becomes of machines.
pub(crate) type Listener = Arc<dyn Fn(&VmName, Change) + Send + Sync>;

/// The virtual machines of this node.
#[derive(Clone)]
pub(crate) struct Machines(Arc<Inner>);

struct Inner {
    paths: Paths,
    store: Store,
    host: RealHost,
    runtime: Handle,
    listener: Listener,
    slots: Mutex<BTreeMap<VmName, Arc<Slot>>>,
    /// Held while it is looked whether a device is another machine's.
    reserving: Mutex<()>,
    ending: AtomicBool,
    /// Reporters of devlink that are in error.
    in_error: failing::Reporters,
}

impl std::fmt::Debug for Machines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Machines")
            .field("slots", &self.0.slots)
            .finish_non_exhaustive()
    }
}

/// Keeps the records of one machine.
struct SlotKeep<'a> {
    inner: &'a Inner,
    slot: &'a Slot,
}

impl Keep for SlotKeep<'_> {
    fn keep(&self, vm: &VmName, record: &Record) -> Result<(), StoreError> {
        self.inner.store.put(vm.as_str(), record)?;
        let mut view = self.slot.view();
        if record.process().is_none() {
            view.live = None;
        }
        view.record = Some(record.clone());
        Ok(())
    }

    fn forget(&self, vm: &VmName) -> Result<(), StoreError> {
        let forgotten = self.inner.store.remove(vm.as_str());
        // Nothing is left of it, whatever the store says: a record without steps does no harm.
        let mut view = self.slot.view();
        view.record = None;
        view.live = None;
        forgotten
    }

    fn at(&self, vm: &VmName, moment: &Moment) {
        self.inner.host.observe(vm, moment);
    }
}

impl Inner {
    fn slots(&self) -> MutexGuard<'_, BTreeMap<VmName, Arc<Slot>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, vm: &VmName, change: Change) {
        (self.listener)(vm, change);
    }

    /// Does something with a machine's life. The caller holds its lock.
    fn live<T>(&self, slot: &Slot, work: impl FnOnce(&Life<'_>) -> T) -> T {
        let keep = SlotKeep { inner: self, slot };
        work(&Life {
            host: &self.host,
            keep: &keep,
            vm: slot.name(),
        })
    }

    /// What owns the character devices that a NIC has: its own, and the one that stands by.
    fn devices_of(&self, vm: &VmName, nic: &NicSpec) -> impl Iterator<Item = PathBuf> {
        let stand_by = nic.on_stand_by(vm);
        let stand_by = stand_by.map(|nic| self.host.device_of(vm, &nic));
        std::iter::once(self.host.device_of(vm, nic)).chain(stand_by)
    }

    /// Fails if a device that `spec` names is another machine's, or is there twice. From now on it is this one's,
    /// until `pending` is taken away.
    fn reserve(&self, slot: &Slot, spec: &VmSpec) -> Result<(), VmError> {
        let _one = self
            .reserving
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut taken: Vec<(PathBuf, VmName)> = Vec::new();
        let others: Vec<Arc<Slot>> = self.slots().values().cloned().collect();
        for other in others.iter().filter(|other| other.name() != slot.name()) {
            let view = other.view().clone();
            let specs = [view.record.map(|record| record.spec), view.pending];
            for nic in specs.iter().flatten().flat_map(VmSpec::nics) {
                for device in self.devices_of(other.name(), nic) {
                    taken.push((device, other.name().clone()));
                }
            }
        }
        let wanted = spec.nics().iter();
        for device in wanted.flat_map(|nic| self.devices_of(slot.name(), nic)) {
            if let Some((device, by)) = taken.iter().find(|(taken, _)| *taken == device) {
                return Err(VmError::DeviceTaken {
                    device: device.display().to_string(),
                    by: by.clone(),
                });
            }
            taken.push((device, slot.name().clone()));
        }
        slot.view().pending = Some(spec.clone());
        Ok(())
    }
}

impl Machines {
    /// All machines that the store tells of. Nothing is done about them yet: see [`Self::settle`].
    ///
    /// # Errors
    /// A record that cannot be read: then nothing was touched.
    pub(crate) fn open(
        store: Store,
        paths: Paths,
        host: RealHost,
        runtime: Handle,
        listener: Listener,
    ) -> Result<Self, StoreError> {
        let mut slots = BTreeMap::new();
        for (name, record) in store.vms::<Record>()? {
            let Ok(name) = name.parse::<VmName>() else {
                tracing::error!(name, "a record of no machine's name is left alone");
                continue;
            };
            slots.insert(name.clone(), Arc::new(Slot::new(name, Some(record))));
        }
        Ok(Self(Arc::new(Inner {
            paths,
            store,
            host,
            runtime,
            listener,
            slots: Mutex::new(slots),
            reserving: Mutex::default(),
            ending: AtomicBool::new(false),
            in_error: failing::Reporters::default(),
        })))
    }

    /// From now on nothing new is begun. Machines go on.
    pub(crate) fn end(&self) {
        self.0.ending.store(true, Ordering::SeqCst);
    }

    /// Does something under a machine's lock, on a worker thread, to its end.
    async fn locked<T: Send + 'static>(
        &self,
        slot: &Arc<Slot>,
        work: impl FnOnce(&Inner, &Slot) -> T + Send + 'static,
    ) -> Result<T, VmError> {
        let guard = slot.steps.clone().lock_owned().await;
        if self.0.ending.load(Ordering::SeqCst) {
            return Err(VmError::Ending);
        }
        let (inner, slot) = (self.0.clone(), slot.clone());
        let done = tokio::task::spawn_blocking(move || {
            let _guard = guard;
            work(&inner, &slot)
        });
        done.await.map_err(VmError::Worker)
    }

    fn find(&self, vm: &VmName) -> Result<Arc<Slot>, VmError> {
        let slot = self.0.slots().get(vm).cloned();
        slot.filter(|slot| slot.view().record.is_some())
            .ok_or_else(|| VmError::NoVm(vm.clone()))
    }

    /// The place of a name, empty if there is no such machine.
    fn place(&self, vm: &VmName) -> Arc<Slot> {
        let mut slots = self.0.slots();
        let slot = slots
            .entry(vm.clone())
            .or_insert_with(|| Arc::new(Slot::new(vm.clone(), None)));
        slot.clone()
    }

    /// Gives an empty place back, unless somebody else waits for it.
    fn tidy(&self, slot: &Arc<Slot>) {
        let mut slots = self.0.slots();
        // The map's and the caller's: nobody gets another one but under this lock.
        const NOBODY_ELSE: usize = 2;
        if Arc::strong_count(slot) <= NOBODY_ELSE && slot.view().record.is_none() {
            slots.remove(slot.name());
        }
    }

    /// All machines, by name.
    pub(crate) fn list(&self) -> Vec<(VmName, View)> {
        let slots: Vec<Arc<Slot>> = self.0.slots().values().cloned().collect();
        let views = slots.iter().map(|slot| {
            let view = slot.view().clone();
            (slot.name().clone(), view)
        });
        views.filter(|(_, view)| view.record.is_some()).collect()
    }

    /// One machine.
    ///
    /// # Errors
    /// [`VmError::NoVm`].
    pub(crate) fn show(&self, vm: &VmName) -> Result<View, VmError> {
        Ok(self.find(vm)?.view().clone())
    }

    /// The character device of a NIC, if there is one now.
    pub(crate) fn character_device(&self, vm: &VmName, nic: &NicSpec) -> Option<PathBuf> {
        self.0.host.character_device(vm, nic).ok()
    }

    /// Makes a machine, or has the one that is there be like this.
    ///
    /// # Errors
    /// [`VmError`]; what was begun is undone then.
    pub(crate) async fn put(&self, vm: &VmName, spec: VmSpec) -> Result<Put, VmError> {
        spec.check(vm)?;
        let slot = self.place(vm);
        let put = self.locked(&slot, move |inner, slot| {
            let put = inner.put(slot, spec);
            slot.view().pending = None;
            put
        });
        let put = put.await;
        if let Ok(Ok(_)) = &put {
            self.supervise(&slot);
        }
        self.tidy(&slot);
        put?
    }

    /// Watches the process that was started for a machine, if nobody does yet.
    fn supervise(&self, slot: &Arc<Slot>) {
        let identity = {
            let mut view = slot.view();
            let running = view.record.as_ref().and_then(|record| record.process()?.0);
            match (running, &view.live) {
                (Some(identity), None) => {
                    view.live = Some(Live::new(identity, false));
                    identity
                }
                _ => return,
            }
        };
        let awaited = slot.record().and_then(|record| record.arrival);
        let change = awaited.map_or(Change::Started, |arrival| Change::Awaited(arrival.listen));
        self.0.tell(slot.name(), change);
        supervisor::begin(self, slot, Some(identity));
    }

    /// Tells a machine what to do.
    ///
    /// # Errors
    /// [`VmError`].
    pub(crate) async fn change(&self, vm: &VmName, wanted: Wanted) -> Result<(), VmError> {
        let slot = self.find(vm)?;
        let changed = self
            .locked(&slot, move |inner, slot| inner.change(slot, wanted))
            .await?;
        if changed.is_ok() {
            self.supervise(&slot);
        }
        // One that was stopped may have left for another node.
        self.tidy(&slot);
        changed
    }

    /// Takes a machine away with all that was made for it.
    ///
    /// # Errors
    /// [`VmError`]; what could not be undone can be tried again.
    pub(crate) async fn delete(&self, vm: &VmName) -> Result<(), VmError> {
        let slot = self.find(vm)?;
        let deleted = self
            .locked(&slot, |inner, slot| {
                let mut record = slot
                    .record()
                    .ok_or_else(|| VmError::NoVm(slot.name().clone()))?;
                record.forget_former();
                inner.live(slot, |life| life.delete(&mut record))?;
                inner.tell(slot.name(), Change::Deleted);
                Ok(())
            })
            .await;
        self.tidy(&slot);
        deleted?
    }

    /// Gives a machine a NIC.
    ///
    /// # Errors
    /// [`VmError`]; what was begun is undone then.
    pub(crate) async fn add_nic(&self, vm: &VmName, nic: NicSpec) -> Result<Put, VmError> {
        let slot = self.find(vm)?;
        self.locked(&slot, move |inner, slot| {
            let added = inner.add_nic(slot, &nic);
            slot.view().pending = None;
            added
        })
        .await?
    }

    /// Moves a NIC of a machine to another device.
    ///
    /// # Errors
    /// [`VmError`]; the NIC stays where it was then.
    pub(crate) async fn swap_nic(
        &self,
        vm: &VmName,
        id: &NicId,
        device: ExistingDevice,
    ) -> Result<(), VmError> {
        let slot = self.find(vm)?;
        let id = id.clone();
        self.locked(&slot, move |inner, slot| {
            let swapped = inner.swap_nic(slot, &id, device);
            slot.view().pending = None;
            swapped
        })
        .await?
    }

    /// Takes a NIC away from a machine.
    ///
    /// # Errors
    /// [`VmError`].
    pub(crate) async fn remove_nic(&self, vm: &VmName, id: &NicId) -> Result<Removed, VmError> {
        let slot = self.find(vm)?;
        let id = id.clone();
        self.locked(&slot, move |inner, slot| inner.remove_nic(slot, &id))
            .await?
    }

    /// Has a running machine leave for another process. From before it is asked until it says that its guest is here, nobody
    /// starts it again. The answer is the machine's, whatever it is.
    ///
    /// # Errors
    /// [`VmError`].
    pub(crate) async fn send(&self, vm: &VmName, request: SendRequest) -> Result<Passed, VmError> {
        let slot = self.find(vm)?;
        let sent = self
            .locked(&slot, move |inner, slot| inner.send(slot, &request))
            .await?;
        // Whoever asked for it asks how it goes.
        slot.asks();
        slot.migration.notify_one();
        sent
    }

    /// Somebody says where the guest of a machine is that was sent elsewhere. If it is here and is to run, it is started.
    ///
    /// # Errors
    /// [`VmError`]; then it is as open as before.
    pub(crate) async fn say_where(&self, vm: &VmName, here: bool) -> Result<(), VmError> {
        let slot = self.find(vm)?;
        let settled = self
            .locked(&slot, move |inner, slot| inner.say_where(slot, here))
            .await;
        self.tidy(&slot);
        settled??;
        if slot.record().is_some_and(|record| record.is_to_start()) {
            supervisor::begin(self, &slot, None);
        }
        Ok(())
    }

    /// A client asks a machine how its migration goes. Its process ends once somebody knows that the guest is gone: that is
    /// to be the client.
    /// Returns which process that is.
    pub(crate) fn asks_migration(&self, vm: &VmName) -> Option<Identity> {
        let slot = self.find(vm).ok()?;
        slot.asks();
        slot.record()?.process()?.0
    }

    /// A client is about to read how a machine's migration goes, by the account of this process.
    pub(crate) async fn hears_migration(
        &self,
        vm: &VmName,
        process: Option<Identity>,
        account: Account,
    ) {
        let Ok(slot) = self.find(vm) else {
            return;
        };
        match account {
            // It is asked again, so that an answer to an earlier request is not taken for one to a later.
            Account::Here => slot.has_heard(),
            Account::There => {
                // It ends now, and this may have been its last word.
                let noted = self.locked(&slot, move |inner, slot| inner.hears_moved(slot, process));
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
    pub(crate) fn vmm(&self, vm: &VmName) -> Result<Vmm, VmError> {
        let slot = self.find(vm)?;
        let view = slot.view().clone();
        let running = view.record.as_ref().and_then(Record::process).is_some();
        match view.live {
            _ if !running => Err(VmError::NotRunning(vm.clone())),
            Some(live) => self.0.check_level(vm, &live),
            None => Ok(()),
        }?;
        Ok(self.0.vmm(vm))
    }
}

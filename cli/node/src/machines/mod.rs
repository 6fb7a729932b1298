//! The VMs of this node: one process each, which outlives the daemon.
//!
//! ```text
//!   endpoints ──> Machines ── an entry for each name ──> Lifecycle (steps in order)
//!                    │  ^       a lock for its steps          │
//!                    │  └── Host: records, devices, processes <┘
//!                    │ supervisor: a task for each process
//!                    └── pidfd, GET /v1/vm/watch <── process "bellhop run"
//! ```
//! The life of one VM:
//!
//! ```text
//!   (none) ── Creating ──────────────> Present ───────────── Deleting ──> (none)
//!                │ a step fails, or a     │ ^                   ^
//!                │ daemon finds it so     │ │                   │
//!                └──> undone ──> (none)   │ └─ restarted <──────┤ DELETE
//!                                         v    by its policy    │
//!                     process ended: why? ┴───> stopped ────────┘
//! ```
//! A VM that was sent elsewhere keeps a mark in its record until it reports that its guest is here.
//! If its process is gone, the daemon does not start it until a client reports where the guest is
//! ([`outgoing`]). An incoming VM is Present, too, and marked until its guest is here
//! ([`incoming`]). [`pairing`] is the exchange between the two nodes. If an arrived guest cannot
//! announce its place, this host does ([`announce`]).
//!
//! A daemon that starts reads the store and checks the state of the host
//! ([`steps::Lifecycle::reconcile`]). It adopts running processes, rolls back interrupted
//! operations and starts VMs that should run. It deletes devices that belong to none of its VMs,
//! and does not start while such processes run ([`ownership`]). It touches nothing without its own
//! mark.
//!
//! Steps wait for the kernel and for other processes, so worker threads run them, to their end even
//! if the client disconnects. Owns the set of VMs.

mod announce;
mod change;
pub(crate) mod condition;
mod cordon;
pub(crate) mod error;
mod failing;
pub(crate) mod health;
pub(crate) mod host;
pub(crate) mod incoming;
pub(crate) mod observer;
pub(crate) mod operations;
pub(crate) mod outgoing;
mod ownership;
pub(crate) mod pairing;
mod plan;
pub(crate) mod process;
mod reconcile;
pub(crate) mod record;
mod requests;
pub(crate) mod sandbox;
mod snapshots;
pub(crate) mod spec;
mod spec_patch;
pub(crate) mod steps;
pub(crate) mod stop;
mod supervisor;
mod vm_entry;
pub(crate) mod vmm;
mod work;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ::vmm::api::API_LEVEL;
use ::vmm::config::{DiskConfig, VfioConfig};
use bellhop_api::machine::{MigrationStatus, WantedState};
use bellhop_api::node::{Role, SnapshotName};
use parking_lot::{Mutex, MutexGuard, RwLock};
use tokio::runtime::Handle;

pub(crate) use self::change::{Change, Put, Removed};
use self::condition::Condition;
use self::error::{no_vm, not_running, starting, unfinished};
use self::health::InError;
use self::host::repairs::Failures;
use self::observer::StepObserver;
use self::operations::{Operations, Requested, Sent};
use self::outgoing::MigrationReport;
use self::process::Identity;
use self::record::Record;
use self::sandbox::{ProcessOptions, Sandbox};
use self::spec::{DeviceId, ExistingDevice, NicId, NicSpec, VmName, VmSpec, owned_by};
use self::steps::{Lifecycle, SendRequest};
pub(crate) use self::vm_entry::View;
use self::vm_entry::VmEntry;
use self::vmm::Vmm;
use super::error::Error;
use super::paths::Paths;
use super::peers::Peers;
use super::store::{Store, VMS};

/// Whether this daemon supports a process with this API level: its own level, and the one before.
pub(crate) fn supports_api(level: u32) -> bool {
    level == API_LEVEL || level.checked_add(1) == Some(API_LEVEL)
}

/// Receives the changes of VMs.
pub(crate) type Listener = Arc<dyn Fn(&VmName, Change) + Send + Sync>;

/// The VMs of this node, and their host.
pub(crate) struct Machines {
    paths: Paths,
    store: Store,
    /// Operations, and their results.
    pub(crate) operations: Operations,
    /// The boot ID of the host.
    boot: String,
    /// The log level of VM processes.
    log_level: String,
    observer: Option<StepObserver>,
    /// Other nodes.
    peers: Peers,
    sandbox: Sandbox,
    /// The runtime that waits for requests to VMs.
    runtime: Handle,
    listener: Listener,
    entries: Mutex<BTreeMap<VmName, Arc<VmEntry>>>,
    /// Held while a VM is created or begins to arrive, and exclusively while that is forbidden.
    admission: RwLock<()>,
    /// Held while a check runs whether another VM has a device.
    reserving: Mutex<()>,
    /// One NIC at a time: VMs queue here instead of at the lock of the records, whose wait has a
    /// time limit. Has the NICs that cannot be repaired.
    nics: Mutex<Failures>,
    ending: AtomicBool,
    /// devlink reporters in the error state.
    in_error: Mutex<InError>,
}

vdpa::opaque_debug!(Machines, this => entries: this.entries);

impl Machines {
    fn entries(&self) -> MutexGuard<'_, BTreeMap<VmName, Arc<VmEntry>>> {
        self.entries.lock()
    }

    fn publish(&self, vm: &VmName, change: Change) {
        (self.listener)(vm, change);
    }

    /// The life of a VM. The caller holds its lock.
    fn lifecycle<'a>(&'a self, entry: &'a VmEntry) -> Lifecycle<'a> {
        Lifecycle {
            host: self,
            vm: entry.name(),
        }
    }

    /// The owners of a NIC's character devices: of its own, and of its backup.
    fn devices_of(&self, vm: &VmName, nic: &NicSpec) -> impl Iterator<Item = PathBuf> {
        let backup = nic.on_backup(vm);
        let backup = backup.map(|nic| self.device_of(vm, &nic));
        std::iter::once(self.device_of(vm, nic)).chain(backup)
    }

    /// Fails if another VM has a device that `spec` names, or if `spec` names one twice. From now
    /// on the devices are reserved for this VM, until `pending` is cleared.
    fn reserve(&self, entry: &VmEntry, spec: &VmSpec) -> Result<(), Error> {
        let _one = self.reserving.lock();
        let mut taken: Vec<(PathBuf, VmName)> = Vec::new();
        let others: Vec<Arc<VmEntry>> = self.entries().values().cloned().collect();
        for other in others.iter().filter(|other| other.name() != entry.name()) {
            let view = other.view().clone();
            let functions = view.record.iter().flat_map(Record::functions);
            let functions = functions.chain(view.pending.iter().flat_map(VmSpec::functions));
            for function in functions {
                taken.push((function.to_string().into(), other.name().clone()));
            }
            let specs = view.record.iter().flat_map(Record::specs);
            for nic in specs.chain(&view.pending).flat_map(VmSpec::nics) {
                for device in self.devices_of(other.name(), nic) {
                    taken.push((device, other.name().clone()));
                }
            }
        }
        let wanted = spec.nics().iter();
        let wanted = wanted.flat_map(|nic| self.devices_of(entry.name(), nic));
        let functions = spec.functions().map(|one| one.to_string().into());
        for device in wanted.chain(functions) {
            if let Some((device, by)) = taken.iter().find(|(taken, _)| *taken == device) {
                let message = format!(
                    "{} already belongs to the virtual machine {by}: only one VM can use a device",
                    device.display()
                );
                return Err(Error::conflict("device_taken", message));
            }
            taken.push((device, entry.name().clone()));
        }
        entry.view().pending = Some(spec.clone());
        Ok(())
    }

    /// Opens all VMs in the store. Does not change any yet: see [`Self::reconcile`].
    ///
    /// # Errors
    /// A record cannot be read; then nothing was changed.
    pub(crate) fn open(
        store: Store,
        paths: Paths,
        boot: String,
        processes: ProcessOptions,
        observer: Option<StepObserver>,
        peers: Peers,
        listener: Listener,
    ) -> Result<Arc<Self>, Error> {
        let ProcessOptions { log_level, sandbox } = processes;
        let mut entries = BTreeMap::new();
        for (name, record) in store.all::<Record>(VMS)? {
            let Ok(name) = name.parse::<VmName>() else {
                tracing::error!(name, "ignoring a record with an invalid VM name");
                continue;
            };
            if let Some(user) = record.user {
                sandbox.note(&name, user);
            }
            entries.insert(name.clone(), Arc::new(VmEntry::new(name, Some(record))));
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
            sandbox,
            runtime: Handle::current(),
            listener,
            entries: Mutex::new(entries),
            admission: RwLock::default(),
            reserving: Mutex::default(),
            nics: Mutex::default(),
            ending: AtomicBool::new(false),
            in_error: Mutex::default(),
        };
        for (device, nic) in machines.created_nics() {
            let owner = nic.owner().and_then(owned_by);
            if let Some((vm, id)) = owner
                && let Ok(entry) = machines.find(&vm)
                && let Some(record) = &mut entry.view().record
            {
                record.finds_device(&vm, id, &device);
            }
        }
        machines.end_interrupted();
        Ok(Arc::new(machines))
    }

    /// Begins nothing new from now on. VMs continue to run.
    pub(crate) fn end(&self) {
        self.ending.store(true, Ordering::SeqCst);
    }

    /// Runs a closure under a VM's lock, on a worker thread, to its end.
    async fn locked<T: Send + 'static>(
        self: &Arc<Self>,
        entry: &Arc<VmEntry>,
        work: impl FnOnce(&Self, &VmEntry) -> T + Send + 'static,
    ) -> Result<T, Error> {
        let guard = entry.steps.clone().lock_owned().await;
        if self.ending.load(Ordering::SeqCst) {
            return Err(Error::unavailable("ending", "this daemon is shutting down"));
        }
        let (machines, entry) = (self.clone(), entry.clone());
        let done = tokio::task::spawn_blocking(move || {
            let _guard = guard;
            work(&machines, &entry)
        });
        done.await.map_err(unfinished)
    }

    /// Runs a request under a VM's lock. Then watches the process that it started or could not end,
    /// and removes the slot if it is empty.
    async fn request<T: Send + 'static>(
        self: &Arc<Self>,
        entry: Arc<VmEntry>,
        work: impl FnOnce(&Self, &VmEntry) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let done = self.locked(&entry, |machines, entry| {
            let done = work(machines, entry);
            entry.view().pending = None;
            done
        });
        let done = done.await;
        match &done {
            Ok(Ok(_)) => self.supervise(&entry),
            _ => self.await_late_end(&entry, false),
        }
        self.tidy(&entry);
        done?
    }

    fn find(&self, vm: &VmName) -> Result<Arc<VmEntry>, Error> {
        let entry = self.entries().get(vm).cloned();
        entry
            .filter(|entry| entry.view().record.is_some())
            .ok_or_else(|| no_vm(vm))
    }

    /// The slot of a name, empty if there is no such VM.
    fn place(&self, vm: &VmName) -> Arc<VmEntry> {
        let mut entries = self.entries();
        let entry = entries
            .entry(vm.clone())
            .or_insert_with(|| Arc::new(VmEntry::new(vm.clone(), None)));
        entry.clone()
    }

    /// Removes an empty slot, unless another task waits for it.
    fn tidy(&self, entry: &Arc<VmEntry>) {
        let mut entries = self.entries();
        // The references of the map and of the caller: others are handed out only under this lock.
        const ONLY_REFERENCE: usize = 2;
        if Arc::strong_count(entry) <= ONLY_REFERENCE && entry.view().record.is_none() {
            entries.remove(entry.name());
        }
    }

    /// All VMs, by name.
    pub(crate) fn list(&self) -> Vec<(VmName, View)> {
        let entries: Vec<Arc<VmEntry>> = self.entries().values().cloned().collect();
        let views = entries.iter().map(|entry| {
            let view = entry.view().clone();
            (entry.name().clone(), view)
        });
        views.filter(|(_, view)| view.record.is_some()).collect()
    }

    /// One VM.
    ///
    /// # Errors
    /// It does not exist.
    pub(crate) fn show(&self, vm: &VmName) -> Result<View, Error> {
        Ok(self.find(vm)?.view().clone())
    }

    /// As [`Self::request`], if the precondition holds once the lock is held.
    async fn request_if<T: Send + 'static>(
        self: &Arc<Self>,
        entry: Arc<VmEntry>,
        condition: Condition,
        work: impl FnOnce(&Self, &VmEntry) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        self.request(entry, move |machines, entry| {
            condition.check(entry.name(), entry.record().as_ref())?;
            work(machines, entry)
        })
        .await
    }

    /// Creates a VM, or changes the existing one to match the request. With a snapshot it continues
    /// there instead of booting.
    ///
    /// # Errors
    /// The change failed and was rolled back.
    pub(crate) async fn put(
        self: &Arc<Self>,
        vm: &VmName,
        condition: Condition,
        spec: VmSpec,
        restore_from: Option<SnapshotName>,
    ) -> Result<Put, Error> {
        spec.check(vm)?;
        let work = move |machines: &Self, entry: &VmEntry| {
            machines.put_now(entry, spec, restore_from.as_ref())
        };
        self.request_if(self.place(vm), condition, work).await
    }

    /// Changes the state of a VM.
    pub(crate) async fn change(
        self: &Arc<Self>,
        vm: &VmName,
        condition: Condition,
        wanted: WantedState,
    ) -> Result<(), Error> {
        let work = move |machines: &Self, entry: &VmEntry| machines.change_now(entry, wanted);
        self.request_if(self.find(vm)?, condition, work).await
    }

    /// Deletes a VM with all that was created for it.
    ///
    /// # Errors
    /// It runs, and `force` is not set; or a step cannot be undone, which a client may retry.
    pub(crate) async fn delete(
        self: &Arc<Self>,
        vm: &VmName,
        condition: Condition,
        force: bool,
    ) -> Result<(), Error> {
        let work = move |machines: &Self, entry: &VmEntry| machines.delete_now(entry, force);
        self.request_if(self.find(vm)?, condition, work).await
    }

    /// Adds a NIC to a VM.
    ///
    /// # Errors
    /// The change failed and was rolled back.
    pub(crate) async fn add_nic(self: &Arc<Self>, vm: &VmName, nic: NicSpec) -> Result<Put, Error> {
        let work = move |machines: &Self, entry: &VmEntry| machines.add_nic_now(entry, &nic);
        self.request(self.find(vm)?, work).await
    }

    /// Moves a NIC of a VM to another device.
    ///
    /// # Errors
    /// The move failed; the NIC stays on its device.
    pub(crate) async fn swap_nic(
        self: &Arc<Self>,
        vm: &VmName,
        id: &NicId,
        device: ExistingDevice,
    ) -> Result<(), Error> {
        let id = id.clone();
        let work =
            move |machines: &Self, entry: &VmEntry| machines.swap_nic_now(entry, &id, device);
        self.request(self.find(vm)?, work).await
    }

    /// Removes a NIC from a VM.
    pub(crate) async fn remove_nic(
        self: &Arc<Self>,
        vm: &VmName,
        id: &NicId,
    ) -> Result<Removed, Error> {
        let id = id.clone();
        let work = move |machines: &Self, entry: &VmEntry| machines.remove_nic_now(entry, &id);
        self.request(self.find(vm)?, work).await
    }

    /// Adds a disk named `id` to a VM.
    ///
    /// # Errors
    /// The change failed; the VM is as before.
    pub(crate) async fn add_disk(
        self: &Arc<Self>,
        vm: &VmName,
        id: &DeviceId,
        disk: DiskConfig,
    ) -> Result<Put, Error> {
        let id = id.clone();
        let work = move |machines: &Self, entry: &VmEntry| machines.add_disk_now(entry, &id, &disk);
        self.request(self.find(vm)?, work).await
    }

    /// Removes a disk from a VM.
    pub(crate) async fn remove_disk(
        self: &Arc<Self>,
        vm: &VmName,
        id: &DeviceId,
    ) -> Result<Removed, Error> {
        let id = id.clone();
        let work = move |machines: &Self, entry: &VmEntry| machines.remove_disk_now(entry, &id);
        self.request(self.find(vm)?, work).await
    }

    /// Adds a function by VFIO named `id` to a VM.
    ///
    /// # Errors
    /// The change failed; the VM is as before.
    pub(crate) async fn add_function(
        self: &Arc<Self>,
        vm: &VmName,
        id: &DeviceId,
        function: VfioConfig,
    ) -> Result<Put, Error> {
        let id = id.clone();
        let work = move |machines: &Self, entry: &VmEntry| {
            machines.add_function_now(entry, &id, &function)
        };
        self.request(self.find(vm)?, work).await
    }

    /// Removes a function by VFIO from a VM.
    pub(crate) async fn remove_function(
        self: &Arc<Self>,
        vm: &VmName,
        id: &DeviceId,
    ) -> Result<Removed, Error> {
        let id = id.clone();
        let work = move |machines: &Self, entry: &VmEntry| machines.remove_function_now(entry, &id);
        self.request(self.find(vm)?, work).await
    }

    /// Requests a running VM to leave for another process. From before the request until the VM
    /// reports that its guest is here, the daemon does not start it. Any refusal is the VM's own.
    pub(crate) async fn send(
        self: &Arc<Self>,
        vm: &VmName,
        request: SendRequest,
        by: Requested,
    ) -> Result<Sent, Error> {
        self.request(self.find(vm)?, move |machines, entry| {
            machines.send_as_operation(entry, by, || machines.send_now(entry, &request))
        })
        .await
    }

    /// The process of a VM.
    pub(crate) fn process_of(&self, vm: &VmName) -> Option<Identity> {
        self.find(vm).ok()?.record()?.process()?.0
    }

    /// Updates the state of a VM's migration from the report of this process, before a client reads
    /// it.
    pub(crate) async fn on_migration_report(
        self: &Arc<Self>,
        vm: &VmName,
        process: Option<Identity>,
        status: MigrationStatus,
    ) {
        let Ok(entry) = self.find(vm) else {
            return;
        };
        match MigrationReport::from(&status) {
            // The supervisor queries it again, so that the answer to an earlier request does not
            // count for a later one.
            MigrationReport::Here => entry.migration.notify_one(),
            MigrationReport::There => {
                // The process exits now, and this may have been its last report.
                let noted = self.locked(&entry, move |machines, entry| {
                    machines.on_guest_moved(entry, process, &status);
                });
                if let Err(error) = noted.await {
                    tracing::debug!(%vm, %error, "cannot record that the VM has moved");
                }
            }
            MigrationReport::None
            | MigrationReport::UnderWay
            | MigrationReport::Indeterminate
            | MigrationReport::Silent => {}
        }
    }

    /// The API of a VM, for a request of a client with this role.
    ///
    /// # Errors
    /// As [`Self::vmm`], or clients have too many requests to it.
    pub(crate) fn vmm_for(&self, vm: &VmName, role: Role) -> Result<Vmm, Error> {
        let vmm = self.vmm(vm)?;
        let place = self.find(vm)?.requests.try_take(role);
        let place = place.ok_or_else(|| {
            let message = format!("{vm} has too many requests of clients with the role {role}");
            Error::unavailable("busy", message).hint("try again later")
        })?;
        Ok(vmm.holding(place))
    }

    /// The API of a VM, for a client with this role that waits for a change.
    ///
    /// # Errors
    /// As [`Self::vmm`], or too many clients wait.
    pub(crate) fn vmm_to_watch(&self, vm: &VmName, role: Role) -> Result<Vmm, Error> {
        let vmm = self.vmm(vm)?;
        let place = self.find(vm)?.watches.try_take(role);
        let place = place.ok_or_else(|| {
            let message = format!("too many clients with the role {role} wait for changes of {vm}");
            Error::unavailable("too_many_watchers", message)
                .hint("end other watches, or use GET /v1/events for all virtual machines")
        })?;
        Ok(vmm.holding(place))
    }

    /// The API of a VM, for the daemon's own requests.
    ///
    /// # Errors
    /// There is no such VM, it does not run or is starting, or its API has an unsupported level.
    pub(crate) fn vmm(&self, vm: &VmName) -> Result<Vmm, Error> {
        let entry = self.find(vm)?;
        let view = entry.view().clone();
        let running = view.record.as_ref().and_then(Record::process).is_some();
        match view.live {
            _ if !running => Err(not_running(vm)),
            Some(live) => self.check_level(vm, &live),
            // Its process may not listen yet.
            None => Err(starting(vm)),
        }?;
        Ok(self.api_of(vm))
    }
}

/// For tests whose VMs have no process of their own.
#[cfg(test)]
impl Machines {
    /// Accepts requests to the process in the record of a VM.
    pub(crate) fn know_process(&self, vm: &VmName) {
        let entry = self.find(vm).unwrap();
        let live = self
            .process_of(vm)
            .map(|which| vm_entry::Live::new(which, true));
        entry.view().live = live;
    }

    /// Begins to watch this process.
    pub(crate) fn supervise_process(self: &Arc<Self>, vm: &VmName) {
        supervisor::begin(self, &self.find(vm).unwrap(), self.process_of(vm));
    }
}

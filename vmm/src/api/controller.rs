//! The requests that are possible in each state, and the lock around the state.
//!
//! Owns the configuration before boot, the handle after it, and the view that clients watch. It
//! must not know HTTP.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};

use bellhop_api::machine::{DiskSummary, NicSummary, VfioSummary, VmState, VmStatus};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit, oneshot, watch};
use vmm_sys_util::eventfd::EventFd;

use super::error::ApiError;
use super::start::{StartRequest, Starts};
use super::{API_LEVEL, WATCHERS_MAX, exactly};
use crate::config::VmConfig;
use crate::http::{HttpError, on_worker};
use crate::machine::{
    Arriving, Direction, End, EndReason, Handle, MachineStatus, Migration, MigrationEnd, Origin,
    RequestError, RunState, SendConfig, Snapshot, StopHandle, stopped,
};
use crate::migration::endpoint::{Endpoint, Route};
use crate::sandbox::seccomp;

/// The phase of the VM.
#[derive(Debug)]
enum Phase {
    /// There is no VM yet.
    BeforeBoot(Option<VmConfig>),
    /// The VM is being built, so neither of the other phases applies. Only the source knows the
    /// configuration of an incoming VM.
    Starting(Option<VmConfig>),
    Running {
        /// The configuration at its start, without pluggable devices.
        config: VmConfig,
        handle: Handle,
    },
}

/// The state of the API: see the module.
pub(super) struct Controller {
    phase: Mutex<Phase>,
    /// The view that clients watch. Its generation grows with each change, over the whole life of
    /// the process.
    view: watch::Sender<VmStatus>,
    starts: SyncSender<StartRequest>,
    wake: Arc<EventFd>,
    stop: StopHandle,
    /// Whether a client requested the end.
    stop_asked: AtomicBool,
    watchers: Semaphore,
    /// The last migration, also after its end.
    migration: Mutex<Option<Migration>>,
}

vdpa::opaque_debug!(Controller, this => phase: this.phase, view: *this.view.borrow());

impl Controller {
    /// A controller without a VM. With an origin, its start is requested already.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub(super) fn new(
        origin: Option<Origin>,
        stop: &StopHandle,
    ) -> std::io::Result<(Arc<Self>, Starts)> {
        // A queue of one: a second request must wait for the first one's answer.
        let (starts, queue) = sync_channel(1);
        let wake = Arc::new(vdpa::eventfd::new()?);
        let controller = Arc::new(Self {
            phase: Mutex::new(Phase::BeforeBoot(None)),
            view: watch::Sender::new(VmStatus {
                generation: 1,
                state: VmState::NotStarted,
                boots: 0,
                pid: std::process::id(),
                version: env!("CARGO_PKG_VERSION").to_owned(),
                api: API_LEVEL,
                nics: Vec::new(),
                end: None,
                disks: Vec::new(),
                vfio: Vec::new(),
                alarms: Vec::new(),
                upgrades: 0,
                upgrade_error: None,
                upgrade_downtime_ms: None,
            }),
            starts,
            wake: wake.clone(),
            stop: stop.clone(),
            stop_asked: AtomicBool::new(false),
            watchers: Semaphore::new(WATCHERS_MAX),
            migration: Mutex::new(None),
        });
        if let Some(origin) = origin {
            // The queue has room, and its other end exists below.
            let _ = controller.request_start(&mut controller.phase.lock(), origin, None);
        }
        Ok((controller, Starts { queue, wake }))
    }

    /// The error with the current state and the remedy.
    pub(super) fn wrong_state(&self, remedy: &'static str) -> ApiError {
        ApiError::WrongState {
            state: self.view.borrow().state,
            remedy,
        }
    }

    /// The current view.
    pub(super) fn view(&self) -> VmStatus {
        self.view.borrow().clone()
    }

    /// The view with its changes.
    pub(super) fn watch(&self) -> watch::Receiver<VmStatus> {
        self.view.subscribe()
    }

    /// Publishes a change to the clients that watch. Most changes of the VM's status have no field
    /// in the view and wake no client.
    fn publish(&self, change: impl FnOnce(&mut VmStatus)) {
        self.view.send_if_modified(|view| {
            let before = view.clone();
            change(view);
            if *view == before {
                return false;
            }
            view.generation = before.generation.wrapping_add(1);
            true
        });
    }

    /// Publishes a change of the configuration, for which the view has no field.
    fn publish_config(&self) {
        self.view
            .send_modify(|view| view.generation = view.generation.wrapping_add(1));
    }

    /// The configuration, with the current pluggable devices.
    pub(super) fn config(&self) -> Result<VmConfig, ApiError> {
        match &*self.phase.lock() {
            Phase::BeforeBoot(config) | Phase::Starting(config) => {
                config.clone().ok_or(ApiError::NoConfig)
            }
            Phase::Running { config, handle } => {
                let mut config = config.clone();
                let MachineStatus {
                    nics, disks, vfio, ..
                } = handle.status();
                config.vfio = vfio.into_iter().map(|one| one.config).collect();
                config.vdpa.extend(nics.into_iter().map(|nic| nic.config));
                config.disks = disks.into_iter().map(|disk| disk.config).collect();
                Ok(config)
            }
        }
    }

    /// Changes the configuration before boot.
    pub(super) fn edit<T>(
        &self,
        change: impl FnOnce(&mut VmConfig) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let mut phase = self.phase.lock();
        let Phase::BeforeBoot(config) = &mut *phase else {
            return Err(self.wrong_state("try again when it runs: GET /v1/vm/watch"));
        };
        let config = config.as_mut().ok_or(ApiError::NoConfig)?;
        let changed = change(config)?;
        self.publish_config();
        Ok(changed)
    }

    /// Replaces the configuration. Opens and builds nothing.
    pub(super) fn configure(&self, config: VmConfig) -> Result<(), ApiError> {
        let affinity = config.cpu_affinity.check(config.cpus.get());
        affinity.map_err(|error| HttpError::Invalid {
            at: "/cpu_affinity".to_owned(),
            reason: error.to_string(),
        })?;
        let mut phase = self.phase.lock();
        let Phase::BeforeBoot(before) = &mut *phase else {
            return Err(self.wrong_state(
                "configure a machine before it starts; add and remove devices of a running machine \
                 with PUT and DELETE of /v1/vm/nics/{id}, /v1/vm/disks/{id} and /v1/vm/vfio/{id}",
            ));
        };
        if before.as_ref() != Some(&config) {
            *before = Some(config);
            self.publish_config();
        }
        Ok(())
    }

    /// Requests the VM to be built and powered on; returns at the result.
    pub(super) async fn start(self: &Arc<Self>) -> Result<(), ApiError> {
        self.start_from(|config| config.cloned().map(Origin::Boot).ok_or(ApiError::NoConfig))
            .await
    }

    /// Requests the VM to be built from the snapshot and to resume there; returns at the result.
    pub(super) async fn restore(self: &Arc<Self>, snapshot: Snapshot) -> Result<(), ApiError> {
        self.start_from(|_| Ok(Origin::Snapshot(Box::new(snapshot))))
            .await
    }

    /// Begins to receive the VM at the address of `arriving`; returns once the migration is in
    /// progress.
    pub(super) fn receive(self: &Arc<Self>, arriving: Arriving) -> Result<Migration, ApiError> {
        let migration = arriving.migration().clone();
        let mut phase = self.phase.lock();
        let Phase::BeforeBoot(_) = &*phase else {
            return Err(self.wrong_state("a process with a machine cannot receive another one"));
        };
        self.request_start(&mut phase, Origin::Migration(Box::new(arriving)), None)?;
        Ok(migration)
    }

    /// Begins to send the VM; returns once the migration is in progress.
    pub(super) fn send(&self, config: SendConfig, route: Route) -> Result<Migration, ApiError> {
        let machine = self.running()?;
        let mut last = self.migration.lock();
        if let Some(last) = &*last {
            match (last.end(), last.direction()) {
                (None, _) => return Err(ApiError::MigrationRuns),
                // The indeterminate migration must be resolved first, and stay on record until
                // then.
                (Some(MigrationEnd::Indeterminate { .. }), _) => {
                    return Err(RequestError::Quiesced.into());
                }
                (Some(MigrationEnd::Moved), Direction::Send) => {
                    return Err(RequestError::Ended.into());
                }
                (Some(MigrationEnd::Stayed { .. }), _)
                | (Some(MigrationEnd::Moved), Direction::Receive) => {}
            }
        }
        let migration = Migration::new(Direction::Send, config.destination.clone());
        let ours = migration.clone();
        std::thread::Builder::new()
            .name("migration".to_owned())
            .spawn(move || {
                seccomp::enter(seccomp::Thread::Migration);
                machine.migrate(&ours, &config, &route);
            })
            .map_err(ApiError::Thread)?;
        *last = Some(migration.clone());
        Ok(migration)
    }

    /// The throughput of the last migration of this VM to the same destination, in bytes per second
    /// on the wire; `None` if unknown.
    pub(super) fn known_rate(&self, destination: &Endpoint) -> Option<u64> {
        let last = self.migration.lock();
        let last = last.as_ref()?;
        if last.direction() != Direction::Send || last.peer() != destination {
            return None;
        }
        Some(last.progress().bytes_per_second).filter(|&rate| rate > 0)
    }

    /// The last migration, or the one in progress.
    pub(super) fn migration(&self) -> Result<Migration, ApiError> {
        self.migration.lock().clone().ok_or(ApiError::NoMigration)
    }

    async fn start_from(
        self: &Arc<Self>,
        origin: impl FnOnce(Option<&VmConfig>) -> Result<Origin, ApiError>,
    ) -> Result<(), ApiError> {
        let answered = {
            let mut phase = self.phase.lock();
            let Phase::BeforeBoot(config) = &*phase else {
                return Err(self.wrong_state("wait until it runs: GET /v1/vm/watch"));
            };
            let origin = origin(config.as_ref())?;
            let (answer, answered) = oneshot::channel();
            self.request_start(&mut phase, origin, Some(answer))?;
            answered
        };
        answered.await.map_err(|_| ApiError::Ending)?
    }

    fn request_start(
        self: &Arc<Self>,
        phase: &mut Phase,
        origin: Origin,
        answer: Option<oneshot::Sender<Result<(), ApiError>>>,
    ) -> Result<(), ApiError> {
        let config = origin.config().cloned();
        if let Some(migration) = origin.migration() {
            self.migration.lock().replace(migration.clone());
        }
        let controller = self.clone();
        let request = StartRequest::new(origin, move |started| {
            let answered = match started {
                Ok((config, machine)) => {
                    controller.started(config, machine);
                    Ok(())
                }
                Err((config, error)) => {
                    controller.start_failed(config);
                    Err(ApiError::Start(error))
                }
            };
            if let Some(answer) = answer {
                // The client may have disconnected.
                let _ = answer.send(answered);
            }
        });
        let sent = self.starts.try_send(request);
        sent.map_err(|_| ApiError::Ending)?;
        *phase = Phase::Starting(config);
        self.publish(|view| view.state = VmState::Starting);
        // It fails only if the counter is at its maximum, which is readable, too.
        let _ = self.wake.write(1);
        Ok(())
    }

    /// Records that the VM is powered on.
    fn started(self: &Arc<Self>, mut config: VmConfig, handle: &Handle) {
        // Pluggable devices change: the VM knows the current ones.
        let nics = handle.status().nics;
        config
            .vdpa
            .retain(|vdpa| nics.iter().all(|nic| nic.id != vdpa.name()));
        config.disks.clear();
        config.vfio.clear();
        // The VM holds the descriptors now.
        config.release_descriptors();
        *self.phase.lock() = Phase::Running {
            config,
            handle: handle.clone(),
        };
        // Weak, because the controller owns the handle.
        let controller = Arc::downgrade(self);
        handle.on_change(move |status| {
            if let Some(controller) = controller.upgrade() {
                controller.observe(status);
            }
        });
    }

    /// Records that the VM could not be built or powered on: there is none, as before. Its
    /// descriptors are closed: the attempt has set the device's owner, and only a close undoes that
    /// (VHOST_SET_OWNER, linux/vhost.h). Their paths stay. The target of a failed restore is
    /// configured as the snapshot describes it.
    fn start_failed(&self, mut config: Option<VmConfig>) {
        if let Some(config) = &mut config {
            config.release_descriptors();
        }
        *self.phase.lock() = Phase::BeforeBoot(config);
        self.publish(|view| view.state = VmState::NotStarted);
    }

    fn observe(&self, status: &MachineStatus) {
        self.publish(|view| {
            view.state = match status.run {
                RunState::Off if status.boots == 0 => VmState::Starting,
                RunState::Running => VmState::Running,
                RunState::Paused => VmState::Paused,
                RunState::Off | RunState::Ended => VmState::Stopped,
            };
            view.boots = status.boots;
            view.nics = status.nics.iter().map(NicSummary::from).collect();
            view.end = (view.state == VmState::Stopped).then(|| match &status.end {
                Some(end) if end.reason != EndReason::Stopped => end.clone(),
                // The requester is unknown. Without an end: the VM exits without having run.
                Some(_) | None => self.stopped(),
            });
            view.disks = status.disks.iter().map(DiskSummary::from).collect();
            view.vfio = status.vfio.iter().map(VfioSummary::from).collect();
            view.alarms.clone_from(&status.alarms);
            view.upgrades = status.upgrade.count;
            view.upgrade_error.clone_from(&status.upgrade.error);
            view.upgrade_downtime_ms = status.upgrade.downtime.map(exactly);
        });
    }

    /// Records the end of the server and the process, with its reason unless the VM has reported
    /// one.
    pub(super) fn ended(&self, end: Option<End>) {
        self.publish(|view| {
            view.state = VmState::Stopped;
            if view.end.is_none() {
                view.end = Some(end.unwrap_or_else(|| self.stopped()));
            }
        });
    }

    /// The end of a VM or process on request.
    fn stopped(&self) -> End {
        let by_a_client = self.stop_asked.load(Ordering::Relaxed);
        stopped(if by_a_client {
            "a client of the API asked it to stop"
        } else {
            "a signal or the console's user asked it to stop"
        })
    }

    /// Admits a client that waits for changes, while the permit lives.
    pub(super) fn watcher(&self) -> Result<SemaphorePermit<'_>, ApiError> {
        self.watchers
            .try_acquire()
            .map_err(|_| ApiError::TooManyWatchers)
    }

    /// The handle of the VM, if there is one.
    pub(super) fn running(&self) -> Result<Handle, ApiError> {
        match &*self.phase.lock() {
            Phase::BeforeBoot(_) => Err(self.wrong_state(
                "start it first: PUT /v1/vm, then PATCH /v1/vm {\"state\": \"Running\"}",
            )),
            Phase::Starting(_) => Err(self.wrong_state("wait until it runs: GET /v1/vm/watch")),
            Phase::Running { handle, .. } => Ok(handle.clone()),
        }
    }

    /// Runs a request to the VM on a worker, if there is a VM.
    pub(super) async fn ask<T: Send + 'static>(
        &self,
        request: impl FnOnce(&Handle) -> Result<T, RequestError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let machine = self.running()?;
        Ok(on_worker(move || request(&machine)).await??)
    }

    /// Succeeds if there is no VM yet; otherwise the error has the remedy.
    pub(super) fn before_boot(&self, remedy: &'static str) -> Result<(), ApiError> {
        match &*self.phase.lock() {
            Phase::BeforeBoot(_) => Ok(()),
            Phase::Starting(_) | Phase::Running { .. } => Err(self.wrong_state(remedy)),
        }
    }

    /// Whether the VM is built.
    pub(super) fn is_built(&self) -> bool {
        matches!(&*self.phase.lock(), Phase::Running { .. })
    }

    /// Requests the VM to stop, and the process to end with it.
    pub(super) fn stop(&self) {
        self.stop_asked.store(true, Ordering::Relaxed);
        self.stop.stop();
    }
}

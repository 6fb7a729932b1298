//! The daemon from its start to its end.
//!
//! Owns the runtime and the signals.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bellhop_api::node::{Event, EventChange};
use bellhop_common::client::Credentials;
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use vdpa_mgmt::devlink::Notice;
use vmm::http::server;
use vmm::http::socket;

use super::access::{self, Access, AccessFiles, TlsListener};
use super::api::{self, Permits};
use super::consoles::Consoles;
use super::context::Node;
use super::error::{Error, HOST_FAILED};
use super::events::Events;
use super::machines::observer::StepObserver;
use super::machines::sandbox::{ProcessOptions, Sandbox, VmUsers};
use super::machines::spec::VmName;
use super::machines::{Change, Machines};
use super::paths::Paths;
use super::peers::Peers;
use super::store::Store;
use super::systemd::Notifier;
use super::watcher::Watcher;

/// Threads for blocking work: netlink, files, VMs.
const WORKERS_MAX: usize = 64;
/// How long an idle thread lives.
const WORKER_IDLE: Duration = Duration::from_secs(10);
/// The interval of checks of the processes of software NICs.
const BETWEEN_LOOKS: Duration = Duration::from_secs(5);
/// The time limit for running steps at shutdown. The next daemon rolls back interrupted ones.
const LAST_STEPS: Duration = Duration::from_secs(30);

/// The daemon's options.
#[derive(Debug)]
pub struct Options {
    /// Its directories.
    pub paths: Paths,
    /// The group that may use the socket, too.
    pub group: Option<String>,
    /// The TCP address to listen on, and its access control.
    pub remote: Option<(SocketAddr, AccessFiles)>,
    /// The log level of VM processes, in the form of `--log-level`.
    pub log_level: String,
    /// The credentials for other nodes' daemons.
    pub credentials: Credentials,
    /// The name or address of this host for incoming VMs.
    pub migration_host: Option<String>,
    /// End the VMs that have no record, instead of refusing to start.
    pub end_orphans: bool,
    /// The users of VMs' processes.
    pub vm_users: VmUsers,
    /// The socket of an observer of each step.
    pub step_observer: Option<PathBuf>,
}

const NOT_STARTED: &str = "cannot start the daemon";

/// Serves until SIGTERM or SIGINT.
///
/// # Errors
/// The daemon cannot start: directories, sockets, certificates or its store cannot be used, or VMs
/// run that it has no records of.
pub fn run(options: &Options) -> Result<(), Error> {
    options.paths.make().map_err(|(path, source)| {
        Error::failed(format!(
            "cannot use the directory {}: run this as root, or choose others with --state-dir and \
             --runtime-dir",
            path.display()
        ))
        .because(source)
    })?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(WORKERS_MAX)
        .thread_keep_alive(WORKER_IDLE)
        .thread_name("worker")
        .build()
        .map_err(Error::context(NOT_STARTED))?;
    runtime.block_on(serve(options))?;
    // Running steps complete, but a worker may block in the kernel for any time.
    runtime.shutdown_timeout(LAST_STEPS);
    Ok(())
}

async fn serve(options: &Options) -> Result<(), Error> {
    let mut terminate = signal(SignalKind::terminate()).map_err(Error::context(NOT_STARTED))?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(Error::context(NOT_STARTED))?;
    let mut hangup = signal(SignalKind::hangup()).map_err(Error::context(NOT_STARTED))?;
    let notifier = Notifier::from_environment();
    let files = options.remote.as_ref().map(|(_, files)| files.clone());
    let no_access = Error::context("cannot authenticate clients over TCP (--listen)");
    let access = Arc::new(Access::new(files).map_err(no_access)?);
    // The file is removed after the last answer.
    let (listener, _file) = socket::listen(&options.paths.socket())
        .map_err(|error| Error::transparent(HOST_FAILED, error))?;
    let listener = UnixListener::from_std(listener).map_err(Error::context(NOT_STARTED))?;
    if let Some(group) = &options.group {
        access::share_with(&options.paths.socket(), group)?;
    }
    let remote = match &options.remote {
        Some((address, _)) => Some(listen(*address).await?),
        None => None,
    };
    let events = Arc::new(Events::default());
    // Before any work, so that no reader misses the events of its own request.
    let reconciled: Arc<OnceLock<Arc<Machines>>> = Arc::default();
    let watcher = {
        let reconciled = reconciled.clone();
        let listener = move |notice: &Notice| {
            if let Some(machines) = reconciled.get() {
                machines.on_devlink_event(notice);
            }
        };
        Watcher::start(events.clone(), Box::new(listener)).map_err(Error::context(NOT_STARTED))?
    };
    let machines = machines(options, &events)?;
    // Nothing else runs yet, so this may block.
    machines.claim_runtime(options.end_orphans)?;
    machines.reconcile().await;
    // Before this, the NICs' devices are unknown.
    let _ = reconciled.set(machines.clone());
    let node = Arc::new(Node {
        paths: options.paths.clone(),
        events,
        kernel_permits: Permits::for_kernel(),
        file_permits: Permits::for_files(),
        machines: machines.clone(),
        consoles: Consoles::default(),
    });
    let (end, ended) = watch::channel(false);
    node.events.publish(Event::new("/v1", EventChange::Served));
    let router = api::router(node.clone(), access.clone());
    let local = server::serve(listener, router.clone(), ended.clone());
    let by_tcp = async {
        if let Some(listener) = remote {
            server::serve(TlsListener::new(listener, access.clone()), router, ended).await;
        }
    };
    let signals = async {
        notifier.ready();
        // One wait across the turns of the loop: other events must not postpone it.
        let mut due = pin!(watchdog(&notifier));
        let mut servers = pin!(repair_nics(&machines));
        loop {
            tokio::select! {
                _ = terminate.recv() => break,
                _ = interrupt.recv() => break,
                _ = hangup.recv() => reload(&access, &notifier),
                () = access.next_expiry() => {}
                () = &mut servers => {}
                () = &mut due => {
                    notifier.alive();
                    due.set(watchdog(&notifier));
                }
            }
        }
        notifier.stopping();
        tracing::info!("shutting down; VMs keep running");
        machines.end();
        end.send_replace(true);
    };
    tokio::join!(local, by_tcp, signals);
    drop(watcher);
    Ok(())
}

async fn listen(address: SocketAddr) -> Result<TcpListener, Error> {
    let listener = TcpListener::bind(address).await;
    let listener = listener.map_err(Error::context(format!(
        "cannot listen on {address}: give --listen an address of this host and a free port"
    )))?;
    // With port 0 the kernel chooses one.
    let address = listener.local_addr().unwrap_or(address);
    tracing::info!(%address, "listening on TCP");
    Ok(listener)
}

/// Reloads the files of access control. Readers of streams by TCP have to authenticate again.
fn reload(access: &Access, notifier: &Notifier) {
    notifier.reloading();
    match access.reload() {
        Ok(()) => tracing::info!("reloaded certificates and tokens"),
        Err(error) => tracing::error!(
            error = &error as &dyn std::error::Error,
            "cannot reload certificates and tokens; keeping the current ones"
        ),
    }
    notifier.ready();
}

/// Notifies systemd at its interval that the daemon is alive, if the watchdog is enabled.
async fn watchdog(notifier: &Notifier) {
    match notifier.interval() {
        Some(interval) => tokio::time::sleep(interval).await,
        None => std::future::pending().await,
    }
}

/// Repairs software NICs, without an end.
async fn repair_nics(machines: &Arc<Machines>) {
    loop {
        let machines = machines.clone();
        // A panic is logged, and the next turn tries again.
        let _ = tokio::task::spawn_blocking(move || machines.repair_nics()).await;
        tokio::time::sleep(BETWEEN_LOOKS).await;
    }
}

/// The VMs in the store; their changes go to `events`.
fn machines(options: &Options, events: &Arc<Events>) -> Result<Arc<Machines>, Error> {
    let store = Store::open(&options.paths.store())?;
    let observer = options.step_observer.as_ref().map(|path| {
        StepObserver::connect(path).map_err(Error::context(format!(
            "cannot connect to the observer of steps on {}",
            path.display()
        )))
    });
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_err(Error::context(NOT_STARTED))?;
    let events = events.clone();
    Machines::open(
        store,
        options.paths.clone(),
        boot.trim().to_owned(),
        ProcessOptions {
            log_level: options.log_level.clone(),
            sandbox: Sandbox::open(&options.vm_users, options.paths.runtime()),
        },
        observer.transpose()?,
        Peers::new(options.credentials.clone(), options.migration_host.clone()),
        Arc::new(move |vm: &VmName, change: Change| {
            if let Some(event) = change.as_event(vm) {
                events.publish(event);
            }
        }),
    )
}

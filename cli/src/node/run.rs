//! The daemon from its start to its end.
//!
//! Owns the runtime and the signals.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixListener;
use tokio::runtime::Handle;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use vmm::http::server;
use vmm::http::socket::{self, SocketError};

use super::api;
use super::context::Node;
use super::events::Events;
use super::machines::host::RealHost;
use super::machines::observer::StepObserver;
use super::machines::spec::VmName;
use super::machines::{Change, Machines};
use super::paths::Paths;
use super::store::{Store, StoreError};
use crate::exit::Code;

/// Threads for what has to wait: netlink, files, machines.
const WORKERS_MAX: usize = 64;
/// How long such a thread lives without work.
const WORKER_IDLE: Duration = Duration::from_secs(10);
/// How long steps that are under way may take at the end. What is cut off then, the next daemon
/// undoes.
const LAST_STEPS: Duration = Duration::from_secs(30);

/// What the daemon is told.
#[derive(Debug)]
pub(crate) struct Options {
    /// Where it keeps what.
    pub(crate) paths: Paths,
    /// What the machines' processes log at, as `--log-level` takes it.
    pub(crate) log_level: String,
    /// Where somebody listens who wants to see each step.
    pub(crate) step_observer: Option<PathBuf>,
}

/// Why there is no daemon.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NodeError {
    /// A directory cannot be used.
    #[error("cannot use the directory {}; run this as root, or choose others with --state-dir and --runtime-dir", path.display())]
    Directory {
        /// Which.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// Its memory cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// No socket.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// Nobody observes.
    #[error("nobody listens on {} to observe steps", path.display())]
    Observer {
        /// The socket.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// Not even that.
    #[error("cannot start the daemon")]
    Start(#[source] io::Error),
}

/// Serves until SIGTERM or SIGINT.
pub(crate) fn run(options: &Options) -> Result<Code, NodeError> {
    options
        .paths
        .make()
        .map_err(|(path, source)| NodeError::Directory { path, source })?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(WORKERS_MAX)
        .thread_keep_alive(WORKER_IDLE)
        .thread_name("worker")
        .build()
        .map_err(NodeError::Start)?;
    runtime.block_on(serve(options))?;
    // What was begun is done to its end, but what a worker waits for in the kernel may take as long
    // as it wants.
    runtime.shutdown_timeout(LAST_STEPS);
    Ok(Code::Success)
}

async fn serve(options: &Options) -> Result<(), NodeError> {
    let mut terminate = signal(SignalKind::terminate()).map_err(NodeError::Start)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(NodeError::Start)?;
    // The file goes when the last answer is given.
    let (listener, _file) = socket::listen(&options.paths.socket())?;
    let listener = UnixListener::from_std(listener).map_err(NodeError::Start)?;
    let events = Arc::new(Events::default());
    let machines = machines(options, &events)?;
    machines.settle().await;
    let node = Arc::new(Node {
        paths: options.paths.clone(),
        events,
        machines: machines.clone(),
    });
    let (end, ended) = watch::channel(false);
    node.events.publish("/v1", "served", None);
    let serving = server::serve(listener, api::router(node), ended);
    let signals = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("the daemon ends; machines go on");
        machines.end();
        end.send_replace(true);
    };
    tokio::join!(serving, signals);
    Ok(())
}

/// The machines that the store tells of; what becomes of them goes to `events`.
fn machines(options: &Options, events: &Arc<Events>) -> Result<Machines, NodeError> {
    let store = Store::open(&options.paths.store())?;
    let runtime = Handle::current();
    let observer = options.step_observer.as_ref().map(|path| {
        StepObserver::connect(path).map_err(|source| NodeError::Observer {
            path: path.clone(),
            source,
        })
    });
    let host = RealHost::new(
        options.paths.clone(),
        runtime.clone(),
        options.log_level.clone(),
        observer.transpose()?,
    );
    let events = events.clone();
    Ok(Machines::open(
        store,
        options.paths.clone(),
        host.map_err(NodeError::Start)?,
        runtime,
        Arc::new(move |vm: &VmName, change: Change| {
            if let Some((word, detail)) = change.as_event() {
                events.publish(&format!("/v1/vms/{vm}"), word, detail);
            }
        }),
    )?)
}

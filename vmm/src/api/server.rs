//! The thread `api`: it accepts connections and serves them, within limits.
//!
//! Owns the thread and what a client may take of it. It must not know what is asked.
//!
//! | what | limit |
//! |---|---|
//! | connections at a time | 64; more wait in the kernel's backlog |
//! | a request's line and headers | 16 KiB, 64 headers, 10 s; the 10 s also end idle connections |
//! | a request's body | `body.rs` |
//! | a connection's life | 5 min and the request that is under way then, at most 90 s: one that takes no answers ends as well |
//! | worker threads for what has to wait for the machine | 4, and each only while there is work |

use std::error::Error;
use std::io;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

use super::controller::Controller;
use super::endpoints;
use super::socket::{self, SocketError, SocketFile};
use super::start::Starts;
use crate::config::VmConfig;
use crate::machine::{End, StopHandle};

const CONNECTIONS_MAX: usize = 64;
const HEADERS_MAX: usize = 64;
const HEAD_MAX: usize = 16 * 1024;
const HEAD_TIME: Duration = Duration::from_secs(10);
const CONNECTION_TIME: Duration = Duration::from_secs(300);
/// How long the request that is under way then may take: longer than any watch.
const LAST_REQUEST: Duration = Duration::from_secs(90);
/// How long answers that are under way may take at the end.
const LAST_ANSWERS: Duration = Duration::from_secs(1);
/// After a failure to accept, which a lack of descriptors may be.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const WORKERS_MAX: usize = 4;
const WORKER_IDLE: Duration = Duration::from_secs(1);
/// Stack of a thread in bytes. The deepest is the opening of a vDPA device.
const STACK_SIZE: usize = 256 * 1024;

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// No socket.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// No thread, or nothing that it needs.
    #[error("cannot start the API's thread")]
    Thread(#[source] io::Error),
}

/// Serves the API until it is dropped. Then the answers that are under way get a
/// second to reach their clients, and the socket's file goes.
#[derive(Debug)]
pub struct Server {
    controller: Arc<Controller>,
    end: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
    _file: SocketFile,
}

impl Server {
    /// Serves on `path` from now on. With a configuration the first request to start is
    /// there already; without one a client gives it. `stop` is what a client stops the
    /// machine with.
    ///
    /// # Errors
    /// See [`ServerError`].
    pub fn start(
        path: &Path,
        config: Option<VmConfig>,
        stop: &StopHandle,
    ) -> Result<(Self, Starts), ServerError> {
        let (listener, file) = socket::listen(path)?;
        let (controller, starts) = Controller::new(config, stop).map_err(ServerError::Thread)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .max_blocking_threads(WORKERS_MAX)
            .thread_keep_alive(WORKER_IDLE)
            .thread_name("api-worker")
            .thread_stack_size(STACK_SIZE)
            .build()
            .map_err(ServerError::Thread)?;
        let listener = {
            // The listener belongs to this runtime.
            let _entered = runtime.enter();
            UnixListener::from_std(listener).map_err(ServerError::Thread)?
        };
        let (end, ended) = watch::channel(false);
        let served = controller.clone();
        let thread = thread::Builder::new()
            .name("api".to_owned())
            .stack_size(STACK_SIZE)
            .spawn(move || {
                let router = endpoints::router(served);
                runtime.block_on(accept(listener, router, ended));
                // A worker that still waits for a machine that is gone ends by itself.
                runtime.shutdown_background();
            })
            .map_err(ServerError::Thread)?;
        let server = Self {
            controller,
            end,
            thread: Some(thread),
            _file: file,
        };
        Ok((server, starts))
    }
}

impl Server {
    /// Ends the server because the process cannot go on: clients are told that instead of
    /// [`Stopped`](crate::machine::EndReason::Stopped), unless the machine has said why it is over.
    pub fn end_with(self, error: &dyn Error) {
        self.controller.ended(Some(End::failed(error)));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // First: who waits for changes gets this one.
        self.controller.ended(None);
        self.end.send_replace(true);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the API's thread panicked");
        }
    }
}

/// Accepts until the end, then waits for the last answers.
async fn accept(listener: UnixListener, router: Router, ended: watch::Receiver<bool>) {
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut connections = JoinSet::new();
    let mut end = ended.clone();
    loop {
        let accepted = tokio::select! {
            biased;
            // An error means that the server is gone, which is the end as well.
            _ = end.wait_for(|ended| *ended) => break,
            accepted = next(&listener, &slots) => accepted,
        };
        // The ones that are over.
        while connections.try_join_next().is_some() {}
        match accepted {
            Ok((stream, slot)) => {
                let (router, ended) = (router.clone(), ended.clone());
                connections.spawn(async move {
                    serve(stream, router, ended).await;
                    drop(slot);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "a connection to the API cannot be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// The next connection, once there is room for it.
async fn next(
    listener: &UnixListener,
    slots: &Arc<Semaphore>,
) -> io::Result<(UnixStream, tokio::sync::OwnedSemaphorePermit)> {
    let slot = slots
        .clone()
        .acquire_owned()
        .await
        .map_err(io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    Ok((stream, slot))
}

/// Serves one connection until either side ends it.
async fn serve(stream: UnixStream, router: Router, mut ended: watch::Receiver<bool>) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_headers(HEADERS_MAX)
        .max_buf_size(HEAD_MAX)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let mut connection = pin!(connection);
    let expired = tokio::select! {
        over = connection.as_mut() => return note(over),
        // An error means that the server is gone, which is the end as well.
        _ = ended.wait_for(|ended| *ended) => false,
        () = tokio::time::sleep(CONNECTION_TIME) => true,
    };
    if expired {
        connection.as_mut().graceful_shutdown();
        tokio::select! {
            over = connection.as_mut() => return note(over),
            _ = ended.wait_for(|ended| *ended) => {}
            // It takes no answers.
            () = tokio::time::sleep(LAST_REQUEST) => return,
        }
    }
    connection.as_mut().graceful_shutdown();
    if let Ok(over) = tokio::time::timeout(LAST_ANSWERS, connection).await {
        note(over);
    }
}

/// Clients come and go as they like: how, is of no interest but for finding mistakes.
fn note(over: hyper::Result<()>) {
    if let Err(error) = over {
        tracing::debug!(%error, "a connection to the API ended");
    }
}

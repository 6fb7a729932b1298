//! The thread `api`, which serves requests.
//!
//! Owns the thread and its runtime. It must not know the requests, nor the limits of clients, which
//! are those of [`crate::http::server`]. At most 4 workers wait for the VM, and each exists only
//! while there is work.

use std::error::Error;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::net::UnixListener;
use tokio::sync::watch;

use super::controller::Controller;
use super::endpoints;
use super::start::Starts;
use crate::http;
use crate::http::descriptors::DescriptorListener;
use crate::http::socket::{self, SocketError, SocketFile};
use crate::machine::{Origin, StopHandle, failed};
use crate::sandbox::seccomp;

const WORKERS_MAX: usize = 4;
const WORKER_IDLE: Duration = Duration::from_secs(1);
/// Stack size of a thread in bytes; only touched pages are resident. Opening a vDPA device needs
/// the most. Without optimization, the construction of the router needs more than 256 KiB.
const STACK_SIZE: usize = 1024 * 1024;

/// Why the server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The socket cannot be created.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The thread, or its runtime, cannot be created.
    #[error("cannot start the API's thread")]
    Thread(#[source] io::Error),
}

/// Serves the API until it is dropped. A drop gives pending answers one second to reach their
/// clients, and removes the socket's file.
#[derive(Debug)]
pub struct Server {
    controller: Arc<Controller>,
    end: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
    _file: SocketFile,
}

impl Server {
    /// Serves on `path` from now on. With an origin the start is requested already; without one a
    /// client must request it. Clients stop the VM through `stop`.
    ///
    /// # Errors
    /// See [`ServerError`].
    pub fn start(
        path: &Path,
        origin: Option<Origin>,
        stop: &StopHandle,
    ) -> Result<(Self, Starts), ServerError> {
        let (listener, file) = socket::listen(path)?;
        let (controller, starts) = Controller::new(origin, stop).map_err(ServerError::Thread)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .max_blocking_threads(WORKERS_MAX)
            .thread_keep_alive(WORKER_IDLE)
            .thread_name("api-worker")
            .thread_stack_size(STACK_SIZE)
            .on_thread_start(|| seccomp::enter(seccomp::Thread::ApiWorker))
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
                seccomp::enter(seccomp::Thread::Api);
                let router = endpoints::router(served);
                runtime.block_on(http::server::serve(
                    DescriptorListener(listener),
                    router,
                    ended,
                ));
                // A worker that still waits for a VM that is gone ends by itself.
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

    /// Ends the server because the process must exit. Clients receive this reason instead of
    /// [`Stopped`](crate::machine::EndReason::Stopped), unless the VM has reported its own.
    pub fn end_with(self, error: &dyn Error) {
        self.controller.ended(Some(failed(error)));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // First, so that clients that wait for changes receive this one.
        self.controller.ended(None);
        self.end.send_replace(true);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the API's thread panicked");
        }
    }
}

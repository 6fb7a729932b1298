//! The way from "start" in the API to the thread that builds the machine.
//!
//! Owns the queue of one and the answer. It must not know how a machine is built.

use std::fmt;
use std::io;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use vmm_sys_util::eventfd::EventFd;

use crate::Error;
use crate::config::VmConfig;
use crate::event_loop::{EventLoop, Ready, Token};
use crate::machine::{Handle, Origin, StopHandle};

/// Where the requests to start arrive.
#[derive(Debug)]
pub struct Starts {
    pub(super) queue: Receiver<StartRequest>,
    pub(super) wake: Arc<EventFd>,
}

impl Starts {
    /// Waits until a client (or the configuration that the server was started with) wants the
    /// machine; `None` if `stop` was asked before.
    ///
    /// # Errors
    /// Whatever epoll says.
    pub fn wait(&self, stop: &StopHandle) -> io::Result<Option<StartRequest>> {
        let events = EventLoop::new()?;
        events.add(stop.eventfd().as_raw_fd(), Token::Stop)?;
        events.add(self.wake.as_raw_fd(), Token::Request)?;
        let mut ready = Ready::default();
        loop {
            events.wait(&mut ready)?;
            if ready.tokens().any(|token| token == Token::Stop) {
                return Ok(None);
            }
            // In this order a request in between is seen now or signalled again.
            let _ = self.wake.read();
            if let Ok(request) = self.queue.try_recv() {
                return Ok(Some(request));
            }
        }
    }
}

/// Somebody wants the machine. To be answered with [`StartRequest::started`] or
/// [`StartRequest::failed`].
pub struct StartRequest {
    origin: Origin,
    answer: Box<dyn FnOnce(Started<'_>) + Send>,
}

/// What came of a request: how the machine is built and its handle, or the configuration that is
/// left and why there is no machine.
pub(super) type Started<'a> = Result<(VmConfig, &'a Handle), (Option<VmConfig>, Error)>;

impl fmt::Debug for StartRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StartRequest")
            .field("origin", &self.origin)
            .finish_non_exhaustive()
    }
}

impl StartRequest {
    pub(super) fn new(origin: Origin, answer: impl FnOnce(Started<'_>) + Send + 'static) -> Self {
        let answer = Box::new(answer);
        Self { origin, answer }
    }

    /// The machine that is wanted, and where it comes from.
    #[must_use]
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// It is built as `config` says and powered on (or restored, or has come), and will be run.
    pub fn started(self, config: VmConfig, machine: &Handle) {
        (self.answer)(Ok((config, machine)));
    }

    /// It cannot be built or powered on: the client gets to know why, and may try another
    /// configuration.
    pub fn failed(self, error: Error) {
        (self.answer)(Err((self.origin.into_config(), error)));
    }
}

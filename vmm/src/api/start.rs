//! Passes a start request from the API to the thread that builds the VM.
//!
//! Owns the queue of one and the answer. It must not know how a VM is built.

use std::io;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use vmm_sys_util::eventfd::EventFd;

use crate::Error;
use crate::config::VmConfig;
use crate::event_loop::{EventLoop, Ready, Token};
use crate::machine::{Handle, Origin, StopHandle};

/// The receiving end of start requests.
#[derive(Debug)]
pub struct Starts {
    pub(super) queue: Receiver<StartRequest>,
    pub(super) wake: Arc<EventFd>,
}

impl Starts {
    /// Waits until a client, or the origin that the server was started with, requests a start;
    /// `None` if `stop` comes first.
    ///
    /// # Errors
    /// Those of epoll.
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
            // In this order a request in between is received now or signalled again.
            let _ = self.wake.read();
            if let Ok(request) = self.queue.try_recv() {
                return Ok(Some(request));
            }
        }
    }
}

/// A start request. The receiver must answer it with [`StartRequest::started`] or
/// [`StartRequest::failed`].
pub struct StartRequest {
    origin: Origin,
    answer: Box<dyn FnOnce(Started<'_>) + Send>,
}

/// The result of a start request: the configuration of the VM and its handle, or the remaining
/// configuration and the error.
pub(super) type Started<'a> = Result<(VmConfig, &'a Handle), (Option<VmConfig>, Error)>;

vdpa::opaque_debug!(StartRequest, this => origin: this.origin);

impl StartRequest {
    pub(super) fn new(origin: Origin, answer: impl FnOnce(Started<'_>) + Send + 'static) -> Self {
        let answer = Box::new(answer);
        Self { origin, answer }
    }

    /// The requested VM and its origin.
    #[must_use]
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Answers that the VM is built as `config` describes and powered on (or restored, or arrived),
    /// and will run.
    pub fn started(self, config: VmConfig, machine: &Handle) {
        (self.answer)(Ok((config, machine)));
    }

    /// Answers that the VM cannot be built or powered on: the client receives the error, and may
    /// try another configuration.
    pub fn failed(self, error: Error) {
        (self.answer)(Err((self.origin.into_config(), error)));
    }
}

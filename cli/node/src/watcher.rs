//! Watches the node's devices for changes that this daemon did not make: kernel messages become
//! events.
//!
//! Owns the thread that waits for them.
//!
//! | source | subject | changes |
//! |---|---|---|
//! | uevents of the vdpa bus | `/v1/vdpa-devices/NAME` | added, removed, bound, unbound, changed |
//! | devlink `config` | `/v1/ports/BUS/DEVICE[/INDEX]` | changed, removed, parameter, rate, … |
//! | either | `/v1/vdpa-devices`, `/v1/ports` | lost: the kernel's buffer overflowed; read again |
//!
//! A listener also receives devlink messages, and decides whose NIC has failed. This module has no
//! queue: messages wait in the kernel's sockets, whose size is limited.

use std::error::Error as _;
use std::fmt::Display;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use bellhop_api::node::{Event, EventChange};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use vdpa_mgmt::ErrorKind;
use vdpa_mgmt::devlink::{self, Handle, HealthReporter, HealthState, RateObject};
use vdpa_mgmt::uevent::{self, Action, Uevent, Uevents};

use super::events::Events;

/// The interval of attempts to open devlink if the kernel does not have it yet.
const RETRY: Timespec = Timespec {
    tv_sec: 10,
    tv_nsec: 0,
};
/// The most messages of one source before it is the other one's turn.
const TURN: usize = 64;
/// The delay after an error that would recur at once.
const PAUSE: Duration = Duration::from_millis(100);

/// Receives devlink messages on the watcher's thread.
pub(super) type Listener = Box<dyn Fn(&devlink::Notice) + Send>;

/// The thread; it ends when this is dropped.
#[derive(Debug)]
pub(super) struct Watcher {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    /// Publishes events from now on.
    ///
    /// # Errors
    /// There is no thread, or no socket for uevents.
    pub(super) fn start(events: Arc<Events>, listener: Listener) -> io::Result<Self> {
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let uevents = Uevents::open()?;
        let stopped = stop.clone();
        let thread = thread::Builder::new()
            .name("watcher".to_owned())
            .spawn(move || watch(&events, &listener, uevents, &stopped))?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let told = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        if let (Ok(_), Some(thread)) = (told, self.thread.take())
            && thread.join().is_err()
        {
            tracing::error!("the watcher's thread panicked");
        }
    }
}

fn watch(events: &Events, listener: &Listener, mut uevents: Uevents, stop: &OwnedFd) {
    let mut devlink: Option<devlink::Events> = None;
    let mut looked: Option<Instant> = None;
    let retry = Duration::try_from(RETRY).unwrap_or_default();
    loop {
        if devlink.is_none() && looked.is_none_or(|looked| looked.elapsed() >= retry) {
            looked = Some(Instant::now());
            // devlink exists only with a driver that has it; its absence is common.
            devlink = devlink::Events::open().ok();
        }
        let ready = {
            let mut fds = vec![
                PollFd::new(stop, PollFlags::IN),
                PollFd::from_borrowed_fd(uevents.as_fd(), PollFlags::IN),
            ];
            if let Some(devlink) = &devlink {
                fds.push(PollFd::from_borrowed_fd(devlink.as_fd(), PollFlags::IN));
            }
            let limit = devlink.is_none().then_some(&RETRY);
            match poll(&mut fds, limit) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "cannot watch devices any more");
                    return;
                }
            }
            fds.iter()
                .map(|fd| !fd.revents().is_empty())
                .collect::<Vec<_>>()
        };
        if ready.first() == Some(&true) {
            return;
        }
        if ready.get(1) == Some(&true) {
            take_uevents(events, &mut uevents);
        }
        if ready.get(2) == Some(&true)
            && let Some(source) = &mut devlink
            && !take_devlink(events, listener, source)
        {
            devlink = None;
        }
    }
}

fn take_uevents(events: &Events, uevents: &mut Uevents) {
    for _ in 0..TURN {
        match uevents.next(Some(NOW)) {
            Ok(Some(uevent::Notice::Event(event))) => uevent(events, &event),
            Ok(Some(uevent::Notice::Lost)) => {
                events.publish(Event::new("/v1/vdpa-devices", EventChange::Lost));
            }
            Ok(None) => return,
            Err(error) => {
                tracing::warn!(%error, "cannot read an event of the vdpa bus");
                thread::sleep(PAUSE);
                return;
            }
        }
    }
}

/// To the socket, zero would mean no limit.
const NOW: Duration = Duration::from_micros(1);

fn uevent(events: &Events, event: &Uevent) {
    let change = match event.action {
        Action::Add => EventChange::Added,
        Action::Remove => EventChange::Removed,
        Action::Bind => EventChange::Bound,
        Action::Unbind => EventChange::Unbound,
        Action::Change => EventChange::Changed,
    };
    let driver = event.driver.as_ref();
    let detail = driver.map(|driver| format!("its bus driver is {driver}"));
    events.publish(Event {
        driver: driver.cloned(),
        detail,
        ..Event::new(format!("/v1/vdpa-devices/{}", event.name), change)
    });
}

/// Returns false if the source cannot be read any more.
fn take_devlink(events: &Events, listener: &Listener, source: &mut devlink::Events) -> bool {
    for _ in 0..TURN {
        match source.next(Some(NOW)) {
            Ok(Some(notice)) => {
                match &notice {
                    devlink::Notice::Event(event) => devlink_event(events, event),
                    devlink::Notice::Lost => {
                        events.publish(Event::new("/v1/ports", EventChange::Lost));
                    }
                }
                listener(&notice);
            }
            Ok(None) => return true,
            Err(error) if error.kind() == ErrorKind::Malformed => {
                let error = error.source().map(tracing::field::display);
                tracing::warn!(error, "cannot decode a devlink event");
            }
            Err(error) => {
                tracing::warn!(%error, "cannot read devlink events; retrying");
                thread::sleep(PAUSE);
                return false;
            }
        }
    }
    true
}

fn devlink_event(events: &Events, event: &devlink::Event) {
    use devlink::Event as Devlink;
    let of = |subject: &dyn Display, change| Event::new(format!("/v1/ports/{subject}"), change);
    let rate = |object: &RateObject, went: &str| {
        of(object.handle(), EventChange::Rate).detail(format!("the rate of {object} {went}"))
    };
    let parameter = |handle: &Handle, name: &str, went: &str| Event {
        parameter: Some(name.to_owned()),
        ..of(handle, EventChange::Parameter).detail(format!("{name} {went}"))
    };
    events.publish(match event {
        Devlink::Instance(instance) => of(&instance.handle, EventChange::Changed),
        Devlink::InstanceGone(handle) => of(handle, EventChange::Removed),
        Devlink::Port(port) => of(&port.handle, EventChange::Changed),
        Devlink::PortGone(port) => of(port, EventChange::Removed),
        Devlink::Param(one) => parameter(&one.handle, &one.name, "is set"),
        Devlink::ParamGone(one) => parameter(&one.handle, &one.name, "is gone"),
        Devlink::Rate(one) => rate(&one.object, "is set"),
        Devlink::RateGone(one) => rate(&one.object, "is gone"),
        Devlink::Health(one) => Event {
            reporter: Some(one.name.clone()),
            healthy: match one.state {
                HealthState::Healthy => Some(true),
                HealthState::Error => Some(false),
                HealthState::Other(_) => None,
            },
            ..of(&one.handle, EventChange::Health).detail(health(one))
        },
    });
}

fn health(reporter: &HealthReporter) -> String {
    let state = match reporter.state {
        HealthState::Healthy => "healthy",
        HealthState::Error => "in error",
        HealthState::Other(_) => "in an unknown state",
    };
    format!("the health reporter {} is {state}", reporter.name)
}

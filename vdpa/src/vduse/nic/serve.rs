//! The device and its threads: one for each queue pair. That of the first pair handles the
//! messages of the kernel, too, so a device with one pair has one thread.

use std::convert::Infallible;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::mpsc;
use std::thread;

use rustix::event::epoll::{self, Event, EventData, EventFlags};
use vmm_sys_util::eventfd::EventFd;

use super::super::Device;
use super::super::device::broken;
use super::control::Control;
use super::features::Configuration;
use super::in_flight::InFlight;
use super::pair::{NOW, OTHERS, Pair, cannot_wait};
use super::port::Port;
use super::shared::Shared;
use crate::Error;
use crate::eventfd;

/// Names of events beside those of a pair.
const MESSAGE: u64 = OTHERS;
const END: u64 = OTHERS + 1;
/// Most events of a thread: two kicks, the tap, messages, and two for the end.
const EVENTS: usize = 6;

/// A network device that serves its driver.
#[derive(Debug)]
pub struct Nic {
    device: Device,
    offered: u64,
    pairs: Vec<Shared>,
}

impl Nic {
    /// The device that was created from this configuration. There is a port for each pair.
    /// `in_flight` has [`IN_FLIGHT_SIZE`](super::IN_FLIGHT_SIZE) bytes, which all processes that
    /// serve the device use one after the other. It is closed before this returns.
    ///
    /// # Errors
    /// The limit of open files is reached, or the configuration is not possible.
    pub fn new(
        device: Device,
        ports: Vec<Port>,
        in_flight: OwnedFd,
        configuration: &Configuration,
    ) -> Result<Self, Error> {
        let pairs = usize::from(configuration.checked_pairs()?);
        if ports.len() != pairs {
            return Err(Error::other(format!(
                "a tap or port with {} queues cannot serve {pairs} queue pairs",
                ports.len()
            )));
        }
        let pair = |(number, queue)| {
            let in_flight = InFlight::new(in_flight.as_fd(), number)?;
            let pair = Pair::new(number, queue, in_flight, configuration.poll_percent)?;
            let epoll = pair.epoll()?;
            Ok(Shared::new(pair, epoll))
        };
        Ok(Self {
            device,
            offered: configuration.features(),
            pairs: (0..).zip(ports).map(pair).collect::<Result<_, Error>>()?,
        })
    }

    /// Serves the device until `stop` is readable. A driver that uses it already had another
    /// process before, and does not notice the change.
    ///
    /// Each thread calls `enter` before its work. All threads are created before this one calls it,
    /// and have called it before one of them accesses the driver's memory.
    ///
    /// # Errors
    /// The kernel declared the device broken, the tap is deleted, `enter` fails, or a thread cannot
    /// be created.
    pub fn serve(
        &self,
        stop: BorrowedFd<'_>,
        enter: &(dyn Fn() -> io::Result<()> + Sync),
    ) -> Result<(), Error> {
        let end = &eventfd::new().map_err(Error::context("cannot create an eventfd"))?;
        let (waits, entered) = mpsc::channel::<Infallible>();
        thread::scope(|scope| {
            let start = |(number, shared)| {
                let waits = waits.clone();
                let serve = move || {
                    let _ends = EndsAll(end);
                    enter().map_err(not_entered())?;
                    drop(waits);
                    self.serve_pair(shared, end, None)
                };
                let thread = thread::Builder::new().name(format!("pair{number}"));
                let thread = thread.spawn_scoped(scope, serve);
                thread.map_err(Error::context("cannot start the thread of a queue pair"))
            };
            let ends = EndsAll(end);
            let others = self.pairs.iter().enumerate().skip(1).map(start);
            let others: Vec<_> = others.collect::<Result<_, Error>>()?;
            drop(waits);
            // Nothing is sent: this ends when no thread waits to enter.
            let _ = entered.recv();
            let served = enter().map_err(not_entered());
            let served = served.and_then(|()| self.serve_first(stop, end));
            drop(ends);
            others.into_iter().fold(served, |served, thread| {
                let panicked = |_| Err(Error::other("the thread of a queue pair panicked"));
                served.and(thread.join().unwrap_or_else(panicked))
            })
        })
    }

    /// Serves the first pair and the messages.
    fn serve_first(&self, stop: BorrowedFd<'_>, end: &EventFd) -> Result<(), Error> {
        let Some(shared) = self.pairs.first() else {
            return Ok(());
        };
        add(shared, self.device.as_fd(), MESSAGE)?;
        add(shared, stop, END)?;
        let mut control = Control::new(&self.device, &self.pairs, self.offered);
        if let Err(error) = control.resume() {
            let error: &dyn std::error::Error = &error;
            tracing::warn!(error, "the NIC waits until its driver resets it");
            control.stop();
        }
        self.serve_pair(shared, end, Some(control))
    }

    /// Serves a pair until `end` is readable. The one with `control` handles the messages.
    fn serve_pair(
        &self,
        shared: &Shared,
        end: &EventFd,
        mut control: Option<Control<'_>>,
    ) -> Result<(), Error> {
        add(shared, eventfd::descriptor(end), END)?;
        let mut events: Vec<Event> = Vec::with_capacity(EVENTS);
        let mut wait = Some(&NOW);
        loop {
            events.clear();
            let spare = rustix::buffer::spare_capacity(&mut events);
            match epoll::wait(&shared.epoll, spare, wait) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(cannot_wait()(error)),
            }
            for event in &events {
                match (event.data.u64(), &mut control) {
                    (END, _) => return Ok(()),
                    (MESSAGE, Some(control)) => {
                        control.messages()?;
                        let flags = event.flags;
                        if flags.contains(EventFlags::ERR) {
                            return Err(broken());
                        }
                    }
                    _ => {}
                }
            }
            let mut pair = shared.turn();
            for event in &events {
                pair.event(event.data.u64());
            }
            wait = pair.turn(&self.device, &shared.epoll)?;
        }
    }
}

/// For `map_err`.
fn not_entered() -> impl FnOnce(io::Error) -> Error {
    Error::context("a thread cannot begin its work")
}

/// Has a thread wait for an event that is reported until it is handled.
fn add(shared: &Shared, fd: BorrowedFd<'_>, name: u64) -> Result<(), Error> {
    let added = epoll::add(&shared.epoll, fd, EventData::new_u64(name), EventFlags::IN);
    added.map_err(cannot_wait())
}

/// Ends the other threads when one ends.
struct EndsAll<'nic>(&'nic EventFd);

impl Drop for EndsAll<'_> {
    fn drop(&mut self) {
        // Its counter is far from its limit, so this does not fail.
        let _ = self.0.write(1);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixDatagram;
    use std::sync::Mutex;
    use std::time::Duration;

    use super::super::rig::in_flight_file;
    use super::super::tap::Tap;
    use super::*;
    use crate::uapi::vduse::REQUEST_SIZE;

    /// A device whose kernel is the socket: it has messages, and no driver.
    fn nic(pairs: u16) -> (Nic, UnixDatagram) {
        let (device, kernel) = UnixDatagram::pair().unwrap();
        device.set_nonblocking(true).unwrap();
        let limit = Duration::from_secs(20);
        kernel.set_read_timeout(Some(limit)).unwrap();
        let port = |_| {
            let socket = OwnedFd::from(UnixDatagram::unbound().unwrap());
            Port::Tap(Tap::of(socket.into()))
        };
        let ports = (0..pairs).map(port);
        let configuration = Configuration {
            mac: [2, 0, 0, 0, 0, 1],
            mtu: 1500,
            pairs,
            features: u64::MAX,
            poll_percent: 10,
        };
        let device = Device::from(std::fs::File::from(OwnedFd::from(device)));
        let nic = Nic::new(device, ports.collect(), in_flight_file(), &configuration).unwrap();
        (nic, kernel)
    }

    /// The kernel sends a message of this type with its first word. Returns whether it is done.
    fn asks(kernel: &UnixDatagram, kind: u32, word: u32) -> bool {
        let mut bytes = [0; REQUEST_SIZE];
        bytes[..4].copy_from_slice(&kind.to_ne_bytes());
        bytes[24..28].copy_from_slice(&word.to_ne_bytes());
        kernel.send(&bytes).unwrap();
        assert_eq!(kernel.recv(&mut bytes).unwrap(), REQUEST_SIZE);
        bytes[4] == 0
    }

    #[test]
    fn each_pair_has_a_thread_and_messages_are_answered() {
        for pairs in [1, 2, 4] {
            let (nic, kernel) = nic(pairs);
            let stop = eventfd::new().unwrap();
            let entered = Mutex::new(Vec::new());
            let enter = || {
                let name = thread::current().name().map(str::to_owned);
                entered.lock().unwrap().push(name);
                Ok(())
            };
            thread::scope(|scope| {
                let served = scope.spawn(|| nic.serve(eventfd::descriptor(&stop), &enter));
                let queues = 2 * u32::from(pairs);
                for _ in 0..100 {
                    for (kind, word, done) in [
                        (0, 0, true),
                        (0, queues - 1, true),
                        (0, queues, false),
                        (1, 0, true),
                        (2, 0, true),
                        (9, 0, false),
                    ] {
                        assert_eq!(asks(&kernel, kind, word), done, "{kind} {word}");
                    }
                }
                stop.write(1).unwrap();
                served.join().unwrap().unwrap();
            });
            let mut entered = entered.into_inner().unwrap();
            entered.sort();
            let named = (1..pairs).map(|number| Some(format!("pair{number}")));
            let expected: Vec<_> = std::iter::once(None).chain(named).collect();
            assert_eq!(entered, expected);
        }
    }

    #[test]
    fn a_failure_of_one_thread_ends_all() {
        for fails in [None, Some("pair1"), Some("pair3")] {
            let (nic, _kernel) = nic(4);
            let stop = eventfd::new().unwrap();
            let enter = || {
                if thread::current().name() == fails {
                    return Err(io::Error::other("no filter"));
                }
                Ok(())
            };
            thread::scope(|scope| {
                let served = scope.spawn(|| nic.serve(eventfd::descriptor(&stop), &enter));
                let error = served.join().unwrap().unwrap_err();
                assert_eq!(error.to_string(), "a thread cannot begin its work");
            });
        }
    }

    #[test]
    fn a_tap_without_a_queue_for_each_pair_is_refused() {
        let (nic, _kernel) = nic(1);
        let configuration = Configuration {
            mac: [0; 6],
            mtu: 0,
            pairs: 2,
            features: 0,
            poll_percent: 0,
        };
        Nic::new(nic.device, Vec::new(), in_flight_file(), &configuration).unwrap_err();
    }
}

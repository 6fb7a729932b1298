//! One end of the traffic, like a VMM: a device, the rings of a guest, and the thread that relays
//! between them.
//!
//! The guest is `vdpa::netdev`. Its rings are handed to the relays as a guest's memory, and its
//! queue pair goes to the sender of the traffic. The thread works like a VMM's: it polls, waits for
//! eventfds as long as the relays require, and changes strategies.
//!
//! ```text
//!   request --> polling --> waiting (hints, bounded by the pace) --> polling ...
//!                  |  strategy direct: waiting for a request
//! ```

use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::time::{ClockId, clock_gettime};
use vdpa::control_queue::MacAddress;
use vdpa::device::Device;
use vdpa::memory::{DeviceMemory, GuestMemory};
use vdpa::netdev::{Driver, Kick, Netdev, Options, QueuePair};
use vdpa::relay::{Pause, Strategy, SvqSet};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use super::{failed, wait};
use crate::error::{Error, Result};

/// Not negotiated: CTRL_VQ, whose queue is not relayed here; RING_PACKED and IN_ORDER, which shadow
/// rings do not support.
const WITHHELD: u64 = 1 << 17 | 1 << 34 | 1 << 35;

/// Entries of each ring, where the device supports that many.
pub(super) const RING: u16 = 256;

/// A request to the thread.
#[derive(Debug)]
enum Request {
    /// Change the strategy of the queues.
    Change(Strategy),
    /// Return the processor time of the thread.
    ProcessorTime,
}

/// A device with its relays.
#[derive(Debug)]
pub(super) struct Station {
    mac: MacAddress,
    /// `None` tells the thread to end.
    requests: Option<Sender<Request>>,
    answers: Receiver<Duration>,
    wake: Arc<EventFd>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Station {
    /// Brings the device up with all queues direct. The device can reach all of `ram` beside the
    /// rings, as it can with a guest. Returns the queues for the traffic.
    ///
    /// # Errors
    /// The device cannot be driven or relayed.
    pub(super) fn start(path: &Path, ram: Option<&GuestMemory>) -> Result<(Self, QueuePair)> {
        let opened = Device::open(path).map_err(failed("open the vDPA device"))?;
        let (device, iotlb) = opened.own().map_err(failed("own the vDPA device"))?;
        let options = Options {
            ring_size: RING,
            withhold: WITHHELD,
            // A doorbell would bypass the relays.
            kick: Kick::Eventfd,
            ..Options::default()
        };
        let started = Netdev::start(device, iotlb, &options);
        let mut netdev = started.map_err(failed("drive the vDPA device"))?;
        let driver = &mut netdev.driver;
        if let Some(ram) = ram {
            let mapped = driver.iotlb.map_guest_memory(0, ram);
            mapped.map_err(failed("map guest memory"))?;
        }
        let memory = driver.guest_memory();
        let memory = memory.map_err(failed("show the rings as a guest's memory"))?;
        let mac = driver
            .config()
            .mac
            .ok_or_else(|| Error::invalid("the vDPA device", "it has no MAC address"))?;
        let set = netdev.relay_set(&memory);
        let set = set.map_err(failed("prepare relays"))?;
        let Netdev { device, mut driver } = netdev;
        let pair = driver
            .pairs
            .pop()
            .ok_or_else(|| Error::invalid("the network driver", "it has no queues"))?;
        let event = vdpa::eventfd::new();
        let wake = Arc::new(event.map_err(Error::system("create an eventfd"))?);
        let (requests, asked) = mpsc::channel();
        let (answer, answers) = mpsc::channel();
        let relays = Relays {
            device,
            signals: signals(&set, &wake)?,
            set,
            memory: memory.into(),
            receive: pair.receive.queue().index(),
            transmit: pair.transmit.queue().index(),
            wake: Arc::clone(&wake),
            requests: asked,
            answers: answer,
            _driver: driver,
        };
        let thread = std::thread::Builder::new()
            .name("relays".to_owned())
            .spawn(move || relays.run())
            .map_err(Error::system("start a thread"))?;
        let station = Self {
            mac,
            requests: Some(requests),
            answers,
            wake,
            thread: Some(thread),
        };
        Ok((station, pair))
    }

    /// The device's address.
    pub(super) fn mac(&self) -> MacAddress {
        self.mac
    }

    /// Changes how the queues reach the device, as a migration would: shadowing covers both queues,
    /// used-ring shadowing only the receive queue. Returns the duration.
    ///
    /// # Errors
    /// The device does not support it, or the relays failed before.
    pub(super) fn change(&mut self, how: Strategy) -> Result<Duration> {
        self.ask(Request::Change(how))
    }

    /// The processor time that the relaying thread has used.
    ///
    /// # Errors
    /// The relays failed before.
    pub(super) fn processor_time(&mut self) -> Result<Duration> {
        self.ask(Request::ProcessorTime)
    }

    fn ask(&mut self, request: Request) -> Result<Duration> {
        let sent = (self.requests.as_ref()).is_some_and(|requests| requests.send(request).is_ok());
        if sent {
            self.wake
                .write(1)
                .map_err(Error::system("wake the relays"))?;
            if let Ok(answer) = self.answers.recv() {
                return Ok(answer);
            }
        }
        self.end()?;
        Err(Error::invalid("the relays", "their thread has ended"))
    }

    /// Ends the thread. Returns the error of a thread that had ended before.
    fn end(&mut self) -> Result<()> {
        self.requests = None;
        // A full counter also wakes the thread.
        let _ = self.wake.write(1);
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(ended)) => ended,
            Some(Err(_)) => Err(Error::invalid("the relays", "their thread panicked")),
            None => Ok(()),
        }
    }
}

impl Drop for Station {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            eprintln!("lab: {}", crate::error::report(&error));
        }
    }
}

/// What the thread owns.
#[derive(Debug)]
struct Relays {
    device: Device,
    set: SvqSet,
    /// The descriptors to wait for with the current strategies.
    signals: Epoll,
    memory: DeviceMemory,
    receive: u16,
    transmit: u16,
    wake: Arc<EventFd>,
    requests: Receiver<Request>,
    answers: Sender<Duration>,
    /// The memory that the device reaches stays mapped while the device runs.
    _driver: Driver,
}

impl Relays {
    fn run(mut self) -> Result<()> {
        loop {
            match self.requests.try_recv() {
                Ok(request) => {
                    let answer = self.answer(&request)?;
                    // The requester may have given up.
                    let _ = self.answers.send(answer);
                }
                Err(TryRecvError::Disconnected) => return Ok(()),
                Err(TryRecvError::Empty) => {}
            }
            let progress = self.set.poll(&self.memory);
            match progress.map_err(failed("relay"))?.pause {
                Pause::None => std::hint::spin_loop(),
                Pause::AtMost(limit) => self.wait(Some(limit))?,
                Pause::Forever => self.wait(None)?,
            }
        }
    }

    fn answer(&mut self, request: &Request) -> Result<Duration> {
        match request {
            Request::ProcessorTime => {
                let time = clock_gettime(ClockId::ThreadCPUTime);
                Duration::try_from(time).map_err(|_| Error::invalid("the clock", "it is negative"))
            }
            Request::Change(how) => {
                // In a transmit ring the device writes only its own part of the ring, so a VMM
                // never gives it a used shadow.
                let transmit = match how {
                    Strategy::UsedShadow => Strategy::Direct,
                    Strategy::Direct | Strategy::FullShadow => *how,
                };
                let targets = [(self.receive, *how), (self.transmit, transmit)];
                let begin = Instant::now();
                let changed = (self.set).change(&mut self.device, &targets, &self.memory);
                let took = begin.elapsed();
                changed.map_err(failed("change the rings"))?;
                self.signals = signals(&self.set, &self.wake)?;
                Ok(took)
            }
        }
    }

    fn wait(&self, limit: Option<Duration>) -> Result<()> {
        let milliseconds = match limit {
            None => -1,
            // epoll counts in whole milliseconds.
            Some(limit) if limit < Duration::from_millis(1) => {
                // SAFETY: needed because Epoll has no `AsFd`. The descriptor is open as
                // long as `self.signals` is borrowed, and so is the result.
                let signals = unsafe { BorrowedFd::borrow_raw(self.signals.as_raw_fd()) };
                let mut signals = [PollFd::from_borrowed_fd(signals, PollFlags::IN)];
                if !wait::until(&mut signals, Some(limit))? {
                    return Ok(());
                }
                0
            }
            Some(limit) => i32::try_from(limit.as_millis())
                .map_err(|_| Error::invalid("a time limit", "it is out of range"))?,
        };
        match self
            .signals
            .wait(milliseconds, &mut [EpollEvent::default(); 8])
        {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(Error::system("wait for eventfds")(error)),
        }
    }
}

/// The descriptors that a poll waits for with these strategies. They are edge-triggered, so that an
/// eventfd need not be read after each signal.
fn signals(set: &SvqSet, wake: &EventFd) -> Result<Epoll> {
    let epoll = Epoll::new().map_err(Error::system("create an epoll instance"))?;
    for event in set.hints().chain([wake]) {
        let interest = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, 0);
        epoll
            .ctl(ControlOperation::Add, event.as_raw_fd(), interest)
            .map_err(Error::system("wait for an eventfd"))?;
    }
    Ok(epoll)
}

//! The process that keeps a software NIC: its tap or port, and its VDUSE device.
//!
//! It touches no frame. A worker in a sandbox does, and this process starts another one when the
//! worker ends, or when it is stopped. The tap stays open here, and the kernel keeps the device. So
//! the new worker continues where the rings are, and the guest does not notice. It sends no frame
//! again: the in-flight record, a file, shows which one the worker before was sending. At a port
//! each worker gets a new socket, and the program at the port stays.
//!
//! Only the worker keeps the device open. The kernel gives a message that a killed worker has read
//! and not answered to the next one only after the last descriptor is closed.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::FdFlags;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, set_parent_process_death_signal,
    waitid,
};
use vdpa::vduse::nic::{Configuration, OFFLOADS, Tap, xdp};
use vdpa::vduse::{Control, Created, Device};
use vdpa_mgmt::nic::PortQueue;
use vdpa_mgmt::nic::server::ServerLock;

use super::{Arguments, failed};
use crate::signals::StopSignals;

/// The interval of checks for a stopped worker, a deleted tap and a large log.
const PERIOD: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};
/// A worker that ends earlier may fail each time, so the next one waits. And how long the worker of
/// a killed process may take to end.
const SHORT: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(100);
/// Largest size of the log, in bytes.
const LOG_MAX: u64 = 16 << 20;

pub(super) fn execute(arguments: &Arguments) -> Result<Code, Error> {
    let begin = || {
        let (server, device, is_new) = Server::new(arguments)?;
        let worker = server.start(&device, is_new)?;
        Ok((server, worker))
    };
    let (server, worker) = begin().inspect_err(|error: &Error| {
        // The parent reports it.
        println!("{}", vdpa::causes::in_one_line(error));
    })?;
    server.run(worker)?;
    Ok(Code::Success)
}

/// The host's end of the cable.
enum End {
    /// The queues of a tap.
    Tap(Vec<OwnedFd>),
    Port(xdp::Attachment),
}

impl End {
    /// Fails if the tap was deleted. The process that follows this one creates another tap. The
    /// next worker finds out whether a port was removed.
    fn check(&self) -> Result<(), Error> {
        match self {
            Self::Tap(queues) => queues.iter().take(1).try_for_each(Tap::check),
            Self::Port(_) => Ok(()),
        }
        .map_err(failed)
    }
}

/// The files that stay open when a worker ends.
struct Server<'a> {
    arguments: &'a Arguments,
    signals: StopSignals,
    end: End,
    _created: Created,
    lock: ServerLock,
}

impl<'a> Server<'a> {
    /// Takes over or creates the device. The last part of the result: it is new.
    fn new(arguments: &'a Arguments) -> Result<(Self, Device, bool), Error> {
        let name = &arguments.name;
        let signals = StopSignals::note().map_err(Error::context("cannot catch signals"))?;
        let lock = ServerLock::take(name).map_err(|error| Error::failed(error.to_string()))?;
        let control = Control::open().map_err(failed)?;
        // A broken device is reported before the port or tap changes.
        let left = Control::exists(name).then(|| reopen(name));
        let left = left.transpose().map_err(failed)?;
        let mut configuration = arguments.configuration();
        let is_new = left.is_none();
        let end = open(arguments, &mut configuration, is_new)?;
        let (created, device) = if let Some(device) = left {
            (control.adopt(name), device)
        } else {
            let description = configuration.description();
            let created = description.and_then(|description| control.create(name, &description));
            created.map_err(failed)?
        };
        let server = Self {
            arguments,
            signals,
            end,
            _created: created,
            lock,
        };
        Ok((server, device, is_new))
    }

    fn run(&self, mut worker: Child) -> Result<(), Error> {
        self.lock
            .ready()
            .map_err(Error::context("cannot report that the NIC is served"))?;
        loop {
            let started = Instant::now();
            let ended = self.wait(&worker);
            // It may be stopped.
            let _ = worker.kill();
            let status = worker
                .wait()
                .map_err(Error::context("cannot wait for the worker"))?;
            if self.signals.received().is_some() {
                return Ok(());
            }
            ended.map_err(Error::context("cannot watch the worker"))?;
            self.end.check()?;
            tracing::warn!(nic = self.arguments.name, %status, "another worker serves the NIC");
            if started.elapsed() < SHORT {
                std::thread::sleep(PAUSE);
            }
            let device = reopen(&self.arguments.name).map_err(failed)?;
            worker = self.start(&device, false)?;
        }
    }

    /// Starts a worker, which alone keeps the device open. `is_new`: no worker has served it.
    fn start(&self, device: &Device, is_new: bool) -> Result<Child, Error> {
        let failed = "cannot start the worker of the NIC";
        let open = |file: &OwnedFd| file.try_clone().map_err(Error::context(failed));
        let mut words = std::env::args_os().skip(1).collect::<Vec<_>>();
        for word in &mut words {
            if word == "--serve" {
                *word = "--worker".into();
            }
        }
        words.retain(|word| word != "--own-tap");
        let mut command = Command::new("/proc/self/exe");
        let device = device.as_fd().try_clone_to_owned();
        command
            .arg0("bellhop")
            .args(words)
            .stdin(device.map_err(Error::context(failed))?);
        let files = match &self.end {
            End::Tap(queues) => queues.iter().map(open).collect::<Result<Vec<_>, _>>()?,
            End::Port(attachment) => {
                // Only the worker keeps them, so the queue is free when the worker ends.
                let endpoint = attachment.endpoint().map_err(super::failed)?;
                vec![endpoint.socket, endpoint.umem.into()]
            }
        };
        let mut files = files.into_iter();
        command.stdout(files.next().map_or_else(Stdio::null, Stdio::from));
        // Until the worker is started, which inherits them under these numbers.
        let further: Vec<_> = files.collect();
        let in_flight = self.lock.in_flight(is_new);
        let in_flight = in_flight.map_err(Error::context("cannot open the in-flight record"))?;
        let mut pass = |option: &str, file: &OwnedFd| {
            rustix::io::fcntl_setfd(file, FdFlags::empty()).map_err(Error::context(failed))?;
            command.arg(option).arg(file.as_raw_fd().to_string());
            Ok::<(), Error>(())
        };
        pass("--in-flight", &in_flight)?;
        further.iter().try_for_each(|file| pass("--files", file))?;
        let server = rustix::process::getpid();
        // SAFETY: there is no safe way to bind a child to its parent before it runs. The closure
        // runs between fork and exec, and makes two system calls, which are async-signal-safe.
        unsafe {
            command.pre_exec(move || {
                // Until the worker changes its user. If this process ended before that, the worker
                // would keep the device.
                set_parent_process_death_signal(Some(Signal::KILL))?;
                if rustix::process::getppid() == Some(server) {
                    Ok(())
                } else {
                    Err(io::ErrorKind::NotFound.into())
                }
            });
        }
        command.spawn().map_err(Error::context(failed))
    }

    /// Waits until the worker ends or is stopped, the tap is deleted, or a signal asks this process
    /// to stop. A worker without a driver does not notice that its tap is deleted.
    fn wait(&self, worker: &Child) -> io::Result<()> {
        let pid = Pid::from_child(worker);
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        let states = WaitIdOptions::EXITED | WaitIdOptions::STOPPED;
        let now = states | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        while self.signals.received().is_none() && self.end.check().is_ok() {
            if waitid(WaitId::PidFd(pidfd.as_fd()), now)?.is_some() {
                break;
            }
            truncate_log()?;
            let mut ended = [PollFd::new(&pidfd, PollFlags::IN)];
            match poll(&mut ended, Some(&PERIOD)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// Opens the tap or the port, and leaves out the features that it lacks. A device that another
/// process left has its features already.
fn open(
    arguments: &Arguments,
    configuration: &mut Configuration,
    is_new: bool,
) -> Result<End, Error> {
    if let Some(PortQueue { interface, queue }) = arguments.port() {
        configuration.features &= !OFFLOADS;
        let Configuration { mac, mtu, .. } = *configuration;
        let attachment = xdp::Attachment::new(&interface, queue, mac, mtu);
        return Ok(End::Port(attachment.map_err(failed)?));
    }
    let tap = arguments.tap.as_deref().unwrap_or(&arguments.name);
    let queues = Tap::open(tap, arguments.queue_pairs).map_err(failed)?;
    if let Some(first) = queues.first() {
        // The question changes the offloads, and a driver has chosen them already.
        if is_new {
            configuration.features &= !first.missing_features();
        }
        if arguments.own_tap {
            first.set_persistent(true).map_err(failed)?;
        }
    }
    Ok(End::Tap(queues.into_iter().map(OwnedFd::from).collect()))
}

/// Opens the device that a worker or a killed process left. The worker of a killed process ends a
/// moment later.
fn reopen(name: &str) -> Result<Device, vdpa::Error> {
    let begin = Instant::now();
    let device = loop {
        match Device::open(name) {
            Err(_) if begin.elapsed() < SHORT => std::thread::sleep(PAUSE / 10),
            opened => break opened?,
        }
    };
    device.check()?;
    Ok(device)
}

/// Empties a log that the workers have filled. They append, so they continue at its beginning.
fn truncate_log() -> io::Result<()> {
    let log = rustix::stdio::stderr();
    let stat = rustix::fs::fstat(log)?;
    let is_file = rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file();
    if is_file && u64::try_from(stat.st_size).is_ok_and(|size| size > LOG_MAX) {
        rustix::fs::ftruncate(log, 0)?;
    }
    Ok(())
}

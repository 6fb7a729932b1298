//! The events that the vmm thread waits for: an epoll set whose entries have a [`Token`], so that
//! the loop itself is one `match`.
//!
//! Owns the set and the meaning of its tokens. It must not know how an event is handled.
//! Registrations are level-triggered: the handler of an event reads its descriptor, or the event
//! repeats.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

/// The descriptor that became readable (or writable, where stated).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Token {
    /// The machine is to stop.
    Stop,
    /// A vCPU cannot continue.
    VcpuFailed,
    /// Statistics are requested.
    Statistics,
    /// A request to the machine waits.
    Request,
    /// The guest ejected a device.
    Ejected,
    /// The rings in guest memory and the devices of the host are due for a check.
    Check,
    /// Throttled vCPUs are to stop or to resume.
    Throttle,
    /// The guest switched the power off or pressed reset.
    Power,
    /// The terminal has input for the serial console.
    ConsoleInput,
    /// The serial console has room for input again.
    ConsoleRoom,
    /// The serial console has output that could not be written at once, or that another thread is
    /// to write.
    ConsoleOutput,
    /// The terminal, or the client of the console's socket, is writable again.
    ConsoleWritable,
    /// A client connects to the console.
    ConsoleConnection,
    /// A device's backend registered this descriptor ([`devices::virtio::backend::Event`]).
    Device {
        /// The device's number, which the machine assigned.
        device: u16,
        /// The backend's own token.
        token: u16,
    },
}

/// First of the numbers for [`Token::Device`]; the two halves below it are the device and its
/// token.
const DEVICE: u64 = 1 << 32;

impl From<Token> for u64 {
    fn from(token: Token) -> Self {
        match token {
            Token::Stop => 0,
            Token::VcpuFailed => 1,
            Token::Power => 2,
            Token::ConsoleInput => 3,
            Token::ConsoleRoom => 4,
            Token::ConsoleOutput => 5,
            Token::ConsoleWritable => 6,
            Token::Statistics => 7,
            Token::Request => 8,
            Token::Ejected => 9,
            Token::ConsoleConnection => 10,
            Token::Check => 11,
            Token::Throttle => 12,
            Token::Device { device, token } => {
                DEVICE | (u64::from(device) << 16) | u64::from(token)
            }
        }
    }
}

impl Token {
    /// Undoes [`u64::from`]; `None` for a number without a token.
    fn from_number(number: u64) -> Option<Self> {
        Some(match number {
            0 => Self::Stop,
            1 => Self::VcpuFailed,
            2 => Self::Power,
            3 => Self::ConsoleInput,
            4 => Self::ConsoleRoom,
            5 => Self::ConsoleOutput,
            6 => Self::ConsoleWritable,
            7 => Self::Statistics,
            8 => Self::Request,
            9 => Self::Ejected,
            10 => Self::ConsoleConnection,
            11 => Self::Check,
            12 => Self::Throttle,
            _ if number >> 32 == 1 => {
                let [a, b, c, d, ..] = number.to_le_bytes();
                Self::Device {
                    device: u16::from_le_bytes([c, d]),
                    token: u16::from_le_bytes([a, b]),
                }
            }
            _ => return None,
        })
    }
}

/// Limit of the events per wait. More follow in the next one.
const BATCH: usize = 32;

/// The result of [`EventLoop::wait`]. Separate from the loop, so that handlers can change
/// registrations.
#[derive(Debug)]
pub struct Ready {
    events: [EpollEvent; BATCH],
    count: usize,
}

impl Default for Ready {
    fn default() -> Self {
        Self {
            events: [EpollEvent::default(); BATCH],
            count: 0,
        }
    }
}

impl Ready {
    /// The events of the last wait.
    pub fn tokens(&self) -> impl Iterator<Item = Token> {
        self.events
            .iter()
            .take(self.count)
            .filter_map(|event| Token::from_number(event.data()))
    }
}

/// The epoll set of the vmm thread.
#[derive(Debug)]
pub struct EventLoop {
    epoll: Epoll,
}

impl EventLoop {
    /// Creates an empty set.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            epoll: Epoll::new()?,
        })
    }

    /// Waits for `fd` to become readable from now on. The caller keeps `fd` open until it removes
    /// it or drops the loop.
    ///
    /// # Errors
    /// EPERM for a file that epoll does not support (a regular file is always readable), EEXIST for
    /// one that is registered already.
    pub fn add(&self, fd: RawFd, token: Token) -> io::Result<()> {
        self.register(fd, EventSet::IN, token)
    }

    /// Waits for `fd` to become writable from now on; otherwise like [`EventLoop::add`].
    ///
    /// # Errors
    /// Those of [`EventLoop::add`].
    pub fn add_writable(&self, fd: RawFd, token: Token) -> io::Result<()> {
        self.register(fd, EventSet::OUT, token)
    }

    fn register(&self, fd: RawFd, set: EventSet, token: Token) -> io::Result<()> {
        self.epoll.ctl(
            ControlOperation::Add,
            fd,
            EpollEvent::new(set, token.into()),
        )
    }

    /// Stops waiting for `fd`.
    ///
    /// # Errors
    /// ENOENT if it was not registered.
    pub fn remove(&self, fd: RawFd) -> io::Result<()> {
        self.epoll
            .ctl(ControlOperation::Delete, fd, EpollEvent::default())
    }

    /// Waits until a descriptor is ready and puts the events into `ready`.
    ///
    /// # Errors
    /// An error of epoll, except an interruption by a signal.
    pub fn wait(&self, ready: &mut Ready) -> io::Result<()> {
        ready.count = 0;
        loop {
            match self.epoll.wait(-1, &mut ready.events) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(count) => {
                    ready.count = count;
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// A timer in the loop.
#[derive(Debug)]
pub(crate) struct Timer(OwnedFd);

impl Timer {
    /// Creates a stopped timer.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub(crate) fn new() -> io::Result<Self> {
        // Not blocking: the timer may be stopped between the event and the read.
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Self(timerfd_create(TimerfdClockId::Monotonic, flags)?))
    }

    /// Has it expire after `first`, and then each `period` unless that is zero. Zero as `first`
    /// stops it.
    ///
    /// # Errors
    /// The times are too long for the kernel.
    pub(crate) fn set(&self, first: Duration, period: Duration) -> io::Result<()> {
        let time = |time| Timespec::try_from(time).map_err(io::Error::other);
        let timer = Itimerspec {
            it_interval: time(period)?,
            it_value: time(first)?,
        };
        timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &timer)?;
        Ok(())
    }

    /// Clears the event, regardless of the number of expirations.
    pub(crate) fn take(&self) {
        // An error only means that there is no event.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsRawFd for Timer {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn tokens_survive_the_kernel() {
        let tokens = [
            Token::Stop,
            Token::VcpuFailed,
            Token::Power,
            Token::ConsoleInput,
            Token::ConsoleRoom,
            Token::ConsoleOutput,
            Token::ConsoleWritable,
            Token::Statistics,
            Token::Request,
            Token::Ejected,
            Token::ConsoleConnection,
            Token::Check,
            Token::Throttle,
        ];
        for token in tokens {
            assert_eq!(Token::from_number(token.into()), Some(token));
        }
        for nothing in [13, u64::from(u32::MAX), 2 << 32, u64::MAX] {
            assert_eq!(Token::from_number(nothing), None);
        }
    }

    proptest! {
        #[test]
        fn device_tokens_survive_the_kernel(device: u16, token: u16) {
            let token = Token::Device { device, token };
            prop_assert_eq!(Token::from_number(token.into()), Some(token));
        }
    }

    fn ready(events: &EventLoop) -> Vec<Token> {
        let mut ready = Ready::default();
        events.wait(&mut ready).unwrap();
        ready.tokens().collect()
    }

    #[test]
    fn reports_ready_descriptors() {
        let events = EventLoop::new().unwrap();
        let (one, two) = (vdpa::eventfd::new().unwrap(), vdpa::eventfd::new().unwrap());
        let device = Token::Device {
            device: 3,
            token: 0x102,
        };
        events.add(one.as_raw_fd(), Token::Stop).unwrap();
        events.add(two.as_raw_fd(), device).unwrap();
        assert!(events.add(two.as_raw_fd(), device).is_err());
        two.write(1).unwrap();
        // Level-triggered: the event repeats until the read.
        for _ in 0..2 {
            assert_eq!(ready(&events), [device]);
        }
        one.write(1).unwrap();
        assert_eq!(ready(&events).len(), 2);
        events.remove(two.as_raw_fd()).unwrap();
        assert_eq!(ready(&events), [Token::Stop]);
        assert!(events.remove(two.as_raw_fd()).is_err());
        events
            .add_writable(two.as_raw_fd(), Token::ConsoleWritable)
            .unwrap();
        assert_eq!(ready(&events), [Token::Stop, Token::ConsoleWritable]);
    }

    #[test]
    fn a_regular_file_cannot_be_waited_for() {
        let events = EventLoop::new().unwrap();
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        let error = events
            .add(file.as_raw_fd(), Token::ConsoleInput)
            .unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EPERM));
    }
}

//! The tap: the host's end of the cable. It has a queue for each queue pair, and each queue is a
//! file.
//!
//! The kernel chooses the queue of a frame for the driver. It is the one by which the driver sends
//! the same flow. For other flows a hash decides. Only attached queues count, and the first one
//! always is.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};

use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4,
    VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_GUEST_UFO, VIRTIO_NET_F_GUEST_USO4,
    VIRTIO_NET_F_GUEST_USO6, VIRTIO_NET_F_HOST_USO,
};

use super::HEADER;
use crate::Error;

const TUN: &str = "/dev/net/tun";

/// Segmentation of UDP, which taps have for both IP versions or none.
const USO: libc::c_uint = libc::TUN_F_USO4 | libc::TUN_F_USO6;
const USO_OF_GUEST: u64 = 1 << VIRTIO_NET_F_GUEST_USO4 | 1 << VIRTIO_NET_F_GUEST_USO6;

/// Frames that wait in a tap: the kernel's queue has 500, or as `ip link set txqueuelen` says.
const STALE_MAX: usize = 100_000;

/// Which queue of a tap it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Position {
    First,
    Further,
    /// Of no tap.
    #[cfg(any(test, feature = "fuzz"))]
    Test,
}

/// A queue of a tap with virtio-net headers. The tap ends with the last process that has it open,
/// unless it is [persistent](Tap::set_persistent).
#[derive(Debug)]
pub struct Tap {
    file: File,
    position: Position,
}

impl From<Tap> for OwnedFd {
    /// For another process: see [`Tap::inherited`].
    fn from(tap: Tap) -> Self {
        tap.file.into()
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Tap {
    /// Opens `queues` queues of the tap `name`, and creates it if it does not exist. Those after
    /// the first are detached.
    ///
    /// # Errors
    /// The kernel has no taps, the name is too long or taken by another interface or process, or
    /// the rights are missing. A tap that exists has one queue, and `queues` are several, or vice
    /// versa.
    pub fn open(name: &str, queues: u16) -> Result<Vec<Self>, Error> {
        let has_several = queues > 1;
        let mut taps = vec![Self::open_queue(name, has_several)?];
        for _ in 1..queues {
            let tap = Self {
                position: Position::Further,
                ..Self::open_queue(name, has_several)?
            };
            tap.set_attached(false)?;
            taps.push(tap);
        }
        Ok(taps)
    }

    fn open_queue(name: &str, has_several: bool) -> Result<Self, Error> {
        let file = OpenOptions::new().read(true).write(true).open(TUN);
        let file = file.map_err(|error| {
            let remedy = if error.kind() == io::ErrorKind::NotFound {
                "load the kernel's module with `modprobe tun`"
            } else {
                "run this as root"
            };
            Error::other(format!("cannot open {TUN}: {remedy}")).because(error)
        })?;
        let several = if has_several {
            libc::IFF_MULTI_QUEUE
        } else {
            0
        };
        let mut request =
            with_flags(libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | several);
        if name.is_empty() || name.len() >= libc::IFNAMSIZ {
            return Err(Error::other(format!(
                "{name:?} is not a name for a tap: it has at most {} bytes",
                libc::IFNAMSIZ - 1
            )));
        }
        for (to, &from) in request.ifr_name.iter_mut().zip(name.as_bytes()) {
            *to = from.cast_signed();
        }
        // SAFETY: there is no safe interface to ioctls. The kernel reads and writes one `ifreq`,
        // which is exclusively borrowed during the call. Its name ends with NUL.
        let set = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
        check(set).map_err(|error| {
            let remedy = match error.raw_os_error() {
                Some(libc::EBUSY) => ": another process has it open",
                Some(libc::EPERM) => ": run this as root",
                Some(libc::EINVAL) if has_several => {
                    ": the name belongs to another kind of interface, or to a tap with one queue; \
                     create a tap for several queue pairs with `ip tuntap add NAME mode tap \
                     multi_queue`"
                }
                Some(libc::EINVAL) => {
                    ": the name belongs to another kind of interface, or to a tap with several \
                     queues; create a tap for one queue pair with `ip tuntap add NAME mode tap`"
                }
                _ => "",
            };
            Error::other(format!("cannot open the tap {name}{remedy}")).because(error)
        })?;
        let header = libc::c_int::try_from(HEADER).unwrap_or_default();
        // SAFETY: there is no safe interface to ioctls. The kernel reads one `int`.
        let set =
            unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const header) };
        check(set).map_err(Error::context(format!(
            "the tap {name} has no headers of {HEADER} bytes"
        )))?;
        rustix::io::ioctl_fionbio(&file, true)
            .map_err(Error::context("cannot use the tap without waiting"))?;
        Ok(Self {
            file,
            position: Position::First,
        })
    }

    /// The queues of a tap that another process has opened, in their order.
    #[must_use]
    pub fn inherited(files: Vec<OwnedFd>) -> Vec<Self> {
        let first = std::iter::once(Position::First);
        let positions = first.chain(std::iter::repeat(Position::Further));
        let tap = |(file, position)| Self {
            file: File::from(file),
            position,
        };
        files.into_iter().zip(positions).map(tap).collect()
    }

    /// Checks that the tap of this queue, its first one, exists.
    ///
    /// # Errors
    /// The tap was deleted. Its files are useless then.
    pub fn check(queue: impl AsFd) -> Result<(), Error> {
        let mut request = with_flags(0);
        // SAFETY: there is no safe interface to ioctls. The kernel writes one `ifreq`, which is
        // exclusively borrowed during the call.
        let found =
            unsafe { libc::ioctl(queue.as_fd().as_raw_fd(), libc::TUNGETIFF, &raw mut request) };
        check(found).map_err(Error::context("the tap of the NIC was deleted"))
    }

    /// Whether the tap stays without a process that has it open.
    ///
    /// # Errors
    /// The rights are missing.
    pub fn set_persistent(&self, persistent: bool) -> Result<(), Error> {
        // SAFETY: there is no safe interface to ioctls. The kernel gets the flag by value.
        let set = unsafe {
            libc::ioctl(
                self.file.as_raw_fd(),
                libc::TUNSETPERSIST,
                libc::c_ulong::from(persistent),
            )
        };
        check(set).map_err(Error::context("cannot change how long the tap stays"))
    }

    /// Any file that keeps the borders of frames, as a test has it.
    #[cfg(any(test, feature = "fuzz"))]
    pub(super) fn of(file: File) -> Self {
        Self {
            file,
            position: Position::Test,
        }
    }

    /// Prepares the queue for a driver with these features. Drops the frames that wait, which may
    /// be of a kind that the driver does not take. A further queue is detached.
    pub(super) fn start(&self, features: u64, buffer: &mut [u8]) -> Result<(), Error> {
        self.set_offloads(features)?;
        if self.position == Position::Further {
            // This drops its frames. There are none to read then.
            return self.set_attached(false);
        }
        for _ in 0..STALE_MAX {
            if self.read(buffer)?.is_none() {
                break;
            }
        }
        Ok(())
    }

    /// Whether the kernel passes frames to this queue. The first one stays attached.
    pub(super) fn set_attached(&self, attached: bool) -> Result<(), Error> {
        if self.position != Position::Further {
            return Ok(());
        }
        let flag = if attached {
            libc::IFF_ATTACH_QUEUE
        } else {
            libc::IFF_DETACH_QUEUE
        };
        let request = with_flags(flag);
        // SAFETY: there is no safe interface to ioctls. The kernel reads one `ifreq`.
        let set =
            unsafe { libc::ioctl(self.file.as_raw_fd(), libc::TUNSETQUEUE, &raw const request) };
        match check(set) {
            // It is so already, also by the process before.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
            set => set.map_err(Error::context("cannot attach or detach a queue of the tap")),
        }
    }

    /// Passes on the offloads that a driver with these features takes. They are those of the tap,
    /// by its first queue.
    pub(super) fn set_offloads(&self, features: u64) -> Result<(), Error> {
        if self.position != Position::First {
            return Ok(());
        }
        let mut offloads = 0;
        for (feature, flag) in [
            (VIRTIO_NET_F_GUEST_CSUM, libc::TUN_F_CSUM),
            (VIRTIO_NET_F_GUEST_TSO4, libc::TUN_F_TSO4),
            (VIRTIO_NET_F_GUEST_TSO6, libc::TUN_F_TSO6),
            (VIRTIO_NET_F_GUEST_ECN, libc::TUN_F_TSO_ECN),
            (VIRTIO_NET_F_GUEST_UFO, libc::TUN_F_UFO),
        ] {
            if features & 1 << feature != 0 {
                offloads |= flag;
            }
        }
        if features & USO_OF_GUEST == USO_OF_GUEST {
            offloads |= USO;
        }
        let set = self.try_offloads(offloads);
        set.map_err(Error::context("the tap rejects the driver's offloads"))
    }

    /// The features of [`OFFERED`](super::OFFERED) that the tap lacks: kernels before 6.2 do not
    /// segment UDP (USO). The offloads are not those of a driver any more.
    #[must_use]
    pub fn missing_features(&self) -> u64 {
        match self.try_offloads(libc::TUN_F_CSUM | USO) {
            Ok(()) => 0,
            Err(_) => USO_OF_GUEST | 1 << VIRTIO_NET_F_HOST_USO,
        }
    }

    /// Segmentation needs checksums (virtio 1.3, 5.1.3.1), which the kernel checks.
    fn try_offloads(&self, offloads: libc::c_uint) -> io::Result<()> {
        // SAFETY: there is no safe interface to ioctls. The kernel gets the flags by value.
        let set = unsafe {
            libc::ioctl(
                self.file.as_raw_fd(),
                libc::TUNSETOFFLOAD,
                libc::c_ulong::from(offloads),
            )
        };
        check(set)
    }

    /// The next frame, if one waits: its bytes.
    pub(super) fn read(&self, buffer: &mut [u8]) -> Result<Option<usize>, Error> {
        loop {
            match (&self.file).read(buffer) {
                Ok(read) => return Ok(Some(read)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                // The interface is down. It sends an event when it is up.
                Err(error) if error.raw_os_error() == Some(libc::EIO) => return Ok(None),
                Err(error) => {
                    return Err(Error::other(
                        "cannot read the tap: it was deleted; start the NIC again",
                    )
                    .because(error));
                }
            }
        }
    }

    /// Sends a frame. The tap drops one with an invalid header or too many pieces. It also drops
    /// frames while the interface is down, as a NIC without a cable would.
    ///
    /// # Safety
    /// The frame's memory must be mapped during the call.
    pub(super) unsafe fn write(&self, frame: &Vectors) -> bool {
        let count = libc::c_int::try_from(frame.0.len()).unwrap_or(libc::c_int::MAX);
        // SAFETY: needed because safe interfaces take references, and a driver changes its memory
        // at any time. The kernel reads `count` entries, as many as there are, and the caller
        // vouches for their addresses.
        unsafe { libc::writev(self.file.as_raw_fd(), frame.0.as_ptr(), count) >= 0 }
    }
}

/// Addresses in this process of a frame in the driver's memory.
#[derive(Default)]
pub(super) struct Vectors(pub(super) Vec<libc::iovec>);

// SAFETY: needed because raw pointers are not `Send`. Between two turns there are none, and only
// the kernel accesses memory through them.
unsafe impl Send for Vectors {}

crate::opaque_debug!(Vectors, this => len: this.0.len());

/// A request without a name.
fn with_flags(flags: libc::c_int) -> libc::ifreq {
    libc::ifreq {
        ifr_name: [0; libc::IFNAMSIZ],
        ifr_ifru: libc::__c_anonymous_ifr_ifru {
            ifru_flags: i16::try_from(flags).unwrap_or_default(),
        },
    }
}

fn check(result: i32) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

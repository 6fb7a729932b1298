//! Events of the vdpa bus: devices that are added, removed, bound and unbound, from the kernel's
//! broadcast.
//!
//! The netlink family has no notifications, but the driver core sends a message for each device
//! (lib/kobject_uevent.c): `ACTION@DEVPATH`, then `KEY=VALUE`, each with a NUL. Messages of other
//! processes and other subsystems are dropped.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recvfrom, socket_with};

/// The multicast group of the kernel's own messages.
const KERNEL_GROUP: u32 = 1;

/// Maximum size of a message (UEVENT_BUFFER_SIZE, and the header before it).
const MESSAGE_MAX: usize = 8192;

/// Maximum number of messages to drop at once.
const DROPPED_MAX: usize = 1024;

/// The event of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// It was added.
    Add,
    /// It was removed.
    Remove,
    /// A bus driver was bound to it.
    Bind,
    /// Its bus driver was unbound.
    Unbind,
    /// Another property changed.
    Change,
}

/// A message about a vDPA device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Uevent {
    /// The event.
    pub action: Action,
    /// The device's name.
    pub name: String,
    /// The bus driver, if the kernel names one.
    pub driver: Option<String>,
    /// The kernel's count of messages (SEQNUM).
    pub sequence: Option<u64>,
}

/// An item of the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// An event occurred.
    Event(Uevent),
    /// More events occurred than fit into the socket: list the devices again.
    Lost,
}

/// The stream of messages since it was opened.
#[derive(Debug)]
pub struct Uevents {
    fd: OwnedFd,
    buffer: Vec<u8>,
}

impl Uevents {
    /// Opens the stream. It needs no privilege.
    ///
    /// # Errors
    /// The kernel refuses the socket.
    pub fn open() -> io::Result<Self> {
        let fd = socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            Some(KOBJECT_UEVENT),
        )?;
        bind(&fd, &SocketAddrNetlink::new(0, KERNEL_GROUP))?;
        Ok(Self {
            fd,
            buffer: vec![0; MESSAGE_MAX],
        })
    }

    /// Waits for the next message about a vDPA device. `None` if no message arrived for this long;
    /// `None` as the limit waits forever.
    ///
    /// # Errors
    /// Reading the socket fails.
    pub fn next(&mut self, limit: Option<Duration>) -> io::Result<Option<Notice>> {
        set_socket_timeout(&self.fd, Timeout::Recv, limit)?;
        loop {
            let (fd, buffer) = (&self.fd, &mut self.buffer);
            match recvfrom(fd, buffer.as_mut_slice(), RecvFlags::TRUNC) {
                Ok((_, length, sender)) => {
                    let from_kernel = sender
                        .and_then(|sender| SocketAddrNetlink::try_from(sender).ok())
                        .is_some_and(|sender| sender.pid() == 0);
                    let message = self.buffer.get(..length).filter(|_| from_kernel);
                    if let Some(event) = message.and_then(parse) {
                        return Ok(Some(Notice::Event(event)));
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::NOBUFS) => return Ok(Some(Notice::Lost)),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Uevents {
    /// Waits until the kernel sends any message, about any device, and drops all pending ones.
    /// Returns whether there was one. For callers that check the devices anyway.
    ///
    /// # Errors
    /// Reading the socket fails.
    pub fn any(&mut self, limit: Duration) -> io::Result<bool> {
        let limit = Timespec::try_from(limit).unwrap_or(Timespec {
            tv_sec: i64::MAX,
            tv_nsec: 0,
        });
        let ready = match poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], Some(&limit)) {
            Err(Errno::INTR) => 0,
            ready => ready?,
        };
        if ready == 0 {
            return Ok(false);
        }
        // At most as many as fit into the socket, because more may arrive all the time.
        for _ in 0..DROPPED_MAX {
            match recvfrom(&self.fd, self.buffer.as_mut_slice(), RecvFlags::DONTWAIT) {
                Ok(_) | Err(Errno::INTR | Errno::NOBUFS) => {}
                Err(Errno::AGAIN) => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }
}

impl AsFd for Uevents {
    /// For waiting together with other descriptors: readable when a message is there.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A message about a vDPA device; `None` for any other.
fn parse(message: &[u8]) -> Option<Uevent> {
    let text = std::str::from_utf8(message).ok()?;
    let mut fields = text.split('\0');
    let (action, path) = fields.next()?.split_once('@')?;
    let mut subsystem = None;
    let mut driver = None;
    let mut sequence = None;
    for field in fields {
        match field.split_once('=') {
            Some(("SUBSYSTEM", value)) => subsystem = Some(value),
            Some(("DRIVER", value)) => driver = Some(value.to_owned()),
            Some(("SEQNUM", value)) => sequence = value.parse().ok(),
            _ => {}
        }
    }
    if subsystem != Some("vdpa") {
        return None;
    }
    let action = match action {
        "add" => Action::Add,
        "remove" => Action::Remove,
        "bind" => Action::Bind,
        "unbind" => Action::Unbind,
        "change" | "move" | "online" | "offline" => Action::Change,
        _ => return None,
    };
    let name = path.rsplit('/').next().filter(|name| !name.is_empty())?;
    Some(Uevent {
        action,
        name: name.to_owned(),
        driver,
        sequence,
    })
}

/// For the fuzz target.
#[cfg(any(test, feature = "fuzz"))]
pub(super) fn decode_anything(message: &[u8]) {
    let _ = parse(message);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BIND: &[u8] = b"bind@/devices/nic0\0ACTION=bind\0DEVPATH=/devices/nic0\0\
        SUBSYSTEM=vdpa\0DRIVER=vhost_vdpa\0SEQNUM=1234\0";

    #[test]
    fn a_message_is_read() {
        let event = parse(BIND).unwrap();
        assert_eq!((event.action, event.name.as_str()), (Action::Bind, "nic0"));
        assert_eq!(event.driver.as_deref(), Some("vhost_vdpa"));
        assert_eq!(event.sequence, Some(1234));
    }

    #[test]
    fn others_are_dropped() {
        for message in [
            &b""[..],
            b"libudev\0SUBSYSTEM=vdpa\0",
            b"add@/devices/nic0/vhost-vdpa-0\0SUBSYSTEM=vhost-vdpa\0",
            b"add@/devices/nic0\0",
            b"add@\0SUBSYSTEM=vdpa\0",
            b"frob@/devices/nic0\0SUBSYSTEM=vdpa\0",
            b"add@/devices/\xff\0SUBSYSTEM=vdpa\0",
        ] {
            assert_eq!(parse(message), None, "{}", String::from_utf8_lossy(message));
        }
    }

    proptest! {
        #[test]
        fn changed_messages_do_no_harm(index: prop::sample::Index, value: u8, cut in 0_usize..100) {
            let mut message = BIND.to_vec();
            let length = message.len();
            message[index.index(length)] = value;
            message.truncate(cut);
            let _ = parse(&message);
        }
    }
}

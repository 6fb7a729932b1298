//! The network between the functions of the SR-IOV rig's NIC.
//!
//! ```text
//!   with the rights for it          without
//!   vf0 ── tap0 ─┐                  vf0 ──┐      vf2 ──┐
//!   vf1 ── tap1 ─┤ bridge           vf1 ──┘      vf3 ──┘
//!   vf2 ── tap2 ─┤ (it learns)      crossed sockets,
//!   vf3 ── tap3 ─┘                  one queue pair each
//! ```
//! The bridge lives in a network namespace without a name. A thread creates the namespace and ends;
//! the taps' descriptors keep it alive. QEMU inherits them, so the kernel removes all of it with
//! QEMU's process, however that ends.
//!
//! This module owns the descriptors and does not depend on PCI.

use crate::error::{Error, Result, report};
use crate::process::output;
use crate::setup::root::Root;
use rustix::thread::UnshareFlags;
use std::fs::File;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::Path;

/// The bridge's name. No other process is in its namespace.
const BRIDGE: &str = "links";

/// The device that creates taps (Documentation/networking/tuntap.rst).
const TUN: &str = "/dev/net/tun";

/// A network, until QEMU has inherited it.
#[derive(Debug)]
pub enum LinkBackend {
    /// Every port reaches every other port: one tap per port, one descriptor per queue pair.
    Switch(Vec<Vec<OwnedFd>>),
    /// Ports 0 and 1, 2 and 3, … are crossed; one queue pair each.
    Pairs(Vec<OwnedFd>),
}

impl LinkBackend {
    /// Creates a switch, or crossed pairs where the rights for a switch are missing. It then prints
    /// the reason and what the pairs lack.
    ///
    /// # Errors
    /// [`Error::System`] when it cannot even create sockets.
    pub fn lay(root: &Root, ports: usize, queue_pairs: usize) -> Result<Self> {
        match switch(root, ports, queue_pairs) {
            Ok(taps) => Ok(Self::Switch(taps)),
            Err(error) => {
                eprintln!(
                    "lab: no switch between the NIC's functions ({}): vf0 and vf1, vf2 and vf3 \
                     are crossed instead, with one queue pair each; tests of several queues and \
                     of moved addresses will fail. Remedy: run as root, with {TUN}",
                    report(&error)
                );
                pairs(ports).map(Self::Pairs)
            }
        }
    }

    /// The value of QEMU's `-netdev` for a port.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a port that does not exist.
    pub fn netdev(&self, port: usize, id: &str) -> Result<String> {
        let missing = || Error::invalid("the link", format!("it has no port {port}"));
        Ok(match self {
            Self::Switch(taps) => {
                let numbers: Vec<String> = taps
                    .get(port)
                    .ok_or_else(missing)?
                    .iter()
                    .map(|tap| tap.as_raw_fd().to_string())
                    .collect();
                format!("tap,id={id},fds={},vhost=off", numbers.join(":"))
            }
            Self::Pairs(sockets) => {
                let socket = sockets.get(port).ok_or_else(missing)?;
                format!(
                    "dgram,id={id},local.type=fd,local.str={}",
                    socket.as_raw_fd()
                )
            }
        })
    }

    /// The descriptors that QEMU inherits.
    pub fn into_descriptors(self) -> Vec<OwnedFd> {
        match self {
            Self::Switch(taps) => taps.into_iter().flatten().collect(),
            Self::Pairs(sockets) => sockets,
        }
    }
}

fn pairs(ports: usize) -> Result<Vec<OwnedFd>> {
    let mut sockets = Vec::new();
    while sockets.len() < ports {
        let (one, other) = UnixDatagram::pair().map_err(Error::system("create sockets"))?;
        sockets.extend([OwnedFd::from(one), OwnedFd::from(other)]);
    }
    sockets.truncate(ports);
    Ok(sockets)
}

/// Creates taps and a bridge in a separate thread. A namespace belongs to a thread, and this
/// process must stay in the machine's network.
fn switch(root: &Root, ports: usize, queue_pairs: usize) -> Result<Vec<Vec<OwnedFd>>> {
    std::thread::scope(|scope| {
        scope
            .spawn(|| switch_in_new_namespace(root, ports, queue_pairs))
            .join()
            .unwrap_or_else(|_| Err(Error::invalid("the switch", "its thread panicked")))
    })
}

fn switch_in_new_namespace(
    root: &Root,
    ports: usize,
    queue_pairs: usize,
) -> Result<Vec<Vec<OwnedFd>>> {
    // SAFETY: needed because the standard library has no namespaces. The call
    // is unsafe for flags that unshare descriptors; this one does not. The
    // thread ends soon and shares its network with no other.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }
        .map_err(Error::system("make a network namespace"))?;
    // The bridge itself must not send on the cable. The file belongs to this thread's namespace;
    // where it is missing there is no IPv6.
    let _ = std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1");
    let ip = |arguments: &[&str]| output(root.program("usr/sbin/ip").args(arguments)).map(drop);
    ip(&[
        "link",
        "add",
        BRIDGE,
        "type",
        "bridge",
        "mcast_snooping",
        "0",
    ])?;
    ip(&["link", "set", BRIDGE, "up"])?;
    (0..ports)
        .map(|port| {
            let name = format!("tap{port}");
            let queues = (0..queue_pairs)
                .map(|_| tap(&name))
                .collect::<Result<Vec<_>>>()?;
            ip(&["link", "set", &name, "master", BRIDGE, "up"])?;
            Ok(queues)
        })
        .collect()
}

/// Opens one more queue of a tap; the first call creates the tap.
fn tap(name: &str) -> Result<OwnedFd> {
    let path = Path::new(TUN);
    let file = File::options()
        .read(true)
        .write(true)
        .open(path)
        .map_err(Error::file("open", path))?;
    // SAFETY: needed because the C structure has a union and no constructor.
    // All its fields are integers, for which zero is valid.
    let mut interface: libc::ifreq = unsafe { std::mem::zeroed() };
    // One byte stays zero: the kernel requires a terminated name.
    if name.len() >= interface.ifr_name.len() {
        return Err(Error::invalid(
            "a tap's name",
            format!("{name:?} is too long"),
        ));
    }
    for (to, from) in interface.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | libc::IFF_MULTI_QUEUE;
    interface.ifr_ifru.ifru_flags = i16::try_from(flags).unwrap_or_default();
    // SAFETY: needed because the interface is an ioctl. The descriptor is open,
    // and the pointer is to a whole `struct ifreq` that lives across the call.
    let made = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut interface) };
    if made < 0 {
        return Err(Error::system("make a tap")(std::io::Error::last_os_error()));
    }
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crossed_ports_receive_each_others_frames() {
        let link_backend = LinkBackend::Pairs(pairs(4).unwrap());
        assert!(
            link_backend
                .netdev(3, "vf3")
                .unwrap()
                .starts_with("dgram,id=vf3,")
        );
        assert!(link_backend.netdev(4, "vf4").is_err());
        let sockets: Vec<UnixDatagram> = link_backend
            .into_descriptors()
            .into_iter()
            .map(UnixDatagram::from)
            .collect();
        for (from, to) in [(0, 1), (1, 0), (2, 3)] {
            sockets[from].send(b"frame").unwrap();
            let mut buffer = [0; 16];
            assert_eq!(sockets[to].recv(&mut buffer).unwrap(), 5);
        }
    }

    #[test]
    fn a_tap_with_a_long_name_is_refused() {
        // Without the rights or the device, the error is a different one.
        assert!(tap("sixteencharacter").is_err());
    }
}

//! NICs: their flags, addresses and drivers (netdevice(7), sysfs).

use crate::{background, frames, info};
use lab::error::{Error, Result};
use lab::files;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use serde_json::{Value, json};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Bytes of an Ethernet address.
pub(crate) type Address = [u8; 6];

/// How long a driver may take to bring its NIC back.
const REBIND_LIMIT: Duration = Duration::from_secs(20);

/// Frames exchanged after each rebind of the driver.
const REBIND_FRAMES: u64 = 10;

/// Their size in bytes.
const REBIND_SIZE: usize = 128;

/// Commands of the ethtool interface (`linux/ethtool.h`).
const ETHTOOL_GCHANNELS: u32 = 0x3c;
const ETHTOOL_SCHANNELS: u32 = 0x3d;
const ETHTOOL_GRINGPARAM: u32 = 0x10;
const ETHTOOL_SRINGPARAM: u32 = 0x11;

/// Names of the NICs that have a device (so not the loopback), sorted.
pub(crate) fn names() -> Vec<String> {
    files::list(Path::new("/sys/class/net"))
        .unwrap_or_default()
        .iter()
        .filter(|path| path.join("device").exists())
        .filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()))
        .collect()
}

/// A NIC's address.
pub(crate) fn address(nic: &str) -> Result<Address> {
    let text = info::attribute(Path::new("/sys/class/net").join(nic).join("address"))
        .ok_or_else(|| Error::invalid("NIC", format!("there is no {nic:?}")))?;
    parse_address(&text)
}

/// Six hexadecimal bytes with colons.
pub(crate) fn parse_address(text: &str) -> Result<Address> {
    let invalid = || Error::invalid("ADDRESS", format!("{text:?} is not six bytes with colons"));
    let bytes: Vec<u8> = text
        .split(':')
        .map(|byte| {
            Some(byte)
                .filter(|byte| {
                    byte.len() == 2 && byte.chars().all(|digit| digit.is_ascii_hexdigit())
                })
                .and_then(|byte| u8::from_str_radix(byte, 16).ok())
                .ok_or_else(invalid)
        })
        .collect::<Result<_>>()?;
    bytes.try_into().map_err(|_| invalid())
}

/// Makes the NIC ready to send and receive.
pub(crate) fn bring_up(nic: &str) -> Result<()> {
    change_flags(nic, libc::IFF_UP, 0)
}

/// Brings up a NIC that appeared while the guest ran, and waits for its link.
pub(crate) fn come_up(nic: &str) -> Result<Value> {
    bring_up(nic)?;
    wait_for(nic, has_link)?;
    Ok(json!({ "up": nic }))
}

/// Switches promiscuous mode.
pub(crate) fn set_promiscuous(nic: &str, on: bool) -> Result<Value> {
    if on {
        change_flags(nic, libc::IFF_PROMISC, 0)?;
    } else {
        change_flags(nic, 0, libc::IFF_PROMISC)?;
    }
    Ok(json!({ "promisc": on }))
}

/// Sets the NIC's address: down, set, up. A driver with a control queue sends
/// the address to the device, and its refusal arrives here.
pub(crate) fn set_address(nic: &str, text: &str) -> Result<Value> {
    let wanted = parse_address(text)?;
    change_flags(nic, 0, libc::IFF_UP)?;
    let set = Request::new(nic)?.set_address(wanted);
    bring_up(nic)?;
    set?;
    let now = address(nic)?;
    if now != wanted {
        return Err(Error::invalid(
            "the NIC's address",
            format!("{now:02x?} after it was set to {wanted:02x?}"),
        ));
    }
    Ok(json!({ "mac": text }))
}

/// Sets the address of a NIC that stays up.
pub(crate) fn tell_address(nic: &str, address: Address) -> Result<()> {
    Request::new(nic)?.set_address(address)
}

/// Unbinds the driver from the NIC's device and binds it again, `times` times. After each bind a
/// few frames are looped back by the device, or go to and from a peer that floods.
pub(crate) fn rebind(nic: &str, times: u64, peer: Option<Address>) -> Result<Value> {
    let driver = Driver::of(nic)?;
    let started = Instant::now();
    let mut totals = frames::Totals::default();
    for _ in 0..times {
        driver.rebind()?;
        totals.add(&match peer {
            Some(peer) => frames::converse(nic, peer, REBIND_FRAMES, REBIND_SIZE)?,
            None => {
                let plan = frames::Plan {
                    count: REBIND_FRAMES,
                    size: REBIND_SIZE,
                    window: 4,
                    peer,
                };
                frames::send_and_verify(nic, &plan)?
            }
        });
    }
    Ok(rebinds(totals.to_json(), times, started))
}

/// The same during the background flood: each time after `frames` of its frames have returned; with
/// 0, as fast as possible.
pub(crate) fn rebind_flooded(nic: &str, times: u64, frames: u64) -> Result<Value> {
    let driver = Driver::of(nic)?;
    let started = Instant::now();
    for _ in 0..times {
        background::wait_for(frames)?;
        driver.rebind()?;
    }
    Ok(rebinds(json!({}), times, started))
}

/// Resets the NIC's PCI function without its driver. Prints the methods that the kernel may use,
/// the preferred one first.
pub(crate) fn reset_function(nic: &str) -> Result<Value> {
    let driver = Driver::of(nic)?;
    let device = Path::new("/sys/class/net").join(nic).join("device");
    let device = device
        .canonicalize()
        .map_err(Error::file("read", &device))?;
    // A virtio device is below its function.
    let function = device.ancestors().find(|path| path.join("reset").exists());
    let function = function.unwrap_or(&device).to_owned();
    driver.rebind_after(|| files::write(&function.join("reset"), "1"))?;
    Ok(json!({ "methods": info::attribute(function.join("reset_method")) }))
}

fn rebinds(mut value: Value, times: u64, started: Instant) -> Value {
    if let Some(object) = value.as_object_mut() {
        object.insert("rebinds".into(), times.into());
        let elapsed = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
        object.insert("elapsed_us".into(), elapsed.into());
    }
    value
}

/// A NIC's driver and the device that it is bound to.
struct Driver {
    nic: String,
    device: String,
    directory: PathBuf,
}

impl Driver {
    fn of(nic: &str) -> Result<Self> {
        let device = Path::new("/sys/class/net").join(nic).join("device");
        let driver = device.join("driver");
        Ok(Self {
            nic: nic.to_owned(),
            device: link_name(&device)?,
            directory: driver
                .canonicalize()
                .map_err(Error::file("read", &driver))?,
        })
    }

    fn rebind(&self) -> Result<()> {
        self.rebind_after(|| Ok(()))
    }

    fn rebind_after(&self, unbound: impl FnOnce() -> Result<()>) -> Result<()> {
        files::write(&self.directory.join("unbind"), &self.device)?;
        unbound()?;
        files::write(&self.directory.join("bind"), &self.device)?;
        wait_for(&self.nic, |nic| nic.exists())?;
        bring_up(&self.nic)?;
        wait_for(&self.nic, has_link)?;
        // The kernel gives the NIC its transmit queues a moment after it shows the link, and drops
        // frames with success until then. It holds the lock that this call takes meanwhile.
        bring_up(&self.nic)
    }
}

/// `struct ethtool_channels` (`linux/ethtool.h`), in its order.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy)]
struct Channels {
    command: u32,
    max_rx: u32,
    max_tx: u32,
    max_other: u32,
    max_combined: u32,
    rx: u32,
    tx: u32,
    other: u32,
    combined: u32,
}

/// Makes the NIC use `count` queue pairs. The driver sends the number through the control queue; a
/// refusal of the device arrives here.
pub(crate) fn set_channels(nic: &str, count: u32) -> Result<Value> {
    let mut request = Request::new(nic)?;
    let mut channels = request.channels(Channels {
        command: ETHTOOL_GCHANNELS,
        ..Channels::default()
    })?;
    channels.command = ETHTOOL_SCHANNELS;
    channels.combined = count;
    request.channels(channels)?;
    channels.command = ETHTOOL_GCHANNELS;
    let now = request.channels(channels)?;
    Ok(json!({ "combined": now.combined, "max_combined": now.max_combined }))
}

/// `struct ethtool_ringparam` (`linux/ethtool.h`), in its order; entries.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy)]
struct RingSizes {
    command: u32,
    max_rx: u32,
    max_rx_mini: u32,
    max_rx_jumbo: u32,
    max_tx: u32,
    rx: u32,
    rx_mini: u32,
    rx_jumbo: u32,
    tx: u32,
}

/// Sets the sizes of all rings of the NIC, as `ethtool -G NIC rx N tx N` does. The driver resets
/// only the queues whose size changes (RING_RESET).
pub(crate) fn set_rings(nic: &str, rx: u32, tx: u32) -> Result<Value> {
    let mut request = Request::new(nic)?;
    let mut sizes = request.rings(RingSizes {
        command: ETHTOOL_GRINGPARAM,
        ..RingSizes::default()
    })?;
    sizes.command = ETHTOOL_SRINGPARAM;
    (sizes.rx, sizes.tx) = (rx, tx);
    request.rings(sizes)?;
    sizes.command = ETHTOOL_GRINGPARAM;
    let now = request.rings(sizes)?;
    Ok(json!({ "rx": now.rx, "tx": now.tx, "max_rx": now.max_rx, "max_tx": now.max_tx }))
}

fn wait_for(nic: &str, is_ready: impl Fn(&Path) -> bool) -> Result<()> {
    let path = Path::new("/sys/class/net").join(nic);
    let started = Instant::now();
    while !is_ready(&path) {
        if started.elapsed() > REBIND_LIMIT {
            return Err(Error::invalid(nic, "it did not come back with its driver"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// "unknown" is a device that does not report its link and always has one.
fn has_link(nic: &Path) -> bool {
    let is = |name: &str, values: &[&str]| {
        info::attribute(nic.join(name)).is_some_and(|value| values.contains(&value.as_str()))
    };
    is("carrier", &["1"]) && is("operstate", &["up", "unknown"])
}

fn link_name(path: &Path) -> Result<String> {
    let target: PathBuf = std::fs::read_link(path).map_err(Error::file("read", path))?;
    target
        .file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .ok_or_else(|| Error::invalid(path.display().to_string(), "it links to nothing"))
}

fn change_flags(nic: &str, set: i32, clear: i32) -> Result<()> {
    let mut request = Request::new(nic)?;
    let flags = i32::from(request.flags()?);
    let flags = (flags | set) & !clear;
    // Flags that do not fit the kernel's short are not in its interface.
    let flags = i16::try_from(flags & 0x7fff).unwrap_or_default();
    request.set_flags(flags)
}

/// The kernel's `struct ifreq` for one NIC, and a socket to send it through.
struct Request {
    socket: OwnedFd,
    interface: libc::ifreq,
}

impl Request {
    fn new(nic: &str) -> Result<Self> {
        // AF_PACKET exists without any network protocol.
        let socket = socket_with(
            AddressFamily::PACKET,
            SocketType::DGRAM,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(Error::system("create a socket"))?;
        // SAFETY: needed because the C structure has a union and no
        // constructor. All its fields are integers, for which zero is valid.
        let mut interface: libc::ifreq = unsafe { std::mem::zeroed() };
        // One byte stays zero: the kernel requires a terminated name.
        if nic.is_empty() || nic.len() >= interface.ifr_name.len() {
            return Err(Error::invalid("NIC", format!("{nic:?} is no NIC's name")));
        }
        for (to, from) in interface.ifr_name.iter_mut().zip(nic.bytes()) {
            *to = from.cast_signed();
        }
        Ok(Self { socket, interface })
    }

    fn flags(&mut self) -> Result<i16> {
        self.send(libc::SIOCGIFFLAGS, "read the NIC's flags")?;
        // SAFETY: needed because the field is in a union. The kernel has just
        // filled in this member, and any bits are a valid integer.
        Ok(unsafe { self.interface.ifr_ifru.ifru_flags })
    }

    fn set_flags(&mut self, flags: i16) -> Result<()> {
        self.interface.ifr_ifru.ifru_flags = flags;
        self.send(libc::SIOCSIFFLAGS, "change the NIC's flags")
    }

    fn set_address(&mut self, address: Address) -> Result<()> {
        let mut hardware = libc::sockaddr {
            sa_family: libc::ARPHRD_ETHER,
            sa_data: [0; 14],
        };
        for (to, from) in hardware.sa_data.iter_mut().zip(address) {
            *to = from.cast_signed();
        }
        self.interface.ifr_ifru.ifru_hwaddr = hardware;
        self.send(libc::SIOCSIFHWADDR, "set the NIC's address")
    }

    fn channels(&mut self, mut channels: Channels) -> Result<Channels> {
        self.interface.ifr_ifru.ifru_data = (&raw mut channels).cast();
        // The kernel reads and writes one whole `Channels`, which lives across
        // the call; no other request looks at the pointer.
        let sent = self.send(libc::SIOCETHTOOL, "get or set the NIC's queue pairs");
        self.interface.ifr_ifru.ifru_data = std::ptr::null_mut();
        sent.map(|()| channels)
    }

    fn rings(&mut self, mut sizes: RingSizes) -> Result<RingSizes> {
        self.interface.ifr_ifru.ifru_data = (&raw mut sizes).cast();
        // As in `channels`.
        let sent = self.send(libc::SIOCETHTOOL, "get or set the NIC's ring sizes");
        self.interface.ifr_ifru.ifru_data = std::ptr::null_mut();
        sent.map(|()| sizes)
    }

    fn send(&mut self, number: libc::Ioctl, action: &'static str) -> Result<()> {
        // SAFETY: needed because the interface is an ioctl. The descriptor is
        // open, and the pointer is to a whole `struct ifreq` that lives across
        // the call. These requests read and write no more than that, and
        // SIOCETHTOOL what its `ifru_data` points to (see `channels`).
        let result =
            unsafe { libc::ioctl(self.socket.as_raw_fd(), number, &raw mut self.interface) };
        if result < 0 {
            return Err(Error::system(action)(std::io::Error::last_os_error()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed_strictly() {
        assert_eq!(
            parse_address("02:00:5e:00:53:FF").unwrap(),
            [2, 0, 0x5e, 0, 0x53, 0xff]
        );
        for text in [
            "",
            "02:00:5e:00:53",
            "2:0:5e:0:53:1",
            "02:00:5e:00:53:01:02",
            "+2:00:5e:00:53:01",
        ] {
            assert!(parse_address(text).is_err(), "{text}");
        }
    }

    #[test]
    fn long_names_do_not_fit() {
        assert!(Request::new("sixteencharacter").is_err());
        assert!(Request::new("").is_err());
    }
}

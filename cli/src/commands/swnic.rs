//! `bellhop swnic`: a NIC without hardware, in the foreground.
//!
//! ```text
//!   create: leftover of a killed process gone -> tap, bridge port -> VDUSE device -> packet thread
//!           -> vDPA device -> vhost_vdpa                  delete: the same in reverse order
//! ```
//! The packet thread answers the kernel while this one adds and deletes the vDPA device.

mod leftover;

use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::{Entry, Format, Layout, Listing};
use vdpa::eventfd;
use vdpa::vduse::Control;
use vdpa::vduse::nic::{Configuration, Nic, Tap};
use vdpa_mgmt::bus::{Bus, BusDevice};
use vdpa_mgmt::link::Links;
use vdpa_mgmt::{Connection, ErrorKind, NewDevice};
use vmm::config::MacAddress;
use vmm::sandbox::privileges;

use crate::signals::StopSignals;

/// The management device of devices in userspace.
const MGMTDEV: &str = "vduse";
/// Between two looks at signals, the packet thread and the users of the device.
const PAUSE: Duration = Duration::from_millis(100);

/// Run a NIC without hardware: a vDPA device in this process, on a bridge or a tap
///
/// The command prints /dev/vhost-vdpa-N for `bellhop run --vdpa`, and stays in the foreground. One
/// thread moves frames between the guest's rings and the tap.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
The kernel's modules vduse, vhost_vdpa and tun must be loaded; distributions ship them. With
--bridge, the tap has the name of the NIC and is a port of the bridge. With --tap, the command opens
this tap, or creates it, and leaves its bridge, MTU and state to you.

SIGTERM and SIGINT delete the vDPA device and the tap. If a VM still uses the NIC, the command waits
for its end first. After kill -9 the next start with this name deletes what is left.

Examples:
  modprobe -a vduse vhost_vdpa tun
  ip link add br0 type bridge
  ip link set br0 up
  bellhop swnic sw0 --bridge br0
  bellhop swnic sw1 --tap tap1 --mac 52:54:00:12:34:56 --mtu 9000
  bellhop run --kernel vmlinuz --initramfs initrd.img --vdpa path=/dev/vhost-vdpa-0

Needs root.")]
pub(crate) struct Arguments {
    /// The name of the vDPA device, and with --bridge of the tap
    #[arg(value_name = "NAME")]
    name: String,

    /// Connect the NIC to this bridge
    #[arg(long, value_name = "BRIDGE", required_unless_present = "tap")]
    bridge: Option<String>,

    /// Connect the NIC to this tap
    #[arg(long, value_name = "TAP", conflicts_with = "bridge")]
    tap: Option<String>,

    /// The address of the guest's interface. Without it, the address depends on the name and this
    /// host
    #[arg(long, value_name = "MAC")]
    mac: Option<MacAddress>,

    /// The largest packet in bytes, without the Ethernet header. The default is that of the bridge,
    /// or 1500
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u16).range(68..))]
    mtu: Option<u16>,

    /// Do not offer packed rings
    #[arg(long)]
    split: bool,
}

impl Arguments {
    fn tap(&self) -> &str {
        self.tap.as_deref().unwrap_or(&self.name)
    }
}

/// Serves the NIC until a signal.
pub(crate) fn execute(arguments: &Arguments, format: Format) -> Result<Code, Error> {
    let name = &arguments.name;
    let new = NewDevice::new(name, MGMTDEV.parse()?)?;
    let signals = StopSignals::note().map_err(Error::context("cannot catch signals"))?;
    let connection = Connection::open()?;
    let control = Control::open().map_err(failed)?;
    leftover::delete(&connection, &control, name)?;
    let tap = Tap::open(arguments.tap()).map_err(failed)?;
    let mtu = connect(arguments)?;
    let configuration = Configuration {
        mac: arguments
            .mac
            .map_or_else(|| address(name), MacAddress::bytes),
        mtu,
        is_split: arguments.split,
    };
    let description = configuration.description();
    let (created, device) = control.create(name, &description).map_err(failed)?;
    let mut nic = Nic::new(device, tap, &configuration).map_err(failed)?;
    let stop = eventfd::new().map_err(Error::context("cannot create an eventfd"))?;
    let served = thread::scope(|scope| {
        let stop = &stop;
        let server = thread::Builder::new()
            .name("swnic".to_owned())
            // The device's file is closed with the thread.
            .spawn_scoped(scope, move || {
                let reduced = privileges::give_up();
                reduced.map_err(Error::context("cannot give up the privileges"))?;
                nic.serve(eventfd::descriptor(stop)).map_err(failed)
            })
            .map_err(Error::context("cannot start the packet thread"))?;
        let shown = add(&connection, &new).and_then(|device| show(arguments, &device, format));
        if shown.is_ok() {
            while signals.received().is_none() && !server.is_finished() {
                thread::sleep(PAUSE);
            }
        }
        let deleted = delete(&connection, name, &server);
        // A full counter is readable, too.
        let _ = stop.write(1);
        let served = match server.join() {
            Ok(served) => served,
            Err(_) => Err(Error::failed("the packet thread panicked")),
        };
        shown.and(served).and(deleted)
    });
    drop(created);
    served.map(|()| Code::Success)
}

/// An error of the library, whose text names the remedy.
fn failed(error: vdpa::Error) -> Error {
    let message = error.to_string();
    Error::failed(message).because(error)
}

/// Connects the tap to the bridge and returns the NIC's MTU.
fn connect(arguments: &Arguments) -> Result<u16, Error> {
    let Some(bridge) = &arguments.bridge else {
        return Ok(arguments.mtu.unwrap_or(1500));
    };
    let links = Links::open()?;
    let bridge = links.link(bridge)?;
    let tap = links.link(arguments.tap())?;
    let usual = u16::try_from(bridge.mtu).unwrap_or(u16::MAX);
    let mtu = arguments.mtu.unwrap_or(usual);
    links.set_mtu(&tap, mtu.into())?;
    links.set_master(&tap, &bridge)?;
    links.set_up(&tap)?;
    Ok(mtu)
}

/// Adds the vDPA device and gives it to guests.
fn add(connection: &Connection, new: &NewDevice) -> Result<BusDevice, Error> {
    connection.add(new)?;
    Ok(Bus::default().bind(new.name(), "vhost_vdpa")?)
}

fn show(arguments: &Arguments, device: &BusDevice, format: Format) -> Result<(), Error> {
    let path = device.path().map(|path| path.display().to_string());
    let entry = Entry::new(&device.name)
        .with_some("path", path)
        .with_text("tap", arguments.tap())
        .with_some("bridge", arguments.bridge.as_deref());
    let listing = Listing {
        section: "swnic",
        layout: Layout::Line,
        entries: vec![entry],
    };
    listing.print(format).map(drop)
}

/// Deletes the vDPA device once no process has it open.
fn delete(
    connection: &Connection,
    name: &str,
    server: &ScopedJoinHandle<'_, Result<(), Error>>,
) -> Result<(), Error> {
    let mut is_reported = false;
    loop {
        match connection.delete(name) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) if error.kind() == ErrorKind::InUse && !server.is_finished() => {
                if !is_reported {
                    tracing::warn!(%error, "the NIC waits for the end of its use");
                }
                is_reported = true;
                thread::sleep(PAUSE);
            }
            deleted => return Ok(deleted?),
        }
    }
}

/// A local address for a NIC of this name: the same at each start, another one on other hosts.
fn address(name: &str) -> [u8; 6] {
    let host = std::fs::read("/etc/machine-id").unwrap_or_default();
    // FNV-1a.
    let hash = host
        .iter()
        .chain(name.as_bytes())
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        });
    let [a, b, c, d, e, ..] = hash.to_le_bytes();
    [0x52, a, b, c, d, e]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_depend_on_the_name_and_stay() {
        let addresses = ["sw0", "sw1", "sw2"].map(address);
        assert_eq!(addresses, ["sw0", "sw1", "sw2"].map(address));
        for (index, one) in addresses.iter().enumerate() {
            // Unicast and local.
            assert_eq!(one[0] & 3, 2);
            assert!(!addresses[..index].contains(one));
        }
    }
}

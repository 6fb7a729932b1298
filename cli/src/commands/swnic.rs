//! `bellhop swnic`: a NIC without hardware, in the foreground; and the processes that serve one.
//!
//! ```text
//!   swnic NAME            the NIC as `nic create --from software`; deleted at a signal
//!      └─ swnic NAME --serve     tap or port, VDUSE device; starts the next one when it ends
//!            └─ swnic NAME --worker     in a sandbox: the guest's rings
//! ```
//! `nic create` and the node daemon start the second one, too.

mod server;
mod worker;

use std::os::fd::RawFd;
use std::thread;

use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::{Entry, Format, Layout, Listing};
use vdpa::vduse::nic::{Configuration, PACKED, PAIRS_MAX};
use vdpa_mgmt::connectivity::Connectivity;
use vdpa_mgmt::nic::{MadeNic, NicRequest, Nics, PortQueue, SOFTWARE, Store};
use vmm::config::MacAddress;

use crate::commands::nic::keep::Keeper;
use crate::commands::parse;
use crate::signals::StopSignals;

/// Run a NIC without hardware: a vDPA device on a bridge, a tap or a queue of a port
///
/// The command prints /dev/vhost-vdpa-N for `bellhop run --vdpa`, and stays in the foreground. A
/// process in a sandbox moves frames between the guest's rings and the tap or port.
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("end").args(["bridge", "tap", "port"]).required(true)))]
#[command(after_long_help = "\
The kernel's modules vduse, vhost_vdpa and tun must be loaded; distributions ship them. With
--bridge, the tap has the name of the NIC and is a port of the bridge. With --tap, the command opens
this tap, or creates it, and leaves its bridge, MTU and state to you. For several queue pairs, a tap
that exists must have several queues: `ip tuntap add NAME mode tap multi_queue`.

With --port and --queue, frames pass between the guest and one queue of a network port (AF_XDP),
without a tap and a bridge. An XDP program passes frames for the guest's address and for groups to
the NIC, and leaves the others to the host. The port's steering must send the guest's frames to that
queue:

  ethtool -L eth1 combined 4                 four queues, 0 to 3
  ethtool -X eth1 equal 3                    the host uses 0 to 2 only
  ethtool -N eth1 flow-type ether dst 52:54:00:12:34:56 action 3

Broadcasts that arrive in the NIC's queue do not reach the host. The NIC has one queue pair, no
checksum and segmentation offloads, and an MTU of at most 3822. A port serves one such NIC.

SIGTERM and SIGINT delete the NIC. If a VM still uses it, the command waits for its end first. After
kill -9 the NIC stays: `bellhop nic list` shows it, and `bellhop nic delete` deletes it.

`bellhop nic create --from software` creates the same NIC in the background.

Examples:
  modprobe -a vduse vhost_vdpa tun
  ip link add br0 type bridge
  ip link set br0 up
  bellhop swnic sw0 --bridge br0
  bellhop swnic sw1 --tap tap1 --mac 52:54:00:12:34:56 --mtu 9000
  bellhop swnic sw2 --port eth1 --queue 3 --mac 52:54:00:12:34:56
  bellhop run --kernel vmlinuz --initramfs initrd.img --vdpa path=/dev/vhost-vdpa-0

Needs root.")]
pub(crate) struct Arguments {
    /// The name of the vDPA device, and with --bridge of the tap
    #[arg(value_name = "NAME")]
    name: String,

    /// Connect the NIC to this bridge
    #[arg(long, value_name = "BRIDGE")]
    bridge: Option<String>,

    /// Connect the NIC to this tap
    #[arg(long, value_name = "TAP")]
    tap: Option<String>,

    /// Connect the NIC to a queue of this network interface
    #[arg(long, value_name = "INTERFACE", requires = "queue")]
    port: Option<String>,

    /// The queue of the port, from 0. Queue 0 of a port with one queue receives all frames
    #[arg(long, value_name = "N", requires = "port")]
    queue: Option<u16>,

    /// The address of the guest's interface. Without it, the address depends on the name and this
    /// host
    #[arg(long, value_name = "MAC")]
    mac: Option<MacAddress>,

    /// The largest packet in bytes, without the Ethernet header. The default is that of the bridge
    /// or the port, or 1500
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u16).range(68..))]
    mtu: Option<u16>,

    /// Queue pairs, at most 16. A guest that moves to hardware needs as many as the hardware has
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        value_parser = clap::value_parser!(u16).range(1..=i64::from(PAIRS_MAX))
    )]
    queue_pairs: u16,

    /// Let the thread of each queue pair look for frames before it sleeps, for at most this share
    /// of a processor, in percent. The guest then notifies it less often
    #[arg(
        long = "poll",
        value_name = "PERCENT",
        value_parser = clap::value_parser!(u8).range(1..=100)
    )]
    poll_percent: Option<u8>,

    /// Do not offer packed rings
    #[arg(long)]
    split: bool,

    /// Offer only these virtio features: a mask in hexadecimal. A guest can move to hardware that
    /// has all of them (`bellhop probe` lists them)
    #[arg(long, value_name = "MASK", value_parser = mask)]
    device_features: Option<u64>,

    /// Serve a NIC that another process creates
    #[arg(long, hide = true, conflicts_with = "bridge")]
    serve: bool,

    /// The tap is the NIC's own, and stays if this process is killed
    #[arg(long, hide = true, requires = "serve")]
    own_tap: bool,

    /// Serve the device at standard input with the tap or the socket at standard output
    #[arg(long, hide = true, conflicts_with = "serve", requires = "in_flight")]
    worker: bool,

    /// The descriptor of the in-flight record
    #[arg(long, hide = true, requires = "worker")]
    in_flight: Option<RawFd>,

    /// The descriptors of the tap's further queues, or of the memory for the socket's frames
    #[arg(long, hide = true, value_delimiter = ',', requires = "worker")]
    files: Vec<RawFd>,
}

impl Arguments {
    /// The settings of a NIC that this process serves.
    fn configuration(&self) -> Configuration {
        Configuration {
            mac: self.mac.map_or([0; 6], MacAddress::bytes),
            mtu: self.mtu.unwrap_or_default(),
            pairs: self.queue_pairs,
            features: self.device_features().unwrap_or(u64::MAX),
            poll_percent: self.poll_percent.unwrap_or_default(),
        }
    }

    fn device_features(&self) -> Option<u64> {
        let split = self.split.then_some(!PACKED);
        match (self.device_features, split) {
            (Some(these), Some(split)) => Some(these & split),
            (these, split) => these.or(split),
        }
    }

    fn port(&self) -> Option<PortQueue> {
        let (interface, queue) = self.port.clone().zip(self.queue)?;
        Some(PortQueue { interface, queue })
    }

    fn request(&self) -> NicRequest {
        let bridge = self.bridge.clone();
        NicRequest {
            mac: self.mac.map(MacAddress::bytes),
            mtu: self.mtu,
            max_vqp: Some(self.queue_pairs),
            device_features: self.device_features(),
            connectivity: bridge.map(|bridge| Connectivity {
                bridge: Some(bridge),
                vlan: None,
                mtu: None,
            }),
            tap: self.tap.clone(),
            poll_percent: self.poll_percent,
            port: self.port(),
            ..NicRequest::new(&self.name, SOFTWARE)
        }
    }
}

fn mask(value: &str) -> Result<u64, Error> {
    parse::mask("--device-features", value)
}

/// Serves the NIC until a signal.
pub(crate) fn execute(arguments: &Arguments, format: Format) -> Result<Code, Error> {
    if arguments.serve {
        return server::execute(arguments);
    }
    if arguments.worker {
        return worker::execute(arguments);
    }
    let signals = StopSignals::note().map_err(Error::context("cannot catch signals"))?;
    let nics = Nics::open()?;
    let mut store = Store::open_default()?.lock()?;
    let nic = nics.make(&arguments.request(), &store.nics()?, &mut store)?;
    // Other processes create NICs meanwhile.
    drop(store);
    let shown = show(arguments, &nics, &nic, format);
    let mut keeper = Keeper::new(&nics, nic);
    if shown.is_ok() {
        while signals.received().is_none()
            && let Some(pause) = keeper.look()?
        {
            thread::sleep(pause);
        }
    }
    let deleted = keeper.delete();
    shown.and(deleted).map(|()| Code::Success)
}

/// An error of the library, whose text names the remedy.
fn failed(error: vdpa::Error) -> Error {
    let message = error.to_string();
    Error::failed(message).because(error)
}

fn show(arguments: &Arguments, nics: &Nics, nic: &MadeNic, format: Format) -> Result<(), Error> {
    let entry =
        Entry::new(nic.name()).with_text("path", nics.character_device(nic)?.display().to_string());
    let entry = match arguments.port() {
        Some(PortQueue { interface, queue }) => entry
            .with_text("port", interface)
            .with_number("queue", Some(queue)),
        None => entry
            .with_text("tap", arguments.tap.as_deref().unwrap_or(nic.name()))
            .with_some("bridge", arguments.bridge.as_deref()),
    };
    let listing = Listing {
        section: "swnic",
        layout: Layout::Line,
        entries: vec![entry],
    };
    listing.print(format).map(drop)
}

//! `bellhop nic create`.

use std::str::FromStr;

use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::{self as output, Format};
use bellhop_common::management::nic::listing;
use vdpa_mgmt::connectivity::Connectivity;
use vdpa_mgmt::nic::{Kind, NicError, NicRequest, Nics, PortQueue, Store};
use vdpa_mgmt::sriov::Rates;

use super::watch::Watch;
use crate::commands::parse;
use crate::plan;

/// Create a vDPA device on a NIC, and print /dev/vhost-vdpa-N
#[derive(Debug, clap::Args)]
#[command(
    alias = "make",
    override_usage = "bellhop nic create [OPTIONS] --from <NIC> <NAME>",
    after_long_help = HELP
)]
pub(crate) struct Arguments {
    /// The name of the new vDPA device
    #[arg(value_name = "NAME", required_unless_present = "old_name")]
    name: Option<String>,

    /// The older spelling of NAME
    #[arg(long = "name", hide = true, conflicts_with = "name")]
    old_name: Option<String>,

    /// The NIC: a network interface, pci/ADDRESS or a devlink handle; a management device, such as
    /// vdpasim_net; or software, for a NIC without hardware
    #[arg(long, value_name = "NIC")]
    from: String,

    /// The kind of function for the device
    #[arg(long, value_enum, ignore_case = true, default_value = "auto")]
    kind: KindWord,

    /// Its MAC address
    #[arg(long, value_name = "MACADDR", value_parser = mac)]
    mac: Option<[u8; 6]>,

    /// Its MTU in bytes
    #[arg(long, value_parser = clap::value_parser!(u16).range(68..))]
    mtu: Option<u16>,

    /// Its queue pairs; at most 16 with --from software
    #[arg(
        long,
        alias = "max-vqp",
        value_name = "N",
        value_parser = clap::value_parser!(u16).range(1..=32768)
    )]
    queue_pairs: Option<u16>,

    /// With --from software: let each queue pair look for frames before it sleeps, for at most this
    /// share of a processor, in percent
    #[arg(
        long = "poll",
        value_name = "PERCENT",
        value_parser = clap::value_parser!(u8).range(1..=100)
    )]
    poll_percent: Option<u8>,

    /// Its virtio feature bits in hexadecimal; all other bits are off
    #[arg(long, value_name = "MASK", value_parser = mask)]
    device_features: Option<u64>,

    /// Its connection: bridge=NAME,vlan=N,mtu=BYTES, or a part of these; with --from software also
    /// port=INTERFACE,queue=N
    #[arg(long, value_name = "HOW")]
    connect: Option<Connect>,

    /// The limit of its transmit rate, in Mbit/s
    #[arg(long, value_name = "RATE", value_parser = clap::value_parser!(u32).range(1..))]
    max_tx_rate: Option<u32>,

    /// Its guaranteed transmit rate, in Mbit/s
    #[arg(long, value_name = "RATE", value_parser = clap::value_parser!(u32).range(1..))]
    min_tx_rate: Option<u32>,

    /// Number of virtual functions to create if the NIC has none (default: its maximum, up to 8)
    #[arg(
        long,
        alias = "vfs",
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    virtual_functions: Option<u32>,

    /// Check, and print the steps without running them
    #[arg(long)]
    dry_run: bool,
}

const HELP: &str = "\
Steps, each undone if a later one fails or the command is interrupted with Ctrl-C:
  virtual functions  created if the NIC has none; an existing number is never changed
  one of them        chosen, if it is free: no vDPA device, not bound to vfio-pci, its interface
                     down, without an address, in no bridge and in no other network namespace
  its settings       MAC address and rates, through the NIC's driver if that supports them
  its driver         bound to one for vDPA: vp-vdpa for virtio functions; others (mlx5) keep theirs
or, on a NIC in switchdev mode (`devlink dev eswitch show`; the command does not change the mode):
  a subfunction      port added with the lowest free sfnum, address and rates set, activated
  its device         waited for, enable_vnet set, reloaded
or, with --from software:
  a process          serves a new tap of this name through VDUSE; or, with --connect
                     port=INTERFACE,queue=N, a queue of a port (`bellhop swnic --help`)
and then
  the device         added, bound to vhost_vdpa, and its character device waited for
  the connection     with --connect: in switchdev mode the representor becomes an untagged port of
                     the bridge in this VLAN, and goes up; before, it passes no frames. In legacy
                     mode there is only vlan=N, a setting of the virtual function

With --dry-run these steps are checked and printed, and nothing changes.

Standard error shows the progress if it is a terminal. The log has it with --log-level info.

Examples:
  bellhop nic create nic0 --from enp1s0f0 --mac 52:54:00:12:34:56
  bellhop nic create nic1 --from pci/0000:01:00.0 --kind vf --virtual-functions 4 -j
  bellhop nic create nic2 --from enp6s0f0np0 --connect bridge=br0,vlan=100 --queue-pairs 4
  bellhop nic create test0 --from vdpasim_net --mac 52:54:00:12:34:57 --mtu 1500
  bellhop nic create sw0 --from software --connect bridge=br0
  bellhop nic create sw1 --from software --connect port=eth1,queue=3 --poll 30
  bellhop nic create nic3 --from enp1s0f0 --dry-run

`bellhop nic delete` undoes all steps, also if this command was killed.";

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum KindWord {
    /// Management device: itself; else a subfunction in switchdev mode; else a virtual function
    Auto,
    /// A virtual function (SR-IOV)
    Vf,
    /// A subfunction (switchdev mode only)
    Sf,
}

/// Where the frames go.
#[derive(Debug, Clone)]
enum Connect {
    /// A bridge or a VLAN.
    Network(Connectivity),
    /// A queue of a port.
    Port(PortQueue),
}

impl FromStr for Connect {
    type Err = vdpa_mgmt::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_port = |word: &str| word.starts_with("port=") || word.starts_with("queue=");
        if text.split(',').any(is_port) {
            return Ok(Self::Port(text.parse()?));
        }
        Ok(Self::Network(text.parse()?))
    }
}

fn mac(value: &str) -> Result<[u8; 6], Error> {
    parse::mac("--mac", value)
}

fn mask(value: &str) -> Result<u64, Error> {
    parse::mask("--device-features", value)
}

impl Arguments {
    fn request(&self) -> Result<NicRequest, NicError> {
        let rates = (self.max_tx_rate, self.min_tx_rate);
        let rates = match rates {
            (None, None) => None,
            (max, min) => Some(Rates::new(
                min.unwrap_or_default(),
                max.unwrap_or_default(),
            )?),
        };
        let name = self.name.as_ref().or(self.old_name.as_ref());
        let (connectivity, port) = match self.connect.clone() {
            Some(Connect::Network(connectivity)) => (Some(connectivity), None),
            Some(Connect::Port(port)) => (None, Some(port)),
            None => (None, None),
        };
        Ok(NicRequest {
            kind: match self.kind {
                KindWord::Auto => Kind::Auto,
                KindWord::Vf => Kind::VirtualFunction,
                KindWord::Sf => Kind::Subfunction,
            },
            mac: self.mac,
            mtu: self.mtu,
            max_vqp: self.queue_pairs,
            poll_percent: self.poll_percent,
            device_features: self.device_features,
            connectivity,
            port,
            rates,
            virtual_functions: self.virtual_functions,
            ..NicRequest::new(name.cloned().unwrap_or_default(), &self.from)
        })
    }
}

pub(super) fn execute(arguments: &Arguments, format: Format) -> Result<Code, Error> {
    let request = arguments.request()?;
    let nics = Nics::open()?;
    if arguments.dry_run {
        let steps = nics.plan_steps(&request, &Store::open_default()?.nics()?)?;
        let steps: Vec<String> = steps.iter().map(ToString::to_string).collect();
        return plan::print(&steps, format);
    }
    let mut watch = Watch::start(Store::open_default()?.lock()?)?;
    let others = watch.store().nics()?;
    let nic = match nics.make(&request, &others, &mut watch) {
        Ok(nic) => nic,
        Err(error) => {
            return match (watch.signal(), &*error.source) {
                // The user requested it; the exit code shows the signal to the shell.
                (Some(number), NicError::Interrupted) => {
                    Error::from(error).in_words().print();
                    Ok(Code::Signal(number))
                }
                _ => Err(error.into()),
            };
        }
    };
    if !format.is_text() {
        return listing(std::slice::from_ref(&nic))?.print(format);
    }
    let path = nics.character_device(&nic)?;
    output::print(format!("{}\n", path.display()).as_bytes())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    #[test]
    fn the_name_has_two_spellings() {
        for line in [
            &["create", "nic0", "--from", "enp1s0"][..],
            &["create", "--from", "enp1s0", "--name", "nic0"],
        ] {
            let line = Line::try_parse_from(line).unwrap();
            let request = line.arguments.request().unwrap();
            assert_eq!((&*request.name, &*request.from), ("nic0", "enp1s0"));
        }
        for counts in [
            ["--queue-pairs=2", "--virtual-functions=4"],
            ["--max-vqp=2", "--vfs=4"],
        ] {
            let line = ["create", "nic0", "--from=enp1s0"].iter().chain(&counts);
            let request = Line::try_parse_from(line).unwrap().arguments.request();
            let request = request.unwrap();
            assert_eq!(
                (request.max_vqp, request.virtual_functions),
                (Some(2), Some(4))
            );
        }
        let line = ["create", "sw0", "--from=software", "--poll=30"];
        let request = Line::try_parse_from(line).unwrap().arguments.request();
        assert_eq!(request.unwrap().poll_percent, Some(30));
        for bad in [
            &["create", "sw0", "--from=software", "--poll=0"][..],
            &["create", "sw0", "--from=software", "--poll=101"],
            &["create", "--from", "enp1s0"],
            &["create", "nic0", "--from", "enp1s0", "--name", "nic0"],
            &["create", "nic0"],
        ] {
            Line::try_parse_from(bad).unwrap_err();
        }
    }
}

//! `bellhop vm create`.

use std::path::PathBuf;

use bellhop_api::node::{NicSettings, Restart};
use hyper::{Method, StatusCode};

use super::arguments;
use super::watch::Watch;
use super::{MAKING, of_vm, say};
use crate::client::{Node, NodeArguments};
use crate::commands::machine_arguments::MachineArguments;
use crate::error::Error;
use crate::exit::Code;
use crate::listing::Format;

/// Make a VM with its NICs and start it: all of it, or nothing
///
/// If a step fails, those before it are undone. The same command again changes nothing.
#[derive(Debug, clap::Args)]
#[command(
    after_long_help = HELP,
    mut_arg("kernel", |kernel| kernel.required_unless_present("file")),
)]
pub(crate) struct Arguments {
    /// Its name: 1 to 63 of a-z, 0-9 and -, not - first
    #[arg(value_name = "NAME")]
    pub(super) name: String,

    #[command(flatten)]
    pub(super) machine: MachineArguments,

    // `help` and not a doc comment: rustdoc takes brackets for links.
    #[arg(
        long = "nic",
        value_name = "OPTIONS",
        help = "A NIC: from=NIC[,bridge=NAME][,vlan=N][,mac=MAC]…, path=/dev/vhost-vdpa-N or device=NAME (may be repeated)"
    )]
    pub(super) nics: Vec<NicSettings>,

    /// Take everything from this TOML or JSON file instead
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["kernel", "initramfs", "cmdline", "cpus", "cpu", "cpu_affinity", "memory", "nics", "disks"]
    )]
    pub(super) file: Option<PathBuf>,

    /// What happens when it ends by itself (default: on-failure)
    #[arg(long, value_enum)]
    pub(super) restart: Option<RestartWord>,

    /// Make it, with its NICs, but do not start it
    #[arg(long)]
    pub(super) stopped: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum RestartWord {
    /// It stays stopped
    Never,
    /// It is started again if it crashed, not if its guest powered off
    OnFailure,
    /// It is started again in any case
    Always,
}

impl From<RestartWord> for Restart {
    fn from(word: RestartWord) -> Self {
        match word {
            RestartWord::Never => Self::Never,
            RestartWord::OnFailure => Self::OnFailure,
            RestartWord::Always => Self::Always,
        }
    }
}

const HELP: &str = "\
Keys of --nic, and of [[nics]] in a file:
  id=NAME          its name in this VM (default: net0, net1, …; a file has to say it)
  from=NIC         made of this NIC, and taken back with the VM: a network interface, pci/ADDRESS, a devlink
                   handle, or a management device such as vdpasim_net
  path=DEV         or a vDPA device that is there: /dev/vhost-vdpa-N
  device=NAME      or its name
  kind=auto|vf|sf  with from: what of the NIC it is made on
  bridge=NAME, vlan=N          with from: what it is connected with
  mtu=BYTES, queue_pairs=N     with from: what the device has
  max_tx_rate=N, min_tx_rate=N with from: what it may send, in Mbit/s
  virtual_functions=N          with from: how many the NIC gets if it has none
  mac=MAC          the address that the guest sees
  doorbell=auto|on|off         whether kicks go to the device without an exit
  rescue=on|off                kick it and interrupt its driver, once, when a queue hangs
  failover=NIC     with from: made of this NIC, like the first; it stands by, and takes over, once, if that one says
                   that it needs a reset
  failover=/dev/vhost-vdpa-N   or a vDPA device that is there stands by. In a file: failover.from, failover.path
                   or failover.device = NAME

In a file, keys are the options' names with _ for -; --nic and --disk are [[nics]] and [[disks]], and there
are state = \"Running\" or \"Stopped\" and restart. Paths are this machine's.

Examples:
  bellhop vm create web --kernel /boot/vmlinuz --initramfs /boot/initrd.img --cpus 2 --memory 1G \\
      --nic from=pci/0000:01:00.0,bridge=br0,vlan=100,mac=52:54:00:12:34:56
  bellhop vm create test --kernel vmlinux --nic from=vdpasim_net --restart never
  bellhop vm create web --file web.toml --stopped";

pub(super) fn execute(
    arguments: &Arguments,
    which: &NodeArguments,
    node: &Node,
    format: Format,
) -> Result<Code, Error> {
    let body = arguments::body(arguments, which.address())?;
    let path = of_vm(&arguments.name);
    let watch = Watch::start(which, &arguments.name);
    let made = node.send(Method::PUT, &path, &body, MAKING);
    drop(watch);
    let (status, answer) = made?;
    if status == StatusCode::OK && !format.is_json() {
        tracing::info!("it was there already");
    }
    say(&answer, format)?;
    Ok(Code::Success)
}

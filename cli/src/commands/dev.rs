//! `bellhop dev`: creates, shows, changes and deletes vDPA devices.

use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::{Format, Listing};
use bellhop_common::management::dev::{config_listing, listing, stats_listing};
use serde_json::json;
use vdpa_mgmt::{Connection, NewDevice};

use super::parse::{self, Words};
use crate::confirm::Confirmation;

/// Create, show, change and delete vDPA devices
///
/// Words, output and JSON keys are those of iproute2's `vdpa dev`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
A vDPA device belongs to a management device (`bellhop mgmtdev show`). With the driver vhost_vdpa it
is /dev/vhost-vdpa-N, which `bellhop run --vdpa path=…` gives to a guest.

Examples:
  bellhop dev add name nic0 mgmtdev vdpasim_net mac 52:54:00:12:34:56 mtu 1500
  bellhop dev add name nic1 mgmtdev pci/0000:01:00.1 max_vqp 4
  bellhop dev show
  bellhop dev config show nic0 -jp
  bellhop dev vstats show nic0 qidx 0
  bellhop dev set name nic0 mac 52:54:00:12:34:57
  bellhop dev del nic0

Adding, deleting, changing and counters need CAP_NET_ADMIN. JSON differs from iproute2's in three
points. The keys \"link\" and \"link_announce\" have no space at their end. Block devices show their
configuration. On a device without the feature MQ, queue 0 is rx and queue 2 is control_vq.")]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Show all devices, or one
    ///
    /// The output has the type, management device, vendor, queues and largest ring.
    #[command(
        visible_aliases = ["list", "ls", "get"],
        after_long_help = "\
Examples:
  bellhop dev show
  bellhop dev show nic0 -jp"
    )]
    Show {
        /// The device's name
        #[arg(value_name = "DEV")]
        device: Option<String>,
    },
    /// Create a device
    #[command(
        override_usage = "bellhop dev add name NAME mgmtdev MANAGEMENTDEV [device_features F] \
                          [mac MACADDR] [mtu MTU] [max_vqp MAX_VQ_PAIRS]",
        after_long_help = ADD_HELP
    )]
    Add {
        /// Pairs of a word and its value
        #[arg(value_name = "WORD VALUE", required = true, num_args = 1..)]
        words: Vec<String>,
    },
    /// Delete a device that no process has open
    ///
    /// Deleting an open device would block the kernel until the device is closed, and with it every
    /// other command on vDPA devices of this host. So the command refuses, and names the process
    /// that has the device open.
    #[command(
        visible_aliases = ["delete", "rm"],
        after_long_help = "\
Examples:
  bellhop dev del nic0"
    )]
    Del {
        /// The device's name
        #[arg(value_name = "DEV")]
        device: String,
        #[command(flatten)]
        confirmation: Confirmation,
    },
    /// Show configurations
    #[command(subcommand, after_long_help = CONFIG_HELP)]
    Config(ConfigCommand),
    /// Show the vendor's counters of a queue
    #[command(subcommand, after_long_help = VSTATS_HELP)]
    Vstats(VstatsCommand),
    /// Change a device's MAC address (Linux 6.12 and later)
    #[command(
        override_usage = "bellhop dev set name NAME mac MACADDR",
        after_long_help = "\
Examples:
  bellhop dev set name nic0 mac 52:54:00:12:34:57"
    )]
    Set {
        /// Pairs of a word and its value: name NAME, mac MACADDR
        #[arg(value_name = "WORD VALUE", required = true, num_args = 1..)]
        words: Vec<String>,
    },
}

const ADD_HELP: &str = "\
Words:
  name NAME               the new device's name: 1 to 63 bytes
  mgmtdev MANAGEMENTDEV   the management device that creates it: NAME or BUS/NAME
  device_features F       the virtio feature bits that it offers, a mask in hexadecimal
  mac MACADDR             its address, such as 52:54:00:12:34:56
  mtu MTU                 68 to 65535 bytes
  max_vqp MAX_VQ_PAIRS    queue pairs, 1 to 32768

Each management device supports some of these words. The command names a word that it rejects.

Examples:
  bellhop dev add name nic0 mgmtdev vdpasim_net mac 52:54:00:12:34:56 mtu 1500
  bellhop dev add name nic1 mgmtdev pci/0000:01:00.1 max_vqp 4";

const CONFIG_HELP: &str = "\
Examples:
  bellhop dev config show
  bellhop dev config show nic0 -jp";

const VSTATS_HELP: &str = "\
Examples:
  bellhop dev vstats show nic0 qidx 0";

#[derive(Debug, clap::Subcommand)]
enum ConfigCommand {
    /// Show the configuration of all devices, or of one
    #[command(visible_aliases = ["list", "ls", "get"], after_long_help = CONFIG_HELP)]
    Show {
        /// The device's name
        #[arg(value_name = "DEV")]
        device: Option<String>,
    },
}

#[derive(Debug, clap::Subcommand)]
enum VstatsCommand {
    /// Show the counters of a queue of a network device in use
    #[command(
        override_usage = "bellhop dev vstats show DEV qidx QUEUE_INDEX",
        after_long_help = VSTATS_HELP
    )]
    Show {
        /// The device's name
        #[arg(value_name = "DEV")]
        device: String,
        /// The word qidx and a queue's index
        #[arg(value_name = "qidx QUEUE_INDEX", required = true, num_args = 1..)]
        words: Vec<String>,
    },
}

/// Runs the subcommand, and prints its result.
pub(crate) fn execute(arguments: &Arguments, format: Format) -> Result<Code, Error> {
    let show = |listing: Listing| listing.print(format);
    // iproute2 prints nothing for people.
    let show_changed = |connection: &Connection, name: &str| {
        if format.is_text() {
            Ok(Code::Success)
        } else {
            show(listing(&[connection.device(name)?]))
        }
    };
    match &arguments.command {
        Command::Show { device } => {
            let connection = Connection::open()?;
            let devices = match device {
                Some(name) => vec![connection.device(name)?],
                None => connection.devices()?,
            };
            show(listing(&devices))
        }
        Command::Config(ConfigCommand::Show { device }) => {
            let connection = Connection::open()?;
            let configs = match device {
                Some(name) => vec![connection.config(name)?],
                None => connection.configs()?,
            };
            show(config_listing(&configs))
        }
        Command::Vstats(VstatsCommand::Show { device, words }) => {
            let words = Words::parse(words, &["qidx"])?;
            let queue_index = words.needed("qidx", parse::number)?;
            let stats = Connection::open()?.vendor_stats(device, queue_index)?;
            show(stats_listing(&stats))
        }
        Command::Add { words } => {
            let device = new_device(words)?;
            let connection = Connection::open()?;
            connection.add(&device)?;
            show_changed(&connection, device.name())
        }
        Command::Set { words } => {
            let words = Words::parse(words, &["name", "mac"])?;
            let name: String = words.needed("name", parse::text)?;
            let mac = words.needed("mac", parse::mac)?;
            let connection = Connection::open()?;
            connection.set_mac(&name, mac)?;
            show_changed(&connection, &name)
        }
        Command::Del {
            device,
            confirmation,
        } => {
            confirmation.ask(format!("Delete the vDPA device {device}?"))?;
            Connection::open()?.delete(device)?;
            format.print_done(&json!({ "name": device, "deleted": true }))
        }
    }
}

fn new_device(words: &[String]) -> Result<NewDevice, Error> {
    let known = [
        "name",
        "mgmtdev",
        "device_features",
        "mac",
        "mtu",
        "max_vqp",
    ];
    let words = Words::parse(words, &known)?;
    let name: String = words.needed("name", parse::text)?;
    let mgmtdev = words.needed("mgmtdev", parse::mgmtdev)?;
    let device = NewDevice::new(&name, mgmtdev)?
        .device_features(words.take("device_features", parse::mask)?)
        .mac(words.take("mac", parse::mac)?)?
        .mtu(words.take("mtu", parse::number)?)?
        .max_vqp(words.take("max_vqp", parse::number)?)?;
    Ok(device)
}

//! `bellhop mgmtdev`: the management devices, on which vDPA devices can be created.

use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::management::mgmtdev::listing;
use vdpa_mgmt::{Connection, MgmtDeviceName};

/// Show management devices, which create vDPA devices
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
The kernel has a management device for each NIC with a loaded vDPA driver (mlx5_vdpa, vp_vdpa, …)
and for each simulator (vdpa_sim_net, vdpa_sim_blk). The output includes their limits. Names are
NAME or BUS/NAME. Words, output and JSON keys are those of iproute2's `vdpa mgmtdev`.

Examples:
  bellhop mgmtdev show
  bellhop mgmtdev show pci/0000:01:00.1
  bellhop mgmtdev show -jp")]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Show all management devices, or one
    #[command(
        visible_aliases = ["list", "ls", "get"],
        after_long_help = "\
Examples:
  bellhop mgmtdev show
  bellhop mgmtdev show vdpasim_net -jp"
    )]
    Show {
        /// The management device: NAME or BUS/NAME
        #[arg(value_name = "DEV")]
        device: Option<MgmtDeviceName>,
    },
}

/// Queries and prints.
pub(crate) fn execute(arguments: &Arguments, format: Format) -> Result<Code, Error> {
    let Command::Show { device } = &arguments.command;
    let connection = Connection::open()?;
    let devices = match device {
        Some(name) => vec![connection.mgmt_device(name)?],
        None => connection.mgmt_devices()?,
    };
    listing(&devices).print(format)
}

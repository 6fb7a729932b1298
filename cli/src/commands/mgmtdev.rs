//! `bellhop mgmtdev`: what vDPA devices can be made on.

use vdpa_mgmt::{Connection, MgmtDevice, MgmtDeviceName};

use crate::error::Error;
use crate::exit::Code;
use crate::listing::{Entry, Format, Layout, Listing};
use crate::virtio_names;

/// Show what vDPA devices can be made on: NICs and simulators, with their limits
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
A management device is there once the vDPA driver of a NIC is loaded (mlx5_vdpa, vp_vdpa, …) or a
simulator (vdpa_sim_net, vdpa_sim_blk). Names are NAME or BUS/NAME. Words, output and JSON keys are
those of iproute2's `vdpa mgmtdev`.

Examples:
  bellhop mgmtdev show
  bellhop mgmtdev show pci/0000:01:00.1
  bellhop mgmtdev show -jp")]
pub(crate) struct Arguments {
    #[command(flatten)]
    format: Format,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Show all management devices, or one
    #[command(
        visible_alias = "list",
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

/// Asks and prints.
pub(crate) fn execute(arguments: &Arguments) -> Result<Code, Error> {
    let Command::Show { device } = &arguments.command;
    let connection = Connection::open()?;
    let devices = match device {
        Some(name) => vec![connection.mgmt_device(name)?],
        None => connection.mgmt_devices()?,
    };
    listing(&devices).print(arguments.format)
}

/// All of them, for reports.
pub(crate) fn all() -> Result<Listing, vdpa_mgmt::Error> {
    Ok(listing(&Connection::open()?.mgmt_devices()?))
}

/// Management devices as they are shown.
pub(crate) fn listing(devices: &[MgmtDevice]) -> Listing {
    Listing {
        section: "mgmtdev",
        layout: Layout::Lines,
        entries: devices.iter().map(entry).collect(),
    }
}

fn entry(device: &MgmtDevice) -> Entry {
    let classes = virtio_names::classes(device.supported_classes);
    let features = device.supported_features;
    let features =
        features.map(|mask| virtio_names::features(mask, virtio_names::naming_class(device)));
    Entry::new(device.name.to_string())
        .with("supported_classes", classes)
        .with_number("max_supported_vqs", device.max_supported_vqs)
        .with("dev_features", features)
}

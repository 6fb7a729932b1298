//! `bellhop bind`: which driver has a vDPA device, and another one for it.

use std::io;

use vdpa::mgmt::bus::{Bus, BusDevice, BusError};

use crate::exit::Code;
use crate::listing::{Entry, Format, Layout, Listing};

/// Show which bus driver has a vDPA device, or give it to another one
///
/// While vhost_vdpa has the device it is /dev/vhost-vdpa-N, for guests; while virtio_vdpa has
/// it, it is a network interface or disk of this machine.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
The N of /dev/vhost-vdpa-N changes when a device is bound again, so it is printed. A device that
somebody has open is not touched: the command says who it is.

Examples:
  bellhop bind nic0                    which driver has it, and /dev/vhost-vdpa-N
  bellhop bind /dev/vhost-vdpa-3       which device that is
  bellhop bind nic0 virtio_vdpa        give it to this machine
  bellhop bind nic0 vhost_vdpa         and back

Changing the driver needs root.")]
pub(crate) struct Arguments {
    #[command(flatten)]
    format: Format,

    /// The device: its name, or /dev/vhost-vdpa-N
    #[arg(value_name = "DEV")]
    device: String,

    /// The driver: vhost_vdpa or virtio_vdpa
    #[arg(value_name = "DRIVER")]
    driver: Option<String>,
}

/// Why it was not done.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CommandError {
    #[error(transparent)]
    Bus(#[from] BusError),
    #[error("no vDPA device is behind {0}; `bellhop dev show` lists them")]
    NotBehind(String),
    #[error("cannot write the result")]
    Output(#[source] io::Error),
}

/// Binds if asked to, and prints how it is then.
pub(crate) fn execute(arguments: &Arguments) -> Result<Code, CommandError> {
    let bus = Bus::default();
    let mut device = find(&bus, &arguments.device)?;
    if let Some(driver) = &arguments.driver {
        device = bus.bind(&device.name, driver)?;
    }
    Listing {
        section: "bind",
        layout: Layout::Line,
        entries: vec![entry(&device)],
    }
    .print(arguments.format)
    .map_err(CommandError::Output)?;
    Ok(Code::Success)
}

fn find(bus: &Bus, text: &str) -> Result<BusDevice, CommandError> {
    let number = text
        .strip_prefix("/dev/vhost-vdpa-")
        .and_then(|number| number.parse().ok());
    match number {
        Some(number) => bus
            .behind(number)?
            .ok_or_else(|| CommandError::NotBehind(text.to_owned())),
        None => Ok(bus.device(text)?),
    }
}

fn entry(device: &BusDevice) -> Entry {
    let entry = Entry::new(&device.name);
    let entry = match &device.driver {
        Some(driver) => entry.with_text("driver", driver),
        None => entry,
    };
    match device.path() {
        Some(path) => entry.with_text("path", path.display().to_string()),
        None => entry,
    }
}

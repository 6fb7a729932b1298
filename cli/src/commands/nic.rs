//! `bellhop nic`: from a NIC to a vDPA device for a guest in one command, and back.

mod add;
mod list;
mod make;
mod remove;
mod swap;
mod watch;

use vdpa_mgmt::nic::{MadeNic, MakeError, NicError, State, Step, StoreError};
use vdpa_mgmt::{ClassConfig, Connection, ErrorKind as MgmtErrorKind};

use crate::error::{Error, ErrorKind};
use crate::exit::Code;
use crate::listing::{Entry, Format, Layout, Listing};
use crate::text::address;

/// Make a vDPA device out of a NIC in one command, and take everything back in another one
///
/// What is needed in between is done in order and remembered: virtual functions counted, the
/// function's address set, a vDPA driver bound (or a subfunction made), the device added, its
/// representor put on a bridge. If a step fails, those before it are undone.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  bellhop nic make --from enp1s0f0 --name nic0        prints /dev/vhost-vdpa-N
  bellhop run --vdpa path=$(bellhop nic make --from pci/0000:01:00.0 --name nic1) …
  bellhop nic make --from enp6s0f0np0 --name nic2 --connect bridge=br0,vlan=100
  bellhop nic list
  bellhop nic remove nic0
and of a VM of the node daemon (`bellhop vm`), which makes it and takes it back itself:
  bellhop nic add --vm web from=pci/0000:01:00.0,bridge=br0,vlan=100
  bellhop nic swap --vm web net1 --path /dev/vhost-vdpa-7
  bellhop nic remove --vm web net1

`nic make` leaves a record in /run/bellhop/nics before each step, so that `nic remove` can undo
what was done even if the command was killed in the middle. Both need root.")]
pub(crate) struct Arguments {
    #[command(flatten)]
    format: Format,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Make(make::Arguments),
    Add(add::Arguments),
    Swap(swap::Arguments),
    Remove(remove::Arguments),
    List(list::Arguments),
}

/// Does what was asked.
pub(crate) fn execute(arguments: &Arguments) -> Result<Code, Error> {
    let format = arguments.format;
    match &arguments.command {
        Command::Make(arguments) => make::execute(arguments, format),
        Command::Add(arguments) => add::execute(arguments, format),
        Command::Swap(arguments) => swap::execute(arguments, format),
        Command::Remove(arguments) => remove::execute(arguments),
        Command::List(_) => list::execute(format),
    }
}

fn kind(error: &NicError) -> ErrorKind {
    match error {
        NicError::NoCount | NicError::NoOrigin(_) => ErrorKind::WrongCommandLine,
        NicError::Mgmt(error) if error.kind() == MgmtErrorKind::Invalid => {
            ErrorKind::WrongCommandLine
        }
        _ => ErrorKind::Failed,
    }
}

impl From<NicError> for Error {
    fn from(error: NicError) -> Self {
        Self::transparent(kind(&error), error)
    }
}

impl From<MakeError> for Error {
    fn from(error: MakeError) -> Self {
        Self::transparent(kind(&error.source), error)
    }
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Self {
        let kind = match error {
            StoreError::Name(_) => ErrorKind::WrongCommandLine,
            _ => ErrorKind::Failed,
        };
        Self::transparent(kind, error)
    }
}

/// A NIC with all that is known of it.
fn entry(nic: &MadeNic, connection: &Connection) -> Entry {
    let mut entry = Entry::new(nic.name())
        .with_text("from", nic.from())
        .with_text(
            "state",
            match nic.state() {
                State::Made => "made",
                State::Making => "making",
                State::Removing => "removing",
            },
        )
        .with_some("owner", nic.owner());
    for step in nic.steps() {
        entry = match step {
            Step::CountVirtualFunctions { physical, count } => entry
                .with_text("pf", format!("pci/{physical}"))
                .with_number("vfs", Some(*count)),
            Step::SetVirtualFunction {
                virtual_function, ..
            } => entry.with_number("vf", Some(*virtual_function)),
            Step::BindFunction {
                function, driver, ..
            } => entry
                .with_text("function", format!("pci/{function}"))
                .with_text("driver", driver),
            Step::AddPort { sfnum, port, .. } => entry
                .with_some("port", port.as_ref().map(ToString::to_string))
                .with_number("sfnum", Some(*sfnum)),
            Step::ActivatePort { .. } => entry,
            Step::AddDevice { mgmtdev } => entry.with_text("mgmtdev", mgmtdev.to_string()),
            Step::Connect { attached } => entry.with_some("representor", attached.interface()),
        };
    }
    let Some(mgmtdev) = nic.mgmtdev() else {
        return entry;
    };
    let device = connection.device(nic.name());
    if !device.is_ok_and(|device| device.mgmtdev == *mgmtdev) {
        return entry.with_flag("exists", Some(false));
    }
    if let Ok(device) = vdpa_mgmt::bus::Bus::default().device(nic.name()) {
        entry = match device.path() {
            Some(path) => entry.with_text("path", path.display().to_string()),
            None => entry.with_text("bus_driver", device.driver.as_deref().unwrap_or("none")),
        };
    }
    match connection.config(nic.name()).map(|config| config.class) {
        Ok(ClassConfig::Net(net)) => entry
            .with_some("mac", net.mac.map(|mac| address(&mac)))
            .with_number("mtu", net.mtu)
            .with_number("max_vq_pairs", net.max_vq_pairs),
        _ => entry,
    }
}

/// NICs as they are shown.
pub(crate) fn listing(nics: &[MadeNic]) -> Result<Listing, vdpa_mgmt::Error> {
    let mut entries = Vec::new();
    if !nics.is_empty() {
        let connection = Connection::open()?;
        entries.extend(nics.iter().map(|nic| entry(nic, &connection)));
    }
    Ok(Listing {
        section: "nic",
        layout: Layout::Line,
        entries,
    })
}

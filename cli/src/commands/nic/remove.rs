//! `bellhop nic delete`.

use bellhop_common::client::NodeArguments;
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use serde_json::json;
use vdpa_mgmt::Connection;
use vdpa_mgmt::nic::{Nics, Store, StoreError};

use super::watch::Watch;
use crate::commands::vm::removal::{GUEST, remove};
use crate::confirm::Confirmation;

/// Take a NIC back: undo all that `nic create` did, the last step first
#[derive(Debug, clap::Args)]
#[command(
    visible_alias = "rm",
    alias = "remove",
    after_long_help = "\
A NIC that somebody has open is not touched: the command says who it is. What others have changed
since, and virtual functions that others use, are left as they are. The virtual functions go
with the last NIC that was made on them. After a `nic create` that was killed, this undoes what it had done.

If something cannot be undone, the command says how to do it by hand; it can also be run again.

Examples:
  bellhop nic delete nic0"
)]
pub(crate) struct Arguments {
    /// The NIC's name
    #[arg(value_name = "NAME")]
    name: String,

    /// As `bellhop vm nic remove VM NAME`
    #[arg(long, value_name = "NAME", hide = true, conflicts_with = "no_record")]
    vm: Option<String>,

    #[command(flatten)]
    node: NodeArguments,

    /// Delete a vDPA device that `nic create` has not made; what it was made on stays as it is
    #[arg(long)]
    no_record: bool,

    #[command(flatten)]
    confirmation: Confirmation,
}

pub(super) fn execute(arguments: &Arguments, format: Format) -> Result<Code, Error> {
    let name = &arguments.name;
    arguments.confirmation.ask(match &arguments.vm {
        Some(vm) => format!("Remove the NIC {name} from the VM {vm}?"),
        None => format!("Delete the vDPA device {name} and undo the steps that made it?"),
    })?;
    if let Some(vm) = &arguments.vm {
        return remove(
            &arguments.node.connect()?,
            [vm, "nics", name],
            GUEST,
            format,
        );
    }
    let mut watch = Watch::start(Store::open_default()?.lock()?)?;
    let nic = match watch.store().nic(name) {
        Err(StoreError::NoNic(_)) => return without_record(name, arguments.no_record, format),
        nic => nic?,
    };
    Nics::open()?.remove(&nic, &mut watch)?;
    deleted(name, format)
}

fn deleted(name: &str, format: Format) -> Result<Code, Error> {
    format.print_done(&json!({ "name": name, "deleted": true }))
}

fn without_record(name: &str, asked_for: bool, format: Format) -> Result<Code, Error> {
    let connection = Connection::open()?;
    match connection.device(name) {
        Err(error) if error.is_missing() => Err(Error::failed(format!(
            "there is no NIC {name}, and no vDPA device of that name: `bellhop nic list` and \
             `bellhop dev show` list what there is"
        ))),
        Err(error) => Err(error.into()),
        Ok(_) if !asked_for => Err(Error::failed(format!(
            "the vDPA device {name} was not made by `bellhop nic create`, so nothing is known of \
             what it was made on: `bellhop nic delete --no-record {name}` deletes the device alone"
        ))),
        Ok(_) => {
            connection.delete(name)?;
            deleted(name, format)
        }
    }
}

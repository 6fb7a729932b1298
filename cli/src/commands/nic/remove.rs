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

/// Delete a NIC: undo the steps of `nic create` in reverse
#[derive(Debug, clap::Args)]
#[command(
    visible_alias = "rm",
    alias = "remove",
    after_long_help = "\
The command does not touch a NIC that a process has open; it names the process. Later changes by
others, and virtual functions that others use, stay as they are. The virtual functions are deleted
with the last NIC on them. If `nic create` was killed, this command undoes the steps that it took.

If a step cannot be undone, the command tells how to do it by hand. You can run it again.

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

    /// Delete a vDPA device that `nic create` did not create; its management device stays as it is
    #[arg(long)]
    no_record: bool,

    #[command(flatten)]
    confirmation: Confirmation,
}

pub(super) fn execute(arguments: &Arguments, format: Format) -> Result<Code, Error> {
    let name = &arguments.name;
    arguments.confirmation.ask(match &arguments.vm {
        Some(vm) => format!("Remove the NIC {name} from the VM {vm}?"),
        None => format!("Delete the vDPA device {name} and undo the steps that created it?"),
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
            "there is no NIC {name}, and no vDPA device with that name: `bellhop nic list` and \
             `bellhop dev show` list them"
        ))),
        Err(error) => Err(error.into()),
        Ok(_) if !asked_for => Err(Error::failed(format!(
            "`bellhop nic create` did not create the vDPA device {name}, so there is no record of \
             its steps: `bellhop nic delete --no-record {name}` deletes the device alone"
        ))),
        Ok(_) => {
            connection.delete(name)?;
            deleted(name, format)
        }
    }
}

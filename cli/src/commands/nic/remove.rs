//! `bellhop nic remove`.

use hyper::Method;
use vdpa::mgmt::nic::{Nics, Store, StoreError};
use vdpa::mgmt::{Connection, MgmtError};

use super::CommandError;
use super::watch::Watch;
use crate::client::{Node, NodeArguments, path};
use crate::commands::vm::MAKING;
use crate::exit::Code;

/// Take a NIC back: undo all that `nic make` did, the last step first; or with --vm one of a VM
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
A NIC that somebody has open is not touched: the command says who it is. What others have changed
since, and virtual functions that others use, are left as they are. The virtual functions go
with the last NIC that was made on them. After a `nic make` that was killed, this undoes what it had done.

If something cannot be undone, the command says how to do it by hand; it can also be run again.

With --vm it is a NIC of a VM of the node daemon, by its id in that VM: the guest is asked to give it up if the
VM runs, and what the daemon has made for it is taken back.

Examples:
  bellhop nic remove nic0
  bellhop nic remove --vm web net1")]
pub(crate) struct Arguments {
    /// The NIC's name; with --vm its id
    #[arg(value_name = "NAME | ID")]
    name: String,

    /// The VM of the node daemon that has it
    #[arg(long, value_name = "NAME", conflicts_with = "no_record")]
    vm: Option<String>,

    #[command(flatten)]
    node: NodeArguments,

    /// Delete a vDPA device that `nic make` has not made; what it was made on stays as it is
    #[arg(long)]
    no_record: bool,
}

pub(super) fn execute(arguments: &Arguments) -> Result<Code, CommandError> {
    let name = &arguments.name;
    if let Some(vm) = &arguments.vm {
        return of_vm(&arguments.node.connect()?, vm, name);
    }
    let mut watch = Watch::start(Store::open_default()?.lock()?)?;
    let nic = match watch.store().nic(name) {
        Err(StoreError::NoNic(_)) => return without_record(name, arguments.no_record),
        nic => nic?,
    };
    Nics::open()?.remove(&nic, &mut watch)?;
    Ok(Code::Success)
}

fn of_vm(node: &Node, vm: &str, id: &str) -> Result<Code, CommandError> {
    node.change_within(Method::DELETE, &path(["v1", "vms", vm, "nics", id]), MAKING)?;
    Ok(Code::Success)
}

fn without_record(name: &str, asked_for: bool) -> Result<Code, CommandError> {
    let connection = Connection::open()?;
    match connection.device(name) {
        Err(MgmtError::NoDevice { .. }) => Err(CommandError::NoNic(name.to_owned())),
        Err(error) => Err(error.into()),
        Ok(_) if !asked_for => Err(CommandError::NoRecord(name.to_owned())),
        Ok(_) => {
            connection.delete(name)?;
            Ok(Code::Success)
        }
    }
}

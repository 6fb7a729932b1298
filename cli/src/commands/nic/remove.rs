//! `bellhop nic delete`.

use std::time::Duration;

use bellhop_api::node::VmInfo;
use bellhop_common::client::{MAKING, Node, NodeArguments, path};
use bellhop_common::error::Error;
use bellhop_common::exit::{Code, Report};
use hyper::{Method, StatusCode};
use vdpa_mgmt::Connection;
use vdpa_mgmt::nic::{Nics, Store, StoreError};

use super::watch::Watch;
use crate::commands::vm::until;
use crate::confirm::Confirmation;

/// How long a guest may take to give a NIC up.
const GUEST: Duration = Duration::from_secs(30);

/// Take a NIC back: undo all that `nic create` did, the last step first; or with --vm one of a VM
#[derive(Debug, clap::Args)]
#[command(
    visible_alias = "rm",
    alias = "remove",
    after_long_help = "\
A NIC that somebody has open is not touched: the command says who it is. What others have changed
since, and virtual functions that others use, are left as they are. The virtual functions go
with the last NIC that was made on them. After a `nic create` that was killed, this undoes what it had done.

If something cannot be undone, the command says how to do it by hand; it can also be run again.

With --vm it is a NIC of a VM of the node daemon, by its id in that VM: the guest is asked to give it up if the
VM runs, and what the daemon has made for it is taken back.

Examples:
  bellhop nic delete nic0
  bellhop nic delete --vm web net1"
)]
pub(crate) struct Arguments {
    /// The NIC's name; with --vm its id
    #[arg(value_name = "NAME | ID")]
    name: String,

    /// The VM of the node daemon that has it
    #[arg(long, value_name = "NAME", conflicts_with = "no_record")]
    vm: Option<String>,

    #[command(flatten)]
    node: NodeArguments,

    /// Delete a vDPA device that `nic create` has not made; what it was made on stays as it is
    #[arg(long)]
    no_record: bool,

    #[command(flatten)]
    confirmation: Confirmation,
}

pub(super) fn execute(arguments: &Arguments) -> Result<Code, Error> {
    let name = &arguments.name;
    arguments.confirmation.ask(match &arguments.vm {
        Some(vm) => format!("Remove the NIC {name} from the VM {vm}?"),
        None => format!("Delete the vDPA device {name} and undo the steps that made it?"),
    })?;
    if let Some(vm) = &arguments.vm {
        return of_vm(&arguments.node.connect()?, vm, name, GUEST);
    }
    let mut watch = Watch::start(Store::open_default()?.lock()?)?;
    let nic = match watch.store().nic(name) {
        Err(StoreError::NoNic(_)) => return without_record(name, arguments.no_record),
        nic => nic?,
    };
    Nics::open()?.remove(&nic, &mut watch)?;
    Ok(Code::Success)
}

/// A NIC of a VM; waits until the guest has given it up.
fn of_vm(node: &Node, vm: &str, id: &str, patience: Duration) -> Result<Code, Error> {
    let at = path(["v1", "vms", vm, "nics", id]);
    let (status, _) = node.change_within(Method::DELETE, &at, MAKING)?;
    if status != StatusCode::ACCEPTED {
        return Ok(Code::Success);
    }
    let gone = until(patience, || {
        let view: VmInfo = node.get(&path(["v1", "vms", vm]))?;
        Ok(view.nics.iter().all(|nic| nic.id != id).then_some(()))
    })?;
    if gone.is_some() {
        return Ok(Code::Success);
    }
    let seconds = patience.as_secs();
    let message = format!("the guest of {vm} has not given {id} up within {seconds} s");
    let hint =
        "it goes when the guest does so, or is reset or stopped; nothing more has to be asked for";
    Report::from_messages([message]).hint(hint).print();
    Ok(Code::TimedOut)
}

fn without_record(name: &str, asked_for: bool) -> Result<Code, Error> {
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
            Ok(Code::Success)
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use bellhop_common::client::made_up::{self, MadeUp};

    fn vm(nics: &Value) -> Value {
        made_up::vm(&json!({"nics": nics}))
    }

    #[test]
    fn a_guest_is_waited_for() {
        let gone = MadeUp::default().answer(204, &Value::Null);
        let code = of_vm(&gone.node(), "web", "net1", GUEST).unwrap();
        assert_eq!(code, Code::Success);
        assert_eq!(gone.asked(), ["DELETE /v1/vms/web/nics/net1"]);

        let both = json!([{"id": "net0"}, {"id": "net1"}]);
        let asked = MadeUp::default()
            .answer(202, &vm(&both))
            .answer(200, &vm(&both))
            .answer(200, &vm(&json!([{"id": "net0"}])));
        let code = of_vm(&asked.node(), "web", "net1", GUEST).unwrap();
        assert_eq!(code, Code::Success);

        let deaf = MadeUp::default()
            .answer(202, &vm(&both))
            .answer(200, &vm(&both));
        let code = of_vm(&deaf.node(), "web", "net1", Duration::ZERO).unwrap();
        assert_eq!(code, Code::TimedOut);
    }
}

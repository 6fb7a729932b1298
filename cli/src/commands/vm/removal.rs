//! `remove` of `bellhop vm nic`, `disk` and `vfio`: the guest must release the device.

use std::time::Duration;

use bellhop_common::client::{MAKING, Node, path};
use bellhop_common::error::{Error, ErrorKind};
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use hyper::{Method, StatusCode};
use serde_json::{Value, json};

use super::until;
use crate::confirm::Confirmation;

/// The time limit for the guest to release a device.
pub(crate) const GUEST: Duration = Duration::from_secs(30);

// A doc comment here would replace the subcommands' own.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// The VM
    #[arg(value_name = "VM")]
    vm: String,

    /// The device's id in the VM
    #[arg(value_name = "ID")]
    id: String,

    #[command(flatten)]
    confirmation: Confirmation,
}

impl Arguments {
    /// Removes the device of this kind from this list of the VM.
    pub(super) fn execute(
        &self,
        node: &Node,
        kind: &str,
        list: &str,
        format: Format,
    ) -> Result<Code, Error> {
        let Self { vm, id, .. } = self;
        let question = format!("Remove the {kind} {id} from the VM {vm}?");
        self.confirmation.ask(question)?;
        remove(node, [vm, list, id], GUEST, format)
    }
}

/// Removes a device of a VM, and waits until the guest has released it.
pub(crate) fn remove(
    node: &Node,
    [vm, list, id]: [&str; 3],
    patience: Duration,
    format: Format,
) -> Result<Code, Error> {
    let at = path(["v1", "vms", vm, list, id]);
    let removed = json!({ "id": id, "vm": vm, "removed": true });
    let (status, _) = node.change_within(Method::DELETE, &at, MAKING)?;
    if status != StatusCode::ACCEPTED {
        return format.print_done(&removed);
    }
    let gone = until(patience, || match node.get::<Value>(&at) {
        // The VM has stopped meanwhile.
        Err(error)
            if error
                .refusal()
                .is_some_and(|no| no.status == StatusCode::CONFLICT) =>
        {
            Ok(Some(()))
        }
        Err(error) if error.refusal().is_some_and(|no| no.is_not_there()) => Ok(Some(())),
        answer => answer.map(|_| None),
    })?;
    if gone.is_some() {
        return format.print_done(&removed);
    }
    let seconds = patience.as_secs();
    let message = format!("the guest of {vm} has not released {id} within {seconds} s");
    let hint =
        "the request stays: the device goes when the guest releases it, or at a reset or stop";
    Err(Error::new(ErrorKind::TimedOut, message).hint(hint))
}

#[cfg(test)]
mod tests {
    use bellhop_common::client::fake::FakeDaemon;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_guest_is_waited_for() {
        let (of, format) = (["web", "disks", "data"], Format::default());
        let gone = FakeDaemon::default().answer(204, &Value::Null);
        assert_eq!(
            remove(&gone.node(), of, GUEST, format).unwrap(),
            Code::Success
        );
        assert_eq!(gone.asked(), ["DELETE /v1/vms/web/disks/data"]);

        let disk = json!({ "id": "data", "state": "UnplugRequested" });
        for (status, code) in [(404, "no_such_device"), (409, "not_running")] {
            let refusal = json!({ "code": code, "message": "it has none" });
            let asked = FakeDaemon::default()
                .answer(202, &disk)
                .answer(200, &disk)
                .answer(status, &refusal);
            assert_eq!(
                remove(&asked.node(), of, GUEST, format).unwrap(),
                Code::Success
            );
            assert_eq!(asked.asked()[2], "GET /v1/vms/web/disks/data");
        }

        let deaf = FakeDaemon::default().answer(202, &disk).answer(200, &disk);
        let error = remove(&deaf.node(), of, Duration::ZERO, format).unwrap_err();
        assert_eq!(error.code(), Code::TimedOut);
    }
}

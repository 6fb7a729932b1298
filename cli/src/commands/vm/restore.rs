//! `bellhop vm restore`.

use bellhop_api::machine::SNAPSHOT_TIME;
use bellhop_common::client::Node;
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;

use super::say;
use crate::confirm::Confirmation;

/// Create a VM with its NICs that continues from a snapshot
///
/// The VM has the same configuration as then, and NICs with the same settings. Its guest continues
/// from the snapshot; later starts boot it. If a step fails, the daemon undoes the earlier ones.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
The images of the disks must have the same contents as then, or the guest damages its file systems.
Only one guest may use an address and an image, so delete or stop the VM that has them.

Examples:
  bellhop snapshot list
  bellhop vm restore web before-the-update
  bellhop vm stop --force web && bellhop vm restore web before-the-update --replace")]
pub(crate) struct Arguments {
    /// The new VM; its name may differ from that in the snapshot
    #[arg(value_name = "NAME")]
    name: String,

    /// The snapshot
    #[arg(value_name = "SNAPSHOT")]
    snapshot: String,

    /// Also replace a stopped VM with this name; if the restore fails, it is put back
    #[arg(long)]
    replace: bool,

    #[command(flatten)]
    confirmation: Confirmation,
}

pub(super) fn execute(arguments: &Arguments, node: &Node, format: Format) -> Result<Code, Error> {
    let Arguments { name, snapshot, .. } = arguments;
    let spec = node.get_snapshot_spec(snapshot).send()?;
    let put = node.put_vm(name, &spec).query("restore_from", snapshot);
    // The daemon gives up before that.
    let put = put.within(2 * SNAPSHOT_TIME);
    let put = if arguments.replace {
        let question = format!("Replace {name}, if it exists, and the NICs created for it?");
        arguments.confirmation.ask(question)?;
        put
    } else {
        put.only_if_absent()
    };
    let hint = "stop it, then `bellhop vm restore --replace` replaces it";
    let vm = put
        .send()
        .map_err(|error| error.advise("vm_exists", hint))?;
    say(&vm, format)
}

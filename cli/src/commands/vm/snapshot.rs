//! `bellhop vm snapshot`.

use bellhop_api::machine::SNAPSHOT_TIME;
use bellhop_api::node::{BadSnapshotName, VmSnapshotRequest};
use bellhop_common::client::{MAKING, Node, STRANGE};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::text::printable;

use super::of_vm;
use crate::commands::operation;

/// Write a snapshot of a VM: memory, processors and devices
///
/// The guest is paused meanwhile, and loses incoming frames. `bellhop vm restore` creates a VM that
/// continues from the snapshot, any number of times.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
The snapshot has all data of the guest's memory, also keys and passwords. Only the daemon's user can
read it. It lacks the contents of disks: copy their images while the VM is paused.

Examples:
  bellhop vm snapshot web before-the-update
  bellhop snapshot list
  bellhop vm delete --force web && bellhop vm restore web before-the-update

To a directory that the daemon does not manage, and from there to a process without the daemon:
  bellhop vm snapshot web /srv/web.snapshot
  bellhop run --restore /srv/web.snapshot --vdpa id=net0,path=/dev/vhost-vdpa-3 \\
      --allow-path /srv/web")]
pub(crate) struct Arguments {
    /// The VM
    #[arg(value_name = "NAME")]
    name: String,

    /// The name of the snapshot; or an absolute path on the node that does not exist yet
    #[arg(value_name = "SNAPSHOT", value_parser = place)]
    snapshot: VmSnapshotRequest,
}

fn place(text: &str) -> Result<VmSnapshotRequest, BadSnapshotName> {
    let is_path = text.contains('/');
    Ok(VmSnapshotRequest {
        name: (!is_path).then(|| text.parse()).transpose()?,
        path: is_path.then(|| text.into()),
    })
}

pub(super) fn execute(arguments: &Arguments, node: &Node, format: Format) -> Result<Code, Error> {
    let at = format!("{}/snapshot?wait=false", of_vm(&arguments.name));
    let wanted = &arguments.snapshot;
    // The daemon cancels a snapshot before that.
    let limit = 2 * SNAPSHOT_TIME;
    let result = operation::carry_through(node, &at, wanted, MAKING, limit, |_| ())?;
    let written = result.snapshot.ok_or_else(|| Error::failed(STRANGE))?;
    let text = || {
        let path = written.path.to_string_lossy();
        let name = wanted.name.as_ref().map_or(&*path, |name| name.as_str());
        format!(
            "{}: {} MiB of memory; the VM was paused for {} ms\n",
            printable(name),
            written.memory_bytes >> 20,
            written.paused_ms,
        )
    };
    format.print(&written, text)
}

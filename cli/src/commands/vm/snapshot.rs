//! `bellhop vm snapshot`.

use std::path::PathBuf;

use bellhop_api::machine::{SNAPSHOT_TIME, SnapshotRequest};
use bellhop_common::client::{MAKING, Node, STRANGE};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::text::printable;

use super::of_vm;
use crate::commands::operation;

/// Write a VM into a directory: its memory, processors and devices
///
/// It stands still meanwhile and then goes on; frames for it are lost. `bellhop run --restore DIRECTORY`
/// brings back what is in it, as often as you like.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
The directory holds all that was in the guest's memory, keys and passwords among it; it is readable by the
daemon's user only.

Examples:
  bellhop vm snapshot web /var/lib/snapshots/web-before-the-update

To go on from it, as a process that is none of the daemon's VMs, on devices that are free (`bellhop vm show` has the NICs' ids):
  bellhop run --restore /var/lib/snapshots/web-before-the-update --vdpa id=net0,path=/dev/vhost-vdpa-3")]
pub(crate) struct Arguments {
    /// The VM
    #[arg(value_name = "NAME")]
    name: String,

    /// An absolute path on the node, where nothing is yet
    #[arg(value_name = "DIRECTORY")]
    directory: PathBuf,
}

pub(super) fn execute(arguments: &Arguments, node: &Node, format: Format) -> Result<Code, Error> {
    let at = format!("{}/snapshot?wait=false", of_vm(&arguments.name));
    let body = SnapshotRequest {
        path: arguments.directory.clone(),
    };
    // The daemon cancels a snapshot before that.
    let limit = 2 * SNAPSHOT_TIME;
    let result = operation::carry_through(node, &at, &body, MAKING, limit, |_| ())?;
    let written = result.snapshot.ok_or_else(|| Error::failed(STRANGE))?;
    let text = || {
        format!(
            "{}: {} MiB of memory; the VM stood still for {} ms\n",
            printable(&arguments.directory.to_string_lossy()),
            written.memory_bytes >> 20,
            written.paused_ms,
        )
    };
    format.print(&written, text)
}

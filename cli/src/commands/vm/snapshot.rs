//! `bellhop vm snapshot`.

use std::path::PathBuf;
use std::time::Duration;

use bellhop_api::machine::{SNAPSHOT_TIME, SnapshotInfo, SnapshotRequest};
use bellhop_common::client::Node;
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::text::printable;
use hyper::Method;

use super::{of_vm, read};

/// How much longer than the daemon this command waits: the daemon's answer names the cause.
const MARGIN: Duration = Duration::from_secs(60);

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
    let at = format!("{}/snapshot", of_vm(&arguments.name));
    let body = SnapshotRequest {
        path: arguments.directory.clone(),
    };
    let (_, answer) = node.send(Method::POST, &at, &body, SNAPSHOT_TIME + MARGIN)?;
    let written: SnapshotInfo = read(&answer)?;
    let text = || {
        format!(
            "{}: {} MiB of memory; the VM stood still for {} ms\n",
            printable(&arguments.directory.to_string_lossy()),
            written.memory_bytes >> 20,
            written.paused_ms,
        )
    };
    format.print(&answer, text)
}

//! `bellhop vm set`.

use bellhop_common::client::{Node, NodeArguments};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;

use super::create::make_paths_absolute;
use super::spec_patch::{send, show};
use crate::commands::machine_arguments::resource;
use crate::setting::{self, Setting};

/// Change single values of a VM's spec, labels and annotations
///
/// The VM may run. The command prints each changed value, and when it takes effect.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
KEY=VALUE sets a value, and KEY- removes it or restores its default. Keys are those of a file for
`bellhop vm create`: cpus, memory, memory.hugepages, kernel, cmdline, restart, labels.NAME,
annotations.NAME and others. Lists such as cpu_affinity are JSON: cpu_affinity=[[0,1],[2]].

The restart policy, labels and annotations take effect at once, all else at the next start of the
VM: `bellhop vm show` lists pending changes. A reset of the guest is not such a start. `bellhop vm
nic` and `bellhop vm disk` change the NICs and disks of a running VM.

Examples:
  bellhop vm set web memory=2G restart=always
  bellhop vm set web labels.tier=web labels.old-
  bellhop vm set web cpus=4 --dry-run")]
pub(crate) struct Arguments {
    /// The VM
    #[arg(value_name = "NAME")]
    name: String,

    /// The changes
    #[arg(value_name = "KEY=VALUE", required = true)]
    settings: Vec<Setting>,

    /// Print the changes without applying them
    #[arg(long)]
    dry_run: bool,
}

pub(super) fn execute(
    arguments: &Arguments,
    which: &NodeArguments,
    node: &Node,
    format: Format,
) -> Result<Code, Error> {
    let Arguments {
        name,
        settings,
        dry_run,
    } = arguments;
    let mut patch = setting::patch(settings);
    make_paths_absolute(&mut patch, which.address())?;
    show(
        name,
        &send(node, name, None, &resource(patch), *dry_run)?,
        format,
    )
}

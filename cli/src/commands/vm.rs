//! `bellhop vm`: VMs of the node daemon.
//!
//! Each subcommand with more arguments than a name has a file. This file has the others, which
//! change a VM's state; `requests.rs` has the common parts.

mod apply;
mod arguments;
mod compat;
mod console;
pub(crate) mod create;
mod delete;
mod disk;
mod edit;
pub(crate) mod list;
mod logs;
pub(super) mod migrate;
mod migration;
pub(crate) mod nic;
pub(crate) mod removal;
mod replace;
mod requests;
mod reset;
mod restore;
mod selection;
mod set;
mod show;
mod snapshot;
mod spec_patch;
pub(crate) mod stats;
mod stop;
mod upgrade;
mod vfio;
pub(crate) mod view;
mod wait;
mod watch;

use bellhop_api::machine::WantedState;
use bellhop_api::node::VmStateChange;
use bellhop_common::client::{MAKING, Node, NodeArguments};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use hyper::Method;

use arguments::absolute;
pub(crate) use requests::{each, until};
use requests::{of_state, of_vm, read, say, vm};
use selection::Selection;

/// Create, show, start, stop, change and delete the node's VMs
///
/// The node daemon (`bellhop serve`) runs each VM in its own process, with NICs that it creates for
/// the VM. It restarts the VM after a crash or a reboot of the host, and deletes the NICs with it.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  bellhop vm create web --kernel /boot/vmlinuz --initramfs /boot/initrd.img --memory 1G \\
      --nic from=pci/0000:01:00.0,bridge=br0,vlan=100
  bellhop vm create web --file web.toml
  bellhop vm list -l tier=web
  bellhop vm show web
  bellhop vm set web memory=2G restart=always
  bellhop vm wait web --for running
  bellhop vm console web                     Ctrl-A X leaves, the VM keeps running
  bellhop vm nic add web from=pci/0000:01:00.0
  bellhop vm disk add web path=/var/lib/images/data.img
  bellhop vm logs web --follow
  bellhop vm snapshot web before-the-update
  bellhop vm restore web before-the-update
  bellhop vm compat web node2
  bellhop vm migrate web node2
  bellhop vm migration show web
  bellhop vm upgrade web --program /opt/bellhop-0.2/bellhop
  bellhop vm stop web
  bellhop vm delete web

--node or --remote selects the daemon of another host (`bellhop remote --help`). All subcommands
support -o json.")]
pub(crate) struct Arguments {
    #[command(flatten)]
    node: NodeArguments,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Create(create::Arguments),
    Replace(replace::Arguments),
    Apply(apply::ApplyArguments),
    Diff(apply::DiffArguments),
    Set(set::Arguments),
    Edit(edit::Arguments),
    /// Start a stopped VM
    ///
    /// The daemon then keeps it running: it starts again after a crash, by its restart policy, and
    /// after a reboot of the host.
    #[command(after_long_help = "\
A running VM stays as it is; a paused one resumes. A VM that may run elsewhere after a migration
does not start: first run `bellhop vm migration resolve NAME here|there`.

Examples:
  bellhop vm start web db
  bellhop vm start -l tier=web")]
    Start(Selection),
    /// Pause a VM's vCPUs
    ///
    /// Devices continue their work; their interrupts wait.
    #[command(after_long_help = "\
Examples:
  bellhop vm pause web
  bellhop vm resume web")]
    Pause(Selection),
    /// Resume a paused VM
    #[command(after_long_help = "\
This does not start a stopped VM: use `bellhop vm start`.

Examples:
  bellhop vm resume web")]
    Resume(Selection),
    Stop(stop::Arguments),
    Reset(reset::Arguments),
    /// Send a non-maskable interrupt to VMs
    ///
    /// Linux logs it, or panics with `unknown_nmi_panic`, which helps to debug a guest that hangs.
    #[command(after_long_help = "\
The first vCPU receives it; a paused one after it resumes.

Examples:
  bellhop vm nmi web")]
    Nmi(Selection),
    List(list::Arguments),
    Show(show::Arguments),
    Stats(stats::Arguments),
    Nic(nic::Arguments),
    Disk(disk::Arguments),
    Vfio(vfio::Arguments),
    Wait(wait::Arguments),
    Console(console::Arguments),
    Logs(logs::Arguments),
    Snapshot(snapshot::Arguments),
    Restore(restore::Arguments),
    Migrate(migrate::Arguments),
    Migration(migration::Arguments),
    Compat(compat::Arguments),
    Upgrade(upgrade::Arguments),
    Delete(delete::Arguments),
}

/// Runs the subcommand.
pub(crate) fn execute(arguments: &Arguments, format: Format) -> Result<Code, Error> {
    let which = &arguments.node.resolved()?;
    let node = which.connect()?;
    match &arguments.command {
        Command::Create(arguments) => create::execute(arguments, which, &node, format),
        Command::Replace(arguments) => {
            let wanted = arguments.wanted(which.address())?;
            arguments.confirm(&wanted)?;
            replace::execute(&wanted, which, &node, format)
        }
        Command::Apply(arguments) => apply::apply(arguments, which, &node, format),
        Command::Diff(arguments) => apply::diff(arguments, which, &node, format),
        Command::Set(arguments) => set::execute(arguments, which, &node, format),
        Command::Edit(arguments) => edit::execute(arguments, &node, format),
        Command::Start(vms) => each(&vms.names(&node)?, |name| {
            change_state(&node, name, WantedState::Running, format)
        }),
        Command::Pause(vms) => each(&vms.names(&node)?, |name| {
            change_state(&node, name, WantedState::Paused, format)
        }),
        Command::Resume(vms) => each(&vms.names(&node)?, |name| resume(&node, name, format)),
        Command::Stop(arguments) => {
            let names = arguments.selection.names(&node)?;
            arguments.confirm(&names)?;
            stop::execute(arguments, &names, &node, format)
        }
        Command::Reset(arguments) => reset::execute(arguments, &node, format),
        Command::Nmi(vms) => reset::press(&vms.names(&node)?, "nmi", &node, format),
        Command::List(arguments) => list::execute(arguments, &node, format),
        Command::Show(arguments) => show::execute(arguments, &node, format),
        Command::Stats(arguments) => stats::execute(arguments, &node, format),
        Command::Nic(arguments) => nic::execute(arguments, which, &node, format),
        Command::Disk(arguments) => disk::execute(arguments, which, &node, format),
        Command::Vfio(arguments) => vfio::execute(arguments, &node, format),
        Command::Wait(arguments) => wait::execute(arguments, &node, format),
        Command::Console(arguments) => console::execute(arguments, &node),
        Command::Logs(arguments) => logs::execute(arguments, &node),
        Command::Snapshot(arguments) => snapshot::execute(arguments, &node, format),
        Command::Restore(arguments) => restore::execute(arguments, &node, format),
        Command::Migrate(arguments) => migrate::execute(arguments, which, &node, format),
        Command::Migration(arguments) => migration::execute(arguments, &node, format),
        Command::Compat(arguments) => compat::execute(arguments, which, &node, format),
        Command::Upgrade(arguments) => upgrade::execute(arguments, which, &node, format),
        Command::Delete(arguments) => {
            let names = arguments.selection.names(&node)?;
            arguments.confirm(&names)?;
            delete::execute(arguments, &names, &node, format)
        }
    }
}

/// Changes a VM's state, and shows the VM.
fn change_state(
    node: &Node,
    name: &str,
    state: WantedState,
    format: Format,
) -> Result<Code, Error> {
    let wanted = VmStateChange::from(state);
    let (_, answer) = node.send(Method::PUT, &of_state(name), &wanted, MAKING)?;
    say(&answer, format)
}

/// Resumes a paused VM.
fn resume(node: &Node, name: &str, format: Format) -> Result<Code, Error> {
    let (view, _) = vm(node, name)?;
    if view.status.pid.is_none() {
        let phase = view.status.phase;
        return Err(Error::conflict(format!(
            "the VM {name} is not paused, it is {phase}: `bellhop vm start {name}` starts it"
        )));
    }
    change_state(node, name, WantedState::Running, format)
}

#[cfg(test)]
mod tests;

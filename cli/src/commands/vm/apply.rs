//! `bellhop vm apply` and `bellhop vm diff`.

use std::path::PathBuf;

use bellhop_common::client::{Condition, MAKING, Node, NodeArguments, Refusal};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use serde_json::{Map, Value};

use super::create::{make_paths_absolute, name};
use super::spec_patch::{send, show};
use super::watch::Watch;
use super::{of_vm, say};
use crate::commands::machine_arguments::{Description, resource};
use crate::setting::Setting;

/// Create a VM, or change it, as a file describes
///
/// The VM may run. Keys that the file lacks keep their values: `bellhop vm replace` resets them.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
The command prints each changed value, and when it takes effect. The restart policy, labels and
annotations change at once, all else at the next start of the VM. Lists (nics, disks) change as a
whole, and only while the VM is stopped. `state` in the file applies only to a new VM: start and
stop change it later.

Examples:
  bellhop vm apply --file web.toml              with name = \"web\" in the file
  bellhop vm apply web --file - < web.json
  bellhop vm diff web --file web.toml && bellhop vm apply web --file web.toml")]
pub(crate) struct ApplyArguments {
    #[command(flatten)]
    file: FileArguments,
}

/// Print the changes that `bellhop vm apply` would make
///
/// The command changes nothing. The daemon checks the new values as for a change.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  bellhop vm diff web --file web.toml
  bellhop vm diff web --file web.toml -o json | jq '.changes | length'")]
pub(crate) struct DiffArguments {
    #[command(flatten)]
    file: FileArguments,
}

// A doc comment here would replace the subcommands' own.
#[derive(Debug, clap::Args)]
struct FileArguments {
    /// The VM (default: `name` in the file)
    #[arg(value_name = "NAME")]
    name: Option<String>,

    /// TOML, JSON or YAML with the keys of `bellhop vm create --file`; - is standard input
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,

    /// Set any key of the file: --set memory=2G (may be repeated)
    #[arg(long = "set", value_name = "KEY=VALUE")]
    settings: Vec<Setting>,
}

impl FileArguments {
    /// The VM's name, and its description.
    fn read(&self, which: &NodeArguments) -> Result<(String, Map<String, Value>), Error> {
        let mut file = Description::read(&self.file, &self.settings)?;
        make_paths_absolute(&mut file.fields, which.address())?;
        Ok((name(self.name.as_deref(), file.name)?, file.fields))
    }
}

/// The merge patch of a file for an existing VM.
fn patch(mut fields: Map<String, Value>) -> Value {
    fields.remove("state");
    resource(fields)
}

pub(super) fn apply(
    arguments: &ApplyArguments,
    which: &NodeArguments,
    node: &Node,
    format: Format,
) -> Result<Code, Error> {
    let (name, fields) = arguments.file.read(which)?;
    match send(node, &name, None, &patch(fields.clone()), false) {
        Err(error) if error.refusal().is_some_and(Refusal::is_not_there) => {}
        answer => return show(&name, &answer?, format),
    }
    let _watch = Watch::start(which, &name);
    let made = node.put(&of_vm(&name), Condition::Absent, &resource(fields), MAKING)?;
    say(&made, format)
}

pub(super) fn diff(
    arguments: &DiffArguments,
    which: &NodeArguments,
    node: &Node,
    format: Format,
) -> Result<Code, Error> {
    let (name, fields) = arguments.file.read(which)?;
    let changes = send(node, &name, None, &patch(fields), true)?;
    show(&name, &changes, format)
}

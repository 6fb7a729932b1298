//! `bellhop vm create`, and the VM configuration that it shares with `bellhop vm replace`.

use std::path::{Path, PathBuf};

use bellhop_api::node::{Desired, NicId, NicSettings};
use bellhop_common::client::{Address, Condition, MAKING, Node, NodeArguments, Refusal};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::arguments::{absolute, free_id, nic_body, unwritable};
use super::watch::Watch;
use super::{of_vm, say, vm};
use crate::commands::machine_arguments::MachineArguments;
use crate::config_file;

/// Create a VM with its NICs and start it: all of it, or nothing
///
/// If a step fails, those before it are undone. A VM that has the name already stays as it is.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(super) vm: VmArguments,

    /// Succeed if a VM has the name already, whatever it is; it stays as it is
    #[arg(long)]
    if_not_exists: bool,
}

// A doc comment here would replace the subcommands' own.
#[derive(Debug, clap::Args)]
#[command(
    after_long_help = HELP,
    mut_arg("kernel", |kernel| kernel.required_unless_present("file")),
)]
pub(crate) struct VmArguments {
    /// Its name: 1 to 63 of a-z, 0-9 and -, not - first
    #[arg(value_name = "NAME")]
    pub(super) name: String,

    #[command(flatten)]
    machine: MachineArguments,

    // `help` instead of a doc comment: rustdoc reads brackets as links.
    #[arg(
        long = "nic",
        value_name = "OPTIONS",
        help = "A NIC: from=NIC[,bridge=NAME][,vlan=N][,mac=MAC]…, path=/dev/vhost-vdpa-N or device=NAME (may be repeated)"
    )]
    nics: Vec<NicSettings>,

    /// Take everything from this TOML or JSON file instead; - is standard input
    #[arg(
        short,
        long,
        value_name = "FILE",
        conflicts_with_all = ["kernel", "initramfs", "cmdline", "cpus", "cpu", "cpu_affinity", "memory", "nics", "disks"]
    )]
    file: Option<PathBuf>,

    /// What happens when it ends by itself (default: on-failure)
    #[arg(long, value_enum, ignore_case = true)]
    restart: Option<RestartWord>,

    /// A label, by which commands select VMs with -l (may be repeated)
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
    labels: Vec<(String, String)>,

    /// Make it, with its NICs, but do not start it
    #[arg(long)]
    stopped: bool,
}

fn label(text: &str) -> Result<(String, String), String> {
    let parts = text.split_once('=').ok_or("give KEY=VALUE")?;
    Ok((parts.0.to_owned(), parts.1.to_owned()))
}

/// As the API's `Restart`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
enum RestartWord {
    /// It stays stopped
    Never,
    /// It is started again if it crashed, not if its guest powered off
    #[value(alias = "OnFailure")]
    OnFailure,
    /// It is started again in any case
    Always,
}

const HELP: &str = "\
Keys of --nic, and of [[nics]] in a file:
  id=NAME          its name in this VM (default: net0, net1, …; a file has to say it)
  from=NIC         made of this NIC, and taken back with the VM: a network interface, pci/ADDRESS, a devlink
                   handle, or a management device such as vdpasim_net
  path=DEV         or a vDPA device that is there: /dev/vhost-vdpa-N
  device=NAME      or its name
  kind=auto|vf|sf  with from: what of the NIC it is made on
  bridge=NAME, vlan=N          with from: what it is connected with
  mtu=BYTES, queue_pairs=N     with from: what the device has
  max_tx_rate=N, min_tx_rate=N with from: what it may send, in Mbit/s
  virtual_functions=N          with from: how many the NIC gets if it has none
  mac=MAC          the address that the guest sees
  doorbell=auto|on|off         whether kicks go to the device without an exit
  rescue=on|off                kick it and interrupt its driver, once, when a queue hangs
  failover=NIC     with from: made of this NIC, like the first; it stands by, and takes over, once, if that one says
                   that it needs a reset
  failover=/dev/vhost-vdpa-N   or a vDPA device that is there stands by. In a file: failover.from, failover.path
                   or failover.device = NAME

In a file, keys are the options' names with _ for -; --nic and --disk are [[nics]] and [[disks]], and there
are name, state = \"Running\" or \"Stopped\", restart, [labels] and [annotations]. Paths are this machine's.

Examples:
  bellhop vm create web --kernel /boot/vmlinuz --initramfs /boot/initrd.img --cpus 2 --memory 1G \\
      --nic from=pci/0000:01:00.0,bridge=br0,vlan=100,mac=52:54:00:12:34:56
  bellhop vm create test --kernel vmlinux --nic from=vdpasim_net --restart never
  bellhop vm create web --file web.toml --stopped";

pub(super) fn execute(
    arguments: &Arguments,
    which: &NodeArguments,
    node: &Node,
    format: Format,
) -> Result<Code, Error> {
    let put = put(&arguments.vm, Condition::Absent, which, node);
    let exists = |error: &Error| error.refusal().is_some_and(Refusal::is_there_already);
    match put {
        Err(error) if exists(&error) && arguments.if_not_exists => {
            say(&vm(node, &arguments.vm.name)?.1, format)
        }
        Err(error) if exists(&error) => Err(error.hint(
            "`bellhop vm show` shows it; `bellhop vm replace` puts another one in its place once \
             it is stopped, and `bellhop vm delete` deletes it",
        )),
        put => say(&put?, format),
    }
}

/// Requests the VM, and shows the progress.
pub(super) fn put(
    arguments: &VmArguments,
    condition: Condition,
    which: &NodeArguments,
    node: &Node,
) -> Result<Value, Error> {
    let body = body(arguments, which.address())?;
    let _watch = Watch::start(which, &arguments.name);
    node.put(&of_vm(&arguments.name), condition, &body, MAKING)
}

fn not_a_table() -> Error {
    Error::invalid_input("the file says what machine it is in a table; this one has something else")
}

/// The request body of the VM. Paths are relative to this command's directory, so they are made
/// absolute.
pub(super) fn body(arguments: &VmArguments, node: &Address) -> Result<Value, Error> {
    let mut body = match &arguments.file {
        Some(file) => {
            let (named, body) = of_file(file, node)?;
            if let Some(named) = named.filter(|named| *named != arguments.name) {
                return Err(other_name(&named, &arguments.name));
            }
            body
        }
        None => of_options(arguments, node)?,
    };
    if arguments.stopped {
        body.insert("state".to_owned(), json!(Desired::Stopped));
    }
    if let Some(restart) = arguments.restart {
        body.insert("restart".to_owned(), json!(restart));
    }
    for (key, value) in &arguments.labels {
        let labels = body.entry("labels").or_insert_with(|| json!({}));
        // The daemon rejects a file with another value.
        if let Some(labels) = labels.as_object_mut() {
            labels.insert(key.clone(), json!(value));
        }
    }
    Ok(Value::Object(body))
}

/// The file and the command line name different VMs.
pub(super) fn other_name(in_file: &str, name: &str) -> Error {
    Error::invalid_input(format!("the file describes the VM {in_file}, not {name}"))
}

/// The VM of a file, and its name if the file has one.
pub(super) fn of_file(
    file: &Path,
    node: &Address,
) -> Result<(Option<String>, Map<String, Value>), Error> {
    let Value::Object(mut body) = config_file::read(file)? else {
        return Err(not_a_table());
    };
    make_paths_absolute(&mut body, node)?;
    let name = match body.remove("name") {
        Some(Value::String(name)) => Some(name),
        Some(other) => {
            let message = format!("`name` in the file is {other}, which is no text");
            return Err(Error::invalid_input(message));
        }
        None => None,
    };
    Ok((name, body))
}

/// Makes paths in a file absolute, because they are relative to this command's directory.
pub(super) fn make_paths_absolute(
    body: &mut Map<String, Value>,
    node: &Address,
) -> Result<(), Error> {
    for key in ["kernel", "initramfs"] {
        if let Some(value) = body.get_mut(key) {
            make_absolute(value, node)?;
        }
    }
    for list in ["disks", "nics"] {
        let entries = body.get_mut(list).and_then(Value::as_array_mut);
        for entry in entries.into_iter().flatten() {
            if let Some(path) = entry.get_mut("path") {
                make_absolute(path, node)?;
            }
        }
    }
    Ok(())
}

fn of_options(arguments: &VmArguments, node: &Address) -> Result<Map<String, Value>, Error> {
    let config = arguments.machine.config();
    let mut config = config
        .ok_or_else(|| Error::wrong("no kernel is given; say --kernel PATH or --file FILE"))?;
    for path in std::iter::once(&mut config.kernel).chain(&mut config.initramfs) {
        *path = absolute(path, node)?;
        text(path)?;
    }
    for disk in &mut config.disks {
        disk.path = absolute(&disk.path, node)?;
    }
    let Value::Object(mut body) = serde_json::to_value(config).map_err(unwritable)? else {
        return Err(not_a_table());
    };
    // The daemon has NICs instead, and this command no option for it.
    body.remove("vdpa");
    body.remove("ring_watch");
    let mut taken: Vec<String> = Vec::new();
    for id in arguments
        .nics
        .iter()
        .filter_map(|nic| nic.id.as_ref().map(NicId::to_string))
    {
        if taken.contains(&id) {
            return Err(Error::wrong(format!("two NICs have the id {id}")));
        }
        taken.push(id);
    }
    let mut nics = Vec::new();
    for nic in &arguments.nics {
        let id = nic.id.as_ref().map(NicId::to_string).unwrap_or_else(|| {
            let id = free_id("net", &taken);
            taken.push(id.clone());
            id
        });
        nics.push(nic_body(nic, &id, node)?);
    }
    body.insert("nics".to_owned(), nics.into());
    Ok(body)
}

fn make_absolute(value: &mut Value, node: &Address) -> Result<(), Error> {
    // The daemon rejects other values and names them.
    if let Some(path) = value.as_str() {
        *value = text(&absolute(Path::new(path), node)?)?;
    }
    Ok(())
}

fn text(path: &Path) -> Result<Value, Error> {
    path.to_str().map(Value::from).ok_or_else(|| {
        let shown = path.display();
        Error::wrong(format!("{shown} has no name that can be written in JSON"))
    })
}

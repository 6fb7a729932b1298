//! `bellhop vm create`, and the VM configuration that it shares with `bellhop vm replace`.

use std::path::Path;

use bellhop_api::config::VfioConfig;
use bellhop_api::node::{Desired, NicId, NicSettings, Plan};
use bellhop_common::client::{Address, Condition, MAKING, Node, NodeArguments, Refusal, path};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use hyper::Method;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::arguments::{absolute, free_id, nic_body};
use super::watch::Watch;
use super::{of_vm, read, say, vm};
use crate::commands::machine_arguments::{MachineArguments, json_of, put_devices, resource};
use crate::plan;

/// Create a VM with its NICs and start it, all or nothing
///
/// If a step fails, the daemon undoes the earlier ones. It never changes an existing VM with this
/// name.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(super) vm: VmArguments,

    /// Succeed without any change if a VM has the name already
    #[arg(long)]
    if_not_exists: bool,

    /// Check, and print the steps without running them
    #[arg(long)]
    dry_run: bool,
}

// A doc comment here would replace the subcommands' own.
#[derive(Debug, clap::Args)]
#[command(
    after_long_help = HELP,
    mut_arg("kernel", |kernel| kernel.required_unless_present("file")),
)]
pub(crate) struct VmArguments {
    /// Its name: 1 to 63 of a-z, 0-9 and -, not - first (default: `name` in the file)
    #[arg(value_name = "NAME", required_unless_present("file"))]
    name: Option<String>,

    #[command(flatten)]
    machine: MachineArguments,

    // `help` instead of a doc comment: rustdoc reads brackets as links.
    #[arg(
        long = "nic",
        value_name = "OPTIONS",
        help = "A NIC: from=NIC[,bridge=NAME][,vlan=N][,mac=MAC]…, path=/dev/vhost-vdpa-N or \
                device=NAME (may be repeated)"
    )]
    nics: Vec<NicSettings>,

    #[arg(
        long,
        value_name = "OPTIONS",
        help = "A PCI function of the node for the guest, by VFIO: host=0000:03:10.1[,id=NAME]\
                [,allow_pf=on][,standby=NIC][,iommu=on][,iommufd=off] (may be repeated)"
    )]
    vfio: Vec<VfioConfig>,

    /// Whether the daemon restarts a VM that ends by itself (default: on-failure)
    #[arg(long, value_enum, ignore_case = true)]
    restart: Option<RestartWord>,

    /// A label, for the selection with -l (may be repeated)
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = label)]
    labels: Vec<(String, String)>,

    /// Create the VM with its NICs, but do not start it
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
    /// It is started again after a crash, not after its guest powers off
    #[value(alias = "OnFailure")]
    OnFailure,
    /// It is started again in any case
    Always,
}

const HELP: &str = "\
Keys of --nic, and of [[nics]] in a file:
  id=NAME          its name in this VM (default: net0, net1, …; required in a file)
  from=NIC         created on this NIC, and deleted with the VM: a network interface, pci/ADDRESS, a
                   devlink handle, a management device such as vdpasim_net, or software: a process
                   of the host (VDUSE)
  path=DEV         or an existing vDPA device: /dev/vhost-vdpa-N
  device=NAME      or its name
  kind=auto|vf|sf  with from: the kind of function
  bridge=NAME, vlan=N          with from: its connection
  port=INTERFACE, queue=N      with from=software: a queue of this port instead
  poll=PERCENT     with from=software: each queue pair looks for frames before it sleeps, for at
                   most this share of a processor
  mtu=BYTES, queue_pairs=N     with from: the device's settings
  device_features=MASK         with from: the virtio features that it may offer, in hexadecimal;
                   the guest can move to a device that has those (`vm nic swap`)
  max_tx_rate=N, min_tx_rate=N with from: its maximum and guaranteed rate, in Mbit/s
  virtual_functions=N          with from: how many to create if the NIC has none
  mac=MAC          the address that the guest sees
  mac_lock=on|off  whether the guest may change neither its address nor the device's filters
  standby=on|off  whether the guest prefers another device with the same MAC address (a standby)
  doorbell=auto|on|off         whether kicks reach the device without an exit
  iommu=on|off     whether the guest's IOMMU decides which memory the device reaches
  stall_kick=on|off                if a queue hangs, kick it and interrupt its driver once
  backup=NIC     with from: a backup device, created like the first; it takes over, once, if the
                   first one reports that it needs a reset
  backup=/dev/vhost-vdpa-N   or an existing vDPA device as the backup. In a file: backup.from,
                   backup.path or backup.device = NAME

In a file, keys are the options' names with _ for -; --nic and --disk are [[nics]] and [[disks]].
A file also has name, state = \"Running\" or \"Stopped\", restart, [labels] and [annotations]. Paths
are those of this host. A file may also have the form of the API: name, labels, annotations and
spec. `bellhop run` reads the same file, `bellhop config check` checks it.

Examples:
  bellhop vm create web --kernel /boot/vmlinuz --initramfs /boot/initrd.img --cpus 2 --memory 1G \\
      --nic from=pci/0000:01:00.0,bridge=br0,vlan=100,mac=52:54:00:12:34:56
  bellhop vm create test --kernel vmlinux --nic from=vdpasim_net --restart never --dry-run
  bellhop vm create --file web.yaml --memory 2G --stopped      with name: web in the file";

/// A VM to create: its name, and the body of the request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) name: String,
    pub(super) body: Value,
}

pub(super) fn execute(
    arguments: &Arguments,
    which: &NodeArguments,
    node: &Node,
    format: Format,
) -> Result<Code, Error> {
    let wanted = arguments.vm.wanted(which.address())?;
    let put = if arguments.dry_run {
        plan(&wanted, node)
    } else {
        put(&wanted, Condition::Absent, which, node)
    };
    let exists = |error: &Error| error.refusal().is_some_and(Refusal::is_there_already);
    match put {
        Err(error) if exists(&error) && arguments.if_not_exists => {
            say(&vm(node, &wanted.name)?.1, format)
        }
        Err(error) if exists(&error) => Err(error.hint(
            "`bellhop vm show` shows it; stop it first, then `bellhop vm replace` replaces it and \
             `bellhop vm delete` deletes it",
        )),
        planned if arguments.dry_run => plan::print(&read::<Plan>(&planned?)?.steps, format),
        put => say(&put?, format),
    }
}

/// Requests the steps that [`put`] would take.
fn plan(wanted: &Wanted, node: &Node) -> Result<Value, Error> {
    let at = format!("{}{}", of_vm(&wanted.name), path(["plan"]));
    Ok(node.send(Method::POST, &at, &wanted.body, MAKING)?.1)
}

/// Requests the VM, and shows the progress.
pub(super) fn put(
    wanted: &Wanted,
    condition: Condition,
    which: &NodeArguments,
    node: &Node,
) -> Result<Value, Error> {
    let _watch = Watch::start(which, &wanted.name);
    node.put(&of_vm(&wanted.name), condition, &wanted.body, MAKING)
}

impl VmArguments {
    /// The VM of the file and the options.
    pub(super) fn wanted(&self, node: &Address) -> Result<Wanted, Error> {
        let description = self.machine.description()?;
        let mut description = description
            .ok_or_else(|| Error::wrong("no kernel: give --kernel PATH or --file FILE"))?;
        let body = &mut description.fields;
        self.put_nics(body, node)?;
        let functions = self.vfio.iter().map(json_of);
        put_devices(body, "vfio", functions.collect::<Result<_, _>>()?)?;
        make_paths_absolute(body, node)?;
        if self.stopped {
            body.insert("state".to_owned(), json!(Desired::Stopped));
        }
        if let Some(restart) = self.restart {
            body.insert("restart".to_owned(), json!(restart));
        }
        for (key, value) in &self.labels {
            let labels = body.entry("labels").or_insert_with(|| json!({}));
            // The daemon rejects a file with another value.
            if let Some(labels) = labels.as_object_mut() {
                labels.insert(key.clone(), json!(value));
            }
        }
        Ok(Wanted {
            name: name(self.name.as_deref(), description.name)?,
            body: resource(description.fields),
        })
    }

    /// Adds the NICs of the options. One without an ID gets the first free name.
    fn put_nics(&self, body: &mut Map<String, Value>, node: &Address) -> Result<(), Error> {
        let mut taken: Vec<String> = Vec::new();
        for id in self.nics.iter().filter_map(|nic| nic.id.as_ref()) {
            let id = id.to_string();
            if taken.contains(&id) {
                return Err(Error::wrong(format!("two NICs have the id {id}")));
            }
            taken.push(id);
        }
        let in_file = body.get("nics").and_then(Value::as_array);
        let in_file = in_file.into_iter().flatten();
        taken.extend(in_file.filter_map(|nic| nic.get("id")?.as_str().map(str::to_owned)));
        let mut nics = Vec::new();
        for nic in &self.nics {
            let id = nic.id.as_ref().map(NicId::to_string).unwrap_or_else(|| {
                let id = free_id("net", &taken);
                taken.push(id.clone());
                id
            });
            nics.push(nic_body(nic, &id, node)?);
        }
        put_devices(body, "nics", nics)
    }
}

/// The VM that the command line names, else the file.
pub(super) fn name(given: Option<&str>, in_file: Option<String>) -> Result<String, Error> {
    match (given, in_file) {
        (Some(name), Some(in_file)) if name != in_file => {
            let message = format!("the file describes the VM {in_file}, not {name}");
            Err(Error::invalid_input(message))
        }
        (Some(name), _) => Ok(name.to_owned()),
        (None, Some(in_file)) => Ok(in_file),
        (None, None) => {
            let message = "the VM has no name: give NAME, or `name` in the file";
            Err(Error::wrong(message))
        }
    }
}

/// Makes paths in a spec absolute, because they are relative to this command's directory.
pub(crate) fn make_paths_absolute(
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
        Error::wrong(format!("{shown} is not valid UTF-8, which JSON requires"))
    })
}

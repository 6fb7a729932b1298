//! `bellhop report`: a bundle for a support ticket.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use bellhop_common::client::{Address, NodeArguments};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::{self, Format};
use bellhop_common::private_file;
use bellhop_diagnostics::doctor::Host;
use bellhop_diagnostics::report::{self, Context};
use serde_json::json;

/// Write a bundle for a support ticket: what is known about this host, its devices and its VMs
///
/// Nothing is changed and no vDPA device is opened. Works without the node daemon too; what cannot be had is in
/// the bundle's errors.txt, with the reason. Run it as root, or much is missing.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
In the bundle, a .tar.gz that can be looked through before it goes anywhere:
  versions.txt, host/   versions, kernel command line, processors, memory, modules
  doctor.txt, .json     what `bellhop doctor` finds
  topology.json, vdpa/  NICs, functions, vDPA devices, who uses them; their configurations and sysfs
  nics/                 records of NICs that were made, with each step
  node/                 the daemon's version, its VMs, and what has happened to them and to the devices
  vms/NAME/             of each VM: its configuration, NICs with queues and where their rings stand, counters
  logs/                 the ends of the daemon's, the kernel's and the VMs' processes' logs; the daemon's
                        has a line for each change that it was asked for
  errors.txt            what is missing, and why

Tokens and keys are not in it. What guests said on their consoles is in it with --console only. VMs' names and
kernel command lines, MAC addresses and this host's name are.

Examples:
  bellhop report
  bellhop report --file /tmp/ticket-4711.tar.gz
  bellhop report --file - | ssh support tar -tz")]
pub(crate) struct Arguments {
    #[command(flatten)]
    node: NodeArguments,

    /// The file, which must not be there yet; - is standard output (default: bellhop-report-TIME.tar.gz here)
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,

    /// With what guests said on their consoles
    #[arg(long)]
    console: bool,

    /// Where the daemon keeps its VMs' logs
    #[arg(long, value_name = "DIRECTORY", default_value = "/var/lib/bellhop")]
    state_dir: PathBuf,
}

/// Collects and writes the bundle.
pub(crate) fn execute(arguments: &Arguments, format: Format) -> Result<Code, Error> {
    let which = arguments.node.resolved()?;
    let node = which.address();
    let runtime_dir = match node {
        Address::Socket(path) => path.parent().map(Path::to_owned).unwrap_or_default(),
        Address::Https { .. } | Address::Ssh { .. } => "/run/bellhop".into(),
    };
    let context = Context {
        host: Host::this(),
        node: node.clone(),
        credentials: which.credentials().clone(),
        state_dir: arguments.state_dir.clone(),
        runtime_dir,
        console: arguments.console,
    };
    let bundle = report::collect(&context, SystemTime::now());
    let path = match &arguments.file {
        Some(path) => path.clone(),
        None => format!("{}.tar.gz", bundle.name()).into(),
    };
    let missing = bundle.missing();
    let bytes = bundle.finish().map_err(Error::unwritten)?;
    if path.as_os_str() == "-" {
        listing::print(&bytes)?;
    } else {
        let shown = path.display();
        private_file::create(&path, &bytes, 0o600)
            .map_err(Error::context(format!("cannot write {shown}")))?;
        let written = json!({ "name": path.to_string_lossy(), "missing": missing });
        format.print(&written, || format!("{shown}\n"))?;
    }
    if missing > 0 {
        let parts = if missing == 1 { "part is" } else { "parts are" };
        eprintln!("{missing} {parts} missing; errors.txt in the bundle says why");
    }
    Ok(Code::Success)
}

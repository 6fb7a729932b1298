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

/// Write a bundle for a support ticket
///
/// The bundle has data about this host, its devices and its VMs. The command changes nothing and
/// opens no vDPA device. It also works without the node daemon. The file errors.txt in the bundle
/// lists missing parts with the reason. Run the command as root, or many parts are missing.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
The bundle is a .tar.gz that you can inspect before you send it:
  versions.txt, host/   versions, kernel command line, processors, memory, modules
  doctor.txt, .json     the findings of `bellhop doctor`
  topology.json, vdpa/  NICs, functions, vDPA devices and their users, configurations and sysfs
  nics/                 records of created NICs, with each step
  node/                 the daemon's version, its VMs, and events of these and of the devices
  vms/NAME/             for each VM: its configuration, counters, and NICs with queues and ring
                        positions
  logs/                 the ends of the logs of the daemon, the kernel and the VMs' processes; the
                        daemon's log has a line for each requested change
  errors.txt            missing parts, with the reason

The bundle has no tokens and no keys. It has the guests' console output only with --console. It
has the VMs' names and kernel command lines, MAC addresses and this host's name.

Examples:
  bellhop report
  bellhop report --file /tmp/ticket-4711.tar.gz
  bellhop report --file - | ssh support tar -tz")]
pub(crate) struct Arguments {
    #[command(flatten)]
    node: NodeArguments,

    /// The new file; - is standard output (default: bellhop-report-TIME.tar.gz in this directory)
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,

    /// Include the guests' console output
    #[arg(long)]
    console: bool,

    /// The directory of the daemon's VM logs
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
        eprintln!("{missing} {parts} missing; errors.txt in the bundle has the reasons");
    }
    Ok(Code::Success)
}

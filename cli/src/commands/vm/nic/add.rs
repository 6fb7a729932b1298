//! `bellhop vm nic add`.

use bellhop_api::node::{NicSettings, Vm};
use bellhop_common::client::{Address, MAKING, Node, NodeArguments, path};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::text::printable;
use hyper::Method;
use serde_json::Value;

use crate::commands::vm::arguments::{free_id, nic_body};

/// Add a NIC to a VM, also while it runs
///
/// The daemon creates the NIC, gives it to the VM, and deletes it with the VM or with
/// `vm nic remove`. `bellhop nic create` creates a NIC without a VM.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
OPTIONS are those of `bellhop vm create --nic`, which its help describes:
  from=NIC[,kind=auto|vf|sf][,bridge=NAME][,vlan=N][,mac=MAC][,mtu=BYTES][,queue_pairs=N]…
  path=/dev/vhost-vdpa-N[,mac=MAC][,backup=/dev/vhost-vdpa-M]
  device=NAME[,mac=MAC]
and id=NAME (default: the first free one of net0, net1, …). The command prints the id.

Examples:
  bellhop vm nic add web from=pci/0000:01:00.0,bridge=br0,vlan=100
  bellhop vm nic add web id=backup,path=/dev/vhost-vdpa-3
  bellhop vm nic remove web backup")]
pub(crate) struct Arguments {
    /// The VM
    #[arg(value_name = "VM")]
    pub(super) vm: String,

    #[command(flatten)]
    pub(super) options: Options,
}

// A doc comment here would replace the subcommand's own.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The source of the NIC, and its settings
    #[arg(value_name = "OPTIONS")]
    nic: NicSettings,
}

/// Adds a NIC to this VM.
pub(crate) fn execute(
    vm: &str,
    options: &Options,
    which: &NodeArguments,
    node: &Node,
    format: Format,
) -> Result<Code, Error> {
    let (id, answer) = add(vm, &options.nic, which.address(), node)?;
    let text = || format!("{}\n", printable(&id));
    format.print(&answer, text)
}

fn add(vm: &str, nic: &NicSettings, at: &Address, node: &Node) -> Result<(String, Value), Error> {
    let id = match &nic.id {
        Some(id) => id.to_string(),
        None => {
            let view: Vm = node.get(&path(["v1", "vms", vm]))?;
            let nics = view.status.nic_devices.into_iter();
            let taken: Vec<String> = nics.map(|nic| nic.id).collect();
            free_id("net", &taken)
        }
    };
    let body = nic_body(nic, &id, at)?;
    let one = path(["v1", "vms", vm, "nics", &id]);
    let (_, answer) = node.send(Method::PUT, &one, &body, MAKING)?;
    Ok((id, answer))
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::json;

    use super::*;
    use bellhop_common::client::fake::{self, FakeDaemon};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    #[test]
    fn the_first_free_name_is_taken() {
        let line = ["add", "web", "from=pci/0000:01:00.0,vlan=100"];
        let Arguments { vm: name, options } = Line::try_parse_from(line).unwrap().arguments;
        let here = "/run/bellhop/node.socket".parse().unwrap();
        let vm = fake::vm(&json!({"status": {
            "nic_devices": [{"id": "net0"}, {"id": "net2"}],
        }}));
        let fake = FakeDaemon::default()
            .answer(200, &vm)
            .answer(201, &json!(null));
        let (id, _) = add(&name, &options.nic, &here, &fake.node()).unwrap();
        assert_eq!(id, "net1");
        let asked = fake.asked();
        assert_eq!(asked[0], "GET /v1/vms/web");
        let put = r#"PUT /v1/vms/web/nics/net1 {"from":"pci/0000:01:00.0","id":"net1","vlan":100}"#;
        assert_eq!(asked[1], put);
    }

    #[test]
    fn invalid_nics_are_refused_at_once() {
        for bad in [
            "",
            "from",
            "mac=52:54:00:12:34:56",
            "from=a,path=/dev/vhost-vdpa-0",
            "from=a,vlan=x",
            "from=a,from=b",
            "from=a,what=1",
            "from=a,kind=pf",
            "from=a,mac=01:00:00:00:00:00",
        ] {
            assert!(Line::try_parse_from(["add", "web", bad]).is_err(), "{bad}");
        }
    }
}

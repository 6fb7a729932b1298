//! `bellhop vm nic swap`: moves a running VM's NIC to another vDPA device.

use std::path::{Path, PathBuf};

use bellhop_api::node::NicMove;
use bellhop_common::client::{Address, MAKING, Node, NodeArguments, path};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use hyper::Method;
use serde_json::Value;

use crate::commands::vm::arguments::absolute;

/// Move a VM's NIC to another vDPA device, even while in use
///
/// The guest keeps running, with the same PCI device, MAC address, receive filters, queues and
/// rings. It gets one spurious interrupt. If its driver supports that, the guest announces itself
/// on the network; otherwise the daemon does, as far as it can. Frames in flight to the old device
/// may be lost, as when a cable moves to another port.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
The new device must exist (`bellhop dev add`, `bellhop nic create`), be free, and be of the same
class. It must offer the features that the guest's driver has negotiated, as many queues, of that
size, and at least the MTU. Otherwise the command names the difference, and nothing changes. During
the change the guest's memory is pinned for both devices. `bellhop probe PATH` shows a device's
features.

If the daemon created the NIC (`from=`), it deletes the old device and the backup (`backup=`).
Connect the new device yourself: the bridge, VLAN and rates of the VM applied to the old one. You
may also name the backup device: then both stay, and naming the VM's own device (`bellhop vm show`
has its name) moves the NIC back. The VM also starts with the new device from now on; set `mac` if
its address must then stay the same.

Examples:
  bellhop vm nic swap web net1 --path /dev/vhost-vdpa-7
  bellhop vm nic swap web net1 --device spare0
  bellhop vm nic swap web net1 --path $(bellhop nic create spare1 --from enp1s0f1)")]
pub(crate) struct Arguments {
    /// The VM
    #[arg(value_name = "VM")]
    pub(super) vm: String,

    #[command(flatten)]
    pub(super) options: Options,
}

// Doc comments here would replace the subcommand's own.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The NIC's id in the VM
    #[arg(value_name = "ID")]
    id: String,

    #[command(flatten)]
    to: To,
}

#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct To {
    /// The vhost-vdpa character device to move to
    #[arg(long, value_name = "/dev/vhost-vdpa-N")]
    path: Option<PathBuf>,

    /// The name of the vDPA device to move to
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,
}

impl To {
    /// The request's body.
    fn body(&self, at: &Address) -> Result<NicMove, Error> {
        let path = self.path.as_deref();
        let path = path.map(|path: &Path| absolute(path, at));
        Ok(NicMove {
            path: path.transpose()?,
            device: self.device.clone(),
        })
    }
}

/// Moves a NIC of this VM.
pub(crate) fn execute(
    vm: &str,
    options: &Options,
    which: &NodeArguments,
    node: &Node,
    format: Format,
) -> Result<Code, Error> {
    let answer = swap(vm, options, which.address(), node)?;
    // The NIC is on the requested device, so there is nothing to print for people.
    format.print_done(&answer)
}

fn swap(vm: &str, options: &Options, at: &Address, node: &Node) -> Result<Value, Error> {
    let one = path(["v1", "vms", vm, "nics", &options.id]);
    let (_, answer) = node.send(Method::PATCH, &one, &options.to.body(at)?, MAKING)?;
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::json;

    use super::*;
    use bellhop_common::client::fake::FakeDaemon;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn line(more: &[&str]) -> Result<Arguments, clap::Error> {
        let line = ["swap", "web", "net1"].iter().chain(more);
        Line::try_parse_from(line).map(|line| line.arguments)
    }

    fn swap_by(arguments: &Arguments, node: &Node) -> Result<Value, Error> {
        let here = "/run/bellhop/node.socket".parse().unwrap();
        swap(&arguments.vm, &arguments.options, &here, node)
    }

    #[test]
    fn a_device_is_named_by_path_or_name() {
        let vm = json!({"name": "web", "status": {"phase": "Running"}});
        for (more, body) in [
            (
                ["--path", "/dev/vhost-vdpa-7"],
                r#"{"path":"/dev/vhost-vdpa-7"}"#,
            ),
            (["--device", "spare0"], r#"{"device":"spare0"}"#),
        ] {
            let fake = FakeDaemon::default().answer(200, &vm);
            let answer = swap_by(&line(&more).unwrap(), &fake.node()).unwrap();
            assert_eq!(answer, vm);
            let asked = format!("PATCH /v1/vms/web/nics/net1 {body}");
            assert_eq!(fake.asked(), [asked]);
        }
    }

    #[test]
    fn one_device_is_wanted() {
        for bad in [
            &[][..],
            &["--path"],
            &["--path", "/dev/vhost-vdpa-7", "--device", "spare0"],
            &["/dev/vhost-vdpa-7"],
        ] {
            line(bad).unwrap_err();
        }
    }

    #[test]
    fn refusals_of_the_machine_are_shown_in_its_words() {
        let refusal = json!({
            "code": "incompatible",
            "message": "cannot move NIC net1",
            "causes": ["the new device lacks features in use: STATUS"],
            "hint": "create one with these features",
        });
        let fake = FakeDaemon::default().answer(422, &refusal);
        let arguments = line(&["--device", "spare0"]).unwrap();
        let error = swap_by(&arguments, &fake.node()).unwrap_err();
        assert_eq!(error.refusal().unwrap().body.code, "incompatible");
        let said = format!("{:?}", error.in_words());
        for words in ["cannot move NIC net1", "STATUS", "create one with"] {
            assert!(said.contains(words), "{said}");
        }
    }
}

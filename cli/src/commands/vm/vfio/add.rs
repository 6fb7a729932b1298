//! `bellhop vm vfio add`.

use bellhop_common::client::{MAKING, Node, path};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::text::printable;
use hyper::Method;
use vmm::config::VfioConfig;

/// Add a PCI function to a VM, also while it runs
///
/// The daemon binds the function to vfio-pci. The guest of a running VM finds it by itself.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
OPTIONS are those of `bellhop vm create --vfio`:
  host=ADDRESS  the function, such as 0000:03:10.1
  id=NAME       its name (default: its address)
  standby=NIC   the vDPA NIC, with standby=on and the same MAC address, that the guest uses while it
                does not have the function
  allow_pf=on   also a function that is not virtual: the guest controls the whole device
  iommu=on      the guest's IOMMU decides which memory the function reaches
  iommufd=off   open the function in a container of VFIO, although the host has iommufd
A VM with a function cannot be saved. It migrates if a NIC stands by for the function, or if the
function's driver moves its state. The command prints the id.

Examples:
  bellhop vm vfio add web host=0000:03:10.1
  bellhop vm vfio add web host=0000:03:10.1,id=vf")]
pub(crate) struct Arguments {
    /// The VM
    #[arg(value_name = "VM")]
    vm: String,

    /// The function, and its settings
    #[arg(value_name = "OPTIONS")]
    function: VfioConfig,
}

pub(super) fn execute(arguments: &Arguments, node: &Node, format: Format) -> Result<Code, Error> {
    let Arguments { vm, function } = arguments;
    let id = function.name();
    let at = path(["v1", "vms", vm, "vfio", &id]);
    let (_, answer): (_, serde_json::Value) = node.send(Method::PUT, &at, function, MAKING)?;
    format.print(&answer, || format!("{}\n", printable(&id)))
}

#[cfg(test)]
mod tests {
    use bellhop_common::client::fake::FakeDaemon;
    use clap::Parser;
    use serde_json::json;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    #[test]
    fn a_function_has_its_id_or_its_address() {
        for (options, id) in [
            ("host=0000:03:10.1", "0000%3A03%3A10.1"),
            ("host=0000:03:10.1,id=vf", "vf"),
        ] {
            let line = Line::try_parse_from(["add", "web", options]).unwrap();
            let fake = FakeDaemon::default().answer(201, &json!({}));
            execute(&line.arguments, &fake.node(), Format::default()).unwrap();
            let asked = fake.asked();
            let (head, body) = asked[0].split_once(" {").unwrap();
            assert_eq!(head, format!("PUT /v1/vms/web/vfio/{id}"));
            assert!(body.contains("\"host\":\"0000:03:10.1\""), "{body}");
        }
    }

    #[test]
    fn invalid_functions_are_refused_at_once() {
        for bad in [
            "",
            "0000:03:10.1",
            "host=eth0",
            "id=a",
            "host=0000:03:10.1,what=1",
        ] {
            Line::try_parse_from(["add", "web", bad]).unwrap_err();
        }
    }
}

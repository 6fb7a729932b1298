//! `bellhop topology`: from NICs to the programs that use them, as one tree.

use std::collections::BTreeMap;

use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::tree::Lines;
use bellhop_diagnostics::topology::text;
use vdpa_mgmt::pci::{Address, Pci};
use vdpa_mgmt::topology;

/// Show NICs, functions, vDPA devices and users as a tree
///
/// The command changes nothing and opens no vDPA device, so you can run it at any time. Only root
/// sees other users' processes.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
From the outside in:
  pci/ADDRESS          a NIC's physical function, or another function with vDPA
  vf N, sf N           its virtual functions and subfunctions; those of other hosts (a DPU's host)
                       appear as representors only
  representor NETDEV   its port on the NIC's switch: if it is down or attached to nothing (master),
                       the function reaches nothing
  mgmtdev NAME         the creator of vDPA devices: `bellhop dev add name NAME mgmtdev …`
  NAME: network …      a vDPA device; with vhost_vdpa it is /dev/vhost-vdpa-N, for guests
  held by …            the program that has it open, and the VM of `bellhop run`. That program must
                       end before the device can be deleted or get another driver
  doorbells            queues whose kicks reach the device without an exit: the holder has mapped
                       their pages
  posted interrupts    impossible, with the obstacle; otherwise unknown, because Linux does not
                       report them

The tree omits NICs without SR-IOV, subfunctions and vDPA. JSON (-j) has the same data, with the
names of fields as keys. It omits unknown values, but always has all lists.

Examples:
  bellhop topology
  bellhop topology enp1s0
  bellhop topology -j | jq -r '.. | objects | select(.path) |
    \"\\(.name) \\(.path) \\([.holders[].pid])\"'")]
pub(crate) struct Arguments {
    /// Only this NIC: a network interface or pci/ADDRESS, also of a virtual function
    #[arg(value_name = "PF")]
    function: Option<String>,
}

/// Reads and prints the tree.
pub(crate) fn execute(arguments: &Arguments, format: Format) -> Result<Code, Error> {
    let topology = match arguments.function.as_deref().map(find).transpose()? {
        Some(address) => topology::read_function(address)?,
        None => topology::read()?,
    };
    let section = BTreeMap::from([("topology", &topology)]);
    let text = || text(&topology, Lines::of_locale());
    format.print(&section, text)
}

/// The function that the argument names.
fn find(text: &str) -> Result<Address, Error> {
    match text.strip_prefix("pci/") {
        Some(address) => Ok(address.parse()?),
        None => Pci::default().behind(text)?.ok_or_else(|| {
            Error::failed(format!(
                "{text} belongs to no PCI function: give pci/ADDRESS, or no name to see the whole \
                 tree"
            ))
        }),
    }
}

//! `bellhop topology`: from NICs to the programs that use them, as one tree.

use std::collections::BTreeMap;

use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::tree::Lines;
use bellhop_diagnostics::topology::text;
use vdpa_mgmt::pci::{Address, Pci};
use vdpa_mgmt::topology;

/// Show how everything hangs together: NICs, their functions, vDPA devices, and who uses them
///
/// Nothing is changed and no vDPA device is opened, so it may be asked at any time. What others' processes do
/// is shown to root only.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
From the outside in:
  pci/ADDRESS          a NIC's physical function, and what vDPA is on although it is none
  vf N, sf N           its virtual functions and subfunctions; those of other machines (a DPU's host)
                       show as representors only
  representor NETDEV   its port on the NIC's switch: it must be up, and attached to something (master), or
                       the function reaches nothing
  mgmtdev NAME         where vDPA devices are made: `bellhop dev add name NAME mgmtdev …`
  NAME: network …      a vDPA device; with vhost_vdpa it is /dev/vhost-vdpa-N, for guests
  held by …            the program that has it open; of `bellhop run` also its machine. That must end before
                       the device can be deleted or get another driver
  doorbells            queues whose kicks go to the device without an exit: the holder has mapped their pages
  posted interrupts    impossible, with what is in the way; else unknown, for Linux does not tell

NICs without SR-IOV, subfunctions and vDPA are left out. JSON (-j) has the same with the names of fields as keys;
what is not known is not there, and lists are always there.

Examples:
  bellhop topology
  bellhop topology enp1s0
  bellhop topology -j | jq -r '.. | objects | select(.path) | \"\\(.name) \\(.path) \\([.holders[].pid])\"'")]
pub(crate) struct Arguments {
    /// One NIC only: a network interface or pci/ADDRESS, also of a virtual function
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
                "{text} is on no function of the PCI bus; without a name everything is shown"
            ))
        }),
    }
}

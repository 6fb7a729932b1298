//! `bellhop nic list`.

use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::management::nic::listing;
use vdpa_mgmt::nic::Store;

/// List the NICs that `nic create` created, also unfinished ones
#[derive(Debug, clap::Args)]
#[command(visible_alias = "ls", after_long_help = HELP)]
pub(crate) struct Arguments {}

const HELP: &str = "\
Fields:
  from           what the NIC was made of, as it was asked for
  owner          whom it was made for: node:VM/NIC for a virtual machine of `bellhop serve`
  state          made; making or removing while that goes on, or when it was killed or failed:
                 `bellhop nic delete` undoes the rest
  pf, vfs        the physical function whose virtual functions were counted, and how many
  vf             the virtual function that was set up
  function, driver  the function that was bound to a vDPA driver, and which
  port, sfnum    the port of the subfunction, and its number
  mgmtdev        the management device
  exists         false if the vDPA device is gone
  path           the device for `bellhop run --vdpa path=…`
  bus_driver     what has the device if it is not vhost_vdpa
  representor    the interface that was connected
  mac, mtu, max_vq_pairs  as the device tells

Examples:
  bellhop nic list
  bellhop nic list -j | jq -r '.nic[].path'";

pub(super) fn execute(format: Format) -> Result<Code, Error> {
    let nics = Store::open_default()?.nics()?;
    listing(&nics)?.print(format)
}

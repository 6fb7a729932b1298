//! `bellhop nic list`.

use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::management::nic::listing;
use vdpa_mgmt::nic::Store;

/// List the NICs of `nic create`, also unfinished ones
#[derive(Debug, clap::Args)]
#[command(visible_alias = "ls", after_long_help = HELP)]
pub(crate) struct Arguments {}

const HELP: &str = "\
Fields:
  from           the source of the NIC, as requested
  owner          its user: node:VM/NIC for a VM of `bellhop serve`
  state          made; making or removing during that work, or if the command was killed or
                 failed: `bellhop nic delete` undoes the rest
  pf, vfs        the physical function on which virtual functions were created, and how many
  vf             the configured virtual function
  function, driver  the function that was bound to a vDPA driver, and that driver
  port, sfnum    the port of the subfunction, and its number
  tap            the tap of a NIC without hardware; or instead of it:
  port, queue    the port and its queue of a NIC without hardware
  poll           the share of a processor that its queue pairs may each poll, in percent
  pid            the process that serves a NIC without hardware
  mgmtdev        the management device
  exists         false if the vDPA device is gone
  path           the device for `bellhop run --vdpa path=…`
  bus_driver     the device's driver, if it is not vhost_vdpa
  representor    the connected interface
  mac, mtu, max_vq_pairs  as the device reports

Examples:
  bellhop nic list
  bellhop nic list -j | jq -r '.nic[].path'";

pub(super) fn execute(format: Format) -> Result<Code, Error> {
    let nics = Store::open_default()?.nics()?;
    listing(&nics)?.print(format)
}

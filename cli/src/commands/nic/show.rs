//! `bellhop nic show`.

use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::management::nic::listing;
use vdpa_mgmt::nic::Store;

use super::list;

/// Show a NIC that `nic create` created
#[derive(Debug, clap::Args)]
#[command(
    visible_alias = "get",
    after_long_help = "\
`bellhop nic list --help` explains the fields.

Examples:
  bellhop nic show nic0
  bellhop nic show nic0 -j | jq -r '.nic[].path'"
)]
pub(crate) struct Arguments {
    /// The NIC (default: all NICs)
    #[arg(value_name = "NAME")]
    name: Option<String>,
}

pub(super) fn execute(arguments: &Arguments, format: Format) -> Result<Code, Error> {
    let Some(name) = &arguments.name else {
        return list::execute(format);
    };
    let nic = Store::open_default()?.nic(name)?;
    listing(&[nic])?.print(format)
}

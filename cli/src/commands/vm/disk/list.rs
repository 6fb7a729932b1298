//! `bellhop vm disk list`.

use bellhop_api::Items;
use bellhop_api::machine::DiskSummary;
use bellhop_common::client::{Node, path};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::table::Table;
use serde_json::Value;

use crate::commands::vm::read;

/// List a VM's disks
#[derive(Debug, clap::Args)]
#[command(
    visible_alias = "ls",
    after_long_help = "\
Columns:
  ID       its name, which the guest sees as its serial number
  STATE    Plugged: the guest has it, or finds it at the next scan; UnplugRequested: the guest was
           asked to release it; Configured: the next start adds it
  ACCESS   rw, or ro: the guest cannot write
  ADDRESS  its PCI address in the guest

Examples:
  bellhop vm disk list web
  bellhop vm disk list web -o json | jq -r '.[].path'"
)]
pub(super) struct Arguments {
    /// The VM
    #[arg(value_name = "VM")]
    vm: String,
}

pub(super) fn execute(arguments: &Arguments, node: &Node, format: Format) -> Result<Code, Error> {
    let answer: Items<Value> = node.get(&path(["v1", "vms", &arguments.vm, "disks"]))?;
    let disks = answer.items.iter().map(read);
    let disks = disks.collect::<Result<Vec<DiskSummary>, _>>()?;
    format.print_table(&answer.items, || table(&disks))
}

fn table(disks: &[DiskSummary]) -> Table {
    let rows = disks.iter().map(|disk| {
        let access = if disk.readonly { "ro" } else { "rw" };
        [
            disk.id.clone(),
            format!("{:?}", disk.state),
            access.to_owned(),
            disk.address.clone().unwrap_or_else(|| "-".to_owned()),
            disk.path.clone(),
        ]
    });
    Table::new(["ID", "STATE", "ACCESS", "ADDRESS", "PATH"], rows)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn disks_are_listed_as_the_daemon_reports_them() {
        let disks: Vec<DiskSummary> = serde_json::from_value(json!([
            { "id": "disk0", "state": "Plugged", "path": "/a.img", "readonly": true,
              "address": "00:05.0", "device": { "driver_ok": true } },
            { "id": "data", "state": "Configured", "path": "/b\u{1b}.img", "readonly": false },
        ]))
        .unwrap();
        let wanted = "\
ID     STATE       ACCESS  ADDRESS  PATH
disk0  Plugged     ro      00:05.0  /a.img
data   Configured  rw      -        /b?.img
";
        assert_eq!(table(&disks).draw(true), wanted);
    }
}

//! `bellhop vm vfio list`.

use bellhop_api::Items;
use bellhop_api::machine::VfioSummary;
use bellhop_common::client::{Node, path};
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::table::Table;
use serde_json::Value;

use crate::commands::vm::read;

/// List a VM's PCI functions
#[derive(Debug, clap::Args)]
#[command(
    visible_alias = "ls",
    after_long_help = "\
Columns:
  ID       its name
  STATE    Plugged: the guest has it, or finds it at the next scan; UnplugRequested: the guest was
           asked to release it; Configured: the next start adds it
  STANDBY  the NIC that the guest uses while it does not have the function
  ADDRESS  its PCI address in the guest
  PATH     its directory in sysfs, which ends with its address on the host

Examples:
  bellhop vm vfio list web
  bellhop vm vfio list web -o json | jq -r '.[].path'"
)]
pub(super) struct Arguments {
    /// The VM
    #[arg(value_name = "VM")]
    vm: String,
}

pub(super) fn execute(arguments: &Arguments, node: &Node, format: Format) -> Result<Code, Error> {
    let answer: Items<Value> = node.get(&path(["v1", "vms", &arguments.vm, "vfio"]))?;
    let functions = answer.items.iter().map(read);
    let functions = functions.collect::<Result<Vec<VfioSummary>, _>>()?;
    format.print_table(&answer.items, || table(&functions))
}

fn table(functions: &[VfioSummary]) -> Table {
    let or_dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
    let rows = functions.iter().map(|function| {
        [
            function.id.clone(),
            format!("{:?}", function.state),
            or_dash(&function.standby),
            or_dash(&function.address),
            function.path.clone(),
        ]
    });
    Table::new(["ID", "STATE", "STANDBY", "ADDRESS", "PATH"], rows)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn functions_are_listed_as_the_daemon_reports_them() {
        let functions: Vec<VfioSummary> = serde_json::from_value(json!([
            { "id": "vf", "state": "Plugged", "path": "/sys/bus/pci/devices/0000:03:10.1",
              "allow_pf": false, "standby": "net0", "address": "00:05.0", "function": null },
            { "id": "b\u{1b}", "state": "Configured", "path": "/b", "allow_pf": false,
              "standby": null, "address": null },
        ]))
        .unwrap();
        let wanted = "\
ID  STATE       STANDBY  ADDRESS  PATH
vf  Plugged     net0     00:05.0  /sys/bus/pci/devices/0000:03:10.1
b?  Configured  -        -        /b
";
        assert_eq!(table(&functions).draw(true), wanted);
    }
}

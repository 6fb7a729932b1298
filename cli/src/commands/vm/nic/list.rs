//! `bellhop vm nic list`.

use bellhop_api::node::VmNic;
use bellhop_common::client::Node;
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::table::Table;

use crate::commands::vm::vm;

/// List a VM's NICs
#[derive(Debug, clap::Args)]
#[command(
    visible_alias = "ls",
    after_long_help = "\
Columns:
  DEVICE  the vDPA device that the daemon created for it
  PATH    its character device
  BACKUP  its backup's character device; in use: the NIC has moved there
  MAC     with -o wide: its address; -: the device's own

Examples:
  bellhop vm nic list web
  bellhop vm nic list web -o json | jq -r '.[].path'"
)]
pub(super) struct Arguments {
    /// The VM
    #[arg(value_name = "VM")]
    vm: String,
}

pub(super) fn execute(arguments: &Arguments, node: &Node, format: Format) -> Result<Code, Error> {
    let (view, answer) = vm(node, &arguments.vm)?;
    format.print_table(&answer["nics"], || table(&view.nics))
}

fn table(nics: &[VmNic]) -> Table {
    let none = || "-".to_owned();
    let rows = nics.iter().map(|nic| {
        let shown = |path: &std::path::PathBuf| path.display().to_string();
        let backup = if nic.failed_over {
            "in use".to_owned()
        } else {
            nic.failover.as_ref().map_or_else(none, shown)
        };
        [
            nic.id.clone(),
            nic.device.clone().unwrap_or_else(none),
            nic.path.as_ref().map_or_else(none, shown),
            backup,
            nic.mac.map_or_else(none, |mac| mac.to_string()),
        ]
    });
    Table::new(["ID", "DEVICE", "PATH", "BACKUP", "MAC"], rows).with_wide(1)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn nics_are_listed_with_what_backs_them() {
        let nics: Vec<VmNic> = serde_json::from_value(json!([
            { "id": "net0", "device": "web.net0", "path": "/dev/vhost-vdpa-0",
              "failover": "/dev/vhost-vdpa-1", "mac": "52:54:00:12:34:56" },
            { "id": "net1", "path": "/dev/vhost-vdpa-3", "failed_over": true },
            { "id": "net2" },
        ]))
        .unwrap();
        let wanted = "\
ID    DEVICE    PATH               BACKUP             MAC
net0  web.net0  /dev/vhost-vdpa-0  /dev/vhost-vdpa-1  52:54:00:12:34:56
net1  -         /dev/vhost-vdpa-3  in use             -
net2  -         -                  -                  -
";
        assert_eq!(table(&nics).draw(true), wanted);
    }
}

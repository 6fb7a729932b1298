//! `bellhop vm nic list`.

use bellhop_api::node::Vm;
use bellhop_common::client::Node;
use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::table::Table;
use serde_json::{Map, Value};

use crate::commands::vm::{view, vm};

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

JSON (-o json) has each NIC's members of the spec, and its devices: vdpa_device, character_device,
backup, failed_over.

Examples:
  bellhop vm nic list web
  bellhop vm nic list web -o json | jq -r '.[].character_device'"
)]
pub(super) struct Arguments {
    /// The VM
    #[arg(value_name = "VM")]
    vm: String,
}

pub(super) fn execute(arguments: &Arguments, node: &Node, format: Format) -> Result<Code, Error> {
    let (vm, answer) = vm(node, &arguments.vm)?;
    format.print_table(&merged(&vm, &answer), || table(&vm))
}

/// Each NIC as it is desired and observed. Both have no member in common but the ID.
fn merged(vm: &Vm, answer: &Value) -> Vec<Value> {
    let all = answer.pointer("/status/nic_devices");
    let all = all.and_then(Value::as_array).into_iter().flatten();
    let merge = |devices: &Map<String, Value>| {
        let id = devices.get("id").and_then(Value::as_str);
        let nic = view::nic(vm, id.unwrap_or_default());
        let mut nic = nic.cloned().unwrap_or_default();
        nic.extend(devices.clone());
        Value::Object(nic)
    };
    all.filter_map(Value::as_object).map(merge).collect()
}

fn table(vm: &Vm) -> Table {
    let none = || "-".to_owned();
    let rows = vm.status.nic_devices.iter().map(|nic| {
        let shown = |path: &std::path::PathBuf| path.display().to_string();
        let backup = if nic.failed_over {
            "in use".to_owned()
        } else {
            nic.backup_device.as_ref().map_or_else(none, shown)
        };
        [
            nic.id.clone(),
            nic.vdpa_device.clone().unwrap_or_else(none),
            nic.character_device.as_ref().map_or_else(none, shown),
            backup,
            view::mac(vm, &nic.id).unwrap_or_else(none),
        ]
    });
    Table::new(["ID", "DEVICE", "PATH", "BACKUP", "MAC"], rows).with_wide(1)
}

#[cfg(test)]
mod tests {
    use bellhop_common::client::fake;
    use serde_json::json;

    use super::*;

    #[test]
    fn nics_are_listed_with_their_devices() {
        let nic = json!({ "id": "net0", "from": "eth0", "mac": "52:54:00:12:34:56" });
        let devices = json!([
            { "id": "net0", "vdpa_device": "web.net0", "character_device": "/dev/vhost-vdpa-0",
              "backup_device": "/dev/vhost-vdpa-1" },
            { "id": "net1", "character_device": "/dev/vhost-vdpa-3", "failed_over": true },
            { "id": "net2" },
        ]);
        let answer = json!({ "spec": { "nics": [nic] }, "status": { "nic_devices": devices } });
        let answer = fake::vm(&answer);
        let vm: Vm = serde_json::from_value(answer.clone()).unwrap();
        let wanted = "\
ID    DEVICE    PATH               BACKUP             MAC
net0  web.net0  /dev/vhost-vdpa-0  /dev/vhost-vdpa-1  52:54:00:12:34:56
net1  -         /dev/vhost-vdpa-3  in use             -
net2  -         -                  -                  -
";
        assert_eq!(table(&vm).draw(true), wanted);
        let nics = merged(&vm, &answer);
        let first = json!({
            "id": "net0", "from": "eth0", "mac": "52:54:00:12:34:56", "vdpa_device": "web.net0",
            "character_device": "/dev/vhost-vdpa-0", "backup_device": "/dev/vhost-vdpa-1",
        });
        assert_eq!((nics.len(), &nics[0]), (3, &first));
    }
}

//! The devices: topology, management devices, vDPA devices with their configurations and their
//! attributes in sysfs, and the records of created NICs.

use std::fmt::Write as _;

use bellhop_common::management::{dev, mgmtdev};
use vdpa::causes::in_one_line;
use vdpa_mgmt::topology;

use super::bundle::Bundle;
use super::context::Context;
use crate::doctor::Host;

/// Maximum size of each file of sysfs and of each record, in bytes.
const FILE_MAX: u64 = 64 << 10;
const DEVICES: &str = "/sys/bus/vdpa/devices";
const RECORDS: &str = "/run/bellhop/nics";

/// Adds the devices.
pub(super) fn add(context: &Context, bundle: &mut Bundle) {
    bundle.put_json(&["topology.json"], topology::read());
    bundle.put_json(&["vdpa", "mgmtdev.json"], mgmtdev::all());
    bundle.put_json(&["vdpa", "dev.json"], dev::all());
    bundle.put_json(&["vdpa", "config.json"], dev::all_configs());
    sysfs(&context.host, bundle);
    records(&context.host, bundle);
}

/// Writes each attribute on a line: `DEVICE/ATTRIBUTE: VALUE`.
fn sysfs(host: &Host, bundle: &mut Bundle) {
    let devices = match host.sysfs_names(DEVICES) {
        Ok(devices) => devices,
        Err(why) => return bundle.miss("vdpa/sysfs.txt", &in_one_line(&why)),
    };
    let mut text = String::new();
    for device in &devices {
        let path = format!("{DEVICES}/{device}");
        // Writing to a String does not fail.
        if let Ok(target) = host.link(&path) {
            let _ = writeln!(text, "{device} -> {target}");
        }
        for name in host.names(&path).unwrap_or_default() {
            let attribute = format!("{path}/{name}");
            let value = match host.link(&attribute) {
                Ok(target) => format!("-> {target}"),
                Err(_) => match host.text(&attribute) {
                    Ok(value) => value.replace('\n', " "),
                    // Directories, and write-only files.
                    Err(_) => continue,
                },
            };
            let _ = writeln!(text, "{device}/{name}: {value}");
        }
    }
    bundle.add(&["vdpa", "sysfs.txt"], text.as_bytes());
}

fn records(host: &Host, bundle: &mut Bundle) {
    match host.names(RECORDS) {
        Ok(names) => {
            for name in names {
                let record = host.bytes(&format!("{RECORDS}/{name}"), FILE_MAX);
                bundle.put(&["nics", &name], record);
            }
        }
        // None was created since the host's boot.
        Err(why) if why.is_absent() => {}
        Err(why) => bundle.miss("nics", &in_one_line(&why)),
    }
}

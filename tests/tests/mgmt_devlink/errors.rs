//! Impossible requests are rejected with the reason and the remedy.

use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use lab::netdevsim::Netdevsim;
use vdpa_mgmt::ErrorKind;
use vdpa_mgmt::devlink::{Cmode, Devlink, ParamValue, ReloadAction};

use super::support::{complaint, complaint_with, printed, program};
use super::tool::{devlink, handle, ours, switchdev};

#[track_caller]
fn refused(line: &str, words: &[&str]) {
    let text = complaint(&ours(line), words);
    // One error and its causes.
    assert_eq!(text.matches("error: ").count(), 1, "{text}");
}

#[test]
fn missing_objects() {
    let nic = Netdevsim::add(100, 1).unwrap();
    let name = nic.handle();
    for (line, words) in [
        (
            "port show pci/0000:ff:1f.7/1".to_owned(),
            ["no devlink instance pci/0000:ff:1f.7", "bellhop port show"],
        ),
        (
            "port show pci/0000:ff:1f.7".to_owned(),
            ["no devlink instance pci/0000:ff:1f.7", "bellhop port show"],
        ),
        (
            format!("port show {name}/77"),
            ["no port netdevsim/netdevsim100/77", "bellhop port show"],
        ),
        (
            format!("port del {name}/77"),
            ["no port netdevsim/netdevsim100/77", "bellhop port show"],
        ),
        (
            format!("port function rate show {name}/none"),
            ["no rate node netdevsim/netdevsim100/none", "rate show"],
        ),
        (
            "port function rate del pci/0000:ff:1f.7/none".to_owned(),
            ["no devlink instance pci/0000:ff:1f.7", "bellhop port show"],
        ),
        (
            "port show lab-none".to_owned(),
            ["\"lab-none\" is no port", "bellhop port show"],
        ),
        (
            "port add pci/0000:ff:1f.7 flavour pcisf pfnum 0".to_owned(),
            ["no devlink instance pci/0000:ff:1f.7", "bellhop port show"],
        ),
    ] {
        refused(&line, &words);
    }
    let connection = Devlink::open().unwrap();
    let error = connection.param(&handle(&nic), "none").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoParam, "{error}");
}

#[test]
fn wrong_arguments_are_explained() {
    lab::sim::require_lab().unwrap();
    for (line, words) in [
        (
            "port del pci/0000:06:00.0",
            ["is no port", "BUS/DEVICE/INDEX"],
        ),
        (
            "port add pci flavour pcisf pfnum 0",
            ["does not name a devlink instance", "BUS/DEVICE"],
        ),
        (
            "port add pci/x flavour pcivf pfnum 0",
            ["flavour \"pcivf\" is unknown", "use pcisf"],
        ),
        ("port add pci/x flavour pcisf", ["pfnum", "missing"]),
        (
            "port function set pci/x/1 state up",
            ["\"up\"", "active or inactive"],
        ),
        (
            "port function set pci/x/1 roce on",
            ["\"on\"", "enable or disable"],
        ),
        (
            "port function set pci/x/1 hw_addr 01:00:5e:00:00:01",
            ["01:00:5e:00:00:01", "unicast"],
        ),
        (
            "port function rate set pci/x/1 tx_max fast",
            ["tx_max \"fast\"", "100mbit"],
        ),
        (
            "port function rate set pci/x/1 tx_share 2gbit tx_max 1gbit",
            ["tx_share 250000000", "tx_max 125000000"],
        ),
        (
            "port function rate add pci/x/1",
            ["does not name a rate node", "not numbers"],
        ),
    ] {
        let code = if line.starts_with("port del") { 1 } else { 2 };
        complaint_with(code, &ours(line), &words);
    }
}

#[test]
fn unsupported_driver_operations() {
    let nic = Netdevsim::add(101, 1).unwrap();
    let name = nic.handle();
    // In legacy mode no port can be added, and netdevsim supports adding none at all.
    let line = format!("port add {name} flavour pcisf pfnum 0 sfnum 88");
    let remedy = format!("devlink dev eswitch set {name} mode switchdev");
    refused(&line, &["its eswitch is in legacy mode", &remedy]);
    printed(&devlink(&format!("dev eswitch set {name} mode switchdev")));
    nic.set_virtual_functions(1).unwrap();
    refused(&line, &["cannot add a port to", "does not support that"]);
    let line = format!("port function set {name}/128 hw_addr 02:5e:10:53:77:01");
    refused(
        &line,
        &[
            "set the hw_addr",
            "does not support",
            "Port doesn't support",
        ],
    );
    refused(&format!("port del {name}/128"), &["does not support that"]);
    // The kernel's own words.
    let line = format!("port function rate set {name}/128 tx_max 1kbit");
    refused(&line, &["cannot set the rate", "units of 1Mbps"]);
}

#[test]
fn values_of_the_wrong_kind() {
    let nic = Netdevsim::add(102, 1).unwrap();
    let connection = Devlink::open().unwrap();
    let set = |cmode, value| {
        let error = connection.set_param(&handle(&nic), "max_macs", cmode, &value);
        error.unwrap_err()
    };
    let error = set(Cmode::Driverinit, ParamValue::U16(1));
    assert!(error.to_string().contains("is a u32, not a u16"), "{error}");
    let error = set(Cmode::Runtime, ParamValue::U32(1));
    assert!(error.to_string().contains("cannot be set as"), "{error}");
    // A reload that the driver rejects, with its message.
    let path = "/sys/kernel/debug/netdevsim/netdevsim102/fail_reload";
    std::fs::write(path, "Y").unwrap();
    let error = connection.reload(&handle(&nic), ReloadAction::DriverReinit);
    let source = std::error::Error::source(&error.unwrap_err())
        .unwrap()
        .to_string();
    assert!(source.contains("fail for testing purposes"), "{source}");
    assert!(connection.instance(&handle(&nic)).unwrap().reload_failed);
    std::fs::write(path, "N").unwrap();
    connection
        .reload(&handle(&nic), ReloadAction::DriverReinit)
        .unwrap();
    assert!(!connection.instance(&handle(&nic)).unwrap().reload_failed);
}

#[test]
fn without_rights_the_error_has_a_remedy() {
    let nic = switchdev(103);
    let name = nic.handle();
    let unprivileged = |line: &str| {
        Command::new(program())
            .args(line.split(' '))
            .uid(65534)
            .gid(65534)
            .stdin(Stdio::null())
            .output()
            .unwrap()
    };
    for line in [
        format!("port add {name} flavour pcisf pfnum 0 sfnum 88"),
        format!("port del {name}/128"),
        format!("port function set {name}/128 state active"),
        format!("port function rate add {name}/all"),
        format!("port function rate set {name}/128 tx_max 8mbit"),
        format!("port function rate del {name}/all"),
    ] {
        complaint(&unprivileged(&line), &["CAP_NET_ADMIN", "root"]);
    }
    // Listing needs no privileges.
    assert_eq!(
        printed(&unprivileged("port show")),
        printed(&ours("port show"))
    );
    // Without this one capability, root may not change anything either.
    let output = Command::new("setpriv")
        .args(["--bounding-set", "-net_admin", "--inh-caps", "-net_admin"])
        .arg(program())
        .args(["port", "del", &format!("{name}/128")])
        .output()
        .unwrap();
    complaint(&output, &["CAP_NET_ADMIN"]);
}

#[test]
fn another_namespace_has_its_own_instances() {
    let _nic = Netdevsim::add(104, 1).unwrap();
    let output = Command::new("unshare")
        .arg("-n")
        .arg(program())
        .args(["port", "show"])
        .output()
        .unwrap();
    assert_eq!(printed(&output), "");
}

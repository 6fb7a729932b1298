//! The life of subfunctions: reports, refusals, and no leftovers.

use std::fs::{File, OpenOptions};

use lab::labnic::Labnic;
use lab::labnic::sf::{
    NIC, Subfunction, debug_file, devlink, devlink_json, enable_vnet, set_eswitch_mode,
};
use lab::sim::SimDevice;
use serde_json::Value;
use vdpa::netdev::Options;

use crate::support::{Bridge, everything, kernel_is_well, refusal, run};
use crate::traffic::start;

const MAC: &str = "02:00:5e:00:53:71";

fn managers() -> Vec<String> {
    let answer: Value = serde_json::from_slice(&run("vdpa", "-j mgmtdev show")).unwrap();
    let managers = answer.get("mgmtdev").unwrap().as_object().unwrap();
    managers.keys().cloned().collect()
}

#[test]
fn the_nic_reports_its_identity() {
    let _labnic = Labnic::load(&[]).unwrap();
    let info = devlink_json(&["dev", "info", NIC]).unwrap();
    let info = &info["info"][NIC];
    assert_eq!(info["driver"], "labnic");
    assert_eq!(info["serial_number"], "LABNIC-0000-0001");
    assert_eq!(info["versions"]["fixed"]["board.id"], "LABNIC");
    assert_eq!(info["versions"]["running"]["fw"], "1.0.0");
    let mode = devlink_json(&["dev", "eswitch", "show", NIC]).unwrap();
    assert_eq!(mode["dev"][NIC]["mode"], "legacy");
    let uplink = devlink_json(&["port", "show", &format!("{NIC}/0")]).unwrap();
    let uplink = &uplink["port"][format!("{NIC}/0")];
    assert_eq!(uplink["flavour"], "physical");
    assert_eq!(uplink["netdev"], "uplink0");
    // The old management device is unchanged.
    assert!(managers().contains(&"labnic".to_owned()));
    kernel_is_well();
}

#[test]
fn a_function_is_reported_as_it_is() {
    let _labnic = Labnic::load(&[("sf_attach_ms", "300")]).unwrap();
    set_eswitch_mode("switchdev").unwrap();
    // The first identifier is 2. It would equal the sfnum, so the module takes 3.
    let function = Subfunction::add(2).unwrap();
    let shown = function.show().unwrap();
    assert_eq!(shown["flavour"], "pcisf");
    assert_eq!((&shown["pfnum"], &shown["sfnum"]), (&0.into(), &2.into()));
    assert_eq!(shown["function"]["hw_addr"], "00:00:00:00:00:00");
    assert_eq!(shown["function"]["state"], "inactive");
    assert_eq!(shown["function"]["opstate"], "detached");
    assert_eq!(shown["function"]["roce"], "enable");
    let class = format!("/sys/class/net/{}", function.representor());
    let read = |name: &str| std::fs::read_to_string(format!("{class}/{name}")).unwrap();
    assert_eq!(read("phys_port_name"), "pf0sf2\n");
    assert_eq!(
        read("phys_switch_id"),
        std::fs::read_to_string("/sys/class/net/uplink0/phys_switch_id").unwrap()
    );

    function
        .set(&["hw_addr", MAC, "roce", "disable", "state", "active"])
        .unwrap();
    // The command returns before the function is attached.
    let shown = function.show().unwrap();
    assert_eq!(shown["function"]["state"], "active");
    assert_eq!(shown["function"]["opstate"], "detached");
    let shown = function.wait_for("attached").unwrap();
    assert_eq!(shown["function"]["roce"], "disable");
    assert_eq!(shown["function"]["hw_addr"], MAC);
    let instance = "auxiliary/labnic.sf.3";
    assert!(shown["function"]["nested_devlink"].get(instance).is_some());
    let sfnum = std::fs::read_to_string("/sys/bus/auxiliary/devices/labnic.sf.3/sfnum").unwrap();
    assert_eq!(sfnum, "2\n");

    // A reload creates the management device, and a reload removes it.
    assert!(!managers().contains(&instance.to_owned()));
    enable_vnet(instance, true).unwrap();
    assert!(managers().contains(&instance.to_owned()));
    let device = SimDevice::add("told", instance, &[]).unwrap();
    let config = device.config().unwrap();
    assert_eq!(config["mac"], MAC);
    let path = std::fs::canonicalize(format!("/sys/bus/vdpa/devices/{}", device.name())).unwrap();
    assert!(path.to_str().unwrap().contains("/labnic.0/labnic.sf.3/"));
    drop(device);
    enable_vnet(instance, false).unwrap();
    assert!(!managers().contains(&instance.to_owned()));

    // Rates are kept.
    let port = function.port();
    let rate = ["tx_share", "1gbit", "tx_max", "10gbit"];
    devlink(&[&["port", "function", "rate", "set", port], &rate[..]].concat()).unwrap();
    let rate = devlink_json(&["port", "function", "rate", "show", port]).unwrap();
    let rate = &rate["rate"][port];
    assert_eq!(rate["tx_share"], 125_000_000);
    assert_eq!(rate["tx_max"], 1_250_000_000);

    // Without its driver the function is active and detached; the driver finds it again.
    let driver = "/sys/bus/auxiliary/drivers/labnic.sf";
    std::fs::write(format!("{driver}/unbind"), "labnic.sf.3").unwrap();
    let shown = function.wait_for("detached").unwrap();
    assert_eq!(shown["function"]["state"], "active");
    std::fs::write(format!("{driver}/bind"), "labnic.sf.3").unwrap();
    function.wait_for("attached").unwrap();
    function.set(&["state", "inactive"]).unwrap();
    function.wait_for("detached").unwrap();
    drop(function);
    kernel_is_well();
}

#[test]
fn refusals_give_the_reason() {
    let _labnic = Labnic::load(&[]).unwrap();
    let add = format!("port add {NIC} flavour pcisf");
    let words = |arguments: &str| refusal("devlink", arguments);
    assert!(words(&format!("{add} pfnum 0 sfnum 7")).contains("need eswitch mode switchdev"));
    set_eswitch_mode("switchdev").unwrap();
    assert!(words(&format!("{add} pfnum 1 sfnum 7")).contains("pfnum must be 0"));
    assert!(words(&format!("{add} pfnum 0")).contains("sfnum is missing"));
    let function = Subfunction::add(7).unwrap();
    let port = function.port();
    assert!(words(&format!("{add} pfnum 0 sfnum 7")).contains("this sfnum exists"));
    assert!(words(&format!("dev eswitch set {NIC} mode legacy")).contains("delete them first"));
    let set = format!("port function set {port}");
    let multicast = format!("{set} hw_addr 01:00:5e:00:53:01");
    assert!(words(&multicast).contains("unicast"));
    let instance = function.activate(MAC).unwrap();
    let parameter = format!("dev param set {instance} name enable_eth value true cmode driverinit");
    assert!(words(&parameter).contains("has no netdev"));

    enable_vnet(&instance, true).unwrap();
    let device = SimDevice::add("full", &instance, &[]).unwrap();
    refusal("vdpa", &format!("dev add name second mgmtdev {instance}"));

    // Open with a status of 0, and with a driver on it: otherwise each command would wait forever.
    let commands = [
        format!("{set} state inactive"),
        format!("port del {port}"),
        format!("dev reload {instance}"),
    ];
    let open = || -> std::io::Result<File> {
        OpenOptions::new()
            .read(true)
            .write(true)
            .open(device.path())
    };
    let file = open().unwrap();
    for command in &commands {
        assert!(
            words(command).contains("in use; close it first"),
            "{command}"
        );
    }
    drop(file);
    let netdev = start(device.path(), &Options::default());
    for command in &commands {
        assert!(
            words(command).contains("in use; close it first"),
            "{command}"
        );
    }
    drop(netdev);
    // A refusal leaves nothing behind.
    drop(open().unwrap());
    let shown = function.show().unwrap();
    assert_eq!(shown["function"]["state"], "active");
    assert_eq!(shown["function"]["opstate"], "attached");
    drop(device);
    drop(function);
    kernel_is_well();
}

#[test]
fn errors_are_reported_and_recovered_from() {
    let _labnic = Labnic::load(&[]).unwrap();
    let debug = |name, text: &str| std::fs::write(debug_file(name).unwrap(), text);
    let health = || {
        let answer = devlink_json(&["health", "show", NIC, "reporter", "fw"]).unwrap();
        answer["health"][NIC][0].clone()
    };
    let count = |shown: &Value, name: &str| shown[name].as_u64().unwrap();
    let before = health();
    assert_eq!(before["state"], "healthy");
    debug("health_report", "smoke").unwrap();
    let after = health();
    assert_eq!(after["state"], "healthy");
    assert_eq!(count(&after, "error"), count(&before, "error") + 1);
    assert_eq!(count(&after, "recover"), count(&before, "recover") + 1);

    // A persistent error.
    debug("health_stuck", "Y").unwrap();
    assert!(debug("health_report", "fire").is_err());
    assert_eq!(health()["state"], "error");
    let recover = format!("health recover {NIC} reporter fw");
    assert!(refusal("devlink", &recover).contains("health_stuck"));
    debug("health_stuck", "N").unwrap();
    run("devlink", &recover);
    assert_eq!(health()["state"], "healthy");
    kernel_is_well();
}

#[test]
fn twenty_lives_leave_everything_as_it_was() {
    let _labnic = Labnic::load(&[]).unwrap();
    set_eswitch_mode("switchdev").unwrap();
    let before = everything();
    for cycle in 0..20 {
        let functions = [100 + cycle, 200 + cycle].map(|sfnum| Subfunction::add(sfnum).unwrap());
        let bridge = Bridge::add();
        let devices = [("x", MAC), ("y", "02:00:5e:00:53:72")]
            .into_iter()
            .zip(&functions)
            .map(|((name, mac), function)| {
                bridge.connect(function.representor());
                function.device(name, mac).unwrap()
            })
            .collect::<Vec<_>>();
        // The users of the subfunction at the port's end differ from cycle to cycle.
        match cycle % 4 {
            0 => {
                drop(start(devices[0].path(), &Options::default()));
                drop(devices);
            }
            // The port's deletion also deletes the device.
            1 => devices.into_iter().for_each(std::mem::forget),
            2 => {
                drop(devices);
                functions[0].set(&["state", "inactive"]).unwrap();
                functions[0].wait_for("detached").unwrap();
            }
            _ => {
                drop(devices);
                functions[1].set(&["state", "inactive"]).unwrap();
            }
        }
        drop(bridge);
        drop(functions);
        assert_eq!(everything(), before, "after cycle {cycle}");
    }
    kernel_is_well();
}

/// Unloading the module removes everything: ports, active functions, a device on one.
#[test]
fn the_module_goes_with_functions_in_it() {
    for _ in 0..3 {
        let labnic = Labnic::load(&[]).unwrap();
        set_eswitch_mode("switchdev").unwrap();
        let bridge = Bridge::add();
        let functions = [5, 6, 7].map(|sfnum| Subfunction::add(sfnum).unwrap());
        let device = functions[0].device("last", MAC).unwrap();
        functions[1].activate("02:00:5e:00:53:73").unwrap();
        bridge.connect(functions[0].representor());
        // They are gone with the module, so nothing deletes them.
        std::mem::forget(device);
        functions.into_iter().for_each(std::mem::forget);
        drop(labnic);
        assert!(!std::path::Path::new("/sys/module/labnic").exists());
        let answer = devlink_json(&["dev", "show"]).unwrap();
        assert!(answer["dev"].get(NIC).is_none(), "{answer}");
        assert!(managers().iter().all(|name| !name.contains("labnic")));
        drop(bridge);
    }
    kernel_is_well();
}

//! Changes are also visible to `devlink`.

use lab::netdevsim::Netdevsim;
use serde_json::json;
use vdpa_mgmt::devlink::{
    Cmode, Devlink, Eswitch, EswitchMode, Flavour, NodeName, ParamValue, RateObject, RateParent,
    RateSettings, ReloadAction,
};

use super::support::printed;
use super::tool::{handle, ours, printed_json, switchdev};

#[test]
fn a_parameter_is_in_force_after_a_reload() {
    let nic = Netdevsim::add(90, 1).unwrap();
    let connection = Devlink::open().unwrap();
    let handle = handle(&nic);
    let before = connection.ports_of(&handle).unwrap();
    for (name, value) in [
        ("max_macs", ParamValue::U32(17)),
        ("test1", ParamValue::Flag(false)),
        ("test1", ParamValue::Flag(true)),
    ] {
        connection
            .set_param(&handle, name, Cmode::Driverinit, &value)
            .unwrap();
        let param = connection.param(&handle, name).unwrap();
        assert_eq!(param.value(Cmode::Driverinit), Some(&value));
    }
    let theirs = printed_json(&format!("dev param show {handle} name max_macs"), "param");
    let values = &theirs[nic.handle()][0]["values"];
    assert_eq!(*values, json!([{ "cmode": "driverinit", "value": 17 }]));
    let done = connection
        .reload(&handle, ReloadAction::DriverReinit)
        .unwrap();
    assert!(done.contains(&ReloadAction::DriverReinit), "{done:?}");
    let instance = connection.instance(&handle).unwrap();
    let stats = instance.reloads.iter();
    let reinit = stats.filter(|one| one.action == ReloadAction::DriverReinit);
    assert_eq!(reinit.map(|one| one.count).sum::<u32>(), 1);
    assert!(!instance.reload_failed);
    let param = connection.param(&handle, "max_macs").unwrap();
    assert_eq!(param.value(Cmode::Driverinit), Some(&ParamValue::U32(17)));
    // The same ports, created again.
    let after = connection.ports_of(&handle).unwrap();
    let handles = |ports: &[vdpa_mgmt::devlink::Port]| {
        ports
            .iter()
            .map(|port| port.handle.clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(handles(&after), handles(&before));
}

#[test]
fn an_eswitch_is_switched_over_and_back() {
    let nic = Netdevsim::add(91, 1).unwrap();
    let connection = Devlink::open().unwrap();
    let handle = handle(&nic);
    nic.set_virtual_functions(2).unwrap();
    let of_functions = || {
        let ports = connection.ports_of(&handle).unwrap().into_iter();
        let functions = ports.filter(|port| matches!(port.flavour, Some(Flavour::PciVf { .. })));
        functions.collect::<Vec<_>>()
    };
    assert!(of_functions().is_empty());
    for (mode, count) in [(EswitchMode::Switchdev, 2), (EswitchMode::Legacy, 0)] {
        let change = Eswitch {
            mode: Some(mode),
            ..Default::default()
        };
        connection.set_eswitch(&handle, change).unwrap();
        let theirs = printed_json(&format!("dev eswitch show {handle}"), "dev");
        assert_eq!(theirs[nic.handle()]["mode"], mode.to_string());
        let ports = of_functions();
        assert_eq!(ports.len(), count, "{ports:?}");
        // Each has a representor.
        assert!(ports.iter().all(|port| port.netdev.is_some()), "{ports:?}");
    }
}

#[test]
fn functions_are_limited_by_themselves_and_in_groups() {
    let nic = switchdev(92);
    let connection = Devlink::open().unwrap();
    let handle = handle(&nic);
    let node = NodeName::new(handle.clone(), "all").unwrap();
    let settings = RateSettings {
        tx_share: Some(125_000),
        tx_max: Some(1_250_000),
        ..Default::default()
    };
    connection.add_rate(&node, &settings).unwrap();
    let leaf = RateObject::Leaf(handle.port(128));
    let into = RateSettings {
        tx_max: Some(250_000),
        parent: Some(RateParent::Node("all".to_owned())),
        ..Default::default()
    };
    connection.set_rate(&leaf, &into).unwrap();
    let theirs = printed_json("port function rate show", "rate");
    let expected = json!({ "type": "node", "tx_share": 125_000, "tx_max": 1_250_000 });
    assert_eq!(theirs[node.to_string()], expected);
    let expected = json!({ "type": "leaf", "tx_max": 250_000, "parent": "all" });
    assert_eq!(theirs[leaf.to_string()], expected);
    // Something is in it.
    let error = connection.delete_rate(&node).unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(source.contains("Node has children"), "{source}");
    // The same through the command.
    let run = |line: String| assert_eq!(printed(&ours(&line)), "");
    run(format!("port function rate set {leaf} noparent tx_max 0"));
    run(format!(
        "port function rate set {node} tx_share 0 tx_max 80mbit"
    ));
    let theirs = printed_json("port function rate show", "rate");
    assert_eq!(theirs[leaf.to_string()], json!({ "type": "leaf" }));
    let expected = json!({ "type": "node", "tx_max": 10_000_000 });
    assert_eq!(theirs[node.to_string()], expected);
    run(format!("port function rate del {node}"));
    run(format!(
        "port function rate add {handle}/other tx_max 8mbit"
    ));
    let theirs = printed_json("port function rate show", "rate");
    assert_eq!(theirs.get(node.to_string()), None);
    let expected = json!({ "type": "node", "tx_max": 1_000_000 });
    assert_eq!(theirs[format!("{handle}/other")], expected);
    run(format!("port function rate del {handle}/other"));
}

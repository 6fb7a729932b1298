//! Bellhop shows the same as `devlink`.

use lab::netdevsim::Netdevsim;
use serde_json::{Value, json};
use vdpa_mgmt::devlink::{
    Devlink, EncapMode, Eswitch, HealthReporter, HealthState, InlineMode, Instance, Param,
    ParamValue, Rate, RateObject, ReloadLimit, ReloadStat,
};

use super::support::printed;
use super::tool::{devlink, handle, ours, printed_json, same, switchdev};

#[test]
fn ports() {
    let nic = Netdevsim::add(80, 2).unwrap();
    let text = same("port show");
    assert_eq!(text.lines().count(), 2, "{text}");
    same("port list");
    printed(&devlink(&format!(
        "dev eswitch set {} mode switchdev",
        nic.handle()
    )));
    nic.set_virtual_functions(3).unwrap();
    let text = same("port show");
    assert_eq!(text.matches("flavour pcivf").count(), 3, "{text}");
    let port = format!("{}/128", nic.handle());
    assert!(text.contains(&port), "{text}");
    same(&format!("port show {port}"));
    let interface = nic.interface().unwrap();
    same(&format!("port show {interface}"));
    // Requests that `devlink` does not accept.
    let all = printed(&ours("port show"));
    assert_eq!(printed(&ours(&format!("port show {}", nic.handle()))), all);
}

#[test]
fn no_ports() {
    let _nic = Netdevsim::add(81, 0).unwrap();
    assert_eq!(same("port show"), "");
    assert_eq!(same("port function rate show"), "");
}

#[test]
fn rates() {
    let nic = switchdev(82);
    same("port function rate show");
    let handle = nic.handle();
    for line in [
        format!("add {handle}/all tx_share 10mbit tx_max 1gbit"),
        format!("add {handle}/some parent all"),
        format!("set {handle}/128 tx_share 1mbit tx_max 2500mbit parent some"),
        format!("set {handle}/129 tx_max 7mbit"),
    ] {
        printed(&devlink(&format!("port function rate {line}")));
    }
    let text = same("port function rate show");
    assert!(text.contains("tx_max 2500Mbit parent some"), "{text}");
    same(&format!("port function rate show {handle}/128"));
    same(&format!("port function rate show {handle}/all"));

    let rates = Devlink::open().unwrap().rates().unwrap();
    let found: Value = rates
        .iter()
        .map(rate)
        .collect::<serde_json::Map<_, _>>()
        .into();
    assert_eq!(found, printed_json("port function rate show", "rate"));
    let node = Devlink::open()
        .unwrap()
        .rate(&format!("{handle}/all").parse().unwrap());
    assert_eq!(node.unwrap().tx_max, 125_000_000);
}

fn rate(rate: &Rate) -> (String, Value) {
    let kind = match rate.object {
        RateObject::Leaf(_) => "leaf",
        RateObject::Node(_) => "node",
    };
    let mut fields = json!({ "type": kind });
    for (key, number) in [("tx_share", rate.tx_share), ("tx_max", rate.tx_max)] {
        if number != 0 {
            fields[key] = number.into();
        }
    }
    if let Some(parent) = &rate.parent {
        fields["parent"] = parent.as_str().into();
    }
    (rate.object.to_string(), fields)
}

#[test]
fn instances_with_their_reloads() {
    let nic = Netdevsim::add(83, 1).unwrap();
    let name = nic.handle();
    let line = format!("dev reload {name} action driver_reinit");
    printed(&devlink(&line));
    let instance = Devlink::open().unwrap().instance(&handle(&nic)).unwrap();
    let listed = Devlink::open().unwrap().instances().unwrap();
    assert!(listed.contains(&instance), "{listed:?}");
    let theirs = printed_json("-s dev show", "dev");
    let Value::Object(names) = &theirs else {
        panic!("{theirs}")
    };
    let ours: Vec<String> = listed.iter().map(|one| one.handle.to_string()).collect();
    assert_eq!(ours, names.keys().cloned().collect::<Vec<_>>());
    assert_eq!(reloads(&instance), theirs[&name]["stats"]["reload"]);
    let reinit = &reloads(&instance)["driver_reinit"]["unspecified"];
    assert_eq!(*reinit, 1);
    assert!(!instance.reload_failed);
}

fn reloads(instance: &Instance) -> Value {
    let mut found = json!({});
    for ReloadStat {
        action,
        limit,
        count,
    } in &instance.reloads
    {
        let limit = match limit {
            ReloadLimit::Unspecified => "unspecified",
            ReloadLimit::NoReset => "no_reset",
            ReloadLimit::Other(_) => panic!("{limit:?}"),
        };
        found[action.to_string()][limit] = (*count).into();
    }
    found
}

#[test]
fn information() {
    let nic = Netdevsim::add(84, 1).unwrap();
    let info = Devlink::open().unwrap().info(&handle(&nic)).unwrap();
    let theirs = printed_json(&format!("dev info {}", nic.handle()), "info");
    let theirs = &theirs[nic.handle()];
    assert_eq!(
        info.driver.as_deref(),
        theirs["driver"].as_str(),
        "{theirs}"
    );
    let serial = theirs["serial_number"].as_str();
    assert_eq!(info.serial_number.as_deref(), serial, "{theirs}");
    for (ours, key) in [
        (&info.fixed, "fixed"),
        (&info.running, "running"),
        (&info.stored, "stored"),
    ] {
        let ours: serde_json::Map<String, Value> = ours
            .iter()
            .map(|(name, version)| (name.clone(), version.as_str().into()))
            .collect();
        let none = json!({});
        let theirs = theirs["versions"].get(key).unwrap_or(&none);
        assert_eq!(Value::from(ours), *theirs, "{key}");
    }
}

#[test]
fn parameters() {
    let nic = Netdevsim::add(85, 1).unwrap();
    let params = Devlink::open().unwrap().params().unwrap();
    let of_nic = params.iter().filter(|param| param.handle == handle(&nic));
    let found: Vec<Value> = of_nic.map(param).collect();
    assert!(!found.is_empty());
    let theirs = printed_json("dev param show", "param");
    assert_eq!(Value::from(found), theirs[nic.handle()]);
}

fn param(param: &Param) -> Value {
    let kind = if param.generic {
        "generic"
    } else {
        "driver-specific"
    };
    let values = param.values.iter().map(|(cmode, value)| {
        let value: Value = match value {
            ParamValue::U8(number) => (*number).into(),
            ParamValue::U16(number) => (*number).into(),
            ParamValue::U32(number) => (*number).into(),
            ParamValue::U64(number) => (*number).into(),
            ParamValue::Flag(flag) => (*flag).into(),
            ParamValue::String(text) => text.as_str().into(),
            ParamValue::Other { .. } => panic!("{value:?}"),
        };
        json!({ "cmode": cmode.to_string(), "value": value })
    });
    json!({ "name": param.name, "type": kind, "values": values.collect::<Vec<_>>() })
}

#[test]
fn health_reporters() {
    let nic = Netdevsim::add(86, 1).unwrap();
    let reporters = Devlink::open().unwrap().health_reporters().unwrap();
    let of_nic = reporters.iter().filter(|one| one.handle == handle(&nic));
    let found: Vec<Value> = of_nic.map(reporter).collect();
    assert_eq!(found.len(), 2);
    let theirs = printed_json("health show", "health");
    assert_eq!(Value::from(found), theirs[nic.handle()]);
}

fn reporter(one: &HealthReporter) -> Value {
    let state = match one.state {
        HealthState::Healthy => "healthy",
        HealthState::Error => "error",
        HealthState::Other(_) => panic!("{one:?}"),
    };
    let mut fields = json!({
        "reporter": one.name,
        "state": state,
        "error": one.error_count,
        "recover": one.recover_count,
    });
    if let Some(milliseconds) = one.graceful_period {
        fields["grace_period"] = milliseconds.into();
    }
    for (key, flag) in [
        ("auto_recover", one.auto_recover),
        ("auto_dump", one.auto_dump),
    ] {
        if let Some(flag) = flag {
            fields[key] = flag.into();
        }
    }
    fields
}

#[test]
fn eswitches() {
    let nic = Netdevsim::add(87, 1).unwrap();
    let connection = Devlink::open().unwrap();
    for mode in ["legacy", "switchdev"] {
        let line = format!("dev eswitch set {} mode {mode}", nic.handle());
        printed(&devlink(&line));
        let found = connection.eswitch(&handle(&nic)).unwrap();
        assert_eq!(found.mode.unwrap().to_string(), mode);
        let theirs = printed_json(&format!("dev eswitch show {}", nic.handle()), "dev");
        assert_eq!(eswitch(found), theirs[nic.handle()]);
    }
}

fn eswitch(eswitch: Eswitch) -> Value {
    let mut fields = json!({});
    if let Some(mode) = eswitch.mode {
        fields["mode"] = mode.to_string().into();
    }
    if let Some(mode) = eswitch.inline_mode {
        assert!(!matches!(mode, InlineMode::Other(_)));
        fields["inline-mode"] = mode.to_string().into();
    }
    if let Some(mode) = eswitch.encap_mode {
        assert!(!matches!(mode, EncapMode::Other(_)));
        fields["encap-mode"] = mode.to_string().into();
    }
    fields
}

//! `bellhop port` beside iproute2's `devlink` for ports with functions: the life of a subfunction
//! of the lab NIC, shown by both tools in every state.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[path = "mgmt_dev/support.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod support;
#[path = "mgmt_devlink/tool.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod tool;

use std::time::{Duration, Instant};

use lab::labnic::sf::{NIC, enable_vnet, set_eswitch_mode};
use lab::labnic::{self, Labnic};
use serde_json::Value;
use support::{complaint, printed};
use tool::{devlink, ours, printed_json, same};

const MAC: &str = "02:00:5e:00:53:72";

/// The name of the port that Bellhop adds.
fn add(sfnum: u32) -> String {
    let line = format!("port add {NIC} flavour pcisf pfnum 0 sfnum {sfnum} -j");
    let answer: Value = serde_json::from_str(&printed(&ours(&line))).unwrap();
    let ports = answer["port"].as_object().unwrap();
    let (name, port) = ports.iter().next().unwrap();
    assert_eq!((ports.len(), &port["sfnum"]), (1, &sfnum.into()));
    name.clone()
}

fn wait_for(port: &str, opstate: &str) {
    let limit = Instant::now() + Duration::from_secs(20);
    while printed_json(&format!("port show {port}"), "port")[port]["function"]["opstate"] != opstate
    {
        assert!(Instant::now() < limit, "{port} is not {opstate}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn subfunctions_are_reported_alike_in_every_state() {
    let _labnic = Labnic::load(&[("sf_attach_ms", "200")]).unwrap();
    same("port show");
    let line = format!("port add {NIC} flavour pcisf pfnum 0 sfnum 88");
    complaint(&ours(&line), &["switchdev"]);
    set_eswitch_mode("switchdev").unwrap();
    let port = add(88);
    let other = add(89);
    let show = format!("port show {port}");
    assert!(same(&show).contains("state inactive opstate detached"));
    printed(&ours(&format!(
        "port function set {port} hw_addr {MAC} roce disable"
    )));
    assert!(same(&show).contains(MAC));
    printed(&ours(&format!("port function set {port} state active")));
    wait_for(&port, "attached");
    let attached = same(&show);
    assert!(attached.contains("nested_devlink"), "{attached}");
    same("port show");
    same("port function rate show");
    let instances = printed_json("dev show", "dev");
    let nested = instances
        .as_object()
        .unwrap()
        .keys()
        .find(|name| name.starts_with("auxiliary/"))
        .unwrap();
    enable_vnet(nested, true).unwrap();
    same("port show");
    printed(&ours(&format!("port function set {port} state inactive")));
    wait_for(&port, "detached");
    same(&show);
    for one in [&port, &other] {
        printed(&ours(&format!("port del {one}")));
    }
    same("port show");
    assert!(!devlink(&show).status.success());
    complaint(&ours(&show), &[&port]);
    assert_eq!(labnic::trouble().unwrap(), Vec::<String>::new());
}

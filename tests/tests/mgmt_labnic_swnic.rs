//! `bellhop run --nic bridge=NAME` chooses hardware: a subfunction of the lab NIC, which is a port
//! of the bridge. A guest on a NIC without hardware reaches it. Afterwards the host is as before.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[path = "mgmt_nic/bridge.rs"]
mod bridge;
#[path = "mgmt_nic/host.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod host;
#[path = "mgmt_dev/support.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod support;

use std::time::Duration;

use bridge::{BRIDGE, Host, UPLINK, run};
use host::Traces;
use lab::guest::{BellhopArguments, Guest};
use lab::labnic::trouble;
use lab::traffic::{Frames, exchange_between};
use serde_json::Value;
use support::{bellhop, printed};

const MACS: [&str; 2] = ["02:00:5e:00:53:31", "02:00:5e:00:53:32"];

#[test]
fn a_vm_gets_a_subfunction_of_a_port_of_its_bridge() {
    let _host = Host::new();
    run("modprobe -a vduse tun");
    run(&format!("ip link set {UPLINK} master {BRIDGE}"));
    let before = Traces::find();
    let [mut guest, mut peer] = [(0, ""), (1, ",from=software")].map(|(number, from)| {
        let mac = MACS[number];
        let nic = format!("bridge={BRIDGE},vlan=100,mac={mac},id=net0{from}");
        let arguments = BellhopArguments::small().unwrap().memory("128M");
        let arguments = arguments.argument("--nic", &nic);
        Guest::start(&arguments.silence(Duration::from_secs(120))).unwrap()
    });
    let said = guest.console();
    let choice = format!("NIC net0: from={UPLINK}, because the port {UPLINK} of {BRIDGE}");
    assert!(said.contains(&choice), "{said}");
    let name = format!("run{}n0", guest.pid());
    let listed: Value = serde_json::from_str(&printed(&bellhop(&["nic", "list", "-j"]))).unwrap();
    assert!(listed["nic"][&name]["representor"].is_string(), "{listed}");
    for size in [60, 1514] {
        let frames = Frames {
            count: 200,
            size,
            window: 16,
        };
        exchange_between(&mut guest, &mut peer, MACS[1], frames).unwrap();
    }
    for guest in [guest, peer] {
        assert!(guest.power_off().unwrap().success());
    }
    before.assert_same("after both VMs ended");
    assert_eq!(trouble().unwrap(), Vec::<String>::new());
}

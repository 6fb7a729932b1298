//! Two daemons migrate a VM with a function by VFIO whose place its NIC can take (net failover).
//! The destination binds a function of its own and plugs it in. The source gives its function back.
//! The functions are those of the rig's igb NIC, with one MAC address.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod end_to_end;
#[path = "mgmt_nic/host.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod host;
#[path = "mgmt_dev/support.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod support;

use std::ffi::CString;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use end_to_end::created;
use lab::guest::{BellhopArguments, Guest};
use lab::igb::IgbNic;
use lab::node::{Node, until};
use lab::process::output;
use lab::sim;
use lab::sriov::{SriovNic, VfDevice, VirtualFunction};
use lab::traffic::exchange_both_ways;
use serde_json::{Value, json};

const VFIO: &str = "vfio-pci";
/// The modules of the simulator, which this rig does not load.
const SIMULATOR: [&str; 3] = ["vringh", "vdpa_sim", "vdpa_sim_net"];
/// The parent of the standby's devices. vp_vdpa creates none with a given MAC address.
const STANDBY: &str = "vdpasim_net";
/// How long the guest may take to answer at the destination.
const ARRIVAL: Duration = Duration::from_secs(60);

/// Gives a function of the igb NIC this MAC address.
#[track_caller]
fn set_mac(function: &VirtualFunction<'_>, index: &str, mac: &str) {
    let netdevs = Path::new("/sys/bus/pci/devices").join(function.address());
    let mut netdevs = fs::read_dir(netdevs.join("physfn/net")).unwrap();
    let netdev = netdevs.next().unwrap().unwrap().file_name();
    let mut ip = Command::new("ip");
    ip.args(["link", "set"]).arg(netdev);
    output(ip.args(["vf", index, "mac", mac])).unwrap();
}

/// Waits until the guest sends through its function.
#[track_caller]
fn await_primary(node: &Node, guest: &mut Guest) {
    until("the guest has its primary", || {
        let shown = guest.command("link").unwrap();
        let mut nics = shown["nics"].as_array().unwrap().iter();
        nics.any(|nic| {
            nic["driver"] == "igbvf" && nic["master"] == "eth0" && nic["operstate"] == "up"
        })
    })
    .unwrap_or_else(|error| panic!("{error}\n{}\n{}", guest.console(), node.said()));
}

/// Frames that the guest's primary has sent.
#[track_caller]
fn sent_by_primary(guest: &mut Guest) -> u64 {
    let shown = guest.command("link").unwrap();
    let mut nics = shown["nics"].as_array().unwrap().iter();
    let primary = nics.find(|nic| nic["driver"] == "igbvf");
    primary.unwrap()["tx_packets"].as_u64().unwrap()
}

#[test]
fn two_daemons_migrate_a_vm_with_a_function_and_its_standby() {
    let (here, there) = (
        Node::start("function-a").unwrap(),
        Node::start("function-b").unwrap(),
    );
    for module in SIMULATOR {
        sim::load(&format!("{module}.ko"), "").unwrap();
    }
    let nic = SriovNic::enable(1).unwrap();
    let device = VfDevice::add(nic.vf(0).unwrap()).unwrap();
    let igb = IgbNic::plug(2).unwrap();
    let functions = [0, 1].map(|index| igb.vf(index).unwrap());
    output(Command::new("modprobe").arg(VFIO)).unwrap();
    let (mac, other) = (functions[0].mac(), device.function().mac());
    set_mac(&functions[1], "1", &mac);
    let small = BellhopArguments::small().unwrap().memory("128M");
    let mut peer = Guest::start(&small.vdpa(device.path())).unwrap();
    let stock = BellhopArguments::stock().unwrap();
    let body = json!({ "spec": {
        "kernel": stock.kernel_image(),
        "initramfs": stock.ramdisk(),
        "cmdline": stock.kernel_words(),
        "memory": "256M",
        "nics": [{ "id": "nic", "from": STANDBY, "mac": mac, "standby": true }],
        "vfio": [{ "host": functions[0].address(), "id": "vf", "standby": "nic" }],
    } });
    let (_, mut guest) = created(&here, "web", &body);
    guest.command("up eth0").unwrap();
    await_primary(&here, &mut guest);
    assert_eq!(functions[0].driver().as_deref(), Some(VFIO));
    exchange_both_ways(&mut guest, &mut peer, [&mac, &other]).unwrap();

    let destination = format!("node:{}", there.api.socket().display());
    let migrate = |vfio: Value, dry_run: bool| {
        let send = json!({ "send": {
            "destination": destination, "name": "web2", "vfio": vfio, "dry_run": dry_run,
        } });
        let answer = here.api.ask("POST", "/v1/vms/web/migration", Some(&send));
        answer.unwrap()
    };
    let to = |address: &str| json!({ "vf": address });
    // What cannot work leaves the function with the guest.
    for (vfio, status, word) in [
        (
            json!({ "other": functions[1].address() }),
            422,
            "no function other",
        ),
        (to("0000:ff:1f.7"), 200, "0000:ff:1f.7"),
    ] {
        let answer = migrate(vfio, true);
        assert_eq!(answer.status, status, "{}", answer.body);
        assert!(answer.body.to_string().contains(word), "{}", answer.body);
    }
    let answer = migrate(to(functions[1].address()), true);
    assert_eq!(answer.body["movable"], true, "{}", answer.body);
    assert_eq!(functions[1].driver(), None);
    assert!(there.vm("web2").unwrap().is_none());

    let answer = migrate(to(functions[1].address()), false);
    assert_eq!(answer.status, 202, "{}\n{}", answer.body, here.said());
    let vm = there.await_phase("web2", "Running").unwrap();
    let given = json!([{
        "host": functions[1].address(), "id": "vf", "standby": "nic",
    }]);
    assert_eq!(vm["spec"]["vfio"], given);
    until("nothing is left of it here", || {
        here.vm("web").unwrap().is_none() && here.processes().is_empty()
    })
    .unwrap();
    assert_eq!(functions[0].driver(), None, "{}", here.said());
    assert_eq!(functions[1].driver().as_deref(), Some(VFIO));
    drop(guest);
    let console = vm["status"]["console"]["socket"].as_str().unwrap();
    let pid = u32::try_from(vm["status"]["pid"].as_u64().unwrap()).unwrap();
    let mut guest = Guest::attach_arrived(Path::new(console), pid, ARRIVAL).unwrap();
    await_primary(&there, &mut guest);
    let before = sent_by_primary(&mut guest);
    exchange_both_ways(&mut guest, &mut peer, [&mac, &other]).unwrap();
    assert!(sent_by_primary(&mut guest) > before);
    drop(guest);
    end_to_end::deleted(&there, "web2");
    assert_eq!(functions[1].driver(), None, "{}", there.said());
    assert!(peer.power_off().unwrap().success());
    drop((here, there));
    for module in SIMULATOR.iter().rev() {
        sim::unload(&CString::new(*module).unwrap()).unwrap();
    }
}

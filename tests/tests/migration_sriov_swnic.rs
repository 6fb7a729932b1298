//! A guest moves between a NIC without hardware and a virtual function with vp_vdpa, both ways.
//!
//! ```text
//!   guest ─ software NIC ─ tap ─ bridge ─ interface of function 2 ─┐
//!      └──── or function 0 (vp_vdpa) ──────────────────────────────┤ the NIC's switch
//!   peer ─── function 1 (vp_vdpa) ─────────────────────────────────┘
//! ```

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[path = "swnic/bridge.rs"]
mod bridge;
#[allow(dead_code, reason = "other tests use more of it")]
mod live;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use bridge::{Bridge, ip};
use lab::api::Client;
use lab::guest::{BellhopArguments, Guest};
use lab::process::output;
use lab::sriov::{SriovNic, VfDevice};
use lab::swnic::Swnic;
use lab::traffic::{Frames, exchange_between, flood_on};

const BRIDGE: &str = "lab-swbr";
/// Moves in each direction.
const ROUNDS: u64 = 3;
const LIMIT: Duration = Duration::from_secs(60);

/// The network interface of a function with its own driver.
fn interface(address: &str) -> String {
    let all = Path::new("/sys/bus/pci/devices").join(address);
    let name = std::fs::read_dir(&all)
        .unwrap()
        .flatten()
        .find_map(|entry| std::fs::read_dir(entry.path().join("net")).ok())
        .unwrap()
        .next();
    name.unwrap().unwrap().file_name().into_string().unwrap()
}

#[test]
fn a_guest_moves_from_software_to_hardware_and_back_under_traffic() {
    let bridge = Bridge::add(BRIDGE);
    output(Command::new("modprobe").arg("vduse")).unwrap();
    ip(&format!("link set {BRIDGE} mtu 1500"));
    let nic = SriovNic::enable(3).unwrap();
    let hardware = VfDevice::add(nic.vf(0).unwrap()).unwrap();
    let other = VfDevice::add(nic.vf(1).unwrap()).unwrap();
    let uplink = nic.vf(2).unwrap();
    let port = interface(uplink.address());
    ip(&format!("link set {port} master {}", bridge.0));
    ip(&format!("link set {port} up"));
    // A guest without a control queue cannot change its address, so both devices have the same.
    // The functions 0 and 1 have split rings.
    let own = hardware.function().mac();
    let software =
        Swnic::start("lab-sw0", &["--bridge", BRIDGE, "--mac", &own, "--split"]).unwrap();

    let socket = std::env::temp_dir().join("lab-sriov-swnic.socket");
    let device = format!("path={},id=nic", software.path().display());
    let arguments = BellhopArguments::small()
        .unwrap()
        .memory("128M")
        .argument("--vdpa", &device)
        .argument("--api-socket", socket.to_str().unwrap());
    let mut guest = Guest::start(&arguments).unwrap();
    let peer = BellhopArguments::small().unwrap().memory("128M");
    let mut peer = Guest::start(&peer.vdpa(other.path())).unwrap();
    let client = Client::new(&socket);
    let mac = other.function().mac();
    let frames = Frames {
        count: 100,
        size: 300,
        window: 8,
    };
    exchange_between(&mut guest, &mut peer, &mac, frames).unwrap();

    peer.command("echo-on").unwrap();
    flood_on(&mut guest, "eth0", &mac);
    for _ in 0..ROUNDS {
        live::swap_nic(&client, hardware.path());
        std::thread::sleep(Duration::from_millis(200));
        live::swap_nic(&client, software.path());
        std::thread::sleep(Duration::from_millis(200));
    }
    let answer = guest.command_within("flood-off", LIMIT).unwrap();
    println!("{answer}");
    assert_eq!(answer["corrupt"], 0, "{answer}");
    assert!(answer["rx"].as_u64().unwrap() > 0, "{answer}");
    peer.command("echo-off").unwrap();

    // On each of them nothing is lost once the network knows the place.
    live::swap_nic(&client, hardware.path());
    exchange_between(&mut guest, &mut peer, &mac, frames).unwrap();
    live::swap_nic(&client, software.path());
    exchange_between(&mut guest, &mut peer, &mac, frames).unwrap();
    for guest in [guest, peer] {
        assert_eq!(guest.power_off().unwrap().code(), Some(0));
    }
    ip(&format!("link set {port} nomaster"));
}

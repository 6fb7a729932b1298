//! A guest with packed rings changes its NIC without hardware under traffic, there and back. The
//! kernel's VDUSE cannot suspend a device.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[path = "swnic/bridge.rs"]
mod bridge;
#[allow(dead_code, reason = "other tests use more of it")]
mod live;

use bridge::Bridge;
use lab::api::Client;
use lab::guest::{BellhopArguments, Guest};
use lab::messages::messages;
use lab::node::until;
use lab::swnic::Swnic;
use lab::temp_path::TempPath;
use lab::traffic::{Frames, exchange_with, flood_off_with_losses};

const MAC: &str = "52:54:00:5e:57:01";
const PEER: &str = "52:54:00:5e:57:02";

/// VIRTIO_F_RING_PACKED.
const RING_PACKED: usize = 34;

const SWAPS: u64 = 20;

/// Frames in flight at once. Those on their way to the NIC that the guest leaves are lost.
const WINDOW: u64 = 16;

const FRAMES: Frames = Frames {
    count: 200,
    size: 590,
    window: WINDOW,
};

fn small() -> BellhopArguments {
    BellhopArguments::small().unwrap().memory("128M")
}

#[test]
fn a_guest_with_packed_rings_changes_its_nic_twenty_times() {
    let bridge = Bridge::add("lab-swbr");
    let start = |name, mac| Swnic::start(name, &["--bridge", bridge.0, "--mac", mac]).unwrap();
    let nics = ["lab-sw0", "lab-sw1"].map(|name| start(name, MAC));
    let of_peer = start("lab-sw2", PEER);
    let mut peer = Guest::start(&small().vdpa(of_peer.path())).unwrap();
    peer.command("echo-on").unwrap();
    let socket = TempPath::new("swnic-swap.api");
    let nic = format!("id=nic,path={}", nics[0].path().display());
    let arguments = small().argument("--vdpa", &nic);
    let mut guest = Guest::start(&arguments.argument("--api-socket", socket.text())).unwrap();
    let client = Client::new(socket.path());
    let features = guest.ready()["nics"][0]["features"].as_str().unwrap();
    assert_eq!(features.as_bytes()[RING_PACKED], b'1');
    let said = messages(&mut guest).unwrap();

    let flood = format!("flood-on 300 {WINDOW} eth0 to {PEER}");
    guest.command(&flood).unwrap();
    for number in 0..SWAPS {
        // Begins with the second one, and ends with the first one.
        let nic = &nics[usize::from(number % 2 == 0)];
        let passed = || ["rx_packets", "tx_packets"].map(|one| nic.statistic(one).unwrap());
        let before = passed();
        live::swap_nic(&client, nic.path());
        until("frames pass the NIC in both directions", || {
            let now = passed();
            (0..2).all(|way| now[way] > before[way] + WINDOW)
        })
        .unwrap();
    }
    flood_off_with_losses(&mut guest, SWAPS * WINDOW);
    exchange_with(&mut guest, PEER, FRAMES).unwrap();
    guest.command("rebind-flooded 1 0").unwrap();
    exchange_with(&mut guest, PEER, FRAMES).unwrap();
    assert_eq!(messages(&mut guest).unwrap(), said);
    for guest in [guest, peer] {
        assert!(guest.power_off().unwrap().success());
    }
}

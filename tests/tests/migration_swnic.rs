//! A guest on NICs without hardware migrates, is saved and restored, while it exchanges frames with
//! a guest on the same bridge. The kernel's VDUSE cannot suspend a device.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[path = "swnic/bridge.rs"]
mod bridge;
mod moving;

use std::process::Command;

use bridge::Bridge;
use lab::guest::{BellhopArguments, Guest};
use lab::messages::messages;
use lab::soak_run::Run;
use lab::swnic::Swnic;
use lab::temp_path::TempPath;
use lab::traffic::{Frames, exchange_with, flood_off_with_losses};
use moving::echo::Echo;
use moving::soak::{Scene, run_soak};
use moving::{Host, NOTICE};
use serde_json::json;

const MAC: &str = "52:54:00:5e:54:01";
const PEER: &str = "52:54:00:5e:54:02";

/// Frames of the flood that are in flight at once. The guest gives them up if a reset loses them,
/// and so many again.
const WINDOW: u64 = 16;
const MAY_LOSE: u64 = 2 * WINDOW;
const FRAMES: Frames = Frames {
    count: 200,
    size: 590,
    window: WINDOW,
};

/// Two NICs for one guest, the third for its peer.
struct Nics {
    of_guest: [Swnic; 2],
    of_peer: Swnic,
    _bridge: Bridge,
}

impl Nics {
    fn start(rings: &[&str]) -> Self {
        let bridge = Bridge::add("lab-swbr");
        let start = |name, mac| {
            let words = ["--bridge", bridge.0, "--mac", mac];
            Swnic::start(name, &[&words, rings].concat()).unwrap()
        };
        Self {
            of_guest: ["lab-sw0", "lab-sw1"].map(|name| start(name, MAC)),
            of_peer: start("lab-sw2", PEER),
            _bridge: bridge,
        }
    }

    fn hosts(&self) -> [Host; 2] {
        [0, 1].map(|at| Host::new(&format!("swnic{at}"), self.of_guest[at].path()))
    }

    fn peer(&self) -> Echo {
        Echo::start(self.of_peer.path(), PEER)
    }
}

fn small() -> BellhopArguments {
    BellhopArguments::small().unwrap().memory("128M")
}

/// Moves a guest between the first two NICs.
fn to_and_fro(rings: &[&str], moves: u32) {
    let nics = Nics::start(rings);
    let scene = Scene {
        hosts: nics.hosts(),
        traffic_peer: nics.peer(),
        set_link: None,
        // The device is reset twice: when its queues become relayed, and when the guest stops.
        may_lose: MAY_LOSE,
        // At these two points, and when the guest starts at the destination.
        resets: 3,
        moves_idle: true,
        packed: rings.is_empty(),
    };
    run_soak(scene, small(), Run { first: 0, moves });
}

#[test]
fn a_guest_moves_there_and_back() {
    to_and_fro(&["--split"], 2);
}

#[test]
fn a_guest_with_packed_rings_moves_there_and_back() {
    to_and_fro(&[], 2);
}

fn flood_on(guest: &mut Guest) {
    let line = format!("flood-on 300 {WINDOW} eth0 to {PEER}");
    guest.command(&line).unwrap();
}

#[test]
fn a_guest_is_saved_under_traffic_and_continues_here_and_on_another_nic() {
    let nics = Nics::start(&[]);
    let [here, there] = nics.hosts();
    let _peer = nics.peer();
    let saved = TempPath::new("swnic.snapshot");
    let mut guest = here.boot(small());
    let said = messages(&mut guest).unwrap();
    let body = json!({ "path": saved.text() });
    for _ in 0..2 {
        saved.clear();
        guest.command("write-on 8 50").unwrap();
        flood_on(&mut guest);
        let answer = here.client().ask("POST", "/v1/vm/snapshot", Some(&body));
        let answer = answer.unwrap();
        assert_eq!(answer.status, 201, "{}", answer.body);
        flood_off_with_losses(&mut guest, MAY_LOSE);
        exchange_with(&mut guest, PEER, FRAMES).unwrap();
        assert_eq!(guest.command("write-off").unwrap()["wrong"], 0);
    }
    drop(guest);
    for host in [&there, &here] {
        let mut command = Command::new(std::env::var_os("BELLHOP").unwrap());
        command.args(["run", "--restore", saved.text(), "--vdpa", host.vdpa()]);
        command.args(small().allow_boot_files());
        let mut guest = Guest::start_restored(command, NOTICE).unwrap();
        // It was saved under its flood.
        flood_off_with_losses(&mut guest, MAY_LOSE);
        exchange_with(&mut guest, PEER, FRAMES).unwrap();
        assert_eq!(guest.command("write-off").unwrap()["wrong"], 0);
        guest.command("rebind-flooded 1 0").unwrap();
        exchange_with(&mut guest, PEER, FRAMES).unwrap();
        assert_eq!(messages(&mut guest).unwrap(), said);
        assert!(guest.power_off().unwrap().success());
    }
}

//! A guest is saved whose NIC takes receive buffers in advance and keeps them while it is suspended: they go with the
//! guest, here and on another device.
//!
//! If they stayed with the old device the ring would be empty after eight saves, and the used index would jump, of
//! which the guest's driver complains. The judges are the guest, which verifies each frame that comes back, and its log.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[allow(dead_code, reason = "other tests use more of it")]
mod labnic_peer;

use lab::api::Client;
use lab::guest::{BellhopArguments, Guest};
use lab::labnic::{Labnic, trouble};
use lab::messages::messages;
use lab::sim::SimDevice;
use labnic_peer::Peer;
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

const MAC: &str = "02:4c:61:62:53:49";
const OTHER_MAC: &str = "02:4c:61:62:53:4a";

/// How long a guest may take to answer when it goes on; it is emulated twice.
const NOTICE: Duration = Duration::from_secs(30);

/// A path of this test's own; what is there goes with it.
struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Self {
        let this = Self(std::env::temp_dir().join(format!("lab-{name}-{}", std::process::id())));
        this.clear();
        this
    }

    fn clear(&self) {
        let _ = fs::remove_dir_all(&self.0);
        let _ = fs::remove_file(&self.0);
    }

    fn text(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.clear();
    }
}

/// 32 buffers at each would empty the ring of 256 after eight if they stayed with the device.
const SAVES: u32 = 9;

/// Each save writes all of it.
const MEMORY: &str = "96M";

fn nic(device: &SimDevice) -> String {
    format!("id=nic,path={}", device.path().display())
}

fn snapshot(client: &Client, to: &Place) -> Value {
    to.clear();
    let body = json!({ "path": to.text() });
    let answer = client.ask("POST", "/v1/vm/snapshot", Some(&body)).unwrap();
    assert_eq!(answer.status, 201, "{}", answer.body);
    assert_eq!(client.get("/v1/vm").unwrap()["state"], "Running");
    answer.body
}

fn restored(saved: &Place, socket: &Place, device: &SimDevice) -> Guest {
    let mut command = Command::new(std::env::var_os("BELLHOP").unwrap());
    command
        .args(["run", "--restore", saved.text()])
        .args(["--vdpa", &nic(device)])
        .args(["--api-socket", socket.text()]);
    Guest::start_restored(command, NOTICE).unwrap()
}

/// A guest on a lab NIC with these parameters is saved again and again while frames come, and restored on another device
/// and on the first.
fn saved_and_restored(parameters: &[(&str, &str)]) {
    let labnic = Labnic::load(parameters).unwrap();
    let peer = Peer::start(&labnic);
    let first = labnic.add("first", &["mac", MAC]).unwrap();
    let second = labnic.add("second", &["mac", OTHER_MAC]).unwrap();
    let (socket, saved) = (Place::new("prefetch.socket"), Place::new("prefetch"));
    let arguments = BellhopArguments::small()
        .unwrap()
        .memory(MEMORY)
        .argument("--vdpa", &nic(&first))
        .argument("--api-socket", socket.text());
    let mut guest = Guest::start(&arguments).unwrap();
    let client = Client::new(&socket.0);
    peer.exchange(&mut guest, 200, 300);
    let said = messages(&mut guest).unwrap();
    for _ in 0..SAVES {
        // The device is stopped while frames come.
        peer.flood(true);
        println!("{}", snapshot(&client, &saved));
        peer.flood(false);
        peer.exchange(&mut guest, 50, 300);
    }
    // More than a lap of the ring.
    peer.exchange(&mut guest, 600, 300);
    snapshot(&client, &saved);
    assert_eq!(messages(&mut guest).unwrap(), said);
    // The guest's address is to be on the switch once.
    drop(guest);

    for device in [&second, &first] {
        let mut guest = restored(&saved, &socket, device);
        peer.exchange(&mut guest, 600, 300);
        assert_eq!(messages(&mut guest).unwrap(), said);
        // From the restored one, as from the one that began.
        snapshot(&Client::new(&socket.0), &saved);
        peer.exchange(&mut guest, 600, 300);
        assert_eq!(messages(&mut guest).unwrap(), said);
        assert!(guest.power_off().unwrap().success());
    }
    drop((first, second));
    assert_eq!(trouble().unwrap(), Vec::<String>::new());
}

#[test]
fn buffers_that_the_device_took_in_advance_go_with_the_guest() {
    saved_and_restored(&[("ring_state", "avail"), ("rx_prefetch", "32")]);
}

#[test]
fn a_device_that_tells_its_used_index_is_saved_as_before() {
    saved_and_restored(&[("ring_state", "used"), ("rx_prefetch", "32")]);
}

//! Saves a guest whose NIC prefetches receive buffers and keeps them while it is suspended. They
//! move with the guest, here and on another device.
//!
//! If they stayed with the old device, the ring would be empty after eight saves. The used index
//! would also jump, and the guest's driver would report that. The guest, which verifies each
//! returned frame, and its log decide the result.

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

/// How long a resumed guest may take to answer; it is emulated twice.
const NOTICE: Duration = Duration::from_secs(30);

/// A path for this test. Dropping it removes the file or directory there.
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

/// If 32 buffers stayed with the device at each save, the ring of 256 would be empty after eight.
const SAVES: u32 = 9;

/// Small, because each save writes all of it.
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
        .args(BellhopArguments::small().unwrap().allow_boot_files())
        .args(["--vdpa", &nic(device)])
        .args(["--api-socket", socket.text()]);
    Guest::start_restored(command, NOTICE).unwrap()
}

/// Saves a guest on a lab NIC with these parameters repeatedly while frames arrive, and restores it
/// on another device and on the first.
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
        // The device stops while frames arrive.
        peer.flood(true);
        println!("{}", snapshot(&client, &saved));
        peer.flood(false);
        peer.exchange(&mut guest, 50, 300);
    }
    // More than one lap of the ring.
    peer.exchange(&mut guest, 600, 300);
    snapshot(&client, &saved);
    assert_eq!(messages(&mut guest).unwrap(), said);
    // The guest's address must be on the switch only once.
    drop(guest);

    for device in [&second, &first] {
        let mut guest = restored(&saved, &socket, device);
        peer.exchange(&mut guest, 600, 300);
        assert_eq!(messages(&mut guest).unwrap(), said);
        // From the restored guest, as from the original.
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
fn a_device_that_reports_its_used_index_is_saved_as_before() {
    saved_and_restored(&[("ring_state", "used"), ("rx_prefetch", "32")]);
}

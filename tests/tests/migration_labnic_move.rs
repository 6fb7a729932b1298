//! A guest on the lab NIC migrates to and fro at any moment, with event index, doorbells, several
//! queue pairs and buffers in flight. Some devices cannot be suspended.
//!
//! Its peer on the switch sends every frame back; the guest verifies each.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

#[allow(dead_code, reason = "other tests use more of it")]
mod labnic_peer;
mod moving;

use std::time::Duration;

use lab::endurance::cycles;
use lab::guest::BellhopArguments;
use lab::labnic::{Labnic, set_link, trouble};
use lab::soak_run::Run;
use labnic_peer::Peer;
use moving::Host;
use moving::soak::{Scene, TrafficPeer, run_soak};

/// A device that returns buffers in another order than it took them.
const OUT_OF_ORDER: (&str, &str) = ("completion", "out_of_order");

/// A device that is reset instead of suspended.
const RELAYED: (&str, &str) = ("suspend", "0");

const MAC: &str = "02:4c:61:62:53:47";

impl TrafficPeer for Peer {
    fn mac(&self) -> String {
        labnic_peer::MAC.to_owned()
    }

    fn flood(&mut self, _guest: &str) {
        Self::flood(self, true);
    }

    fn calm(&mut self) {
        Self::flood(self, false);
    }

    fn longest_gap(&mut self) -> Option<Duration> {
        let arrivals = self.arrivals();
        arrivals
            .windows(2)
            .map(|pair| pair[1].0.duration_since(pair[0].0))
            .max()
    }

    fn account(&mut self) -> String {
        format!("came twice: {:?}", self.twice())
    }
}

/// Two devices of the same kind and one guest, on a run of its scenario.
fn to_and_fro(
    parameters: &[(&str, &str)],
    arguments: BellhopArguments,
    pairs: &str,
    may_lose: u64,
    run: Run,
) {
    // The guest leaves its port; a device that cannot be suspended is also reset twice.
    let resets = if parameters.contains(&RELAYED) { 3 } else { 1 };
    let labnic = Labnic::load(parameters).unwrap();
    let traffic_peer = Peer::start(&labnic);
    let devices = ["here", "there"].map(|name| {
        let attributes = ["mac", MAC, "max_vqp", pairs];
        labnic.add(name, &attributes).unwrap()
    });
    let hosts = [
        Host::new("here", devices[0].path()),
        Host::new("there", devices[1].path()),
    ];
    run_soak(
        Scene {
            hosts,
            traffic_peer,
            set_link: Some(&|host, up| set_link(&devices[host], up).unwrap()),
            may_lose,
            resets,
            moves_idle: !parameters.contains(&OUT_OF_ORDER),
            packed: false,
        },
        arguments,
        run,
    );
    drop(devices);
    assert_eq!(trouble().unwrap(), Vec::<String>::new());
}

#[test]
fn doorbells_event_indices_and_queue_pairs_go_along() {
    let two = BellhopArguments::small().unwrap().processors(2);
    let moves = cycles().unwrap().div_ceil(2);
    to_and_fro(
        &[("rx_prefetch", "32")],
        two,
        "2",
        16,
        Run { first: 0, moves },
    );
}

#[test]
fn buffers_come_back_in_any_order() {
    // Starts with the moments that the first test leaves out.
    let moves = (cycles().unwrap() / 2).max(2);
    let one = BellhopArguments::small().unwrap();
    let parameters = [("rx_prefetch", "32"), OUT_OF_ORDER];
    to_and_fro(&parameters, one, "1", 16, Run { first: 2, moves });
}

#[test]
fn a_device_that_cannot_be_suspended_is_relayed() {
    let parameters = [RELAYED, ("resume", "0"), ("rx_prefetch", "8")];
    // Starts with the moments that the other test leaves out.
    let moves = (cycles().unwrap() / 2).max(2);
    let one = BellhopArguments::small().unwrap();
    to_and_fro(&parameters, one, "1", 32, Run { first: 3, moves });
}

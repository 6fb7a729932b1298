//! A guest whose device can neither suspend nor begin in the middle of a ring (vp_vdpa) migrates to
//! and fro between two functions. The device is reset at a point where relays know what is in
//! flight, and continues with shadow rings.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod moving;

use lab::endurance::cycles;
use lab::guest::BellhopArguments;
use lab::rig::FIRST_PACKED_FUNCTION as PACKED;
use lab::soak_run::Run;
use lab::sriov::{SriovNic, VfDevice, set_link};
use moving::Host;
use moving::echo::Echo;
use moving::soak::{Scene, run_soak};

/// A guest migrates between the first two functions; the third one belongs to its peer.
fn to_and_fro(functions: [usize; 3], arguments: BellhopArguments, run: Run) {
    let nic = SriovNic::enable(4).unwrap();
    let [first, second, third] =
        functions.map(|index| VfDevice::add(nic.vf(index).unwrap()).unwrap());
    let links = [&first, &second].map(|device| device.function().link());
    let traffic_peer = Echo::start(third.path(), &third.function().mac());
    let packed = functions[0] >= PACKED;
    let pull = |host: usize, up| set_link(&links[host], up).unwrap();
    run_soak(
        Scene {
            hosts: [
                Host::new("here", first.path()),
                Host::new("there", second.path()),
            ],
            traffic_peer,
            // QEMU's packed rings break while the link is down: see `rings_sriov_backend`.
            set_link: if packed { None } else { Some(&pull) },
            // The device is reset twice: when its queues become relayed, and when the guest stops.
            may_lose: 32,
            // At these two points, and when the guest starts at the destination.
            resets: 3,
            moves_idle: true,
            packed,
        },
        arguments,
        run,
    );
}

#[test]
fn a_guest_on_vp_vdpa_moves_to_and_fro_at_any_moment() {
    let moves = cycles().unwrap();
    let small = BellhopArguments::small().unwrap();
    to_and_fro([0, 1, 2], small, Run { first: 0, moves });
}

/// Both functions offer packed rings, and the guest negotiates them ([`PACKED`]).
#[test]
fn a_guest_with_packed_rings_moves_there_and_back() {
    let packed = [PACKED, PACKED + 1, 0];
    let small = BellhopArguments::small().unwrap();
    to_and_fro(packed, small, Run { first: 0, moves: 2 });
}

//! `bellhop probe` on a NIC without hardware: the kernel's VDUSE and the project's own device.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[path = "swnic/bridge.rs"]
mod bridge;
#[path = "rings_netdev/command.rs"]
mod command;

use std::sync::atomic::AtomicBool;

use bridge::Bridge;
use command::{json, outcome, rules};
use lab::swnic::Swnic;
use lab::threads::StopOnDrop;

const MAC: &str = "52:54:00:5e:56:01";
const OTHER: &str = "52:54:00:5e:56:02";

#[test]
fn a_nic_without_hardware_conforms_with_split_and_with_packed_rings() {
    let bridge = Bridge::add("lab-swbr");
    let on = |mac| ["--bridge", bridge.0, "--mac", mac];
    let peer = Swnic::start("lab-sw1", &on(OTHER)).unwrap();
    // The suite uses the first pair.
    for rings in [&["--split"][..], &["--queue-pairs", "2"]] {
        let nic = Swnic::start("lab-sw0", &[&on(MAC)[..], rings].concat()).unwrap();
        let report = json(nic.path(), &["--conformance"], 0);
        println!("{report:#}");
        assert_eq!(rules(&report, "fail"), Vec::<String>::new(), "{report:#}");

        let report = json(nic.path(), &[], 0);
        println!("{report:#}");
        let stop = AtomicBool::new(false);
        let before = nic.pair_times().unwrap();
        std::thread::scope(|threads| {
            threads.spawn(|| command::echo(peer.path(), &stop));
            // Also when there is no report: the scope waits for its threads.
            let _stop = StopOnDrop(&stop);
            let report = json(nic.path(), &["--peer", OTHER, "--seconds", "20"], 0);
            for (check, wanted) in [
                ("start", "ok"),
                ("traffic", "ok"),
                ("doorbell", "not_offered"),
                ("interrupt", "ok"),
                ("suspend", "not_offered"),
            ] {
                assert_eq!(outcome(&report, check), wanted, "{check}: {report:#}");
            }
        });
        // A pair that the driver does not use gets no frames.
        let times = nic.pair_times().unwrap();
        assert!(
            times[0] > before[0] && times[1..] == before[1..],
            "{times:?}"
        );
    }
}

//! The machine logs the simulator's writes, under a guest with its stock driver.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod logging;

use lab::sim::SimDevice;

use self::logging::{Flood, Machine, REBIND, lost_by_resets, rounds};

/// No zero bytes: the simulator compares addresses like C strings.
const MAC: &str = "52:54:5e:11:55:01";

#[test]
fn a_log_begins_and_ends_many_times_under_traffic() {
    let net = SimDevice::net("log", MAC, 1500).unwrap();
    let mut machine = Machine::start("log", net.path(), 1);
    let flood = Flood {
        // The simulator sends everything back.
        to: MAC,
        lost_by_log: 0,
        // The driver resets the device, or two rings.
        lost_between: lost_by_resets(2),
    };
    machine.log_under_traffic(rounds(), &flood, |round, machine| {
        match round % 4 {
            0 => machine.guest.command(REBIND),
            1 => machine.guest.command("rings 64 128"),
            2 => machine.guest.command("rings 256 256"),
            _ => machine.guest.command("promisc on"),
        }
        .unwrap();
        machine.relay_threads_are(1);
        // The simulator has no doorbells.
        assert_eq!(machine.doorbells(), 0);
    });
    machine.relay_threads_are(0);
    machine.end();
}

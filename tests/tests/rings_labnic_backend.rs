//! The machine logs the writes of a device with doorbells, several queues and EVENT_IDX, which
//! completes in its own time and order.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod logging;

use lab::labnic::{Labnic, set_link, trouble};

use self::logging::{Echo, Flood, Machine, REBIND, lost_by_resets, rounds};

const MACS: [&str; 2] = ["02:4c:61:62:55:71", "02:4c:61:62:55:72"];

fn logs(parameters: &[(&str, &str)], rounds: u32, processors: u32) {
    let labnic = Labnic::load(parameters).unwrap();
    let devices = [0, 1].map(|index| {
        let attributes = ["mac", MACS[index], "max_vqp", "2"];
        labnic.add(&format!("log{index}"), &attributes).unwrap()
    });
    let mut machine = Machine::start("log", devices[0].path(), processors);
    let peer = Echo::start(devices[1].path());
    let doorbells = machine.doorbells();
    let flood = Flood {
        to: MACS[1],
        // The device is suspended: it finishes what it has begun.
        lost_by_log: 0,
        // The driver resets the device, or two rings; or the link goes down.
        lost_between: lost_by_resets(2),
    };
    machine.log_under_traffic(rounds, &flood, |round, machine| {
        match round % 5 {
            0 => drop(machine.guest.command(REBIND).unwrap()),
            1 => drop(machine.guest.command("rings 64 128").unwrap()),
            2 => drop(machine.guest.command("rings 256 256").unwrap()),
            3 => {
                set_link(&devices[0], false).unwrap();
                set_link(&devices[0], true).unwrap();
            }
            _ => drop(machine.guest.command("promisc on").unwrap()),
        }
        machine.relay_threads_are(1);
        // Used-shadow queues keep their doorbells.
        assert_eq!(machine.doorbells(), doorbells, "round {round}");
    });
    machine.relay_threads_are(0);
    assert_eq!(machine.doorbells(), doorbells);
    machine.end();
    peer.end();
    drop(devices);
    assert_eq!(trouble().unwrap(), Vec::<String>::new());
}

#[test]
fn a_log_begins_and_ends_many_times_under_traffic() {
    logs(&[], rounds(), 2);
}

#[test]
fn a_device_that_completes_out_of_order_is_recorded() {
    let parameters = [
        ("completion", "out_of_order"),
        ("completion_ms", "2"),
        ("rx_prefetch", "6"),
    ];
    logs(&parameters, rounds(), 2);
}

//! The machine records what a device with doorbells, several queues and events by index
//! writes, which completes in its own time and order.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod logging;

use std::cell::RefCell;

use lab::guest::Guest;
use lab::labnic::{Labnic, set_link, trouble};
use lab::traffic::{Frames, exchange_between};

use self::logging::{Machine, REBIND, rounds};

const MACS: [&str; 2] = ["02:4c:61:62:55:71", "02:4c:61:62:55:72"];

fn logs(parameters: &[(&str, &str)], rounds: u32, processors: u32) {
    let labnic = Labnic::load(parameters).unwrap();
    let devices = [0, 1].map(|index| {
        let attributes = ["mac", MACS[index], "max_vqp", "2"];
        labnic.add(&format!("log{index}"), &attributes).unwrap()
    });
    let [mut machine, peer] = [0, 1].map(|index| {
        let name = format!("log{index}");
        Machine::start(&name, devices[index].path(), processors)
    });
    let doorbells = machine.doorbells();
    let peer = RefCell::new(peer);
    let traffic = |guest: &mut Guest| {
        let frames = Frames {
            count: 60,
            size: 590,
            window: 16,
        };
        let peer = &mut peer.borrow_mut().guest;
        exchange_between(guest, peer, MACS[1], frames).unwrap();
    };
    machine.log_under_traffic(rounds, traffic, |round, machine| {
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
        // Mediated queues keep their doorbells.
        assert_eq!(machine.doorbells(), doorbells, "round {round}");
    });
    machine.relay_threads_are(0);
    assert_eq!(machine.doorbells(), doorbells);
    machine.end();
    peer.into_inner().end();
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

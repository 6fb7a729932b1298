//! Two guests on the lab NIC: small frames, many of them, and jumbo frames.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

use lab::guest::{BellhopArguments, Guest};
use lab::labnic::{Labnic, counter, trouble};
use lab::sim::SimDevice;
use lab::traffic::{Frames, exchange_between};

const MACS: [&str; 2] = ["02:4c:61:62:53:71", "02:4c:61:62:53:72"];
/// Frames are 14 bytes longer.
const MTU: u64 = 9000;

fn start(device: &SimDevice, processors: u32) -> Guest {
    let arguments = BellhopArguments::small()
        .unwrap()
        .processors(processors)
        .memory("128M")
        .vdpa(device.path());
    Guest::start(&arguments).unwrap()
}

fn two_guests(parameters: &[(&str, &str)], processors: [u32; 2]) {
    let labnic = Labnic::load(parameters).unwrap();
    let mtu = MTU.to_string();
    let devices = [0, 1].map(|index| {
        let attributes = ["mac", MACS[index], "mtu", &mtu, "max_vqp", "4"];
        labnic.add(&format!("talk{index}"), &attributes).unwrap()
    });
    let mut guests = [0, 1].map(|index| start(&devices[index], processors[index]));
    for ((guest, mac), processors) in guests.iter().zip(MACS).zip(processors) {
        let ready = guest.ready();
        assert_eq!(ready["cpus_online"], processors);
        assert_eq!(ready["nics"][0]["mac"], mac);
        assert_eq!(ready["nics"][0]["mtu"], MTU);
        assert_eq!(ready["nics"][0]["tx_queues"], processors);
    }
    let [first, second] = &mut guests;
    let frames = |count, size, window| Frames {
        count,
        size,
        window,
    };
    exchange_between(first, second, MACS[1], frames(1000, 64, 32)).unwrap();
    exchange_between(second, first, MACS[0], frames(300, MTU + 14, 8)).unwrap();
    for device in &devices {
        assert_eq!(counter(device, "bad_doorbells").unwrap(), 0);
    }
    for guest in guests {
        assert!(guest.power_off().unwrap().success());
    }
    drop(devices);
    assert_eq!(trouble().unwrap(), Vec::<String>::new());
}

#[test]
fn guests_with_one_and_four_processors_talk() {
    two_guests(&[], [1, 4]);
}

#[test]
fn guests_with_two_processors_talk() {
    two_guests(&[], [2, 2]);
}

/// Completions arrive later and in another order than the buffers were offered.
#[test]
fn guests_talk_over_a_device_that_completes_out_of_order() {
    two_guests(
        &[("completion", "out_of_order"), ("completion_ms", "2")],
        [2, 2],
    );
}

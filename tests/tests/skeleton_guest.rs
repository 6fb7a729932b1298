//! A guest of Bellhop's with a vDPA NIC on the kernel's simulator.

use lab::guest::{BellhopArguments, Guest};
use lab::sim::SimDevice;
use std::time::Duration;

const MAC: &str = "02:00:5e:00:53:01";

/// Boots, checks what the guest sees, sends frames, compares with the device's
/// own count, and switches off.
fn boots_and_sends(arguments: BellhopArguments, processors: u32) {
    let net = SimDevice::net("guest", MAC, 1400).unwrap();
    let arguments = arguments.processors(processors).vdpa(net.path());
    let mut guest = Guest::start(&arguments).unwrap();
    let ready = guest.ready().clone();
    assert_eq!(ready["problems"], serde_json::json!([]));
    assert_eq!(ready["cpus_online"], processors);
    let nic = &ready["nics"][0];
    assert_eq!(nic["name"], "eth0");
    assert_eq!(nic["mac"], MAC);
    assert_eq!(nic["mtu"], 1400);
    assert_eq!(nic["driver"], "virtio_net");

    let frames = guest.command("frames 1000 256 32").unwrap();
    assert_eq!(frames["tx"], 1000, "{frames}");
    assert_eq!(frames["rx"], 1000, "{frames}");
    assert_eq!(frames["corrupt"], 0, "{frames}");
    assert_eq!(frames["duplicate"], 0, "{frames}");
    let receive = net.vstats(0).unwrap();
    let transmit = net.vstats(1).unwrap();
    // The kernel of the guest may send some of its own as well.
    for (statistics, name) in [(receive, "rx packets"), (transmit, "tx packets")] {
        let packets = statistics[name].as_u64();
        assert!(
            packets.is_some_and(|packets| packets >= 1000),
            "{statistics}"
        );
    }

    let status = guest.power_off().unwrap();
    assert!(status.success(), "{status}");
}

#[test]
fn the_small_kernel_sends_with_one_processor() {
    boots_and_sends(BellhopArguments::small().unwrap(), 1);
}

#[test]
fn the_small_kernel_sends_with_two_processors() {
    boots_and_sends(BellhopArguments::small().unwrap(), 2);
}

#[test]
fn the_small_kernel_sends_with_four_processors() {
    boots_and_sends(BellhopArguments::small().unwrap(), 4);
}

#[test]
fn the_stock_kernel_sends_with_one_processor() {
    boots_and_sends(BellhopArguments::stock().unwrap(), 1);
}

#[test]
fn the_stock_kernel_sends_with_two_processors() {
    boots_and_sends(BellhopArguments::stock().unwrap(), 2);
}

#[test]
fn a_driver_taken_off_and_back_goes_on() {
    let net = SimDevice::net("guest", MAC, 1500).unwrap();
    let mut guest = Guest::start(&BellhopArguments::small().unwrap().vdpa(net.path())).unwrap();
    let answer = guest
        .command_within("rebind 20", Duration::from_secs(120))
        .unwrap();
    assert_eq!(answer["rebinds"], 20);
    assert_eq!(answer["rx"], 200, "{answer}");
    guest.power_off().unwrap();
}

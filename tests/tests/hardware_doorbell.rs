//! Doorbells on a device without any: the simulator.

use lab::guest::{BellhopArguments, Guest};
use lab::sim::SimDevice;
use std::process::Stdio;

const MAC: &str = "02:00:5e:00:53:41";

fn arguments(device: &SimDevice, doorbell: &str) -> BellhopArguments {
    let options = format!("path={}{doorbell}", device.path().display());
    BellhopArguments::small()
        .unwrap()
        .argument("--vdpa", &options)
}

#[test]
fn a_forced_doorbell_is_refused_with_a_remedy() {
    let device = SimDevice::net("bell", MAC, 1500).unwrap();
    let output = arguments(&device, ",doorbell=on")
        .command()
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{message}");
    for words in [
        "queue 0 has no doorbell",
        "doorbell=auto",
        "page of its own",
    ] {
        assert!(message.contains(words), "no {words:?} in: {message}");
    }
}

/// One guest with one NIC for each value of the option, each on its own device.
#[test]
fn without_a_doorbell_eventfds_do_it_silently() {
    // No zero bytes: the simulator compares addresses like C strings.
    let devices = [1, 2, 3].map(|number| {
        let mac = format!("52:54:5e:11:5e:0{number}");
        SimDevice::net(&format!("bell{number}"), &mac, 1500).unwrap()
    });
    let ways = ["", ",doorbell=auto", ",doorbell=off"];
    let small = BellhopArguments::small().unwrap();
    let arguments = devices.iter().zip(ways).fold(small, |arguments, nic| {
        let (device, doorbell) = nic;
        let options = format!("path={}{doorbell}", device.path().display());
        arguments.argument("--vdpa", &options)
    });
    let mut guest = Guest::start(&arguments).unwrap();
    for nic in ["eth0", "eth1", "eth2"] {
        let frames = guest.command(&format!("frames 50 128 1 {nic}")).unwrap();
        assert_eq!(frames["rx"], 50, "{nic}: {frames}");
    }
    let said = guest.console();
    assert!(
        !said.contains("doorbell ") && !said.contains("WARN"),
        "{said}"
    );
    assert!(guest.power_off().unwrap().success());
}

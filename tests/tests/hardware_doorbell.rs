//! Doorbells where there are none: on the simulator.

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

#[test]
fn without_a_doorbell_eventfds_do_it_silently() {
    for doorbell in ["", ",doorbell=auto", ",doorbell=off"] {
        let device = SimDevice::net("bell", MAC, 1500).unwrap();
        let mut guest = Guest::start(&arguments(&device, doorbell)).unwrap();
        let frames = guest.command("frames 50 128 1").unwrap();
        assert_eq!(frames["rx"], 50, "{frames}");
        let said = guest.console();
        assert!(
            !said.contains("doorbell ") && !said.contains("WARN"),
            "{said}"
        );
        guest.power_off().unwrap();
    }
}

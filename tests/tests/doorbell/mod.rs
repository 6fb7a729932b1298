//! What holds for every device with doorbells, whichever rig it is on.

use lab::guest::{BellhopArguments, Guest};
use std::path::Path;
use std::time::Duration;

const SILENCE: Duration = Duration::from_secs(120);

pub(crate) fn start(device: &Path, doorbell: &str) -> Guest {
    let options = format!("path={},doorbell={doorbell}", device.display());
    let arguments = BellhopArguments::small()
        .unwrap()
        .cmdline("iomem=relaxed")
        .argument("--vdpa", &options);
    Guest::start(&arguments).unwrap()
}

/// Pages of vhost-vdpa devices that the VMM has mapped, all of them write-only.
pub(crate) fn pages(guest: &Guest) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", guest.pid())).unwrap();
    let pages: Vec<&str> = maps
        .lines()
        .filter(|line| line.contains("vhost-vdpa"))
        .collect();
    assert!(pages.iter().all(|line| line.contains(" -w-s ")), "{maps}");
    pages.len()
}

/// Sends frames, and makes sure that the device took them.
#[track_caller]
pub(crate) fn send(guest: &mut Guest, count: u64) {
    let sent = guest.command(&format!("pace {count} 128 1000")).unwrap();
    assert_eq!(sent["statistics"]["tx_packets"], count, "{sent}");
}

/// Driver taken off and back, reboots: the pages stay as they are, and work.
pub(crate) fn pages_serve_every_driver(device: &Path) {
    let mut guest = start(device, "on");
    let before = pages(&guest);
    assert!(before >= 2, "{before} pages");
    send(&mut guest, 20);
    for _ in 0..2 {
        guest.send("reboot").unwrap();
        guest.wait_ready(SILENCE).unwrap();
        send(&mut guest, 20);
        assert_eq!(pages(&guest), before);
    }
    assert!(!guest.console().contains("WARN"), "{}", guest.console());
    assert!(guest.power_off().unwrap().success());
    // Everything was let go: the device opens again, with no page at all.
    let mut guest = start(device, "off");
    assert_eq!(pages(&guest), 0);
    send(&mut guest, 20);
    assert!(guest.power_off().unwrap().success());
}

/// A guest that reads the page of its transmit queue before any store to it.
pub(crate) fn a_read_does_not_hurt(device: &Path) {
    let mut guest = start(device, "on");
    for _ in 0..2 {
        let read = guest.command("notify-read 1").unwrap();
        assert_eq!(read["value"], 0, "{read}");
    }
    let said = guest.console();
    assert_eq!(
        said.matches("the guest read a doorbell").count(),
        1,
        "{said}"
    );
    send(&mut guest, 50);
    // The machine's reset forgives.
    guest.send("reboot").unwrap();
    guest.wait_ready(SILENCE).unwrap();
    send(&mut guest, 50);
    assert!(guest.power_off().unwrap().success());
}

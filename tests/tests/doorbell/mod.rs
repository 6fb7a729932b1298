//! Checks for every device with doorbells, on either rig.

use lab::guest::{BellhopArguments, Guest};
use lab::kvm_events::AddressExits;
use lab::notice::{Kind, notice};
use serde_json::Value;
use std::path::Path;
use std::time::Duration;

const SILENCE: Duration = Duration::from_secs(120);

pub(crate) fn start(device: &Path, doorbell: &str) -> Guest {
    let options = format!("path={},doorbell={doorbell}", device.display());
    let arguments = BellhopArguments::small()
        .unwrap()
        .cmdline("iomem=relaxed")
        .memory("128M")
        .argument("--log-level", "info")
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

/// Sends frames and checks that the device took them.
#[track_caller]
pub(crate) fn send(guest: &mut Guest, count: u64) {
    let sent = guest.command(&format!("pace {count} 128 1000")).unwrap();
    assert_sent(&sent, count);
}

/// The driver counts a frame when it reclaims the buffer. It may reclaim the last one later.
#[track_caller]
fn assert_sent(sent: &Value, count: u64) {
    let counted = sent["statistics"]["tx_packets"].as_u64().unwrap();
    assert!((count - 1..=count).contains(&counted), "{sent}");
}

/// Frames whose exits are counted. The pause after each frame lets the device serve its kick, so
/// nearly each frame is a kick of its own.
const COUNTED: u64 = 200;
const PAUSE_US: u64 = 2000;

/// With fewer exits by eventfd, the test would not show what a doorbell saves. A device that is
/// late on a busy host serves two frames with one kick, so the limit is well below all frames.
const BY_EVENTFD_MIN: u64 = COUNTED / 2;
/// More exits than this with a doorbell are those of an eventfd.
const MAPPED_MAX: u64 = COUNTED / 20;

/// Exits to the NIC's notification addresses while the guest sends [`COUNTED`] frames.
#[track_caller]
fn kick_exits(guest: &mut Guest, exits: &AddressExits) -> u64 {
    let notify = guest.command("notify").unwrap();
    let number = |name: &str| notify[name].as_u64().unwrap();
    let before = exits.count().unwrap();
    exits
        .watch(&(number("address")..number("address") + number("length")))
        .unwrap();
    let line = format!("pace {COUNTED} 128 {PAUSE_US}");
    let sent = guest.command(&line).unwrap();
    assert_sent(&sent, COUNTED);
    exits.watch(&(0..0)).unwrap();
    exits.count().unwrap() - before
}

/// The pages stay mapped over reboots, and a kick through them costs no exit. A guest that reads
/// the page of its transmit queue before any store to it loses the doorbell until the next reset.
pub(crate) fn pages_save_exits_and_serve_every_driver(device: &Path) {
    // Tracepoints are switched while there is no guest.
    let exits = AddressExits::prepare().unwrap();
    let mut guest = start(device, "on");
    let before = pages(&guest);
    assert!(before >= 2, "{before} pages");
    for _ in 0..2 {
        let read = guest.command("notify-read 1").unwrap();
        assert_eq!(read["value"], 0, "{read}");
    }
    send(&mut guest, 50);

    // The machine's reset restores the doorbell.
    guest.send("reboot").unwrap();
    guest.wait_ready(SILENCE).unwrap();
    assert_eq!(pages(&guest), before);
    send(&mut guest, 20);
    let mapped = kick_exits(&mut guest, &exits);

    guest.send("reboot").unwrap();
    guest.wait_ready(SILENCE).unwrap();
    send(&mut guest, 50);
    assert_eq!(pages(&guest), before);
    let said = guest.console();
    let warnings: Vec<&str> = said.lines().filter(|line| line.contains("WARN")).collect();
    assert_eq!(warnings.len(), 1, "{said}");
    assert!(
        warnings[0].contains("the guest read a write-only doorbell"),
        "{warnings:?}"
    );
    assert!(guest.power_off().unwrap().success());

    // The VMM released everything: the device opens again, without any page.
    let mut guest = start(device, "off");
    assert_eq!(pages(&guest), 0);
    send(&mut guest, 20);
    let eventfd = kick_exits(&mut guest, &exits);
    notice(
        Kind::Figure,
        format!("kick exits of {COUNTED} frames: {eventfd} by eventfd, {mapped} with a doorbell"),
    );
    assert!(
        eventfd >= BY_EVENTFD_MIN && mapped <= MAPPED_MAX,
        "{eventfd} exits by eventfd, {mapped} with a doorbell"
    );
    assert!(guest.power_off().unwrap().success());
}

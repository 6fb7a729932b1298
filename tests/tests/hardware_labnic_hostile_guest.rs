//! A hostile guest without an operating system beside a guest with checked traffic, on one switch.
//!
//! ```text
//!   hostile guest                        victim <── numbered frames, each checked ──> peer
//!     configuration space, registers,      ^
//!     doorbells, MSI-X, rings: random      └── nothing lost, nothing in its kernel's log
//! ```
//! The hostile guest starts its devices, writes at random to all that reaches its VMM, the device
//! and the kernel, and starts again. Its own VMM may end only because its guest crashed.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod bare_metal;
mod labnic_peer;

use bare_metal::hostile::Hostile;
use bare_metal::{CTRL_VQ, VERSION_1};
use lab::endurance::soak;
use lab::guest::{BellhopArguments, Guest};
use lab::labnic::{Labnic, counter, trouble};
use lab::notice::{Kind, notice};
use lab::sim::SimDevice;
use labnic_peer::Peer;
use std::time::{Duration, Instant};

const HOSTILE: &str = "02:4c:61:62:53:66";
const VICTIM: &str = "02:4c:61:62:53:67";
const VICTIM_BYTES: [u8; 6] = [0x02, 0x4c, 0x61, 0x62, 0x53, 0x67];
/// How long the hostile guest may take until its first bad doorbell. Its VMM starts slowly beside a
/// guest with traffic: both are emulated twice.
const START_MAX: Duration = Duration::from_secs(120);
/// How long the victim's console may be silent while it boots.
const SILENCE: Duration = Duration::from_secs(120);

fn with_doorbell(device: &SimDevice) -> String {
    format!("path={},doorbell=on", device.path().display())
}

#[test]
fn a_hostile_guest_disturbs_no_other() {
    let labnic = Labnic::load(&[]).unwrap();
    let peer = Peer::start(&labnic);
    let hostile_device = labnic.add("hostile", &["mac", HOSTILE]).unwrap();
    let device = labnic.add("victim", &["mac", VICTIM]).unwrap();
    let arguments = BellhopArguments::small()
        .unwrap()
        .memory("128M")
        .silence(SILENCE)
        .argument("--vdpa", &with_doorbell(&device));
    let mut victim = Guest::start(&arguments).unwrap();
    peer.exchange(&mut victim, 300, 590);

    let length = if soak() {
        Duration::from_secs(120)
    } else {
        notice(Kind::Thinned, "a hostile guest: 15 of 120 seconds");
        Duration::from_secs(15)
    };
    let mut hostile = Hostile::start(
        with_doorbell(&hostile_device),
        VICTIM_BYTES,
        &[VERSION_1 | CTRL_VQ; 4],
    );
    let bad_doorbells = || counter(&hostile_device, "bad_doorbells").unwrap();
    let begin = Instant::now();
    let mut attacked = None;
    let mut frames = 0;
    while attacked.is_none_or(|since: Instant| since.elapsed() < length) {
        if attacked.is_none() {
            attacked = (bad_doorbells() > 0).then(Instant::now);
            let is_late = attacked.is_none() && begin.elapsed() > START_MAX;
            assert!(!is_late, "no bad doorbell yet: {}", hostile.said());
        }
        // Each frame returns once and whole, as without the other guest.
        peer.exchange(&mut victim, 200, 590);
        frames += 200;
        hostile.keep_running();
    }
    let text = hostile.said();
    let bad = bad_doorbells();
    println!(
        "{frames} frames; the hostile guest: {} crashes, {bad} bad doorbells, {} lines",
        hostile.crashes,
        text.lines().count()
    );
    // It reached the device and the VMM.
    assert!(text.contains("broke its queue"), "{text}");
    drop(hostile);
    assert_eq!(counter(&device, "bad_doorbells").unwrap(), 0);
    let log = victim.command("dmesg").unwrap();
    assert_eq!(log["errors"], 0, "{log}");
    peer.exchange(&mut victim, 300, 590);
    assert!(victim.power_off().unwrap().success());
    drop(peer);
    drop((hostile_device, device));
    assert_eq!(trouble().unwrap(), Vec::<String>::new());
}

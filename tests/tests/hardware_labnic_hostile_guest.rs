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

use bare_metal::{
    BAR, BARS, COMMAND, CTRL_VQ, DISK, ECAM, Files, MSIX_TABLE, NIC, NOTIFY, Program, RINGS,
    RINGS_SIZE, RNG, Ring, SCRATCH, VERSION_1, WINDOW_COUNT, Window, config,
};
use lab::endurance::soak;
use lab::guest::{BellhopArguments, CRASHED, Guest};
use lab::labnic::{Labnic, counter, trouble};
use lab::notice::{Kind, notice};
use lab::sim::SimDevice;
use lab::tiny::BASE;
use labnic_peer::Peer;
use std::process::Child;
use std::time::{Duration, Instant};

const HOSTILE: &str = "02:4c:61:62:53:66";
const VICTIM: &str = "02:4c:61:62:53:67";
const VICTIM_BYTES: [u8; 6] = [0x02, 0x4c, 0x61, 0x62, 0x53, 0x67];
/// How long the hostile guest may take until its first bad doorbell. Its VMM starts slowly beside a
/// guest with traffic: both are emulated twice.
const START_MAX: Duration = Duration::from_secs(120);
/// How long the victim's console may be silent while it boots.
const SILENCE: Duration = Duration::from_secs(120);
/// Random writes between two starts of a device.
const WRITES: u32 = 300;
/// Buffers of the hostile guest.
const BUFFERS: u32 = 0x30_0000;
const BUFFER: u32 = 2048;
/// Flags of a descriptor.
const NEXT: u32 = 1;
const WRITE: u32 = 2;

/// A ring as the driver initializes it: eight descriptors, all available.
fn restore(program: &mut Program, ring: Ring, flags: u32) {
    let at = |address: u64| u32::try_from(address).unwrap();
    for index in 0..8 {
        let descriptor = [BUFFERS + index * BUFFER, 0, BUFFER, flags];
        for (word, value) in (0..).zip(descriptor) {
            program.set(at(ring.descriptors) + 16 * index + 4 * word, value);
        }
    }
    program.set(at(ring.avail), 8 << 16);
    for pair in 0..4 {
        let heads = ((2 * pair + 1) << 16) | (2 * pair);
        program.set(at(ring.avail) + 4 + 4 * pair, heads);
    }
    program.set(at(ring.used), 0);
}

/// A frame to the victim in each buffer, after the virtio header.
fn write_frames(program: &mut Program) {
    let mut packet = vec![0; 12];
    packet.extend(VICTIM_BYTES);
    // The source is the address of no NIC. The victim's test ignores this EtherType, "local
    // experimental 2".
    packet.extend([2, 0, 0, 0, 0, 1, 0x88, 0xb6]);
    packet.resize(64, 0x66);
    for buffer in 0..8 {
        for (word, bytes) in (0..).zip(packet.chunks(4)) {
            let value = u32::from_le_bytes(bytes.try_into().unwrap());
            program.set(BUFFERS + buffer * BUFFER + 4 * word, value);
        }
    }
}

/// The distance of the BARs of the slots, which have at most 16 queues.
const NEXT_BAR: u32 = 0x2_0000;
/// The header of a function in configuration space, of the first four slots.
const HEADERS: u32 = 0x1_803f;

/// All that reaches the VMM, the device or the kernel. Rings are the most frequent.
fn windows() -> [Window; WINDOW_COUNT] {
    let [nic, disk, rng] = [0, 1, 2].map(|number| BARS + number * NEXT_BAR);
    let others = [
        // Registers.
        [nic, 0x3f],
        [nic, 0x3f],
        [disk, 0x3f],
        [rng, 0x3f],
        [nic + 0x2000, 0xff],
        // The first word of each doorbell, which the device reads, and all of them.
        [nic + NOTIFY, 0x3000],
        [nic + NOTIFY, 0x3000],
        [nic + NOTIFY, 0x3000],
        [nic + NOTIFY, 0x3fff],
        [disk + NOTIFY, 0],
        [rng + NOTIFY, 0],
        // Interrupt vectors.
        [nic + MSIX_TABLE, 0xff],
        [disk + MSIX_TABLE, 0xff],
        // BARs of all devices, and the space between them.
        [BARS, 0x1f_ffff],
        [BARS, 0x1f_ffff],
        [ECAM, HEADERS],
        [ECAM, 0x1_ffff],
        [ECAM, 0xf_ffff],
        // Interrupt controllers, and holes.
        [0xfec0_0000, 0xfff],
        [0xd000_0000, 0xffff],
    ];
    let mut windows = [[BASE + RINGS, RINGS_SIZE - 1]; WINDOW_COUNT];
    windows[..others.len()].copy_from_slice(&others);
    windows
}

fn attack(seed: u32) -> Vec<u8> {
    let mut program = Program::default();
    let slots = [NIC, DISK, RNG];
    let saved = |slot: u32| SCRATCH + 16 * slot;
    for slot in slots {
        for word in [0, 4] {
            program.copy(saved(slot) + word, config(slot, BAR + word));
        }
    }
    let again = program.address();
    let [receive, transmit, control, other] = [0, 1, 2, 3].map(Ring::number);
    let start = |program: &mut Program, slot: u32, features: u64, queues: &[(u32, Ring, u32)]| {
        for slot in slots {
            for word in [0, 4] {
                program.copy(config(slot, BAR + word), saved(slot) + word);
            }
            program.set(config(slot, COMMAND), 6);
        }
        program.negotiate(slot, features);
        for (index, ring, flags) in queues {
            restore(program, *ring, *flags);
            program.queue(slot, *index, *ring);
        }
        program.run(slot, queues[queues.len() - 1].0);
    };
    write_frames(&mut program);
    for _ in 0..4 {
        let queues = [(0, receive, WRITE), (2, control, 0), (1, transmit, 0)];
        start(&mut program, NIC, VERSION_1 | CTRL_VQ, &queues);
        program.write_at_random(WRITES);
    }
    // Chains that loop, and buffers for random numbers.
    start(&mut program, DISK, VERSION_1, &[(0, other, NEXT)]);
    program.write_at_random(WRITES);
    start(&mut program, RNG, VERSION_1, &[(0, other, WRITE)]);
    program.write_at_random(WRITES);
    program.continue_at(again);
    program.kernel(&[], seed, &windows())
}

/// The VMM of the hostile guest.
struct Hostile<'a> {
    device: &'a SimDevice,
    files: Files,
    child: Child,
    crashes: u32,
}

impl<'a> Hostile<'a> {
    fn start(device: &'a SimDevice, seed: u32) -> Self {
        let files = Files::new("hostile-guest", &attack(seed));
        Self {
            child: files.spawn(&with_doorbell(device)),
            device,
            files,
            crashes: 0,
        }
    }

    /// Restarts a guest that has crashed. Any other end is a fault of the VMM.
    fn keep_running(&mut self) {
        let Some(status) = self.child.try_wait().unwrap() else {
            return;
        };
        let said = || self.files.said();
        assert_eq!(status.code(), Some(CRASHED), "{status}\n{}", said());
        self.crashes += 1;
        self.child = self.files.spawn(&with_doorbell(self.device));
    }
}

impl Drop for Hostile<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

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

    let seed = std::process::id();
    println!("seed {seed}");
    let length = if soak() {
        Duration::from_secs(120)
    } else {
        notice(Kind::Thinned, "a hostile guest: 15 of 120 seconds");
        Duration::from_secs(15)
    };
    let mut hostile = Hostile::start(&hostile_device, seed);
    let bad_doorbells = || counter(&hostile_device, "bad_doorbells").unwrap();
    let begin = Instant::now();
    let mut attacked = None;
    let mut frames = 0;
    while attacked.is_none_or(|since: Instant| since.elapsed() < length) {
        if attacked.is_none() {
            attacked = (bad_doorbells() > 0).then(Instant::now);
            let is_late = attacked.is_none() && begin.elapsed() > START_MAX;
            assert!(!is_late, "no bad doorbell yet: {}", hostile.files.said());
        }
        // Each frame returns once and whole, as without the other guest.
        peer.exchange(&mut victim, 200, 590);
        frames += 200;
        hostile.keep_running();
    }
    let text = hostile.files.said();
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

//! A guest that starts its devices, writes at random to all that reaches its VMM, the device and
//! the kernel, and starts again.

use std::process::Child;

use lab::guest::CRASHED;
use lab::tiny::BASE;

use super::{
    BAR, BARS, COMMAND, CTRL_VQ, DISK, ECAM, Files, MSIX_TABLE, NIC, NOTIFY, Program, RING_PACKED,
    RINGS, RINGS_SIZE, RNG, Ring, SCRATCH, VERSION_1, WINDOW_COUNT, Window, config,
};

/// Random writes between two starts of a device.
const WRITES: u32 = 300;
/// Buffers of the hostile guest.
const BUFFERS: u32 = 0x30_0000;
const BUFFER: u32 = 2048;
/// Flags of a descriptor.
const NEXT: u32 = 1;
const WRITE: u32 = 2;
const AVAILABLE: u32 = 1 << 7;

/// A ring as the driver initializes it: eight descriptors, all available.
fn restore(program: &mut Program, ring: Ring, flags: u32, packed: bool) {
    let at = |address: u64| u32::try_from(address).unwrap();
    for index in 0..8 {
        let flags = if packed {
            index | (flags | AVAILABLE) << 16
        } else {
            flags
        };
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
fn write_frames(program: &mut Program, victim: [u8; 6]) {
    let mut packet = vec![0; 12];
    packet.extend(victim);
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

/// Starts the NIC with each of these features, one after the other, then the other devices.
fn attack(seed: u32, victim: [u8; 6], features: &[u64]) -> Vec<u8> {
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
            restore(program, *ring, *flags, features & RING_PACKED != 0);
            program.queue(slot, *index, *ring);
        }
        program.run(slot, queues[queues.len() - 1].0);
    };
    write_frames(&mut program, victim);
    for &features in features {
        let queues = [(2, control, 0), (0, receive, WRITE), (1, transmit, 0)];
        let without_control = usize::from(features & CTRL_VQ == 0);
        start(&mut program, NIC, features, &queues[without_control..]);
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
pub(crate) struct Hostile {
    /// The options of its NIC.
    nic: String,
    files: Files,
    child: Child,
    pub(crate) crashes: u32,
}

impl Hostile {
    /// It sends frames to `victim`, and negotiates each of `features` in turn.
    pub(crate) fn start(nic: String, victim: [u8; 6], features: &[u64]) -> Self {
        let seed = std::process::id();
        println!("seed {seed}");
        let files = Files::new("hostile-guest", &attack(seed, victim, features));
        Self {
            child: files.spawn(&nic),
            nic,
            files,
            crashes: 0,
        }
    }

    /// Restarts a guest that has crashed. Any other end is a fault of the VMM.
    pub(crate) fn keep_running(&mut self) {
        let Some(status) = self.child.try_wait().unwrap() else {
            return;
        };
        assert_eq!(status.code(), Some(CRASHED), "{status}\n{}", self.said());
        self.crashes += 1;
        self.child = self.files.spawn(&self.nic);
    }

    /// What its VMM has logged.
    pub(crate) fn said(&self) -> String {
        self.files.said()
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

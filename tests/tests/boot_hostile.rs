//! A hostile guest without an operating system. It programs its devices in every wrong way that its
//! VMM logs, as fast as it can. The VMM's log stays small.
//!
//! The guest's program is a table of copies of 32 bits, which a few instructions interpret. It
//! reaches the registers of virtio functions by their capability for access through configuration
//! space (virtio 1.3, 4.1.4.9), so it needs no page tables.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

use lab::guest::BellhopArguments;
use lab::sim::SimDevice;
use lab::temp_path::TempPath;
use lab::tiny::{BASE, kernel_of};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File};
use std::process::Stdio;
use std::thread::sleep;
use std::time::Duration;

const MAC: &str = "02:00:5e:00:53:31";
const ATTACK: Duration = Duration::from_secs(10);
const LOG_MAX: u64 = 1 << 20;

/// Configuration space in memory.
const ECAM: u32 = 0xe000_0000;
/// The slots: a NIC, a disk, and the random number generator of every machine.
const NIC: u32 = 1;
const DISK: u32 = 2;
const RNG: u32 = 3;
const COMMAND: u32 = 0x04;
const BAR: u32 = 0x10;

// Common configuration (virtio 1.3, 4.1.4.3).
const DRIVER_FEATURE_SELECT: u32 = 0x08;
const DRIVER_FEATURE: u32 = 0x0c;
const DEVICE_STATUS: u32 = 0x14;
const QUEUE_SELECT: u32 = 0x16;
const QUEUE_SIZE: u32 = 0x18;
const QUEUE_ENABLE: u32 = 0x1c;
const QUEUE_ADDRESSES: u32 = 0x20;
// Other parts of the BAR.
const MSIX_TABLE: u32 = 0x8000;
const NOTIFY: u32 = 0x1_0000;
const PAGE: u32 = 4096;

/// VIRTIO_F_VERSION_1 and VIRTIO_NET_F_CTRL_VQ.
const VERSION_1: u64 = 1 << 32;
const CTRL_VQ: u64 = 1 << 17;

/// Copies words from the table at `BASE + TABLE`. An entry is destination and source; with the
/// destination 0, the source is the address of the next entry.
const INTERPRETER: [u8; 27] = [
    0xbe, 0x20, 0x00, 0x10, 0x00, // mov esi, BASE + TABLE
    0x8b, 0x3e, // next: mov edi, [esi]
    0x8b, 0x5e, 0x04, // mov ebx, [esi + 4]
    0x83, 0xc6, 0x08, // add esi, 8
    0x85, 0xff, // test edi, edi
    0x74, 0x06, // jz jump
    0x8b, 0x03, // mov eax, [ebx]
    0x89, 0x07, // mov [edi], eax
    0xeb, 0xee, // jmp next
    0x89, 0xde, // jump: mov esi, ebx
    0xeb, 0xea, // jmp next
];
const TABLE: u32 = 0x20;
/// Constants that the table copies, and rings; offsets from `BASE`.
const DATA: u32 = 0x8000;
const RINGS: u32 = 0xc000;
/// Memory behind the kernel's file.
const SCRATCH: u32 = 0x20_0000;

/// Where the parts of one ring lie.
#[derive(Clone, Copy)]
struct Ring {
    descriptors: u64,
    avail: u64,
    used: u64,
}

impl Ring {
    /// A ring in the kernel's file.
    fn number(number: u32) -> Self {
        let at = u64::from(BASE + RINGS + number * 0x400);
        Self {
            descriptors: at,
            avail: at + 0x100,
            used: at + 0x200,
        }
    }
}

/// The guest's program, as it grows.
struct Program {
    table: Vec<[u32; 2]>,
    constants: Vec<u32>,
}

impl Program {
    fn copy(&mut self, to: u32, from: u32) {
        self.table.push([to, from]);
    }

    fn address(&self) -> u32 {
        BASE + TABLE + 8 * u32::try_from(self.table.len()).unwrap()
    }

    fn set(&mut self, to: u32, value: u32) {
        let known = self.constants.iter().position(|known| *known == value);
        let index = known.unwrap_or_else(|| {
            self.constants.push(value);
            self.constants.len() - 1
        });
        self.copy(to, BASE + DATA + 4 * u32::try_from(index).unwrap());
    }

    /// Writes a register of a virtio function.
    fn write(&mut self, slot: u32, register: u32, len: u32, value: u32) {
        let capability = config(slot, if slot == RNG { 0x74 } else { 0x84 });
        self.set(capability + 8, register);
        self.set(capability + 12, len);
        self.set(capability + 16, value);
    }

    /// Resets a device and requests FEATURES_OK.
    fn negotiate(&mut self, slot: u32, features: u64) {
        for status in [0, 1, 3] {
            self.write(slot, DEVICE_STATUS, 1, status);
        }
        for (half, bits) in (0..).zip(halves(features)) {
            self.write(slot, DRIVER_FEATURE_SELECT, 4, half);
            self.write(slot, DRIVER_FEATURE, 4, bits);
        }
        self.write(slot, DEVICE_STATUS, 1, 0xb);
    }

    fn queue(&mut self, slot: u32, index: u32, ring: Ring) {
        self.write(slot, QUEUE_SELECT, 2, index);
        self.write(slot, QUEUE_SIZE, 2, 8);
        let mut register = QUEUE_ADDRESSES;
        for address in [ring.descriptors, ring.avail, ring.used] {
            for half in halves(address) {
                self.write(slot, register, 4, half);
                register += 4;
            }
        }
        self.write(slot, QUEUE_ENABLE, 2, 1);
    }

    /// DRIVER_OK, and a kick that the VMM gets some time to serve.
    fn run(&mut self, slot: u32, kicked: u32) {
        self.write(slot, DEVICE_STATUS, 1, 0xf);
        self.write(slot, NOTIFY + kicked * PAGE, 2, kicked);
        for _ in 0..20 {
            self.copy(SCRATCH, config(slot, 0));
        }
    }

    /// The kernel with this program and `rings`.
    fn kernel(&self, rings: &[(u64, Vec<u32>)]) -> Vec<u8> {
        let mut code = INTERPRETER.to_vec();
        let mut put = |at: u32, words: &mut dyn Iterator<Item = u32>| {
            let at = usize::try_from(at).unwrap();
            assert!(code.len() <= at, "the parts overlap");
            code.resize(at, 0);
            words.for_each(|word| code.extend(word.to_le_bytes()));
        };
        put(TABLE, &mut self.table.iter().flatten().copied());
        put(DATA, &mut self.constants.iter().copied());
        for (address, words) in rings {
            let at = u32::try_from(*address).unwrap() - BASE;
            put(at, &mut words.iter().copied());
        }
        code.resize(usize::try_from(RINGS + 0x1000).unwrap(), 0);
        kernel_of(&code)
    }
}

fn halves(value: u64) -> [u32; 2] {
    [value & 0xffff_ffff, value >> 32].map(|half| u32::try_from(half).unwrap())
}

fn config(slot: u32, register: u32) -> u32 {
    ECAM + (slot << 15) + register
}

/// Everything at once, for ever.
fn attack() -> Vec<u8> {
    let mut program = Program {
        table: Vec::new(),
        constants: Vec::new(),
    };
    let slots = [NIC, DISK, RNG];
    for slot in slots {
        program.copy(SCRATCH + 4 * slot, config(slot, BAR));
        program.set(config(slot, COMMAND), 6);
    }
    let again = program.address();
    // BARs over each other, at one address after the other. One exit of the guest causes a line.
    for _ in 0..200 {
        for over in [DISK, RNG] {
            program.copy(config(NIC, BAR), SCRATCH + 4 * over);
        }
    }
    for over in [DISK, NIC] {
        program.copy(config(RNG, BAR), SCRATCH + 4 * over);
    }
    for slot in slots {
        program.copy(config(slot, BAR), SCRATCH + 4 * slot);
    }
    // Features that were not offered; no VERSION_1.
    for slot in slots {
        program.negotiate(slot, u64::MAX);
        program.negotiate(slot, 0);
    }
    // Rings outside guest memory.
    let outside = Ring {
        descriptors: 0x7000_0000_0000,
        avail: 0x7000_0000_1000,
        used: 0x7000_0000_2000,
    };
    for slot in slots {
        program.negotiate(slot, VERSION_1);
        program.queue(slot, 0, outside);
        program.run(slot, 0);
    }
    // An avail index that is too far ahead; a chain that loops.
    let [ahead, looping, empty] = [0, 1, 2].map(Ring::number);
    for (slot, ring) in [(RNG, ahead), (DISK, looping), (DISK, ahead), (RNG, looping)] {
        program.negotiate(slot, VERSION_1);
        program.queue(slot, 0, ring);
        program.run(slot, 0);
    }
    // The control queue, which the VMM serves.
    program.negotiate(NIC, VERSION_1 | CTRL_VQ);
    for (index, ring) in [(0, empty), (1, empty), (2, ahead)] {
        program.queue(NIC, index, ring);
    }
    program.run(NIC, 2);
    // Interrupts to anywhere.
    for slot in slots {
        for (word, value) in [(0, u32::MAX), (1, u32::MAX), (2, u32::MAX), (3, 0), (3, 1)] {
            program.write(slot, MSIX_TABLE + 4 * word, 4, value);
        }
    }
    program.copy(0, again);
    // `flags` and `idx`, then the head of the chain; a descriptor of 16 bytes that continues at
    // itself.
    program.kernel(&[
        (ahead.avail, vec![0x4000_0000]),
        (looping.descriptors, vec![BASE, 0, 16, 1]),
        (looping.avail, vec![1 << 16, 0]),
    ])
}

#[test]
fn a_guest_does_not_fill_the_log() {
    let net = SimDevice::net("hostile", MAC, 1500).unwrap();
    let kernel = TempPath::new("hostile-kernel");
    let disk = TempPath::new("hostile-disk");
    let log = TempPath::new("hostile-log");
    fs::write(kernel.path(), attack()).unwrap();
    File::create(disk.path()).unwrap().set_len(1 << 20).unwrap();
    let mut child = BellhopArguments::small()
        .unwrap()
        .kernel(kernel.path())
        .vdpa(net.path())
        .disk(disk.path())
        .argument("--log-file", log.text())
        .command()
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    sleep(ATTACK);
    assert_eq!(child.try_wait().unwrap(), None, "the VMM has ended");
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(128 + Signal::TERM.as_raw()));

    let text = fs::read_to_string(log.path()).unwrap();
    let lines = |what: &str| text.lines().filter(|line| line.contains(what)).count();
    let size = fs::metadata(log.path()).unwrap().len();
    println!("{size} bytes, {} lines", text.lines().count());
    for what in [
        "the guest put a BAR over another device",
        "the device cannot start",
        "device needs reset",
        "the driver of virtio-rng broke its queue",
        "the driver of virtio-blk broke its queue",
        "the control queue is broken",
    ] {
        println!("{}: {what}", lines(what));
        assert!(lines(what) > 0, "no {what:?} in: {text}");
    }
    assert!(lines("lines suppressed") > 0, "{text}");
    assert!(size < LOG_MAX, "{size}");
}

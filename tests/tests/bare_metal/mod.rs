//! A guest without an operating system, for attacks on its VMM.
//!
//! ```text
//!   table:  copy 32 bits | write at random, COUNT times | continue at another entry
//!                               │
//!                               └─> one of 32 windows: an address and a mask
//! ```
//! The guest's program is that table, which a few instructions interpret. It programs virtio
//! functions by their capability for access through configuration space (virtio 1.3, 4.1.4.9). Its
//! page tables map the first 4 GiB to themselves, except for [`BARS`].

#[allow(dead_code, reason = "not every test has a second guest")]
pub(crate) mod hostile;

use lab::guest::BellhopArguments;
use lab::temp_path::TempPath;
use lab::tiny::{BASE, kernel_of};
use std::fs::{self, File};
use std::process::{Child, Stdio};

/// Configuration space in memory.
pub(crate) const ECAM: u32 = 0xe000_0000;
/// The 2 MiB of the first slot's BAR, in which all BARs lie until the guest moves them.
pub(crate) const BARS: u32 = 0x8000_0000;
/// The slots: a NIC, a disk, and the random number generator of every machine.
pub(crate) const NIC: u32 = 1;
pub(crate) const DISK: u32 = 2;
pub(crate) const RNG: u32 = 3;
pub(crate) const COMMAND: u32 = 0x04;
pub(crate) const BAR: u32 = 0x10;

// Common configuration (virtio 1.3, 4.1.4.3).
const DRIVER_FEATURE_SELECT: u32 = 0x08;
const DRIVER_FEATURE: u32 = 0x0c;
const DEVICE_STATUS: u32 = 0x14;
const QUEUE_SELECT: u32 = 0x16;
const QUEUE_SIZE: u32 = 0x18;
const QUEUE_ENABLE: u32 = 0x1c;
const QUEUE_ADDRESSES: u32 = 0x20;
// Other parts of the BAR.
pub(crate) const MSIX_TABLE: u32 = 0x8000;
pub(crate) const NOTIFY: u32 = 0x1_0000;
pub(crate) const PAGE: u32 = 4096;

/// VIRTIO_F_VERSION_1 and VIRTIO_NET_F_CTRL_VQ.
pub(crate) const VERSION_1: u64 = 1 << 32;
pub(crate) const CTRL_VQ: u64 = 1 << 17;
pub(crate) const RING_PACKED: u64 = 1 << 34;
#[allow(dead_code, reason = "the lab NIC's rings are split ones")]
pub(crate) const INDIRECT_AND_EVENT_IDX: u64 = 1 << 28 | 1 << 29;

/// Enables the page tables, then interprets the table at `BASE + TABLE`. An entry is destination
/// and source. With the destination 0, the source is the address of the next entry; with 1, the
/// number of random writes.
const CODE: [u8; 182] = [
    0xbd, 0x01, 0x00, 0x00, 0x00, // mov ebp, 1: replaced by the seed
    0xa1, 0x10, 0x80, 0x00, 0xe0, // mov eax, [ECAM + (NIC << 15) + BAR]
    0x25, 0x00, 0x00, 0xe0, 0xff, // and eax, 0xffe00000
    0x0d, 0x83, 0x00, 0x00, 0x00, // or eax, 0x83: present, writable, 2 MiB
    0xa3, 0x00, 0x30, 0x11, 0x00, // mov [the entry for BARS], eax
    0xa1, 0x14, 0x80, 0x00, 0xe0, // mov eax, [ECAM + (NIC << 15) + BAR + 4]
    0xa3, 0x04, 0x30, 0x11, 0x00, // mov [the entry for BARS + 4], eax
    0xb8, 0x00, 0x00, 0x11, 0x00, // mov eax, BASE + PAGE_TABLES
    0x0f, 0x22, 0xd8, // mov cr3, eax
    0x0f, 0x20, 0xe0, // mov eax, cr4
    0x83, 0xc8, 0x20, // or eax, PAE
    0x0f, 0x22, 0xe0, // mov cr4, eax
    0x0f, 0x20, 0xc0, // mov eax, cr0
    0x0d, 0x00, 0x00, 0x00, 0x80, // or eax, PG
    0x0f, 0x22, 0xc0, // mov cr0, eax
    0xbe, 0x00, 0x01, 0x10, 0x00, // mov esi, BASE + TABLE
    0x8b, 0x3e, // next: mov edi, [esi]
    0x8b, 0x5e, 0x04, // mov ebx, [esi + 4]
    0x83, 0xc6, 0x08, // add esi, 8
    0x83, 0xff, 0x01, // cmp edi, 1
    0x72, 0x08, // jb jump
    0x74, 0x0a, // je burst
    0x8b, 0x03, // mov eax, [ebx]
    0x89, 0x07, // mov [edi], eax
    0xeb, 0xeb, // jmp next
    0x89, 0xde, // jump: mov esi, ebx
    0xeb, 0xe7, // jmp next
    0x89, 0xe8, // burst: mov eax, ebp: xorshift32 (Marsaglia 2003)
    0xc1, 0xe0, 0x0d, // shl eax, 13
    0x31, 0xc5, // xor ebp, eax
    0x89, 0xe8, // mov eax, ebp
    0xc1, 0xe8, 0x11, // shr eax, 17
    0x31, 0xc5, // xor ebp, eax
    0x89, 0xe8, // mov eax, ebp
    0xc1, 0xe0, 0x05, // shl eax, 5
    0x31, 0xc5, // xor ebp, eax
    0x89, 0xe9, // mov ecx, ebp
    0xc1, 0xe9, 0x1b, // shr ecx, 27
    0x8b, 0x3c, 0xcd, 0x04, 0xb0, 0x10, 0x00, // mov edi, [BASE + WINDOWS + 8 * ecx + 4]
    0x21, 0xef, // and edi, ebp
    0x03, 0x3c, 0xcd, 0x00, 0xb0, 0x10, 0x00, // add edi, [BASE + WINDOWS + 8 * ecx]
    0x69, 0xd5, 0xb1, 0x79, 0x37, 0x9e, // imul edx, ebp, 0x9e3779b1
    0x89, 0xd0, // mov eax, edx
    0xc1, 0xc8, 0x08, // ror eax, 8
    0xf6, 0xc2, 0x04, // test dl, 4
    0x74, 0x05, // jz +5
    0x25, 0xff, 0x7f, 0x00, 0x00, // and eax, 0x7fff: small numbers are valid more often
    0xf6, 0xc2, 0x02, // test dl, 2
    0x74, 0x0e, // jz four
    0xf6, 0xc2, 0x01, // test dl, 1
    0x74, 0x04, // jz two
    0x88, 0x07, // mov [edi], al
    0xeb, 0x07, // jmp done
    0x66, 0x89, 0x07, // two: mov [edi], ax
    0xeb, 0x02, // jmp done
    0x89, 0x07, // four: mov [edi], eax
    0x4b, // done: dec ebx
    0x75, 0xa9, // jnz burst
    0xeb, 0x8e, // jmp next
];
/// The destinations of entries that are no copies.
const CONTINUE: u32 = 0;
const AT_RANDOM: u32 = 1;
/// Offsets from `BASE`; [`CODE`] has those of the table, the windows and the page tables.
const TABLE: u32 = 0x100;
/// Constants that the table copies.
const DATA: u32 = 0x8000;
const WINDOWS: u32 = 0xb000;
pub(crate) const RINGS: u32 = 0xc000;
/// Bytes of all rings.
pub(crate) const RINGS_SIZE: u32 = 0x1000;
const PAGE_TABLES: u32 = 0x1_0000;
/// Present, writable, 2 MiB.
const PAGE_ENTRY: u32 = 0x83;
/// Memory behind the kernel's file.
pub(crate) const SCRATCH: u32 = 0x20_0000;

/// How many windows there are for writes at random.
pub(crate) const WINDOW_COUNT: usize = 32;

/// Addresses for writes at random: the first, and a mask of the offset.
pub(crate) type Window = [u32; 2];

/// Where the parts of one ring lie.
#[derive(Clone, Copy)]
pub(crate) struct Ring {
    pub(crate) descriptors: u64,
    pub(crate) avail: u64,
    pub(crate) used: u64,
}

impl Ring {
    /// A ring in the kernel's file, one of four.
    pub(crate) fn number(number: u32) -> Self {
        let at = u64::from(BASE + RINGS + number * 0x400);
        Self {
            descriptors: at,
            avail: at + 0x100,
            used: at + 0x200,
        }
    }
}

/// The guest's program, as it grows.
#[derive(Default)]
pub(crate) struct Program {
    table: Vec<[u32; 2]>,
    constants: Vec<u32>,
}

impl Program {
    pub(crate) fn copy(&mut self, to: u32, from: u32) {
        self.table.push([to, from]);
    }

    /// Where the next entry is.
    pub(crate) fn address(&self) -> u32 {
        BASE + TABLE + 8 * u32::try_from(self.table.len()).unwrap()
    }

    pub(crate) fn continue_at(&mut self, address: u32) {
        self.table.push([CONTINUE, address]);
    }

    /// Writes random values of 1, 2 and 4 bytes to random windows.
    pub(crate) fn write_at_random(&mut self, times: u32) {
        self.table.push([AT_RANDOM, times]);
    }

    pub(crate) fn set(&mut self, to: u32, value: u32) {
        let known = self.constants.iter().position(|known| *known == value);
        let index = known.unwrap_or_else(|| {
            self.constants.push(value);
            self.constants.len() - 1
        });
        self.copy(to, BASE + DATA + 4 * u32::try_from(index).unwrap());
    }

    /// Writes a register of a virtio function.
    pub(crate) fn write(&mut self, slot: u32, register: u32, len: u32, value: u32) {
        let capability = config(slot, if slot == RNG { 0x74 } else { 0x84 });
        self.set(capability + 8, register);
        self.set(capability + 12, len);
        self.set(capability + 16, value);
    }

    /// Resets a device and requests FEATURES_OK.
    pub(crate) fn negotiate(&mut self, slot: u32, features: u64) {
        for status in [0, 1, 3] {
            self.write(slot, DEVICE_STATUS, 1, status);
        }
        for (half, bits) in (0..).zip(halves(features)) {
            self.write(slot, DRIVER_FEATURE_SELECT, 4, half);
            self.write(slot, DRIVER_FEATURE, 4, bits);
        }
        self.write(slot, DEVICE_STATUS, 1, 0xb);
    }

    pub(crate) fn queue(&mut self, slot: u32, index: u32, ring: Ring) {
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
    pub(crate) fn run(&mut self, slot: u32, kicked: u32) {
        self.write(slot, DEVICE_STATUS, 1, 0xf);
        self.write(slot, NOTIFY + kicked * PAGE, 2, kicked);
        for _ in 0..20 {
            self.copy(SCRATCH, config(slot, 0));
        }
    }

    /// The kernel with this program and `rings`. `seed` and `windows` are for random writes.
    pub(crate) fn kernel(
        &self,
        rings: &[(u64, Vec<u32>)],
        seed: u32,
        windows: &[Window; WINDOW_COUNT],
    ) -> Vec<u8> {
        let mut code = CODE.to_vec();
        code[1..5].copy_from_slice(&seed.max(1).to_le_bytes());
        let mut put = |at: u32, words: &mut dyn Iterator<Item = u32>| {
            let at = usize::try_from(at).unwrap();
            assert!(code.len() <= at, "the parts overlap");
            code.resize(at, 0);
            words.for_each(|word| code.extend(word.to_le_bytes()));
        };
        put(TABLE, &mut self.table.iter().flatten().copied());
        put(DATA, &mut self.constants.iter().copied());
        put(WINDOWS, &mut windows.iter().flatten().copied());
        for (address, words) in rings {
            let at = u32::try_from(*address).unwrap() - BASE;
            put(at, &mut words.iter().copied());
        }
        let directories = (1..=4).flat_map(|page| [BASE + PAGE_TABLES + page * PAGE + 1, 0]);
        put(PAGE_TABLES, &mut directories.into_iter());
        let pages = (0..2048).flat_map(|page| [page << 21 | PAGE_ENTRY, 0]);
        put(PAGE_TABLES + PAGE, &mut pages.into_iter());
        kernel_of(&code)
    }
}

pub(crate) fn halves(value: u64) -> [u32; 2] {
    [value & 0xffff_ffff, value >> 32].map(|half| u32::try_from(half).unwrap())
}

pub(crate) fn config(slot: u32, register: u32) -> u32 {
    ECAM + (slot << 15) + register
}

/// The files of a VMM whose guest is such a program.
pub(crate) struct Files {
    kernel: TempPath,
    disk: TempPath,
    log: TempPath,
}

impl Files {
    pub(crate) fn new(name: &str, kernel: &[u8]) -> Self {
        let path = |file: &str| TempPath::new(&format!("{name}-{file}"));
        let files = Self {
            kernel: path("kernel"),
            disk: path("disk"),
            log: path("log"),
        };
        fs::write(files.kernel.path(), kernel).unwrap();
        let disk = File::create(files.disk.path()).unwrap();
        disk.set_len(1 << 20).unwrap();
        files
    }

    /// Starts a VMM with this NIC and a disk. It reads no input and writes to its log only.
    pub(crate) fn spawn(&self, nic: &str) -> Child {
        BellhopArguments::small()
            .unwrap()
            .kernel(self.kernel.path())
            .argument("--vdpa", nic)
            .disk(self.disk.path())
            .argument("--log-file", self.log.text())
            .command()
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    }

    /// What the VMM has logged.
    pub(crate) fn said(&self) -> String {
        fs::read_to_string(self.log.path()).unwrap()
    }
}

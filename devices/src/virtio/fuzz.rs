//! The rings of the emulated devices against a hostile driver: for the fuzz target `rings`, and for
//! the tests below, which need no fuzzer.
//!
//! The first byte selects the device (rng or block), the ring format, event index, and whether the
//! device is behind an IOMMU, in bypass. Then follow the driver's steps. For any steps each call
//! ends without a panic. The device changes only its part of the ring and the buffers that the
//! driver offered.
//!
//! A driver may offer its own descriptors as a buffer. Then the device may change them, so the
//! second rule is not checked.

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vdpa::iova::IovaRange;
use vdpa::memory::{AddressSpace, DeviceMemory, Mode};
use virtio_bindings::virtio_config::{
    VIRTIO_F_ACCESS_PLATFORM, VIRTIO_F_RING_PACKED, VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::backend::{Activation, Backend};
use super::block::Block;
use super::block::disk::Disk;
use super::rng::Rng;
use super::userspace_queue::driver::{BUFFERS, Driver, INDIRECT, RAM, WRITE, memory};
use crate::Error;

const SIZE: u16 = 16;
/// The table for indirect descriptors, and its entries.
const TABLE: u64 = 0x8000;
const TABLE_SIZE: u16 = 64;
/// Sectors of the disk.
const SECTORS: u64 = 128;

/// One action of the driver.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum Step {
    /// Writes a descriptor, in the ring or in the table. `next` is the id in a packed ring.
    Descriptor {
        in_table: bool,
        slot: u16,
        address: u64,
        len: u32,
        flags: u16,
        next: u16,
    },
    /// Makes a head available in a split ring.
    Publish(u16),
    /// Writes the avail index of a split ring.
    AvailIndex(u16),
    /// Writes the suppression of interrupts: flags and event.
    Suppress(u16, u16),
    /// Writes the header of a block request.
    Header {
        slot: u16,
        kind: u32,
        sector: u64,
    },
    /// The event loop gets one of the device's events.
    Process(bool),
    Reset,
    /// Saves, and resumes in the same device.
    Save,
}

#[derive(Debug)]
enum Device {
    Rng(Box<Rng>),
    Block(Box<Block>),
}

impl Device {
    fn new(block: bool, memory: DeviceMemory) -> Self {
        if !block {
            return Self::Rng(Box::new(Rng::new(memory)));
        }
        let name = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let file = File::from(name);
        // As addresses, the contents of the disk are outside of guest memory.
        let content = vec![0xff; usize::try_from(SECTORS * 512).unwrap()];
        std::os::unix::fs::FileExt::write_all_at(&file, &content, 0).unwrap();
        let disk = Disk::for_test(file, SECTORS);
        Self::Block(Box::new(Block::new(disk, "disk0", memory).unwrap()))
    }

    fn backend(&mut self) -> &mut dyn Backend {
        match self {
            Self::Rng(rng) => &mut **rng,
            Self::Block(block) => &mut **block,
        }
    }

    fn activate(&mut self, activation: Activation) -> Result<(), Error> {
        match self {
            Self::Rng(rng) => rng.activate_any(activation),
            Self::Block(block) => block.activate_any(activation),
        }
    }
}

struct Rig {
    driver: Driver,
    device: Device,
    features: u64,
    packed: bool,
    tokens: Vec<u16>,
    avail: u16,
    /// All of guest memory as the driver wrote it.
    expected: Vec<u8>,
    /// Where the device may write.
    offered: Vec<Range<u64>>,
    /// The sum of all lengths in descriptors.
    lengths: u64,
    /// The driver wrote all descriptors itself.
    is_exact: bool,
}

impl Rig {
    fn new(variant: u8) -> Self {
        let has = |bit: u8| variant >> bit & 1 == 1;
        let packed = has(1);
        let driver = Driver::new(&memory(), SIZE);
        let space = || Arc::new(AddressSpace::new(IovaRange::ALL));
        let behind = has(4);
        let memory = if behind {
            DeviceMemory::behind(Arc::clone(&driver.memory), space())
        } else {
            Arc::clone(&driver.memory).into()
        };
        let mut device = Device::new(has(0), memory);
        if let Some(translated) = device.backend().translated() {
            let domain = space();
            domain.change(|domain| domain.set_mode(Mode::Identity));
            translated.enter(&domain).unwrap();
        }
        let events = device.backend().events(&[Arc::clone(&driver.kick)]);
        let bits = [
            (true, VIRTIO_F_VERSION_1),
            (packed, VIRTIO_F_RING_PACKED),
            (behind, VIRTIO_F_ACCESS_PLATFORM),
            (has(2), VIRTIO_RING_F_EVENT_IDX),
            (!has(3), VIRTIO_RING_F_INDIRECT_DESC),
        ];
        let bits = bits.into_iter().filter(|(on, _)| *on);
        let features: u64 = bits.map(|(_, bit)| 1u64 << bit).sum();
        device.activate(driver.activation(features)).unwrap();
        let own = if packed {
            let ring = driver.addresses.descriptor.0;
            let suppression = driver.addresses.device.0;
            Vec::from([
                ring..ring + 16 * u64::from(SIZE),
                suppression..suppression + 4,
            ])
        } else {
            let used = driver.addresses.device.0;
            std::iter::once(used..used + 6 + 8 * u64::from(SIZE)).collect()
        };
        Self {
            driver,
            device,
            features,
            packed,
            tokens: events.iter().map(|event| event.token).collect(),
            avail: 0,
            expected: vec![0; RAM],
            offered: own,
            lengths: 0,
            is_exact: true,
        }
    }

    fn put(&mut self, at: u64, bytes: &[u8]) {
        self.driver.fill(at, bytes);
        let at = usize::try_from(at).unwrap();
        self.expected[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn put_descriptor(&mut self, at: u64, address: u64, len: u32, flags: u16, next: u16) {
        let (first, second) = if self.packed {
            (next, flags)
        } else {
            (flags, next)
        };
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend(first.to_le_bytes());
        bytes.extend(second.to_le_bytes());
        self.put(at, &bytes);
        self.lengths = self.lengths.saturating_add(len.into());
        if flags & INDIRECT != 0 {
            let table = TABLE..TABLE + 16 * u64::from(TABLE_SIZE);
            let end = address.saturating_add(len.into());
            self.is_exact &= table.contains(&address) && end <= table.end;
        }
        // The device writes lengths and flags of a packed ring: each descriptor may become one of a
        // buffer.
        let (writable, len) = if self.packed {
            (true, self.lengths)
        } else {
            (flags & WRITE != 0, len.into())
        };
        if writable {
            self.is_exact &= address >= BUFFERS || flags & INDIRECT != 0;
            self.offered.push(address..address.saturating_add(len));
        }
    }

    fn run(&mut self, step: Step) {
        match step {
            Step::Descriptor {
                in_table,
                slot,
                address,
                len,
                flags,
                next,
            } => {
                let (base, size) = if in_table {
                    (TABLE, TABLE_SIZE)
                } else {
                    (self.driver.addresses.descriptor.0, SIZE)
                };
                let at = base + 16 * u64::from(slot % size);
                self.put_descriptor(at, address, len, flags, next);
            }
            Step::Publish(head) => {
                let slot = u64::from(self.avail % SIZE);
                let ring = self.driver.addresses.driver;
                self.put((ring + 4 + 2 * slot).0, &head.to_le_bytes());
                self.run(Step::AvailIndex(self.avail.wrapping_add(1)));
            }
            Step::AvailIndex(index) => {
                self.avail = index;
                let ring = self.driver.addresses.driver;
                self.put((ring + 2).0, &index.to_le_bytes());
            }
            Step::Suppress(flags, event) => {
                let ring = self.driver.addresses.driver;
                let (first, second) = if self.packed {
                    (ring + 2, ring)
                } else {
                    (ring, ring + 4 + 2 * u64::from(SIZE))
                };
                self.put(first.0, &flags.to_le_bytes());
                self.put(second.0, &event.to_le_bytes());
            }
            Step::Header { slot, kind, sector } => {
                let mut bytes = kind.to_le_bytes().to_vec();
                bytes.extend([0; 4]);
                bytes.extend(sector.to_le_bytes());
                self.put(BUFFERS + 16 * u64::from(slot % 64), &bytes);
            }
            Step::Process(first) => {
                let token = if first {
                    self.tokens.first()
                } else {
                    self.tokens.last()
                };
                self.device.backend().process(*token.unwrap());
            }
            Step::Reset => {
                self.device.backend().reset();
                self.activate();
            }
            Step::Save => {
                let activation = self.driver.activation(self.features);
                let backend = self.device.backend();
                let resumed = backend.save().and_then(|state| {
                    backend.reset();
                    backend.restore(&state, activation)
                });
                if resumed.is_err() {
                    self.run(Step::Reset);
                }
            }
        }
    }

    fn activate(&mut self) {
        let activation = self.driver.activation(self.features);
        self.device.activate(activation).unwrap();
    }

    /// Resets the device and checks all of guest memory.
    fn finish(mut self) {
        self.device.backend().reset();
        if !self.is_exact {
            return;
        }
        let actual = self.driver.bytes(0, RAM);
        let pages = actual.chunks(4096).zip(self.expected.chunks(4096));
        for (base, (actual, expected)) in (0u64..).step_by(4096).zip(pages) {
            if actual == expected {
                continue;
            }
            for (at, (actual, expected)) in (base..).zip(actual.iter().zip(expected)) {
                let is_offered = || self.offered.iter().any(|range| range.contains(&at));
                assert!(
                    actual == expected || is_offered(),
                    "the device wrote {actual:#x} to {at:#x}, which no buffer has"
                );
            }
        }
    }
}

/// Lets a driver take any steps with a device; see the module.
pub fn rings_anything(input: &[u8]) {
    let Some((&variant, rest)) = input.split_first() else {
        return;
    };
    let mut rig = Rig::new(variant);
    for step in crate::steps::steps(rest) {
        rig.run(step);
    }
    rig.finish();
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use virtio_bindings::virtio_blk::{
        VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    };

    use super::super::userspace_queue::driver::NEXT;
    use super::*;
    use crate::steps::{encoded, generated};

    const DATA: u64 = BUFFERS + 0x1000;
    const STATUS: u64 = BUFFERS + 0x2000;
    /// VIRTQ_DESC_F_AVAIL of a packed ring.
    const AVAIL: u16 = 1 << 7;
    const KINDS: [u32; 5] = [
        VIRTIO_BLK_T_IN,
        VIRTIO_BLK_T_OUT,
        VIRTIO_BLK_T_FLUSH,
        VIRTIO_BLK_T_GET_ID,
        77,
    ];

    /// Requests of an honest driver: in the ring, and one behind an indirect descriptor.
    fn valid(variant: u8) -> Vec<Step> {
        let packed = variant & 2 != 0;
        let lap = if packed { AVAIL } else { 0 };
        let mut steps = Vec::new();
        let mut head = 0;
        for (number, kind) in (0..).zip(KINDS) {
            let in_table = kind == VIRTIO_BLK_T_GET_ID;
            let first = if in_table { 0 } else { head };
            let header = BUFFERS + 16 * u64::from(number);
            let writes = if kind == VIRTIO_BLK_T_OUT { 0 } else { WRITE };
            let next = if in_table && packed { 0 } else { NEXT };
            let pieces = [
                (header, 16, next),
                (DATA, 512, next | writes),
                (STATUS + u64::from(number), 1, WRITE),
            ];
            for (slot, (address, len, flags)) in (first..).zip(pieces) {
                steps.push(Step::Descriptor {
                    in_table,
                    slot,
                    address,
                    len,
                    flags: if in_table { flags } else { flags | lap },
                    next: if packed { number } else { slot + 1 },
                });
            }
            if in_table {
                steps.push(Step::Descriptor {
                    in_table: false,
                    slot: head,
                    address: TABLE,
                    len: 48,
                    flags: INDIRECT | lap,
                    next: number,
                });
            }
            let (slot, sector) = (number, u64::from(number));
            steps.push(Step::Header { slot, kind, sector });
            steps.extend([
                Step::Publish(head),
                Step::Process(true),
                Step::Process(false),
            ]);
            head += if in_table { 1 } else { 3 };
        }
        steps
    }

    fn step() -> impl Strategy<Value = Step> + Clone {
        let address = prop_oneof![
            4 => BUFFERS..BUFFERS + 0x2000,
            1 => TABLE..TABLE + 0x200,
            1 => Just(RAM as u64 - 8),
            1 => Just(RAM as u64 / 2 - 8),
            1 => 0..RAM as u64,
            1 => any::<u64>(),
        ];
        let len =
            prop_oneof![4 => 0..0x400u32, 1 => Just(16), 1 => Just(u32::MAX), 1 => any::<u32>()];
        let flags = prop_oneof![
            4 => (0..8u16).prop_map(|low| low | AVAIL),
            4 => 0..4u16,
            1 => any::<u16>()
        ];
        let descriptor = (
            prop::bool::weighted(0.3),
            0..20u16,
            address,
            len,
            flags,
            0..20u16,
        );
        let descriptor =
            descriptor.prop_map(
                |(in_table, slot, address, len, flags, next)| Step::Descriptor {
                    in_table,
                    slot,
                    address,
                    len,
                    flags,
                    next,
                },
            );
        let header = (0..64u16, 0..14u32, prop_oneof![0..130u64, any::<u64>()]);
        prop_oneof![
            8 => descriptor,
            4 => (0..17u16).prop_map(Step::Publish),
            1 => any::<u16>().prop_map(Step::AvailIndex),
            1 => (0..4u16, any::<u16>()).prop_map(|(flags, event)| Step::Suppress(flags, event)),
            3 => header.prop_map(|(slot, kind, sector)| Step::Header { slot, kind, sector }),
            4 => any::<bool>().prop_map(Step::Process),
            1 => Just(Step::Reset),
            1 => Just(Step::Save),
        ]
    }

    #[test]
    fn the_corpus_of_the_rings_changes_only_offered_buffers() {
        let seeds = || {
            let valid = (0..32).map(|variant| {
                let mut steps = valid(variant);
                steps.extend([Step::Save, Step::Process(true), Step::Reset]);
                encoded(variant, &steps)
            });
            valid.chain(generated(16, step())).collect()
        };
        crate::corpus::replay("rings", seeds, rings_anything);
    }

    /// The valid sequences of the corpus reach all of the block device: the last of its answers is
    /// that to an unknown request.
    #[test]
    fn an_honest_driver_gets_its_answers() {
        for variant in [1, 3, 5, 7, 17, 19] {
            let mut rig = Rig::new(variant);
            for step in valid(variant) {
                rig.run(step);
            }
            assert_eq!(rig.driver.read::<u8>(STATUS + 4), 2, "variant {variant}");
            assert!(rig.is_exact);
            rig.finish();
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        #[test]
        fn any_steps_change_only_offered_buffers(
            variant in any::<u8>(),
            steps in prop::collection::vec(step(), 1..60),
        ) {
            rings_anything(&encoded(variant, &steps));
        }

        #[test]
        fn any_input_changes_only_offered_buffers(
            input in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            rings_anything(&input);
        }
    }
}

//! The IOMMU against a hostile driver: for the fuzz target `iommu`, and for the tests below, which
//! need no fuzzer.
//!
//! The first byte selects bypass at power-on. Then follow the driver's steps. For any steps each
//! call ends without a panic. A device reaches exactly what its address space has, unless it is
//! blocked. The IOMMU writes only into the room for its answer, and reports no more than that.

use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use vdpa::memory::Mode;

use super::recorder::{Recorder, domains};
use super::request::encode;
use super::{FEATURES, Iommu, KICK};
use crate::virtio::backend::Backend as _;
use crate::virtio::userspace_queue::driver::{BUFFERS, Buffer, Driver, memory, readable, writable};

const SIZE: u16 = 64;
/// So few mappings that the limit is reached.
const MAPPINGS: u32 = 12;
/// The most requests that wait: each has at most [`PIECES`] descriptors.
const WAITING: usize = SIZE as usize / PIECES;
const PIECES: usize = 5;
/// The most room of an answer, the memory that the driver has for it, the byte in unused memory.
const ROOM: u32 = 0x400;
const SLOT: usize = 0x800;
/// Unused bytes between two parts of an answer.
const GAP: u64 = 16;
const ANSWERS: u64 = BUFFERS + 0x1_0000;
const UNUSED: u8 = 0xa5;

/// One action of the driver, or of a device.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum Step {
    /// Adds a request of any bytes, with so much room for the answer.
    Bytes(Vec<u8>, u16),
    /// The next request consists of these pieces, in this order: whether the device writes one, and
    /// its length. The last piece of each direction has the rest.
    Shape(Vec<(bool, u8)>),
    Attach {
        domain: u8,
        endpoint: u8,
        flags: u32,
    },
    Detach {
        domain: u8,
        endpoint: u8,
    },
    /// Pages from the first to the last one, and the target's page.
    Map {
        domain: u8,
        first: u8,
        last: u8,
        target: u8,
        flags: u32,
    },
    Unmap {
        domain: u8,
        first: u8,
        last: u8,
    },
    Probe(u8),
    Kick,
    Process,
    /// Writes a byte of the configuration.
    Config(u8, u8),
    Reset,
    /// Saves, and resumes in the same device.
    Save,
    /// Saves and restores the domains.
    Domains,
    /// A device refuses a change after so many others.
    Refuse(u8, u8),
    /// A device refuses all changes from now on, or none.
    Break(u8, bool),
}

struct Rig {
    driver: Driver,
    iommu: Iommu,
    devices: [Arc<Mutex<Recorder>>; 2],
    /// The number of the next request, and its pieces if they are not one of each direction.
    next: u64,
    shape: Option<Vec<(bool, u8)>>,
    waiting: Vec<Waiting>,
}

/// A request that is not answered yet.
struct Waiting {
    request: Vec<u8>,
    at: u64,
    /// Memory for the answer, and the parts of it that the device got.
    answer: u64,
    room: Vec<Buffer>,
}

impl Rig {
    fn new(bypass: bool) -> Self {
        let driver = Driver::new(&memory(), SIZE);
        let devices = [Recorder::new(), Recorder::new()];
        let mut domains = domains(bypass, MAPPINGS);
        for (endpoint, device) in (0..).zip(&devices) {
            domains.add(endpoint, device.clone()).unwrap();
        }
        let memory = Arc::clone(&driver.memory);
        let mut iommu = Iommu::new(memory, Arc::new(Mutex::new(domains)));
        iommu.events(&[Arc::clone(&driver.kick)]);
        let mut rig = Self {
            driver,
            iommu,
            devices,
            next: 0,
            shape: None,
            waiting: Vec::new(),
        };
        rig.activate();
        rig
    }

    fn activate(&mut self) {
        let activation = self.driver.activation(FEATURES);
        self.iommu.activate(activation).unwrap();
    }

    /// Adds a request. The driver waits when its ring is full.
    fn add(&mut self, request: &[u8], room: u32) {
        if self.waiting.len() >= WAITING {
            self.kick();
        }
        let slot = self.next % WAITING as u64;
        self.next += 1;
        let (at, answer) = (BUFFERS + 0x100 * slot, ANSWERS + SLOT as u64 * slot);
        let request = request[..request.len().min(0x100)].to_vec();
        self.driver.fill(at, &request);
        self.driver.fill(answer, &[UNUSED; SLOT]);
        let len = u32::try_from(request.len()).unwrap();
        let shape = self.shape.take();
        let pieces = cut(shape.as_deref(), (at, len), (answer, room));
        self.driver.add(&pieces);
        let room = pieces.into_iter().filter(|piece| piece.writable);
        self.waiting.push(Waiting {
            request,
            at,
            answer,
            room: room.collect(),
        });
    }

    fn kick(&mut self) {
        let outcome = self.iommu.kicked(0);
        self.check();
        if outcome.needs_reset || !self.waiting.is_empty() {
            // Only a reset helps now.
            self.reset();
        }
    }

    fn reset(&mut self) {
        self.iommu.reset();
        self.waiting.clear();
        // A new driver clears its rings.
        self.driver = Driver::new(&self.driver.memory, SIZE);
        self.driver
            .fill(self.driver.addresses.driver.0, &[0; 0x1000]);
        self.driver
            .fill(self.driver.addresses.device.0, &[0; 0x1000]);
        self.activate();
    }

    /// Takes the answers, and compares devices with their spaces.
    fn check(&mut self) {
        while let Some((_, written)) = self.driver.take_used() {
            let waiting = self.waiting.remove(0);
            let room: u32 = waiting.room.iter().map(|piece| piece.len).sum();
            assert!((4..=room).contains(&written), "{written} of {room}");
            let request = self.driver.bytes(waiting.at, waiting.request.len());
            assert_eq!(request, waiting.request);
            let bytes = self.driver.bytes(waiting.answer, SLOT);
            for (at, byte) in (waiting.answer..).zip(bytes) {
                let of = |piece: &Buffer| {
                    (piece.address..piece.address + u64::from(piece.len)).contains(&at)
                };
                assert!(byte == UNUSED || waiting.room.iter().any(of), "{at:#x}");
            }
        }
        for device in &self.devices {
            let mut device = device.lock();
            if std::mem::take(&mut device.blocked) > 0 {
                assert!(device.follows() && device.mode == Mode::Blocked);
                device.broken = false;
                device.restart();
            }
            assert!(device.follows());
        }
    }

    fn run(&mut self, step: Step) {
        let domain_of = |domain: u8| u32::from(domain % 4);
        let page = |page: u8| u64::from(page) << 12;
        let end = |last: u8| (u64::from(last) << 12) + 0xfff;
        match step {
            Step::Bytes(bytes, room) => {
                self.add(&bytes, u32::from(room) % (ROOM + 1));
            }
            Step::Shape(mut pieces) => {
                pieces.truncate(PIECES);
                self.shape = (!pieces.is_empty()).then_some(pieces);
            }
            Step::Attach {
                domain,
                endpoint,
                flags,
            } => {
                let (domain, endpoint) = (domain_of(domain), u32::from(endpoint % 3));
                self.add(&encode::attach(domain, endpoint, flags), 4);
            }
            Step::Detach { domain, endpoint } => {
                let (domain, endpoint) = (domain_of(domain), u32::from(endpoint % 3));
                self.add(&encode::detach(domain, endpoint), 4);
            }
            Step::Map {
                domain,
                first,
                last,
                target,
                flags,
            } => {
                let at = [page(first), end(last), page(target)];
                self.add(&encode::map(domain_of(domain), at, flags), 4);
            }
            Step::Unmap {
                domain,
                first,
                last,
            } => self.add(
                &encode::unmap(domain_of(domain), [page(first), end(last)]),
                4,
            ),
            Step::Probe(endpoint) => self.add(&encode::probe(u32::from(endpoint % 3)), 516),
            Step::Kick => self.kick(),
            Step::Process => {
                self.iommu.process(KICK);
                self.check();
            }
            Step::Config(offset, value) => {
                self.iommu.write_config(u32::from(offset % 40), &[value]);
                self.check();
            }
            Step::Reset => self.reset(),
            Step::Save => {
                let state = self.iommu.save().unwrap();
                let activation = self.driver.activation(FEATURES);
                self.iommu.restore(&state, activation).unwrap();
            }
            Step::Domains => {
                // A device that refuses its domain has the rest of an earlier state.
                self.devices
                    .iter()
                    .for_each(|device| device.lock().broken = false);
                let mut domains = self.iommu.domains.lock();
                let state = domains.save();
                domains.restore(&state).unwrap();
                assert_eq!(domains.save(), state);
            }
            Step::Refuse(device, after) => {
                let device = &self.devices[usize::from(device % 2)];
                device.lock().refuse_after = Some(usize::from(after % 8));
            }
            Step::Break(device, broken) => {
                self.devices[usize::from(device % 2)].lock().broken = broken;
            }
        }
    }
}

/// The pieces of a request and of the room for its answer, each at an address with a length.
fn cut(
    shape: Option<&[(bool, u8)]>,
    (mut at, mut request): (u64, u32),
    (mut answer, mut room): (u64, u32),
) -> Vec<Buffer> {
    let shape = shape.unwrap_or(&[(false, 0), (true, 0)]);
    let mut pieces = Vec::new();
    for (number, &(writes, len)) in shape.iter().enumerate() {
        let is_last = shape[number + 1..].iter().all(|later| later.0 != writes);
        let left = if writes { &mut room } else { &mut request };
        let len = if is_last {
            *left
        } else {
            u32::from(len).min(*left)
        };
        *left -= len;
        if writes {
            pieces.push(writable(answer, len));
            answer += u64::from(len) + GAP;
        } else {
            pieces.push(readable(at, len));
            at += u64::from(len);
        }
    }
    pieces
}

/// Lets a driver take any steps with an IOMMU; see the module.
pub fn iommu_anything(input: &[u8]) {
    let Some((&variant, rest)) = input.split_first() else {
        return;
    };
    let mut rig = Rig::new(variant & 1 == 1);
    for step in crate::steps::steps(rest) {
        rig.run(step);
    }
    rig.kick();
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::steps::{encoded, generated};

    fn step() -> impl Strategy<Value = Step> + Clone {
        let bytes = prop::collection::vec(any::<u8>(), 0..80);
        let room = prop_oneof![4 => Just(4u16), 1 => 0..600u16];
        let page = 0..20u8;
        let pieces = prop::collection::vec((any::<bool>(), 0..40u8), 1..=PIECES);
        let ordered = pieces.clone().prop_map(|mut pieces| {
            pieces.sort_by_key(|piece| piece.0);
            pieces
        });
        let attach_flags = prop_oneof![8 => 0..2u32, 1 => any::<u32>()];
        let map_flags = prop_oneof![8 => 1..4u32, 1 => any::<u32>()];
        prop_oneof![
            2 => (bytes, room).prop_map(|(bytes, room)| Step::Bytes(bytes, room)),
            4 => ordered.prop_map(Step::Shape),
            1 => pieces.prop_map(Step::Shape),
            4 => (0..4u8, 0..3u8, attach_flags).prop_map(|(domain, endpoint, flags)| {
                Step::Attach { domain, endpoint, flags }
            }),
            2 => (0..4u8, 0..3u8)
                .prop_map(|(domain, endpoint)| Step::Detach { domain, endpoint }),
            10 => (0..4u8, page.clone(), page.clone(), any::<u8>(), map_flags).prop_map(
                |(domain, first, last, target, flags)| {
                    Step::Map { domain, first, last, target, flags }
                }
            ),
            6 => (0..4u8, page.clone(), page)
                .prop_map(|(domain, first, last)| Step::Unmap { domain, first, last }),
            1 => (0..3u8).prop_map(Step::Probe),
            6 => Just(Step::Kick),
            1 => Just(Step::Process),
            1 => (36..40u8, 0..3u8).prop_map(|(offset, value)| Step::Config(offset, value)),
            1 => Just(Step::Reset),
            1 => Just(Step::Save),
            1 => Just(Step::Domains),
            2 => (0..2u8, 0..8u8).prop_map(|(device, after)| Step::Refuse(device, after)),
            1 => (0..2u8, any::<bool>()).prop_map(|(device, on)| Step::Break(device, on)),
        ]
    }

    #[test]
    fn the_corpus_of_the_iommu_keeps_devices_in_their_spaces() {
        let seeds = || generated(32, step());
        crate::corpus::replay("iommu", seeds, iommu_anything);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        #[test]
        fn any_steps_keep_devices_in_their_spaces(
            variant in any::<u8>(),
            steps in prop::collection::vec(step(), 1..60),
        ) {
            iommu_anything(&encoded(variant, &steps));
        }

        #[test]
        fn any_input_keeps_devices_in_their_spaces(
            input in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            iommu_anything(&input);
        }
    }
}

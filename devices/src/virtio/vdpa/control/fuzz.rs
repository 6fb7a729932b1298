//! The control queue between a hostile driver and a hostile device: for the fuzz target `control`,
//! and for the tests below, which need no fuzzer.
//!
//! The first byte selects the features, the device's queue pairs, and whether the device has a
//! control queue. Then follow commands of any
//! bytes, answers, and writes of the device to the VMM's ring. For any steps each call ends without
//! a panic. The device gets only commands that pass the checks, and the recorded state could be
//! replayed to it. Each answer to the guest is OK or ERR.

use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};
use vdpa::iova::IovaRange;
use virtio_bindings::virtio_net::VIRTIO_NET_F_MQ;

use super::*;
use crate::virtio::backend::SharedMemory;
use crate::virtio::userspace_queue::driver::{BUFFERS, Driver, memory, readable, writable};

/// Entries of the guest's ring.
const SIZE: u16 = 64;
/// The ack byte of the guest's commands.
const ACK: u64 = BUFFERS + 0x8000;

/// One action of the driver, the device or the event loop.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum Step {
    /// The driver sends a command, in two pieces.
    Command {
        bytes: Vec<u8>,
        split: u16,
        ack: bool,
    },
    /// The device returns the command that it has, with this ack.
    Answer(u8),
    /// The device writes where it may: to its part of the VMM's ring, or around the ack.
    Scribble {
        at: u16,
        bytes: Vec<u8>,
    },
    /// The event loop serves the queue.
    Serve,
    /// The backend reports that the device failed.
    GiveUp,
    Reset,
}

/// The device's side of the VMM's ring.
#[derive(Debug, Default)]
struct Peer {
    used: u16,
}

impl Peer {
    fn answer(&mut self, queue: &ControlQueue, ack: u8) {
        let (memory, addresses) = (queue.memory(), queue.vring_config().addresses);
        let at = |iova: u64| iova - queue.range().first();
        let load = |offset| memory.load_u16(offset, Ordering::Acquire).unwrap();
        let (driver, device) = (at(addresses.driver.0), at(addresses.device.0));
        if load(driver + 2) == self.used {
            return;
        }
        let slot = u64::from(self.used % queue.vring_config().size);
        let head = load(driver + 4 + 2 * slot);
        // The ack is the last descriptor. The device cannot write to any of them.
        let mut descriptor = [0; 16];
        let mut index = head;
        loop {
            let offset = at(addresses.descriptor.0) + 16 * u64::from(index);
            memory.read(offset, &mut descriptor).unwrap();
            if descriptor[12] & 1 == 0 {
                break;
            }
            index = u16::from_le_bytes([descriptor[14], descriptor[15]]);
        }
        let iova = u64::from_le_bytes(descriptor[..8].try_into().unwrap());
        memory.write(at(iova), &[ack]).unwrap();
        let element = [u32::from(head).to_le_bytes(), 1u32.to_le_bytes()].concat();
        memory.write(device + 4 + 8 * slot, &element).unwrap();
        self.used = self.used.wrapping_add(1);
        memory
            .store_u16(self.used, device + 2, Ordering::Release)
            .unwrap();
        queue.call().write(1).unwrap();
    }

    fn scribble(queue: &ControlQueue, at: u16, bytes: &[u8]) {
        let first = queue.range().first();
        let ring = queue.vring_config().addresses.device.0 - first;
        let ack_page = queue.range().last() - first - 4095;
        let base = if at & 1 == 0 { ring } else { ack_page };
        let bytes = bytes.get(..bytes.len().min(256)).unwrap_or_default();
        let at = base + u64::from(at >> 1) % 256;
        queue.memory().write(at, bytes).unwrap();
        queue.call().write(1).unwrap();
    }
}

/// Runs any steps; see the module.
pub fn control_anything(input: &[u8]) {
    let Some((&variant, rest)) = input.split_first() else {
        return;
    };
    let limits = Limits {
        features: match variant & 3 {
            0 => 0,
            1 => u64::MAX,
            2 => u64::MAX ^ 1 << VIRTIO_NET_F_MQ,
            _ => 1 << VIRTIO_NET_F_MQ,
        },
        max_virtqueue_pairs: u16::from(variant >> 2 & 7) + 1,
        rss_max_key_size: 40,
        rss_max_indirection_table_length: 128,
        supported_hash_types: 0x1ff,
    };
    let mut window = PrivateWindow::new(IovaRange::ALL, 0).unwrap();
    let mut control = if variant & 0x20 == 0 {
        Control::new(&mut window).unwrap()
    } else {
        Control::without_device().unwrap()
    };
    let memory = memory();
    let (mut driver, mut peer) = begin(&mut control, limits, &memory);
    for step in crate::steps::steps(rest) {
        match step {
            Step::Command { bytes, split, ack } => {
                let bytes = bytes.get(..bytes.len().min(0x5000)).unwrap_or_default();
                driver.fill(BUFFERS, bytes);
                let len = u32::try_from(bytes.len()).unwrap();
                let first = u32::from(split).min(len);
                let second = readable(BUFFERS + u64::from(first), len - first);
                let mut buffers = vec![readable(BUFFERS, first), second];
                if ack {
                    buffers.push(writable(ACK, 1));
                }
                driver.add(&buffers);
            }
            Step::Answer(ack) => {
                if let Some(queue) = &control.queue {
                    peer.answer(queue, ack);
                }
            }
            Step::Scribble { at, bytes } => {
                if let Some(queue) = &control.queue {
                    Peer::scribble(queue, at, &bytes);
                }
            }
            Step::Serve => {
                let done = control.serve();
                for command in done.commands {
                    let bytes = command.encode().unwrap();
                    assert_eq!(Command::parse(&bytes, &limits).unwrap(), command);
                }
                control.state.validate(&limits).unwrap();
                let waits = control.guest.as_ref().unwrap().forwarded.is_some();
                assert!(!waits || control.queue.is_some());
                while let Some((_, written)) = driver.take_used() {
                    assert!(written <= 1 && driver.read::<u8>(ACK) <= 1);
                }
            }
            Step::GiveUp => control.give_up_on_device(),
            Step::Reset => {
                control.stop();
                (driver, peer) = begin(&mut control, limits, &memory);
            }
        }
    }
}

/// Starts the queue as [`Control::start`] does with a device.
fn begin(control: &mut Control, limits: Limits, memory: &SharedMemory) -> (Driver, Peer) {
    let features = RingFeatures::default();
    if let Some(queue) = &mut control.queue {
        queue.restart(features).unwrap();
    }
    control.limits = Some(limits);
    let driver = Driver::new(memory, SIZE);
    for ring in [driver.addresses.driver, driver.addresses.device] {
        driver.write((ring + 2).0, 0u16);
    }
    let queue = driver.queue();
    let served = control.serve_guest(queue, None, SIZE, features, &memory.clone().into());
    served.unwrap();
    (driver, Peer::default())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::steps::{encoded, generated};

    /// Each kind of command, with its answer.
    fn valid() -> Vec<Step> {
        let rss = [
            &[4, 1][..],
            &[1, 0, 0, 0],
            &[1, 0],
            &[0, 0],
            &[0, 0, 0, 0],
            &[1, 0],
            &[2, 7, 7],
        ];
        let commands: [&[u8]; 11] = [
            &[0, 0, 1],
            &[0, 1, 1],
            &[1, 1, 2, 0, 0, 0, 0, 9],
            &[1, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 1, 0, 0, 0, 0],
            &[2, 0, 5, 0],
            &[2, 1, 5, 0],
            &[3, 0],
            &[4, 0, 1, 0],
            &[4, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 7],
            &[5, 0, 2, 0, 0, 0, 0, 0, 0, 0],
            &rss.concat(),
        ];
        let mut steps = Vec::new();
        for (number, bytes) in (0..).zip(commands) {
            let command = Step::Command {
                bytes: bytes.to_vec(),
                split: 2,
                ack: true,
            };
            let ack = u8::from(number == 1);
            steps.extend([command, Step::Serve, Step::Answer(ack), Step::Serve]);
        }
        steps
    }

    fn step() -> impl Strategy<Value = Step> + Clone {
        let bytes = |most| prop::collection::vec(prop_oneof![0..9u8, any::<u8>()], 0..most);
        let ack = prop::bool::weighted(0.9);
        let sent = (0..6u8, 0..3u8, bytes(40), 0..6u16, ack);
        let sent = sent.prop_map(|(class, number, data, split, ack)| Step::Command {
            bytes: [&[class, number][..], &data].concat(),
            split,
            ack,
        });
        prop_oneof![
            4 => sent,
            4 => prop_oneof![4 => Just(0), 1 => any::<u8>()].prop_map(Step::Answer),
            1 => (any::<u16>(), bytes(16)).prop_map(|(at, bytes)| Step::Scribble { at, bytes }),
            6 => Just(Step::Serve),
            1 => Just(Step::GiveUp),
            1 => Just(Step::Reset),
        ]
    }

    #[test]
    fn the_corpus_of_the_control_queue_reaches_no_device_unchecked() {
        let seeds = || {
            let variants = (0..8).flat_map(|variant| [4 + variant, 0x24 + variant]);
            let valid = variants.map(|variant| encoded(variant, &valid()));
            valid.chain(generated(24, step())).collect()
        };
        crate::corpus::replay("control", seeds, control_anything);
    }

    proptest! {
        #[test]
        fn any_steps_reach_no_device_unchecked(
            variant in any::<u8>(),
            steps in prop::collection::vec(step(), 1..60),
        ) {
            control_anything(&encoded(variant, &steps));
        }
    }
}

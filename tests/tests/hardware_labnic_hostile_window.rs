//! A hostile guest attacks the VMM's private window, on a device with one address space. There, a
//! descriptor can name any mapped address: the control queue's rings, the command, the ack.
//!
//! These properties hold:
//!
//! * No ring of the guest lies in the window.
//! * Memory that the device only reads is not written.
//! * The guest can spoil memory that the device may write. It then gets an error soon, and after a
//!   reset the device works again.
//!
//! One property does not hold, and a test shows it: the guest can read the window. Nothing in it
//! is secret from the guest.
//!
//! The guest's frames go to a second machine in the same process, which represents any peer.
//! The lab NIC's switch sends nothing back to its origin.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[expect(
    dead_code,
    reason = "shared with other files of tests, which use the rest"
)]
#[path = "vdpa_backend/support/mod.rs"]
mod support;

use std::time::{Duration, Instant};

use devices::virtio::backend::{Backend as _, QueueChange};
use lab::labnic::{Labnic, trouble};
use lab::sim::SimDevice;
use support::frames::{HEADER, Loopback as _};
use support::guest::{Buffer, HIGH, REGION, wait};
use support::machine::{ACK, COMMAND, Machine, chain};
use support::nic::{PATIENCE, RECEIVE, TRANSMIT};
use support::{MAC, SECOND, text};
use vdpa::control_queue::ControlQueue;
use vdpa::control_queue::queue::ANSWER_TIMEOUT;
use vdpa::iova::DeviceAddress;
use vdpa::ring::SplitLayout;
use vdpa::window::{HIGHEST_END, WINDOW_SIZE};
use vm_memory::{Bytes as _, GuestAddress};

const PAGE: u64 = 4096;
/// The backend's first allocation in the window: the control queue.
const CONTROL_QUEUE: u64 = HIGHEST_END - WINDOW_SIZE + PAGE;
/// Entries of the VMM's control ring.
const CONTROL_RING: u16 = 16;
/// The headers of virtio and Ethernet.
const HEAD: usize = HEADER + 14;
/// Guest memory for the head of a frame.
const SCRATCH: u64 = HIGH + REGION / 4;
/// EVENT_IDX, RING_PACKED, IN_ORDER: not supported by the rings of these tests.
const BEYOND_US: u64 = 1 << 29 | 1 << 34 | 1 << 35;

const OK: u8 = 0;
const ERR: u8 = 1;

fn labnic() -> Labnic {
    Labnic::load(&[
        ("address_spaces", "1"),
        ("cvq_group", "0"),
        ("desc_group", "0"),
    ])
    .unwrap()
}

fn add(labnic: &Labnic, name: &str, mac: [u8; 6]) -> SimDevice {
    labnic
        .add(name, &["mac", &text(mac), "mtu", "9000"])
        .unwrap()
}

fn machine(device: &SimDevice) -> Machine {
    let mut machine = Machine::new(device);
    machine.features &= !BEYOND_US;
    machine
}

/// Starts a device without receive buffers.
fn start(machine: &mut Machine) {
    machine.nic.restart();
    machine.nic.receive.clear();
    machine.control.clear();
    machine.backend.negotiate(machine.features).unwrap();
    let activation = machine.activation();
    machine.backend.activate(activation).unwrap();
}

/// Areas of the control queue, as offsets: memory that the device reads, and memory that it writes.
struct Areas {
    read_only: Vec<u64>,
    used: u64,
    ack: u64,
    end: u64,
}

fn areas() -> Areas {
    let ring = SplitLayout::new(CONTROL_RING).unwrap();
    let end = ControlQueue::memory_size().unwrap();
    let (used, ack) = (ring.used_offset(), end - PAGE);
    let pages = |first: u64, end: u64| (first..end).step_by(4096);
    Areas {
        read_only: pages(0, used).chain(pages(ring.size(), ack)).collect(),
        used,
        ack,
        end,
    }
}

fn mac_addr_set(mac: [u8; 6]) -> Vec<u8> {
    [&[1, 1][..], &mac].concat()
}

/// Sends a frame with `payload` after the head.
fn send(from: &mut Machine, to: [u8; 6], payload: &[u8]) {
    let mut packet = vec![0; HEADER];
    packet.extend_from_slice(&to);
    packet.extend_from_slice(if to == MAC { &SECOND } else { &MAC });
    packet.extend_from_slice(&[0x88, 0xb5]);
    packet.extend_from_slice(payload);
    from.nic.send(&packet);
}

/// Head and length of the next used chain of the receive ring.
fn received(machine: &mut Machine) -> (u32, u32) {
    let begin = Instant::now();
    loop {
        if let Some(used) = machine.nic.receive.take() {
            return used;
        }
        let left = PATIENCE.checked_sub(begin.elapsed()).unwrap();
        wait(&machine.nic.receive.call, left);
    }
}

/// Makes the device write `bytes` to `place`, by a receive buffer of the guest whose second piece
/// lies there. Returns `true` if the device reports that it did.
fn aim(hostile: &mut Machine, peer: &mut Machine, place: u64, bytes: &[u8]) -> bool {
    let len = u32::try_from(bytes.len()).unwrap();
    let head = u32::try_from(HEAD).unwrap();
    let chain: [Buffer; 3] = [
        (SCRATCH, head, true),
        (place, len, true),
        (SCRATCH + PAGE, 2048, true),
    ];
    hostile.nic.receive.add(&chain);
    let padding = [0; 64];
    send(peer, MAC, &[bytes, &padding].concat());
    received(hostile).1 != 0
}

/// The bytes that the peer receives if the guest sends the memory at `place`.
fn peek(hostile: &mut Machine, peer: &mut Machine, place: u64, len: u32) -> Vec<u8> {
    let mut head = vec![0; HEADER];
    head.extend_from_slice(&SECOND);
    head.extend_from_slice(&MAC);
    head.extend_from_slice(&[0x88, 0xb5]);
    hostile
        .memory
        .write_slice(&head, GuestAddress(SCRATCH + 2 * PAGE))
        .unwrap();
    let head = u32::try_from(HEAD).unwrap();
    let chain = [(SCRATCH + 2 * PAGE, head, false), (place, len, false)];
    hostile.nic.transmit.add(&chain);
    let packet = peer.nic.receive().unwrap();
    packet[HEAD..].to_vec()
}

struct Pair {
    hostile: Machine,
    peer: Machine,
}

impl Pair {
    fn new(devices: &[SimDevice; 2]) -> Self {
        let mut pair = Self {
            hostile: machine(&devices[0]),
            peer: machine(&devices[1]),
        };
        start(&mut pair.hostile);
        pair.peer.start();
        pair
    }

    fn reset(&mut self) {
        self.hostile.backend.reset();
        start(&mut self.hostile);
    }

    fn is_whole(&mut self) {
        assert_eq!(self.hostile.command(&mac_addr_set(MAC)), OK);
        let Self { hostile, peer } = self;
        let bytes = [7; 100];
        assert!(aim(hostile, peer, HIGH, &bytes));
        let mut written = [0; 100];
        let place = GuestAddress(HIGH);
        hostile.memory.read_slice(&mut written, place).unwrap();
        assert_eq!(written, bytes);
    }
}

/// Machines are dropped before their devices, and these before the module.
fn with_pair(test: impl FnOnce(&mut Pair)) {
    let labnic = labnic();
    let devices = [add(&labnic, "hostile", MAC), add(&labnic, "peer", SECOND)];
    let mut pair = Pair::new(&devices);
    pair.is_whole();
    test(&mut pair);
    drop(pair);
    assert_eq!(trouble().unwrap(), [""; 0]);
}

#[test]
fn no_ring_lies_in_the_window() {
    with_pair(|pair| {
        let Areas { read_only, end, .. } = areas();
        let pages = (0..end).step_by(4096).chain([WINDOW_SIZE - 2 * PAGE]);
        let places: Vec<u64> = pages.map(|offset| CONTROL_QUEUE + offset).collect();
        assert!(places.len() > read_only.len());
        let hostile = &mut pair.hostile;
        for place in places {
            for queue in [0, 1] {
                for area in 0..3 {
                    hostile.backend.reset();
                    hostile.nic.restart();
                    hostile.control.clear();
                    let mut activation = hostile.activation();
                    let addresses = &mut activation.queues[queue].addresses;
                    *[
                        &mut addresses.descriptor,
                        &mut addresses.driver,
                        &mut addresses.device,
                    ][area] = DeviceAddress(place);
                    hostile.backend.negotiate(hostile.features).unwrap();
                    let error = hostile.backend.activate(activation).unwrap_err();
                    assert!(chain(&error).contains("outside"), "{}", chain(&error));
                }
            }
        }
        // A queue reset does not move them either.
        pair.reset();
        for area in 0..3 {
            let hostile = &mut pair.hostile;
            let change = QueueChange::Reset { index: TRANSMIT };
            hostile.backend.change(change).unwrap();
            let mut queue = hostile.nic.transmit.queue();
            *[
                &mut queue.addresses.descriptor,
                &mut queue.addresses.driver,
                &mut queue.addresses.device,
            ][area] = DeviceAddress(CONTROL_QUEUE);
            let error = hostile.backend.change(QueueChange::Enable(queue));
            let error = error.unwrap_err();
            assert!(chain(&error).contains("outside"), "{}", chain(&error));
            pair.reset();
        }
        pair.is_whole();
    });
}

#[test]
fn readable_buffers_are_not_written() {
    with_pair(|pair| {
        let Areas { read_only, .. } = areas();
        // Leaves a command and a used descriptor chain behind.
        assert_eq!(pair.hostile.command(&mac_addr_set(MAC)), OK);
        let Pair { hostile, peer } = pair;
        for offset in read_only {
            let place = CONTROL_QUEUE + offset;
            let before = peek(hostile, peer, place, 512);
            let wrote = aim(hostile, peer, place, &[0xee; 512]);
            assert!(!wrote, "page {offset:#x}");
            assert_eq!(peek(hostile, peer, place, 512), before, "{offset:#x}");
        }
        // Commands still work, without a reset in between.
        assert_eq!(hostile.command(&mac_addr_set(MAC)), OK);
        pair.is_whole();
    });
}

/// Sends a command after the guest has written over memory that the device writes. An answer must
/// arrive in time, and, if it is an error, so must the request for a reset.
fn answered(machine: &mut Machine) -> (u8, bool) {
    let place = GuestAddress(COMMAND);
    machine
        .memory
        .write_slice(&mac_addr_set(MAC), place)
        .unwrap();
    machine.memory.write_obj(0xaau8, GuestAddress(ACK)).unwrap();
    machine.control.add(&[(COMMAND, 8, false), (ACK, 1, true)]);
    let begin = Instant::now();
    let mut needs_reset = false;
    loop {
        let outcome = machine.turn(Duration::from_millis(50));
        needs_reset |= outcome.needs_reset;
        if let Some((_, written)) = machine.control.take() {
            assert_eq!(written, 1);
            let ack = machine.memory.read_obj(GuestAddress(ACK)).unwrap();
            return (ack, needs_reset);
        }
        let limit = ANSWER_TIMEOUT + Duration::from_secs(5);
        assert!(begin.elapsed() < limit, "no answer");
    }
}

#[test]
fn a_spoiled_used_ring_or_ack_ends_in_an_error_and_heals_with_a_reset() {
    with_pair(|pair| {
        let Areas { used, ack, .. } = areas();
        let index = |index: u16| [&[0, 0][..], &index.to_le_bytes()].concat();
        // The index is 1 here: one command was executed.
        let forged = [&index(2)[..], &[0; 8], &[0; 8]].concat();
        let spoiled: [(u64, Vec<u8>, bool); 8] = [
            // Far ahead, behind, and one too many.
            (used, index(0x8000), false),
            (used, index(0), false),
            (used, forged, false),
            // An ID that no chain has, at every place.
            (used + 4, [0xff; 8 * 16].to_vec(), true),
            (used, vec![0xff; 4096], false),
            (used, vec![0; 4096], false),
            // The device overwrites these with its own answer.
            (ack, vec![0x77; 4096], true),
            (ack, vec![ERR; 1], true),
        ];
        for (number, (offset, bytes, harmless)) in spoiled.into_iter().enumerate() {
            pair.reset();
            assert_eq!(pair.hostile.command(&mac_addr_set(MAC)), OK);
            let Pair { hostile, peer } = &mut *pair;
            assert!(aim(hostile, peer, CONTROL_QUEUE + offset, &bytes));
            let (ack, needs_reset) = answered(hostile);
            assert!(ack == OK || ack == ERR, "case {number}: {ack:#x}");
            // The VMM's own error requests a reset.
            assert_eq!(ack == ERR, needs_reset, "case {number}");
            assert!(!harmless || ack == OK, "case {number}");
            println!("case {number}: ack {ack}, needs reset: {needs_reset}");
            if needs_reset {
                let begin = Instant::now();
                assert_eq!(answered(hostile).0, ERR, "case {number}");
                // The VMM does not wait for the device again.
                assert!(begin.elapsed() < ANSWER_TIMEOUT, "case {number}");
            }
            pair.reset();
            pair.is_whole();
        }
    });
}

#[test]
fn commands_that_were_not_negotiated_never_reach_the_device() {
    let labnic = labnic();
    let device = add(&labnic, "classes", MAC);
    let mut machine = machine(&device);
    let requests = || {
        let counted = device.vstats(2).unwrap();
        counted["cvq requests"].as_u64().unwrap()
    };
    // A feature, and a command that needs it and that the device would accept.
    let commands: [(u32, &[u8]); 7] = [
        (18, &[0, 0, 1]),
        (20, &[0, 2, 1]),
        (18, &[1, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        (23, &[1, 1, 2, 0, 0, 0, 0, 1]),
        (19, &[2, 0, 5, 0]),
        (19, &[2, 1, 5, 0]),
        (21, &[3, 0]),
    ];
    let all = machine.features;
    for (bit, command) in commands {
        machine.backend.reset();
        machine.features = all;
        machine.start();
        assert_eq!(machine.command(command), OK, "{command:?}");
        machine.backend.reset();
        machine.features = all & !(1 << bit);
        machine.start();
        let before = requests();
        assert_eq!(machine.command(command), ERR, "{command:?}");
        assert_eq!(requests(), before, "{command:?}");
    }
    // Never offered by this device: queue pairs, receive steering, hashes, offloads.
    let before = requests();
    for command in [
        &[4, 0, 1, 0][..],
        &[4, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0],
        &[4, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        &[5, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ] {
        assert_eq!(machine.command(command), ERR, "{command:?}");
    }
    assert_eq!(requests(), before);
    let index = RECEIVE;
    machine
        .backend
        .change(QueueChange::Reset { index })
        .unwrap();
    drop(machine);
    drop(device);
    assert_eq!(trouble().unwrap(), [""; 0]);
}

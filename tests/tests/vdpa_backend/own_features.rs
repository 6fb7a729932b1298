//! Features of the VMM itself: the announcement and the reset of single queues.

use std::time::{Duration, Instant};

use devices::virtio::backend::{Backend as _, Hardware as _, QueueChange};
use lab::sim::{Mapping, SimDevice};
use vdpa::iova::DeviceAddress;
use vdpa::window::{HIGHEST_END, WINDOW_SIZE};
use vm_memory::{Bytes as _, GuestAddress};

use super::support::frames::{Loopback as _, exchange, packet};
use super::support::guest::{HIGH, REGION, Ring, wait};
use super::support::machine::{ACK, COMMAND, Machine, chain};
use super::support::nic::{CONTROL, RECEIVE, TRANSMIT};
use super::support::{FOREIGN, MAC, net};

const OK: u8 = 0;
const ERR: u8 = 1;
const GUEST_ANNOUNCE: u64 = 1 << 21;
const RING_RESET: u64 = 1 << 40;
/// Class and command of VIRTIO_NET_CTRL_ANNOUNCE_ACK.
const ANNOUNCE_ACK: [u8; 2] = [3, 0];
/// `status` in the configuration and its bits (virtio 1.3, 5.1.4).
const STATUS: u32 = 6;
const LINK_UP: u16 = 1;
const ANNOUNCE: u16 = 2;

fn status(machine: &mut Machine) -> u16 {
    let mut status = [0; 2];
    machine.backend.read_config(STATUS, &mut status);
    u16::from_le_bytes(status)
}

fn announce(machine: &mut Machine) -> bool {
    let outcome = machine.backend.announce();
    assert!(!outcome.needs_reset);
    outcome.config_changed
}

#[test]
fn the_device_never_sees_them() {
    let net = net(Mapping::DEFAULT);
    let mut machine = Machine::new(&net);
    let own = GUEST_ANNOUNCE | RING_RESET;
    assert_eq!(machine.features & own, own);
    machine.start();
    let config = net.config().unwrap();
    let negotiated = config["negotiated_features"].to_string();
    assert!(negotiated.contains("CTRL_VQ"), "{config}");
    for name in ["GUEST_ANNOUNCE", "RING_RESET"] {
        assert!(!negotiated.contains(name), "{config}");
    }
}

#[test]
fn an_announcement_is_asked_for_until_it_is_acknowledged() {
    let net = net(Mapping::DEFAULT);
    let mut machine = Machine::new(&net);
    assert!(!announce(&mut machine), "no driver");
    machine.start();
    assert_eq!(status(&mut machine), LINK_UP);
    for _ in 0..2 {
        assert!(announce(&mut machine));
        assert!(announce(&mut machine), "once more is no harm");
        assert_eq!(status(&mut machine), LINK_UP | ANNOUNCE);
        let malformed = [&ANNOUNCE_ACK[..], &[0]].concat();
        assert_eq!(machine.command(&malformed), ERR);
        assert_eq!(status(&mut machine), LINK_UP | ANNOUNCE);
        assert_eq!(machine.command(&ANNOUNCE_ACK), OK);
        assert_eq!(status(&mut machine), LINK_UP);
    }
    // No announcement was requested: harmless.
    assert_eq!(machine.command(&ANNOUNCE_ACK), OK);
    exchange(&mut machine.nic, 10, &[MAC]);

    assert!(announce(&mut machine));
    machine.backend.reset();
    assert_eq!(status(&mut machine) & ANNOUNCE, 0, "a reset forgets it");
}

#[test]
fn a_driver_that_did_not_negotiate_it_is_not_asked() {
    let net = net(Mapping::DEFAULT);
    let mut machine = Machine::new(&net);
    machine.features &= !GUEST_ANNOUNCE;
    machine.start();
    assert!(!announce(&mut machine));
    assert_eq!(status(&mut machine), LINK_UP);
    assert_eq!(machine.command(&ANNOUNCE_ACK), ERR);
}

#[test]
fn a_pending_announcement_is_saved() {
    let net = net(Mapping::DEFAULT);
    let mut machine = Machine::new(&net);
    machine.start();
    for pending in [false, true] {
        if pending {
            assert!(announce(&mut machine));
        }
        let state = machine.backend.save().unwrap();
        let activation = machine.activation();
        machine.backend.restore(&state, activation).unwrap();
        assert_eq!(status(&mut machine) & ANNOUNCE != 0, pending);
    }
    assert_eq!(machine.command(&ANNOUNCE_ACK), OK);
    assert_eq!(status(&mut machine), LINK_UP);
}

fn reset(machine: &mut Machine, index: u16) {
    let change = QueueChange::Reset { index };
    machine.backend.change(change).unwrap();
}

/// Other rings for the same queue, in the same 64 KiB.
fn move_rings(ring: &mut Ring) {
    for address in [
        &mut ring.addresses.descriptor,
        &mut ring.addresses.driver,
        &mut ring.addresses.device,
    ] {
        address.0 ^= 0x8_0000;
    }
}

fn resets_data_queues(net: &SimDevice) {
    let mut machine = Machine::new(net);
    machine.start();
    exchange(&mut machine.nic, 20, &[MAC]);
    for _ in 0..3 {
        // Some frames are in flight.
        for sequence in 0..4 {
            machine.nic.send(&packet(sequence, 590, MAC));
        }
        reset(&mut machine, RECEIVE);
        reset(&mut machine, TRANSMIT);
        // Parked memory is not touched.
        let receive = machine.nic.receive.addresses;
        let used: u16 = machine
            .memory
            .read_obj(GuestAddress((receive.device + 2).0))
            .unwrap();
        machine.nic.transmit.kick.write(1).unwrap();
        let _ = machine.nic.receive.call.read();
        let interrupted = wait(&machine.nic.receive.call, Duration::from_millis(100));
        assert!(!interrupted, "an interrupt of a queue that was reset");
        let after: u16 = machine
            .memory
            .read_obj(GuestAddress((receive.device + 2).0))
            .unwrap();
        assert_eq!(after, used);
        // The control queue continues to work.
        let command = [&[1, 1][..], &MAC].concat();
        assert_eq!(machine.command(&command), OK);

        move_rings(&mut machine.nic.receive);
        move_rings(&mut machine.nic.transmit);
        machine.nic.restart();
        for queue in [machine.nic.transmit.queue(), machine.nic.receive.queue()] {
            machine.backend.change(QueueChange::Enable(queue)).unwrap();
        }
        exchange(&mut machine.nic, 40, &[MAC]);
    }
}

#[test]
fn data_queues_are_reset_and_return_at_other_addresses() {
    for mapping in [Mapping::DEFAULT, Mapping::PINNED] {
        resets_data_queues(&net(mapping));
    }
}

#[test]
fn one_queue_of_two_is_reset() {
    let net = net(Mapping::DEFAULT);
    let mut machine = Machine::new(&net);
    machine.start();
    exchange(&mut machine.nic, 20, &[MAC]);
    // Its driver knows that no frame is in flight: a frame would be lost.
    reset(&mut machine, TRANSMIT);
    machine.nic.transmit.clear();
    let queue = machine.nic.transmit.queue();
    machine.backend.change(QueueChange::Enable(queue)).unwrap();
    exchange(&mut machine.nic, 20, &[MAC]);
}

#[test]
fn a_device_with_a_parked_queue_is_saved_without_it() {
    let net = net(Mapping::DEFAULT);
    let mut machine = Machine::new(&net);
    machine.start();
    exchange(&mut machine.nic, 20, &[MAC]);
    reset(&mut machine, TRANSMIT);
    machine.nic.transmit.clear();
    let state = machine.backend.save().unwrap();
    let mut activation = machine.activation();
    activation.queues.retain(|queue| queue.index != TRANSMIT);
    machine.backend.restore(&state, activation).unwrap();
    // It was not enabled since that start, and still comes back.
    let queue = machine.nic.transmit.queue();
    machine.backend.change(QueueChange::Enable(queue)).unwrap();
    exchange(&mut machine.nic, 20, &[MAC]);
}

#[test]
fn the_guest_s_control_queue_is_reset_without_losing_an_answer() {
    let net = net(Mapping::DEFAULT);
    let mut machine = Machine::new(&net);
    machine.start();
    let set = |mac: [u8; 6]| [&[1, 1][..], &mac].concat();
    assert_eq!(machine.command(&set(FOREIGN)), OK);
    for _ in 0..3 {
        // In flight when the reset comes.
        machine
            .memory
            .write_slice(&set(MAC), GuestAddress(COMMAND))
            .unwrap();
        machine.control.add(&[(COMMAND, 8, false), (ACK, 1, true)]);
        machine.turn(Duration::from_secs(1));
        let begin = Instant::now();
        reset(&mut machine, CONTROL);
        assert!(begin.elapsed() < Duration::from_secs(10));
        machine.control.clear();
        let queue = machine.control.queue();
        machine.backend.change(QueueChange::Enable(queue)).unwrap();
        // The device's result is kept, and the next command is answered.
        assert_eq!(machine.mac(), MAC);
        assert_eq!(machine.command(&set(FOREIGN)), OK);
        assert_eq!(machine.mac(), FOREIGN);
    }
    exchange(&mut machine.nic, 10, &[FOREIGN]);
}

/// Requests that a transport does not send, and values that only a hostile driver programs.
#[test]
fn a_hostile_driver_loses_its_device_and_nothing_else() {
    let net = net(Mapping::DEFAULT);
    let mut machine = Machine::new(&net);
    let window = HIGHEST_END - WINDOW_SIZE + 0x1000;
    type Attack = fn(&mut Machine, u64);
    let attacks: [(Attack, &str); 5] = [
        (
            |machine, place| machine.nic.transmit.addresses.descriptor = DeviceAddress(place),
            "outside",
        ),
        (
            |machine, place| machine.nic.transmit.addresses.device = DeviceAddress(place),
            "outside",
        ),
        (
            |machine, _| machine.nic.transmit.addresses.driver = DeviceAddress(HIGH + REGION),
            "outside",
        ),
        (
            |machine, _| machine.nic.transmit.addresses.size = 512,
            "512",
        ),
        (|machine, _| machine.nic.transmit.addresses.size = 0, "0"),
    ];
    for (attack, says) in attacks {
        machine.start();
        let good = machine.nic.transmit.addresses;
        reset(&mut machine, TRANSMIT);
        attack(&mut machine, window);
        let queue = machine.nic.transmit.queue();
        let change = QueueChange::Enable(queue);
        let error = machine.backend.change(change).unwrap_err();
        assert!(chain(&error).contains(says), "{}", chain(&error));
        machine.nic.transmit.addresses = good;
        machine.backend.reset();
        machine.start();
        exchange(&mut machine.nic, 10, &[MAC]);
        // Enabled twice.
        let queue = machine.nic.transmit.queue();
        let error = machine.backend.change(QueueChange::Enable(queue));
        let error = error.unwrap_err();
        assert!(chain(&error).contains("already"), "{}", chain(&error));
        machine.backend.reset();
    }
    // Reset twice.
    machine.start();
    reset(&mut machine, TRANSMIT);
    let change = QueueChange::Reset { index: TRANSMIT };
    let error = machine.backend.change(change).unwrap_err();
    assert!(chain(&error).contains("not enabled"), "{}", chain(&error));
}

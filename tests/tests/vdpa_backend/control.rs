//! The guest's control queue: executed commands, rejected commands, and rings that no driver would
//! create.

use std::time::{Duration, Instant};

use devices::virtio::backend::Backend as _;
use vdpa::control_queue::queue::ANSWER_TIMEOUT;
use vm_memory::{Bytes as _, GuestAddress};

use lab::sim::Mapping;

use super::support::frames::{exchange, is_not_delivered};
use super::support::guest::HIGH;
use super::support::machine::{ACK, COMMAND, Machine};
use super::support::nic::PATIENCE;
use super::support::process::behind_the_back;
use super::support::{FOREIGN, MAC, net, text};

const OK: u8 = 0;
const ERR: u8 = 1;
/// Class and command of VIRTIO_NET_CTRL_MAC_ADDR_SET.
const MAC_ADDR_SET: [u8; 2] = [1, 1];

fn mac_addr_set(mac: [u8; 6]) -> Vec<u8> {
    [&MAC_ADDR_SET[..], &mac].concat()
}

#[test]
fn a_new_address_reaches_the_device_and_the_configuration() {
    for mapping in [Mapping::DEFAULT, Mapping::PINNED] {
        let net = net(mapping);
        let mut machine = Machine::new(&net);
        machine.start();
        assert_eq!(machine.command(&mac_addr_set(FOREIGN)), OK);
        assert_eq!(machine.mac(), FOREIGN);
        assert_eq!(net.config().unwrap()["mac"], text(FOREIGN));
        exchange(&mut machine.nic, 20, &[FOREIGN]);
        is_not_delivered(&mut machine.nic, MAC, FOREIGN);
        // After a reset the guest and the device have their own address again, although the
        // simulator remembers the other one.
        machine.backend.reset();
        assert_eq!(machine.mac(), MAC);
        machine.start();
        assert_eq!(net.config().unwrap()["mac"], text(MAC));
        exchange(&mut machine.nic, 20, &[MAC]);
        is_not_delivered(&mut machine.nic, FOREIGN, MAC);
    }
}

#[test]
fn malformed_commands_are_refused_and_the_queue_continues() {
    let net = net(Mapping::DEFAULT);
    let mut machine = Machine::new(&net);
    machine.start();
    let long = [&MAC_ADDR_SET[..], &[7; 20 * 1024]].concat();
    let commands: [&[u8]; 9] = [
        &MAC_ADDR_SET,
        &[&MAC_ADDR_SET[..], &[2; 5]].concat(),
        &[&MAC_ADDR_SET[..], &[2; 7]].concat(),
        &[1],
        &long,
        &[99, 0, 1],
        &[1, 99, 1],
        // A VLAN and queue pairs: known, but not negotiated.
        &[2, 0, 5, 0],
        &[4, 0, 1, 0],
    ];
    for command in commands {
        let shown = &command[..command.len().min(8)];
        assert_eq!(machine.command(command), ERR, "{shown:?}");
        assert_eq!(machine.mac(), MAC);
    }
    assert_eq!(machine.command(&mac_addr_set(FOREIGN)), OK);
    assert_eq!(machine.mac(), FOREIGN);
}

#[test]
fn chains_without_a_command_or_without_an_ack_come_back() {
    let net = net(Mapping::DEFAULT);
    let mut machine = Machine::new(&net);
    machine.start();
    let command = mac_addr_set(FOREIGN);
    let place = GuestAddress(COMMAND);
    machine.memory.write_slice(&command, place).unwrap();
    // Only an ack.
    assert_eq!(machine.send_control(&[(ACK, 1, true)]), (ERR, 1));
    // A bad command without room for the answer.
    assert_eq!(machine.send_control(&[(COMMAND, 5, false)]).1, 0);
    // A good command, also without room: it is executed, and the chain returns with nothing
    // written.
    assert_eq!(machine.send_control(&[(COMMAND, 8, false)]).1, 0);
    assert_eq!(machine.mac(), FOREIGN);
    // Byte by byte, and with more room than an ack needs.
    machine
        .memory
        .write_slice(&mac_addr_set(MAC), place)
        .unwrap();
    let mut pieces: Vec<_> = (0..8).map(|at| (COMMAND + at, 1, false)).collect();
    pieces.push((ACK, 64, true));
    assert_eq!(machine.send_control(&pieces), (OK, 1));
    assert_eq!(machine.mac(), MAC);
}

#[test]
fn many_commands_at_once_are_all_answered_in_order() {
    let net = net(Mapping::DEFAULT);
    let mut machine = Machine::new(&net);
    machine.start();
    machine
        .memory
        .write_slice(&mac_addr_set(FOREIGN), GuestAddress(COMMAND))
        .unwrap();
    for round in 0..20 {
        let heads: Vec<u32> = (0..8)
            .map(|at| {
                let ack = (ACK + at, 1, true);
                u32::from(machine.control.add(&[(COMMAND, 8, false), ack]))
            })
            .collect();
        for head in heads {
            let (used, written, _) = machine.answer().unwrap();
            assert_eq!((used, written), (head, 1), "round {round}");
        }
        let acks: [u8; 8] = machine.memory.read_obj(GuestAddress(ACK)).unwrap();
        assert_eq!(acks, [OK; 8]);
    }
}

/// The guest breaks its control ring. The device requests a reset, nothing hangs, and after the
/// reset the device works.
fn breaks(what: &str, fault: impl Fn(&mut Machine)) {
    let net = net(Mapping::DEFAULT);
    let mut machine = Machine::new(&net);
    machine.start();
    fault(&mut machine);
    let begin = Instant::now();
    let mut needs_reset = false;
    while !needs_reset && begin.elapsed() < PATIENCE {
        needs_reset = machine.turn(PATIENCE).needs_reset;
    }
    assert!(needs_reset, "{what}");
    // The request is reported once, and the event loop has nothing more to do soon.
    for _ in 0..3 {
        let outcome = machine.turn(Duration::ZERO);
        assert!(!outcome.needs_reset, "{what}");
    }
    // It does not affect traffic.
    exchange(&mut machine.nic, 5, &[MAC]);
    machine.backend.reset();
    machine.start();
    assert_eq!(machine.command(&mac_addr_set(FOREIGN)), OK, "{what}");
}

#[test]
fn a_broken_control_ring_asks_for_a_reset() {
    let outside = HIGH - 0x1000;
    breaks("an avail index far ahead", |machine| {
        machine.control.publish(1000);
    });
    breaks("a command outside memory", |machine| {
        machine.control.add(&[(outside, 8, false), (ACK, 1, true)]);
    });
    breaks("an ack outside memory", |machine| {
        machine
            .control
            .add(&[(COMMAND, 8, false), (outside, 1, true)]);
    });
    breaks("an ack before the command", |machine| {
        machine.control.add(&[(ACK, 1, true), (COMMAND, 8, false)]);
    });
}

#[test]
fn a_device_that_does_not_answer_costs_the_guest_an_error_and_no_more() {
    let net = net(Mapping::DEFAULT);
    let mut machine = Machine::new(&net);
    machine.start();
    behind_the_back(&net, vdpa::uapi::suspend());
    let place = GuestAddress(COMMAND);
    machine
        .memory
        .write_slice(&mac_addr_set(FOREIGN), place)
        .unwrap();
    let chain = [(COMMAND, 8, false), (ACK, 1, true)];
    let heads = [machine.control.add(&chain), machine.control.add(&chain)].map(u32::from);
    let begin = Instant::now();
    let mut broken = 0;
    let mut answered = Vec::new();
    while answered.len() < 2 && begin.elapsed() < ANSWER_TIMEOUT + PATIENCE {
        broken += u32::from(machine.turn(PATIENCE).needs_reset);
        while let Some((head, written)) = machine.control.take() {
            assert_eq!(written, 1);
            answered.push(head);
        }
    }
    assert_eq!(answered, heads);
    assert_eq!(broken, 1, "a reset is asked for once");
    assert!(begin.elapsed() >= ANSWER_TIMEOUT);
    let ack: u8 = machine.memory.read_obj(GuestAddress(ACK)).unwrap();
    assert_eq!(ack, ERR);
    assert_eq!(machine.mac(), MAC);
    // Commands that arrive now are answered at once, and the event loop does not spin.
    assert_eq!(machine.command(&mac_addr_set(FOREIGN)), ERR);
    let begin = Instant::now();
    machine.turn(Duration::from_millis(300));
    assert!(
        begin.elapsed() >= Duration::from_millis(300),
        "the event loop spins"
    );

    machine.backend.reset();
    machine.start();
    assert_eq!(machine.command(&mac_addr_set(FOREIGN)), OK);
    exchange(&mut machine.nic, 10, &[FOREIGN]);
}

//! Saves the backend, and starts one from a state that may be hostile.

use std::time::Duration;

use devices::virtio::backend::{Backend as _, SavedState};
use devices::virtio::vdpa::VdpaBackend;
use lab::sim::{Mapping, SimDevice};
use vdpa::control_queue::{Command, ControlState};
use vdpa::device::VringBase;
use vm_memory::{Bytes as _, GuestAddress};

use super::support::frames::{Loopback as _, exchange, is_not_delivered, packet};
use super::support::guest::RAM_END;
use super::support::machine::{ACK, COMMAND, Machine, chain, options};
use super::support::process::behind_the_back;
use super::support::{FOREIGN, MAC, SECOND, net, second_net, text};

/// The payload of a saved state, field by field, as an independent writer of states would build it.
/// postcard encodes a struct as its fields.
type Payload = (
    u32,
    u64,
    Vec<(u16, VringBase)>,
    Option<[u8; 6]>,
    bool,
    Option<(ControlState, Option<SplitQueue>)>,
);

/// The guest's control queue: 0 for a split ring, next avail and used index, whether it is broken.
/// postcard encodes an enum as its variant's number.
type SplitQueue = (u32, u16, u16, bool);

fn decode(state: &SavedState) -> Payload {
    postcard::from_bytes(&state.payload).unwrap()
}

fn encode(state: &SavedState, payload: &Payload) -> SavedState {
    SavedState {
        payload: postcard::to_stdvec(payload).unwrap(),
        ..state.clone()
    }
}

/// A running machine whose guest has set another address.
fn running(net: &SimDevice) -> Machine {
    let mut machine = Machine::new(net);
    machine.start();
    exchange(&mut machine.nic, 30, &[MAC]);
    let command = [&[1, 1][..], &FOREIGN].concat();
    assert_eq!(machine.command(&command), 0);
    exchange(&mut machine.nic, 7, &[FOREIGN]);
    machine
}

#[test]
fn a_saved_device_continues_in_place() {
    for mapping in [Mapping::DEFAULT, Mapping::PINNED] {
        let net = net(mapping);
        let mut machine = running(&net);
        for _ in 0..5 {
            let state = machine.backend.save().unwrap();
            let payload = decode(&state);
            assert_eq!(payload.3, Some(FOREIGN));
            let activation = machine.activation();
            machine.backend.restore(&state, activation).unwrap();
            assert_eq!(machine.mac(), FOREIGN);
            exchange(&mut machine.nic, 10, &[FOREIGN]);
            assert_eq!(machine.command(&[1, 1, 2, 0, 0, 0]), 1);
        }
    }
}

#[test]
fn positions_are_where_the_device_stopped() {
    let net = net(Mapping::DEFAULT);
    let mut machine = running(&net);
    let payload = decode(&machine.backend.save().unwrap());
    assert_eq!(payload.0, 1);
    assert_eq!(payload.1, machine.features);
    let at = |index| (index, VringBase::Split { index: 37 });
    assert_eq!(payload.2, [at(0), at(1)]);
    let (control, ring) = payload.5.unwrap();
    assert_eq!(control.mac(), Some(FOREIGN));
    assert_eq!(ring, Some((0, 1, 1, false)));
}

#[test]
fn a_saved_device_continues_on_another_one() {
    let first = net(Mapping::DEFAULT);
    let second = second_net("second", SECOND);
    let mut source = running(&first);
    let state = source.backend.save().unwrap();
    // A frame that the guest sends before the other device runs.
    let late = packet(5, 590, FOREIGN);
    source.nic.send(&late);

    let memory = source.memory.clone();
    let mut destination = VdpaBackend::open(&options(&second), memory, RAM_END).unwrap();
    destination.restore(&state, source.activation()).unwrap();
    let nic = &mut source.nic;
    let got = nic.receive().unwrap();
    assert_eq!(got[12..], late[12..]);
    exchange(nic, 50, &[FOREIGN]);
    is_not_delivered(nic, SECOND, FOREIGN);
    let mut shown = [0; 6];
    destination.read_config(0, &mut shown);
    assert_eq!(shown, FOREIGN);
    assert_eq!(second.config().unwrap()["mac"], text(FOREIGN));
}

/// Makes a command available that sets the original address; returns its head.
fn add_command(machine: &mut Machine) -> u16 {
    let command = [&[1, 1][..], &MAC].concat();
    let place = GuestAddress(COMMAND);
    machine.memory.write_slice(&command, place).unwrap();
    machine.control.add(&[(COMMAND, 8, false), (ACK, 1, true)])
}

#[test]
fn a_command_that_came_too_late_is_served_where_the_device_continues() {
    let net = net(Mapping::DEFAULT);
    let mut machine = running(&net);
    let state = machine.backend.save().unwrap();
    let head = add_command(&mut machine);
    machine.turn(Duration::ZERO);
    assert_eq!(machine.control.take(), None);
    let activation = machine.activation();
    machine.backend.restore(&state, activation).unwrap();
    assert_eq!(machine.answer(), Some((u32::from(head), 1, false)));
    assert_eq!(machine.mac(), MAC);
    assert_eq!(net.config().unwrap()["mac"], text(MAC));
}

/// How long the device does not answer a command in this test.
const LATE: Duration = Duration::from_millis(300);

#[test]
fn a_save_waits_for_the_command_that_the_device_has() {
    let net = net(Mapping::DEFAULT);
    let mut machine = running(&net);
    // The device gets the command while it is suspended and executes it when it is resumed.
    behind_the_back(&net, vdpa::uapi::suspend());
    let head = add_command(&mut machine);
    machine.turn(Duration::ZERO);
    assert_eq!(machine.control.take(), None);
    let state = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(LATE);
            behind_the_back(&net, vdpa::uapi::resume());
        });
        machine.backend.save().unwrap()
    });
    assert_eq!(machine.control.take(), Some((u32::from(head), 1)));
    let ack: u8 = machine.memory.read_obj(GuestAddress(ACK)).unwrap();
    assert_eq!(ack, 0);
    assert_eq!(decode(&state).3, Some(MAC));
    let activation = machine.activation();
    machine.backend.restore(&state, activation).unwrap();
    assert_eq!(machine.mac(), MAC);
    exchange(&mut machine.nic, 10, &[MAC]);
}

#[test]
fn a_suspended_device_is_not_given_the_guest_s_commands() {
    let net = net(Mapping::DEFAULT);
    let mut machine = running(&net);
    machine.backend.save().unwrap();
    add_command(&mut machine);
    for _ in 0..3 {
        machine.turn(Duration::ZERO);
    }
    // If it had received the command, it would execute it before this frame.
    behind_the_back(&net, vdpa::uapi::resume());
    exchange(&mut machine.nic, 1, &[FOREIGN]);
    assert_eq!(machine.control.take(), None);
    assert_eq!(net.config().unwrap()["mac"], text(FOREIGN));
}

/// States that no device of this kind wrote, with the fault of each.
fn hostile(good: &SavedState) -> Vec<(&'static str, SavedState)> {
    let payload = decode(good);
    let with = |change: &dyn Fn(&mut Payload)| {
        let mut changed = payload.clone();
        change(&mut changed);
        encode(good, &changed)
    };
    let mut vlan = ControlState::new();
    vlan.acknowledge(&Command::VlanAdd(7));
    let mut states = vec![
        ("another device type", with(&|p| p.0 = 2)),
        ("other features", with(&|p| p.1 &= !(1 << 23))),
        ("features not offered", with(&|p| p.1 |= 1 << 38)),
        ("no position", with(&|p| p.2.clear())),
        ("a position missing", with(&|p| p.2.truncate(1))),
        (
            "a position far ahead",
            with(&|p| p.2[0].1 = VringBase::Split { index: 30_000 }),
        ),
        (
            "a position just too far behind",
            with(&|p| p.2[1].1 = VringBase::Split { index: 37 - 17 }),
        ),
        (
            "a packed position",
            with(&|p| p.2[0].1 = VringBase::initial(true)),
        ),
        (
            "a command that was not negotiated",
            with(&|p| p.5 = Some((vlan.clone(), None))),
        ),
        (
            "a control ring with chains under way",
            with(&|p| p.5.as_mut().unwrap().1 = Some((0, 5, 1, false))),
        ),
    ];
    let mut other = good.clone();
    other.name = "virtio-rng".to_owned();
    states.push(("another backend", other));
    let mut other = good.clone();
    other.version += 1;
    states.push(("another version", other));
    let mut long = good.clone();
    long.payload.push(0);
    states.push(("a byte too many", long));
    for len in 0..good.payload.len() {
        let payload = good.payload[..len].to_vec();
        let state = SavedState {
            payload,
            ..good.clone()
        };
        states.push(("truncated", state));
    }
    states
}

#[test]
fn hostile_states_are_refused_and_the_device_stays_usable() {
    for mapping in [Mapping::DEFAULT, Mapping::PINNED] {
        let net = net(mapping);
        let mut machine = running(&net);
        let good = machine.backend.save().unwrap();
        let mapped = machine.backend.mapped_bytes();
        for (what, state) in hostile(&good) {
            let activation = machine.activation();
            let restored = machine.backend.restore(&state, activation);
            let error = restored.expect_err(what);
            assert!(!chain(&error).is_empty());
            assert_eq!(machine.backend.mapped_bytes(), mapped, "{what}");
        }
        // The valid state still fits.
        let activation = machine.activation();
        machine.backend.restore(&good, activation).unwrap();
        exchange(&mut machine.nic, 10, &[FOREIGN]);
        machine.backend.reset();
        machine.start();
        exchange(&mut machine.nic, 10, &[MAC]);
    }
}

#[test]
fn a_stopped_device_cannot_be_saved() {
    let net = net(Mapping::DEFAULT);
    let mut machine = Machine::new(&net);
    machine.backend.save().unwrap_err();
    machine.backend.negotiate(machine.features).unwrap();
    machine.backend.save().unwrap_err();
    machine.backend.reset();
    machine.start();
    exchange(&mut machine.nic, 5, &[MAC]);
    machine.backend.save().unwrap();
    // A second save fails too.
    machine.backend.save().unwrap_err();
    machine.backend.reset();
    machine.start();
    exchange(&mut machine.nic, 5, &[MAC]);
}

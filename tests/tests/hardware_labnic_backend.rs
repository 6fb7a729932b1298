//! The vDPA backend on lab NICs, with guest memory but without a guest.
//!
//! It covers commands that a device refuses, control state that a device receives again after a
//! reset, and the signals that follow a suspend.

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

use devices::virtio::backend::{Backend as _, Hardware as _, QueueChange};
use lab::labnic::{Labnic, trouble};
use lab::sim::SimDevice;
use support::frames::{HEADER, Loopback as _};
use support::guest::wait;
use support::machine::Machine;
use support::nic::{CONTROL, PATIENCE, RECEIVE, TRANSMIT};
use support::{FOREIGN, MAC, SECOND, text};
use vmm_sys_util::eventfd::EventFd;

/// EVENT_IDX, RING_PACKED, IN_ORDER: not supported by the rings of these tests.
const BEYOND_US: u64 = 1 << 29 | 1 << 34 | 1 << 35;

const OK: u8 = 0;
const ERR: u8 = 1;

/// The VLAN that the guest receives, and one that it does not.
const VLANS: [u8; 2] = [7, 8];

/// A signal arrives in much less time.
const QUIET: Duration = Duration::from_millis(100);

fn add(labnic: &Labnic, name: &str, mac: [u8; 6]) -> SimDevice {
    labnic.add(name, &["mac", &text(mac)]).unwrap()
}

fn machine(device: &SimDevice) -> Machine {
    let mut machine = Machine::new(device);
    machine.features &= !BEYOND_US;
    machine.start();
    machine
}

/// A counter of one of the device's queues.
fn count(device: &SimDevice, queue: u16, what: &str) -> u64 {
    let counted = device.vstats(u32::from(queue)).unwrap();
    counted[what].as_u64().unwrap()
}

fn mac_addr_set(mac: [u8; 6]) -> Vec<u8> {
    [&[1, 1][..], &mac].concat()
}

#[test]
fn a_command_that_the_device_refuses_is_refused_to_the_guest() {
    let labnic = Labnic::load(&[]).unwrap();
    let device = add(&labnic, "refuses", MAC);
    let mut machine = machine(&device);
    let errors = || count(&device, CONTROL, "cvq errors");
    // The VMM accepts any address. A device refuses a multicast address and the zero address.
    for mac in [[1, 0, 0x5e, 0, 0, 1], [0; 6]] {
        let before = errors();
        assert_eq!(machine.command(&mac_addr_set(mac)), ERR, "{mac:x?}");
        assert_eq!(errors(), before + 1, "it was not the device that refused");
        assert_eq!(machine.mac(), MAC);
    }
    assert_eq!(machine.command(&mac_addr_set(FOREIGN)), OK);
    assert_eq!(machine.mac(), FOREIGN);
    drop(machine);
    drop(device);
    assert_eq!(trouble().unwrap(), [""; 0]);
}

/// A frame with a VLAN tag.
fn tagged(to: [u8; 6], vlan: u8, number: u8) -> Vec<u8> {
    let mut packet = vec![0; HEADER];
    packet.extend_from_slice(&to);
    packet.extend_from_slice(&SECOND);
    packet.extend_from_slice(&[0x81, 0x00, 0, vlan, 0x88, 0xb5]);
    packet.extend_from_slice(&[number; 60]);
    packet
}

/// The guest, whose address is `mac`, receives only frames of its VLAN.
#[track_caller]
fn receives_its_vlan(guest: &mut Machine, peer: &mut Machine, mac: [u8; 6], number: u8) {
    let [own, other] = VLANS.map(|vlan| tagged(mac, vlan, number));
    peer.nic.send(&other);
    peer.nic.send(&own);
    let got = guest.nic.receive().unwrap();
    assert_eq!(got[HEADER..], own[HEADER..]);
}

/// A device without SUSPEND is reset when the dirty log begins and when it ends. The reset clears
/// the control state that the guest has set.
#[test]
fn a_device_reset_for_the_log_keeps_its_guests_settings() {
    let labnic = Labnic::load(&[("suspend", "0"), ("resume", "0")]).unwrap();
    let devices = [add(&labnic, "log", MAC), add(&labnic, "peer", SECOND)];
    let [mut guest, mut peer] = devices.each_ref().map(machine);
    // The device accepts frames to its own address and in one VLAN only.
    let (promiscuous_off, vlan_add) = ([0, 0, 0], [2, 0, VLANS[0], 0]);
    for command in [
        &promiscuous_off[..],
        &vlan_add[..],
        &mac_addr_set(FOREIGN)[..],
    ] {
        assert_eq!(guest.command(command), OK, "{command:?}");
    }
    receives_its_vlan(&mut guest, &mut peer, FOREIGN, 0);
    for round in 0..3 {
        guest.backend.log_writes(true).unwrap();
        receives_its_vlan(&mut guest, &mut peer, FOREIGN, 2 * round + 1);
        guest.backend.log_writes(false).unwrap();
        receives_its_vlan(&mut guest, &mut peer, FOREIGN, 2 * round + 2);
    }
    assert_eq!(guest.mac(), FOREIGN);
    drop((guest, peer));
    drop(devices);
    assert_eq!(trouble().unwrap(), [""; 0]);
}

/// Reads signals until none arrives.
fn drain(event: &EventFd) {
    while wait(event, QUIET) {}
}

/// The device is suspended during the change. A kick or an interrupt of another queue may be lost.
#[test]
fn the_other_queue_is_signalled_where_one_is_reset_or_enabled() {
    let labnic = Labnic::load(&[]).unwrap();
    let device = add(&labnic, "reset", MAC);
    let mut machine = machine(&device);
    for enable in [false, true, false, true] {
        let change = if enable {
            machine.nic.transmit.clear();
            QueueChange::Enable(machine.nic.transmit.queue())
        } else {
            QueueChange::Reset { index: TRANSMIT }
        };
        drain(&machine.nic.receive.call);
        let kicks = count(&device, RECEIVE, "kicks");
        machine.backend.change(change).unwrap();
        let interrupted = wait(&machine.nic.receive.call, PATIENCE);
        assert!(interrupted, "no interrupt, enabled: {enable}");
        let begin = Instant::now();
        while count(&device, RECEIVE, "kicks") == kicks {
            assert!(begin.elapsed() < PATIENCE, "no kick, enabled: {enable}");
        }
    }
    drop(machine);
    drop(device);
    assert_eq!(trouble().unwrap(), [""; 0]);
}

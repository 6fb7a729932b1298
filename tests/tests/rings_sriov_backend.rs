//! The machine logs the writes of vp_vdpa, which can neither suspend nor begin in the middle of a
//! ring. The device is reset under its guest's driver, and stays shadowed until the driver resets
//! it.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod logging;
#[expect(dead_code, reason = "helpers of several targets")]
#[path = "vdpa_backend/support/mod.rs"]
mod support;

use devices::virtio::backend::{Backend as _, Hardware as _};
use devices::virtio::vdpa::{DoorbellMode, VdpaOptions};

use lab::rig::FIRST_PACKED_FUNCTION;
use lab::sriov::{SriovNic, VfDevice, set_link};

use vm_memory::bitmap::Bitmap as _;
use vm_memory::{GuestAddress, GuestMemoryBackend as _, GuestMemoryRegion as _};

use self::logging::{Echo, Flood, Machine, REBIND, lost_by_resets, rounds, traffic};
use self::support::frames::{Loopback as _, packet};
use self::support::guest::{self, HIGH};
use self::support::machine;

/// VIRTIO_F_RING_PACKED (virtio 1.3, 6).
const RING_PACKED: usize = 34;

/// Resets in one round between the start and the end of the log: those of the driver and of the
/// link. Where the log ends and starts again, those of the driver and of the start.
const RESETS: u64 = 3;

/// The machine of a guest on the first function logs writes; its peer is on the second function.
fn logs(functions: [usize; 2], packed: bool) {
    let nic = SriovNic::enable(4).unwrap();
    let devices = functions.map(|index| VfDevice::add(nic.vf(index).unwrap()).unwrap());
    let mac = devices[1].function().mac();
    let mut machine = Machine::start("log", devices[0].path(), 2);
    let features = machine.guest.ready()["nics"][0]["features"].clone();
    // sysfs: one character for each bit, bit 0 first.
    let negotiated = features.as_str().unwrap().as_bytes()[RING_PACKED] == b'1';
    assert_eq!(negotiated, packed, "{features}");
    let peer = Echo::start(devices[1].path());
    let doorbells = machine.doorbells();
    assert!(doorbells >= 4, "{doorbells}");
    let link = devices[0].function().link();
    let flood = Flood {
        to: &mac,
        // The device is reset when the log starts: frames in flight to it are lost.
        lost_by_log: lost_by_resets(1),
        lost_between: lost_by_resets(RESETS),
    };
    machine.log_under_traffic(rounds(), &flood, |round, machine| {
        assert_eq!(machine.doorbells(), 0, "a shadowed queue has no doorbell");
        match round % 3 {
            // Starts shadowed again at once.
            0 => drop(machine.guest.command(REBIND).unwrap()),
            // QEMU's device breaks if it drops frames of a packed ring while its link is down. Its
            // count of chains in flight falls below zero (`virtqueue_packed_drop_all` in
            // hw/virtio/virtio.c). So a guest with packed rings keeps its link.
            1 if !packed => {
                set_link(&link, false).unwrap();
                set_link(&link, true).unwrap();
            }
            _ => drop(machine.guest.command("promisc on").unwrap()),
        }
        machine.relay_threads_are(1);
        // In every other round the log ends on a device that works directly again.
        if round % 2 == 1 {
            machine.ask("dirty-log off");
            machine.guest.command(REBIND).unwrap();
            machine.relay_threads_are(0);
            assert_eq!(machine.doorbells(), doorbells, "round {round}");
            machine.ask("dirty-log on");
        }
    });
    // Shadowed, until the driver resets it.
    machine.relay_threads_are(1);
    machine.flooded(&mac, lost_by_resets(1), |machine| {
        machine.guest.command(REBIND).unwrap();
    });
    machine.relay_threads_are(0);
    assert_eq!(machine.doorbells(), doorbells);
    traffic(&mut machine.guest, &mac);
    machine.end();
    peer.end();
}

#[test]
fn a_log_begins_and_ends_many_times_under_traffic() {
    logs([0, 1], false);
}

#[test]
fn a_log_of_packed_rings_begins_and_ends_many_times_under_traffic() {
    logs([FIRST_PACKED_FUNCTION, FIRST_PACKED_FUNCTION + 1], true);
}

/// A hand-written network driver, without a control queue, EVENT_IDX or merged buffers.
fn by_hand(device: &VfDevice<'_>) -> machine::Machine {
    let options = VdpaOptions {
        id: device.function().mac(),
        path: device.path().to_owned(),
        mac: None,
        mac_lock: false,
        standby: false,
        num_queues: None,
        doorbell: DoorbellMode::Auto,
        iommu: false,
    };
    let mut machine = machine::Machine::on(&options, &guest::memory());
    // VERSION_1, MAC, STATUS.
    machine.features &= 1 << 32 | 1 << 5 | 1 << 16;
    machine.start();
    machine
}

/// Sends frames one after the other and waits for each; ignores other frames on the switch.
#[track_caller]
fn send(from: &mut machine::Machine, to: &mut machine::Machine, mac: [u8; 6]) {
    for sequence in 0..40 {
        let sent = packet(sequence, 590, mac);
        from.nic.send(&sent);
        while to.nic.receive().unwrap()[12..] != sent[12..] {}
    }
}

/// Pages of receive buffers that are marked.
fn marked(machine: &machine::Machine) -> usize {
    let region = machine.memory.find_region(GuestAddress(HIGH)).unwrap();
    let pages = (0..16).map(|page| page * 4096);
    pages.filter(|page| region.bitmap().dirty_at(*page)).count()
}

/// vp_vdpa cannot suspend and begins only at the start of a ring. It is saved by a reset and
/// continues with shadow rings until its driver resets it.
#[test]
fn a_saved_device_continues_shadowed() {
    let nic = SriovNic::enable(2).unwrap();
    let devices = [0, 1].map(|index| VfDevice::add(nic.vf(index).unwrap()).unwrap());
    let [mut a, mut b] = devices.each_ref().map(by_hand);
    let macs = [&mut a, &mut b].map(machine::Machine::mac);
    send(&mut a, &mut b, macs[1]);
    for round in 0..4 {
        if round % 2 == 1 {
            b.backend.log_writes(true).unwrap();
            assert!(b.backend.doorbell(0).is_none());
        }
        let state = b.backend.save().unwrap();
        b.backend.save().unwrap_err();
        let activation = b.activation();
        b.backend.restore(&state, activation).unwrap();
        assert!(b.backend.doorbell(0).is_none(), "round {round}");
        send(&mut a, &mut b, macs[1]);
        send(&mut b, &mut a, macs[0]);
        // The device is already shadowed, so a log needs no change.
        let memory = std::sync::Arc::clone(&b.memory);
        memory.iter().for_each(|region| (**region).bitmap().reset());
        b.backend.log_writes(true).unwrap();
        send(&mut a, &mut b, macs[1]);
        assert_eq!(marked(&b), 16, "round {round}");
        assert_eq!(b.backend.untracked_writes(), []);
        b.backend.log_writes(false).unwrap();
    }
    b.backend.reset();
    b.start();
    assert!(b.backend.doorbell(0).is_some());
    send(&mut a, &mut b, macs[1]);
    send(&mut b, &mut a, macs[0]);
}

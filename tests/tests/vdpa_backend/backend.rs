//! The vDPA backend through its trait, with guest memory but without a guest: lifecycle, refusals,
//! resets, another device class.

use std::sync::Arc;
use std::time::Duration;

use devices::virtio::backend::{Activation, Backend as _, QueueChange};
use devices::virtio::vdpa::{VdpaBackend, VdpaOptions};
use lab::sim::{Mapping, SimDevice};
use vdpa::iova::DeviceAddress;
use vdpa::memory::GuestMemory;
use vdpa::window::{HIGHEST_END, WINDOW_SIZE};
use vm_memory::{Bytes as _, GuestAddress};

use super::support::frames::{Loopback as _, exchange, is_not_delivered, packet};
use super::support::guest::{self, HIGH, REGION, Ring, wait};
use super::support::machine::{Machine, chain, options};
use super::support::nic::PATIENCE;
use super::support::process::{descriptors, pinned};
use super::support::{BROADCAST, FOREIGN, MAC, net, simulator, text};

const NEEDS_CONTROL: u64 = 1 << 17;

#[test]
fn a_guest_s_frames_loop_back() {
    for mapping in Mapping::ALL {
        let net = net(mapping);
        let mut machine = Machine::new(&net);
        assert_eq!(machine.backend.device_type(), 1);
        assert_eq!(machine.backend.queue_max_sizes(), [256; 3]);
        machine.start();
        exchange(&mut machine.nic, 200, &[MAC, BROADCAST]);
        is_not_delivered(&mut machine.nic, FOREIGN, MAC);
    }
}

#[test]
fn a_driver_without_a_control_queue_is_served_too() {
    let net = net(Mapping::DEFAULT);
    let mut machine = Machine::new(&net);
    machine.features &= !(NEEDS_CONTROL | 1 << 23);
    machine.start();
    exchange(&mut machine.nic, 20, &[MAC]);
}

#[test]
fn the_address_that_the_user_wants_reaches_guest_and_device() {
    let net = net(Mapping::DEFAULT);
    let options = VdpaOptions {
        mac: Some(FOREIGN),
        ..options(&net)
    };
    let mut machine = Machine::with(&options);
    assert_eq!(machine.mac(), FOREIGN);
    machine.start();
    assert_eq!(net.config().unwrap()["mac"], text(FOREIGN));
    exchange(&mut machine.nic, 20, &[FOREIGN]);
}

#[test]
fn the_error_for_a_wrong_number_of_queues_names_the_right_one() {
    let net = net(Mapping::DEFAULT);
    let options = VdpaOptions {
        num_queues: Some(5),
        ..options(&net)
    };
    let error = VdpaBackend::open(&options, guest::memory(), guest::RAM_END).unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with("the device has 3 queues and num_queues is 5"),
        "{text}"
    );
}

/// Features that a driver may request and must not get.
#[test]
fn refused_features_leave_a_device_that_works() {
    for mapping in [Mapping::DEFAULT, Mapping::PINNED] {
        let net = net(mapping);
        let mut machine = Machine::new(&net);
        let mapped = machine.backend.mapped_bytes();
        for features in [0, 1 << 34 | machine.features, machine.features & !(1 << 32)] {
            machine.backend.negotiate(features).unwrap_err();
            assert_eq!(machine.backend.mapped_bytes(), mapped);
        }
        let activation = machine.nic.activation(machine.features);
        let error = machine.backend.activate(activation).unwrap_err();
        assert!(
            chain(&error).contains("not negotiated"),
            "{}",
            chain(&error)
        );
        machine.start();
        exchange(&mut machine.nic, 20, &[MAC]);
    }
}

#[test]
fn a_ring_outside_guest_memory_does_not_start_the_device() {
    let net = net(Mapping::DEFAULT);
    let mut machine = Machine::new(&net);
    let window = HIGHEST_END - WINDOW_SIZE;
    for place in [
        REGION,
        HIGH - 0x1000,
        HIGH + REGION,
        window + 0x1000,
        !0xffff,
    ] {
        for part in 0..3 {
            machine.nic.restart();
            let mut activation = machine.activation();
            let addresses = &mut activation.queues[part].addresses;
            match part {
                0 => addresses.descriptor = DeviceAddress(place),
                1 => addresses.driver = DeviceAddress(place),
                // The control queue, which the backend itself serves.
                _ => addresses.device = DeviceAddress(place),
            }
            machine.backend.negotiate(machine.features).unwrap();
            let error = machine.backend.activate(activation).unwrap_err();
            assert!(chain(&error).contains("outside"), "{}", chain(&error));
            machine.backend.reset();
        }
    }
    machine.start();
    exchange(&mut machine.nic, 20, &[MAC]);
}

#[test]
fn a_ring_that_is_too_large_or_overlaps_itself_does_not_start_the_device() {
    let net = net(Mapping::DEFAULT);
    let mut machine = Machine::new(&net);
    for (size, overlap) in [
        (0, false),
        (3, false),
        (512, false),
        (32768, false),
        (16, true),
    ] {
        for queue in 0..3 {
            let mut activation = machine.activation();
            let addresses = &mut activation.queues[queue].addresses;
            addresses.size = size;
            if overlap {
                addresses.device = addresses.descriptor;
            }
            machine.backend.negotiate(machine.features).unwrap();
            machine.backend.activate(activation).unwrap_err();
            machine.backend.reset();
        }
    }
    machine.start();
    exchange(&mut machine.nic, 20, &[MAC]);
}

#[test]
fn a_new_interrupt_is_used_and_signalled_once() {
    let net = net(Mapping::DEFAULT);
    let mut machine = Machine::new(&net);
    machine.start();
    exchange(&mut machine.nic, 5, &[MAC]);
    let fresh = Arc::new(vdpa::eventfd::new().unwrap());
    let change = QueueChange::Call {
        index: 0,
        call: Some(fresh.clone()),
    };
    machine.backend.change(change).unwrap();
    assert!(wait(&fresh, PATIENCE), "the spurious interrupt");
    machine.nic.receive.call = fresh;
    exchange(&mut machine.nic, 20, &[MAC]);
}

fn resets_leak_nothing(mapping: Mapping) {
    let net = net(mapping);
    let mut machine = Machine::new(&net);
    machine.start();
    exchange(&mut machine.nic, 5, &[MAC]);
    let count = |machine: &Machine| (machine.backend.mapped_bytes(), descriptors(), pinned());
    let before = count(&machine);
    for round in 0..100 {
        // In flight when the reset comes.
        for sequence in 0..8 {
            machine.nic.send(&packet(sequence, 590, MAC));
        }
        machine.backend.reset();
        machine.start();
        assert_eq!(count(&machine), before, "round {round}");
    }
    exchange(&mut machine.nic, 50, &[MAC]);
}

#[test]
fn a_hundred_resets_under_traffic_leak_nothing() {
    resets_leak_nothing(Mapping::DEFAULT);
}

#[test]
fn a_hundred_resets_under_traffic_leave_nothing_pinned() {
    resets_leak_nothing(Mapping::PINNED);
}

#[test]
fn nothing_is_written_to_guest_memory_after_a_reset() {
    let net = net(Mapping::DEFAULT);
    let mut machine = Machine::new(&net);
    machine.start();
    exchange(&mut machine.nic, 5, &[MAC]);
    for sequence in 0..8 {
        machine.nic.send(&packet(sequence, 4084, MAC));
    }
    machine.backend.reset();
    let mut before = vec![0; usize::try_from(REGION).unwrap()];
    let mut after = before.clone();
    machine
        .memory
        .read_slice(&mut before, GuestAddress(HIGH))
        .unwrap();
    // Kicks that the device has not seen yet must not wake it later.
    let _ = machine.nic.receive.call.read();
    machine.nic.transmit.kick.write(1).unwrap();
    let interrupted = wait(&machine.nic.receive.call, Duration::from_millis(200));
    assert!(!interrupted, "an interrupt after the reset");
    machine
        .memory
        .read_slice(&mut after, GuestAddress(HIGH))
        .unwrap();
    assert!(before == after, "the device wrote after its reset");
}

/// One request of virtio-blk (virtio 1.3, 5.2.6): kind 0 reads, 1 writes.
fn request(memory: &GuestMemory, ring: &mut Ring, kind: u32, sector: u64) -> u8 {
    let mut header = [0; 16];
    header[..4].copy_from_slice(&kind.to_le_bytes());
    header[8..].copy_from_slice(&sector.to_le_bytes());
    memory.write_slice(&header, GuestAddress(HIGH)).unwrap();
    memory
        .write_obj(0xffu8, GuestAddress(HIGH + 0x3000))
        .unwrap();
    ring.add(&[
        (HIGH, 16, false),
        (HIGH + 0x1000, 512, kind == 0),
        (HIGH + 0x3000, 1, true),
    ]);
    while ring.take().is_none() {
        assert!(wait(&ring.call, PATIENCE), "the request is not done");
    }
    memory.read_obj(GuestAddress(HIGH + 0x3000)).unwrap()
}

#[test]
fn a_block_device_reads_back_its_writes() {
    simulator(Mapping::DEFAULT);
    let block = SimDevice::block("blk").unwrap();
    let memory = guest::memory();
    let mut backend = VdpaBackend::open(&options(&block), memory.clone(), guest::RAM_END).unwrap();
    assert_eq!(backend.device_type(), 2);
    let mut capacity = [0; 8];
    backend.read_config(0, &mut capacity);
    assert_eq!(u64::from_le_bytes(capacity) * 512, 128 << 20);

    let features = backend.features();
    let mut ring = Ring::new(&memory, 0);
    ring.clear();
    backend.negotiate(features).unwrap();
    let queues = vec![ring.queue()];
    backend.activate(Activation { features, queues }).unwrap();
    let data: Vec<u8> = packet(9, 500, MAC);
    memory
        .write_slice(&data, GuestAddress(HIGH + 0x1000))
        .unwrap();
    assert_eq!(request(&memory, &mut ring, 1, 77), 0);
    memory
        .write_slice(&[0; 512], GuestAddress(HIGH + 0x1000))
        .unwrap();
    assert_eq!(request(&memory, &mut ring, 0, 77), 0);
    let mut back = vec![0; 512];
    memory
        .read_slice(&mut back, GuestAddress(HIGH + 0x1000))
        .unwrap();
    assert_eq!(back, data);
    // Beyond the end: the device reports an error and continues.
    assert_eq!(request(&memory, &mut ring, 0, 128 << 20), 1);
    assert_eq!(request(&memory, &mut ring, 0, 77), 0);
}

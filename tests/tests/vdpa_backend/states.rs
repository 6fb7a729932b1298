//! The device's states, compared step by step with the kernel's view.

use std::fs::File;

use vdpa::causes::in_one_line;
use vdpa::device::{Device, State, VringBase, VringConfig};
use vdpa::iova::DeviceAddress;
use vdpa::uapi::BackendFeatures;

use lab::sim::Mapping;

use super::support::frames::{Loopback as _, exchange, packet};
use super::support::nic::{Nic, RECEIVE, Rig, TRANSMIT, features, own, reduced};
use super::support::{MAC, net};

const ACKNOWLEDGE: u8 = 1;
const DRIVER: u8 = 2;
const DRIVER_OK: u8 = 4;
const FEATURES_OK: u8 = 8;
const RUNNING: u8 = ACKNOWLEDGE | DRIVER | DRIVER_OK | FEATURES_OK;

#[test]
fn each_state_is_the_status_that_the_kernel_shows() {
    let net = net(Mapping::DEFAULT);
    let device = Device::open(net.path()).unwrap();
    assert_eq!(device.status().unwrap(), 0);
    let (mut device, iotlb) = device.own().unwrap();
    assert_eq!(device.status().unwrap(), 0);
    let features = features(&device);
    device.negotiate(features).unwrap();
    assert_eq!(device.status().unwrap(), ACKNOWLEDGE | DRIVER | FEATURES_OK);
    device.start().unwrap();
    assert_eq!(device.status().unwrap(), RUNNING);
    device.suspend().unwrap();
    device.resume().unwrap();
    assert_eq!(device.status().unwrap(), RUNNING);
    device.suspend().unwrap();
    device.reset().unwrap();
    assert_eq!(device.status().unwrap(), 0);
    assert_eq!(device.state(), State::Owned);
    drop((device, iotlb));
}

#[test]
fn features_that_the_device_lacks_are_refused_and_it_stays_usable() {
    let net = net(Mapping::DEFAULT);
    let (mut device, mut iotlb) = own(net.path(), BackendFeatures::all());
    let offered = features(&device);
    let lacking = !device.info().features & (1 << 22 | 1 << 34);
    assert_ne!(lacking, 0);
    let error = device.negotiate(offered | lacking).unwrap_err();
    let text = error.to_string();
    assert!(
        text.ends_with(&format!("not offer the features {lacking:#x}")),
        "{text}"
    );
    let error = device.negotiate(offered & !(1 << 32)).unwrap_err();
    assert!(error.to_string().ends_with("which is needed"), "{error}");
    assert_eq!(device.status().unwrap(), 0);

    let mut nic = Nic::new();
    nic.map(&mut iotlb);
    device.negotiate(offered).unwrap();
    nic.set_up(&mut device);
    device.enable_vring(RECEIVE).unwrap();
    device.enable_vring(TRANSMIT).unwrap();
    device.start().unwrap();
    exchange(&mut nic, 10, &[MAC]);
    drop(device);
}

#[test]
fn rings_that_the_device_cannot_have_are_refused_by_us() {
    let net = net(Mapping::DEFAULT);
    let (mut device, _iotlb) = own(net.path(), BackendFeatures::all());
    let maximum = device.info().queues[0].max_size;
    let features = features(&device);
    device.negotiate(features).unwrap();
    let nic = Nic::new();
    let allowed = [nic.memory.range()];
    let good = nic.receive.config();
    let mut refused =
        |queue, config: &VringConfig<'_>| device.set_vring(queue, config, &allowed).unwrap_err();
    let size = maximum * 2;
    let error = refused(0, &VringConfig { size, ..good });
    let text = in_one_line(&error);
    assert!(text.starts_with("cannot set up queue 0"), "{text}");
    assert!(text.ends_with(&format!("takes up to {maximum}")), "{text}");
    let error = refused(3, &good);
    assert_eq!(error.to_string(), "there is no queue 3: the device has 3");
    let mut outside = good;
    outside.addresses.device = DeviceAddress(allowed[0].last() + 1);
    let error = refused(0, &outside);
    let text = in_one_line(&error);
    assert!(text.ends_with("outside the memory for rings"), "{text}");
    device.set_vring(0, &good, &allowed).unwrap();
}

/// Suspend, new rings, resume, with receive buffers in flight and a frame sent while the device was
/// suspended.
fn switches_rings(wanted: BackendFeatures) {
    let net = net(Mapping::DEFAULT);
    let Rig {
        mut device,
        iotlb,
        mut nic,
        control,
        ..
    } = Rig::start(&net, wanted);
    exchange(&mut nic, 5, &[MAC]);
    device.suspend().unwrap();
    for queue in [RECEIVE, TRANSMIT] {
        let base = device.vring_base(queue).unwrap();
        assert_eq!(base, VringBase::Split { index: 5 }, "queue {queue}");
    }
    nic.reap();
    nic.switch(&mut device);
    let late = packet(77, 590, MAC);
    nic.send(&late);
    assert!(nic.receive.ring.pop_used().unwrap().is_none());
    device.resume().unwrap();
    assert_eq!(nic.receive().unwrap()[12..], late[12..]);
    exchange(&mut nic, 50, &[MAC]);
    device.suspend().unwrap();
    // Counted from the start of the new rings.
    let base = device.vring_base(RECEIVE).unwrap();
    assert_eq!(base, VringBase::Split { index: 51 });
    drop((device, iotlb, control));
}

#[test]
fn rings_are_switched_in_place() {
    switches_rings(BackendFeatures::all());
}

#[test]
fn rings_are_switched_in_place_with_reduced_abilities() {
    switches_rings(reduced());
}

#[test]
fn abilities_that_were_not_acknowledged_are_not_used() {
    let net = net(Mapping::DEFAULT);
    let without =
        BackendFeatures::all() - BackendFeatures::SUSPEND - BackendFeatures::ENABLE_AFTER_DRIVER_OK;
    let mut rig = Rig::start(&net, without);
    let error = rig.device.enable_vring(RECEIVE).unwrap_err();
    assert!(
        error.to_string().starts_with("the device cannot"),
        "{error}"
    );
    let error = rig.device.suspend().unwrap_err();
    assert_eq!(error.to_string(), "the device cannot suspend");
    // It keeps running.
    assert_eq!(rig.device.state(), State::Running);
    exchange(&mut rig.nic, 5, &[MAC]);
}

#[test]
fn a_reset_device_works_again_whether_its_mappings_survive_or_not() {
    for mapping in [Mapping::DEFAULT, Mapping::PINNED] {
        for wanted in [BackendFeatures::all(), reduced()] {
            let net = net(mapping);
            let mut rig = Rig::start(&net, wanted);
            assert_eq!(
                rig.iotlb.survives_reset(),
                wanted.contains(BackendFeatures::IOTLB_PERSIST)
            );
            let mapped = rig.iotlb.mapped_bytes();
            for _ in 0..3 {
                exchange(&mut rig.nic, 10, &[MAC]);
                rig.reset();
                assert_eq!(rig.iotlb.mapped_bytes(), mapped);
            }
            exchange(&mut rig.nic, 10, &[MAC]);
            drop(rig);
        }
    }
}

#[test]
fn queues_can_be_enabled_while_the_device_runs() {
    let net = net(Mapping::DEFAULT);
    let (mut device, mut iotlb) = own(net.path(), BackendFeatures::all());
    let mut nic = Nic::new();
    nic.map(&mut iotlb);
    let features = features(&device);
    device.negotiate(features).unwrap();
    nic.set_up(&mut device);
    device.start().unwrap();
    device.enable_vring(RECEIVE).unwrap();
    device.enable_vring(TRANSMIT).unwrap();
    exchange(&mut nic, 50, &[MAC]);
    drop(device);
}

#[test]
fn an_opened_descriptor_is_reset_and_has_one_owner() {
    let net = net(Mapping::DEFAULT);
    let file = File::options().read(true).write(true).open(net.path());
    let file = file.unwrap();
    let first = Device::from_fd(file.try_clone().unwrap().into()).unwrap();
    let (mut first, iotlb) = first.own().unwrap();
    let features = features(&first);
    first.negotiate(features).unwrap();
    assert_ne!(first.status().unwrap(), 0);
    let second = Device::from_fd(file.into()).unwrap();
    assert_eq!(second.status().unwrap(), 0);
    let error = second.own().unwrap_err();
    assert!(
        error.to_string().contains("has an owner already"),
        "{error}"
    );
    drop((first, iotlb));
}

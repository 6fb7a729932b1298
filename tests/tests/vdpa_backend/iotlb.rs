//! The IOTLB compared with the kernel's: refusals, rollback, pinned pages.

use std::sync::Arc;

use devices::virtio::vdpa::VdpaBackend;
use lab::sim::{self, SimDevice};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use vdpa::ErrorKind;
use vdpa::causes::in_one_line;
use vdpa::device::{Device, VringAddresses, VringBase, VringConfig};
use vdpa::iotlb::{Access, Iotlb, Mapping};
use vdpa::memory::{GuestRegion, SharedBuffer};
use vdpa::uapi::BackendFeatures;

use super::support::frames::{exchange, is_not_delivered};
use super::support::guest::{self, GuestNic, RAM_END, REGION};
use super::support::machine::{chain, options};
use super::support::nic::{RECEIVE, Rig, TRANSMIT, features, own, reduced};
use super::support::process::{descriptors, pinned};
use super::support::{BROADCAST, FOREIGN, MAC, net};

/// Lowers the limit on locked memory until dropped.
struct LowMemlock(Rlimit);

impl LowMemlock {
    fn new(bytes: u64) -> Self {
        let before = getrlimit(Resource::Memlock);
        let current = Some(bytes);
        setrlimit(Resource::Memlock, Rlimit { current, ..before }).unwrap();
        Self(before)
    }
}

impl Drop for LowMemlock {
    fn drop(&mut self) {
        setrlimit(Resource::Memlock, self.0).unwrap();
    }
}

fn opened(net: &SimDevice, wanted: BackendFeatures) -> (Device, Iotlb) {
    own(net.path(), wanted)
}

#[test]
fn guest_memory_in_two_regions_carries_frames() {
    for mapping in lab::sim::Mapping::ALL {
        let net = net(mapping);
        let (mut device, mut iotlb) = opened(&net, BackendFeatures::all());
        let memory = guest::memory();
        iotlb.map_guest_memory(0, &memory).unwrap();
        assert_eq!(iotlb.mapped_bytes(), 2 * REGION);
        let ram: Vec<_> = iotlb
            .address_space(0)
            .unwrap()
            .iter()
            .map(|(range, _)| range)
            .collect();
        let mut nic = GuestNic::new(&memory);
        let features = features(&device);
        device.negotiate(features).unwrap();
        for (index, ring) in [(RECEIVE, &nic.receive), (TRANSMIT, &nic.transmit)] {
            let config = VringConfig {
                size: ring.addresses.size,
                addresses: VringAddresses {
                    descriptor: ring.addresses.descriptor,
                    driver: ring.addresses.driver,
                    device: ring.addresses.device,
                },
                base: VringBase::initial(false),
                kick: Some(&ring.kick),
                call: Some(&ring.call),
            };
            device.set_vring(index, &config, &ram).unwrap();
            device.enable_vring(index).unwrap();
        }
        device.start().unwrap();
        exchange(&mut nic, 100, &[MAC, BROADCAST]);
        is_not_delivered(&mut nic, FOREIGN, MAC);
        drop((device, iotlb));
    }
}

#[test]
fn impossible_mappings_are_refused_before_the_kernel_sees_them() {
    let net = net(sim::Mapping::DEFAULT);
    let mut rig = Rig::start(&net, BackendFeatures::all());
    let mapped = rig.iotlb.mapped_bytes();
    let taken = rig.nic.memory.range().first();
    let region = Arc::new(SharedBuffer::new(0x4000, 0x2000_0000).unwrap());
    let mut refused = |iova, size| {
        let mapping = Mapping {
            region: region.clone(),
            offset: 0,
            access: Access::ReadWrite,
        };
        let error = rig.iotlb.map(0, iova, size, mapping).unwrap_err();
        let text = in_one_line(&error);
        assert_ne!(error.kind(), ErrorKind::Refused, "by the kernel: {text}");
        text
    };
    assert!(refused(taken, 0x1000).contains("overlaps"));
    assert!(refused(taken - 0x1000, 0x2000).contains("overlaps"));
    for (iova, size) in [
        (0x2000_0000, 0),
        (0x2000_0000, 0x1001),
        (0x2000_0001, 0x1000),
        (u64::MAX - 0xfff, 0x2000),
        (0x2000_0000, u64::MAX - 0xfff),
    ] {
        refused(iova, size);
    }
    for (asid, iova) in [(0, 0x2000_0000), (2, taken)] {
        let error = rig.iotlb.unmap(asid, iova).unwrap_err();
        assert_ne!(error.kind(), ErrorKind::Refused, "{error}");
    }
    assert_eq!(rig.iotlb.mapped_bytes(), mapped);
    exchange(&mut rig.nic, 10, &[MAC]);
}

/// The first of two regions can be pinned, the second not.
fn rolls_back(wanted: BackendFeatures) {
    let net = net(sim::Mapping::PINNED);
    let (_device, mut iotlb) = opened(&net, wanted);
    let memory = guest::memory();
    let before = pinned();
    let error = {
        let _low = LowMemlock::new(before + REGION + REGION / 2);
        iotlb.map_guest_memory(0, &memory).unwrap_err()
    };
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    let remedy = format!("ulimit -l {}", (before + 2 * REGION) / 1024);
    assert!(error.to_string().contains(&remedy), "{error}");
    assert_eq!(iotlb.mapped_bytes(), 0);
    assert_eq!(pinned(), before);
    // The kernel's table is empty too: otherwise this would overlap.
    iotlb.map_guest_memory(0, &memory).unwrap();
    assert_eq!(pinned(), before + 2 * REGION);
    for region in GuestRegion::all(&memory) {
        iotlb.unmap(0, region.base()).unwrap();
    }
    assert_eq!(pinned(), before);
}

#[test]
fn a_batch_that_the_kernel_refuses_half_way_is_rolled_back() {
    rolls_back(BackendFeatures::all());
}

#[test]
fn mappings_that_the_kernel_refuses_half_way_are_rolled_back_without_batches() {
    rolls_back(reduced());
}

#[test]
fn a_guest_that_cannot_be_pinned_is_an_error_with_a_remedy_and_leaves_nothing() {
    let net = net(sim::Mapping::PINNED);
    let (pages, fds) = (pinned(), descriptors());
    let error = {
        let _low = LowMemlock::new(pages + REGION);
        VdpaBackend::open(&options(&net), guest::memory(), RAM_END).unwrap_err()
    };
    let text = chain(&error);
    assert!(
        text.contains("cannot map guest memory for the device"),
        "{text}"
    );
    let remedy = format!("ulimit -l {}", (pages + 2 * REGION) / 1024);
    assert!(text.contains(&remedy), "{text}");
    assert_eq!((pinned(), descriptors()), (pages, fds));
    drop(VdpaBackend::open(&options(&net), guest::memory(), RAM_END).unwrap());
}

#[test]
fn nothing_stays_pinned_or_open_after_200_devices() {
    let net = net(sim::Mapping::PINNED);
    let memory = guest::memory();
    let (pages, fds) = (pinned(), descriptors());
    for round in 0..200 {
        let (device, mut iotlb) = opened(&net, BackendFeatures::all());
        iotlb.map_guest_memory(0, &memory).unwrap();
        assert_eq!(pinned(), pages + 2 * REGION, "round {round}");
        // In both orders.
        if round % 2 == 0 {
            drop(iotlb);
            drop(device);
        } else {
            drop(device);
            drop(iotlb);
        }
        assert_eq!(pinned(), pages, "round {round}");
    }
    assert_eq!(descriptors(), fds);
}

#[test]
fn a_closed_device_leaves_nothing_pinned_even_while_it_runs() {
    let net = net(sim::Mapping::PINNED);
    let pages = pinned();
    let mut rig = Rig::start(&net, BackendFeatures::all());
    exchange(&mut rig.nic, 5, &[MAC]);
    assert!(pinned() > pages);
    drop(rig);
    assert_eq!(pinned(), pages);
}

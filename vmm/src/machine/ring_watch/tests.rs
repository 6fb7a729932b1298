use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use devices::virtio::backend::{QueueAddresses, QueueRole};
use vdpa::iotlb::Access;
use vdpa::iova::{DeviceAddress, IovaRange, PAGE_SIZE};
use vdpa::memory::{AddressSpace, Mode, Piece};
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::layout::Layout;
use crate::memory::GuestRam;

const DRIVER: u64 = 0x10_0000;
const DEVICE: u64 = 0x20_0000;

fn memory() -> DeviceMemory {
    let layout = Layout::new(16 << 20, 40).unwrap();
    let ram = GuestRam::new(&layout, None).unwrap();
    Arc::new(ram.memory().clone()).into()
}

fn ring(driver: u64, device: u64) -> RunningRing {
    RunningRing {
        index: 0,
        addresses: QueueAddresses {
            size: 16,
            descriptor: DeviceAddress(0),
            driver: DeviceAddress(driver),
            device: DeviceAddress(device),
        },
        packed: false,
        role: QueueRole::Request,
        start: 1,
    }
}

fn store(memory: &DeviceMemory, area: u64, index: u16) {
    let address = GuestAddress(area + 2);
    memory
        .store(index.to_le(), address, Ordering::Release)
        .unwrap();
}

#[test]
fn indices_are_read_at_the_drivers_addresses() {
    let memory = memory();
    for (avail, used) in [(7, 3), (16, 0), (3, 65_530), (100, 3), (3, 4)] {
        store(&memory, DRIVER, avail);
        store(&memory, DEVICE, used);
        assert_eq!(indices(&ring(DRIVER, DEVICE), &memory), Some((avail, used)));
    }
    // A hole, the end of RAM, the end of the address space, an odd address.
    for address in [1 << 40, (16 << 20) - 3, u64::MAX, u64::MAX - 1, DRIVER + 1] {
        assert_eq!(
            indices(&ring(address, DEVICE), &memory),
            None,
            "{address:#x}"
        );
        assert_eq!(
            indices(&ring(DRIVER, address), &memory),
            None,
            "{address:#x}"
        );
    }
}

#[test]
fn a_ring_behind_an_iommu_is_read_where_it_is_mapped() {
    let memory = memory();
    let space = Arc::new(AddressSpace::new(IovaRange::ALL));
    let behind = DeviceMemory::behind(Arc::clone(memory.ram()), Arc::clone(&space));
    store(&memory, DRIVER, 7);
    store(&memory, DEVICE, 3);
    assert_eq!(indices(&ring(1 << 40, DEVICE), &behind), None);
    space.change(|space| {
        space.set_mode(Mode::Mapped);
        for (iova, gpa) in [(1 << 40, DRIVER), (1 << 41, DEVICE)] {
            let range = IovaRange::from_size(iova, PAGE_SIZE).unwrap();
            let access = Access::ReadOnly;
            space.map(range, Piece { gpa, access }).unwrap();
        }
    });
    assert_eq!(indices(&ring(1 << 40, 1 << 41), &behind), Some((7, 3)));
    assert_eq!(indices(&ring(1 << 40, DEVICE), &behind), None);
}

#[test]
fn a_queue_in_full_flight_is_consistent() {
    let memory = memory();
    let stop = Arc::new(AtomicBool::new(false));
    let traffic = std::thread::spawn({
        let (memory, stop) = (memory.clone(), stop.clone());
        move || {
            let mut index = 0u16;
            while !stop.load(Ordering::Relaxed) {
                store(&memory, DRIVER, index.wrapping_add(16));
                store(&memory, DEVICE, index.wrapping_add(16));
                index = index.wrapping_add(16);
            }
        }
    });
    for _ in 0..100_000 {
        let (avail, used) = indices(&ring(DRIVER, DEVICE), &memory).unwrap();
        assert!(avail.wrapping_sub(used) <= 16, "{avail} {used}");
    }
    stop.store(true, Ordering::Relaxed);
    traffic.join().unwrap();
}

#[test]
fn a_timer_without_an_event_never_blocks() {
    let timer = Timer::new().unwrap();
    timer.take();
    arm(&timer).unwrap();
    timer.take();
}

//! The pages that a guest and this process write, as KVM and vm-memory log them, against a real
//! `/dev/kvm`. Fails with a message without KVM.

mod support;

use std::time::Instant;

use support::{CODE, PATIENCE, RAM_SIZE, Rig};
use vm_memory::{Bytes, GuestAddress};
use vmm::layout::AddressRange;
use vmm::memory::RamSlot;
use vmm::migration::dirty::{DirtyPages, DirtyTracker};

/// inc dword [0x500]; jmp back: writes page 0 forever.
const SPIN: &[u8] = &[0x66, 0xff, 0x06, 0x00, 0x05, 0xeb, 0xf9];

/// mov byte [PAGE × 4096 + 0x123], 1; jmp back to it.
fn store(page: u8) -> [u8; 7] {
    [0xc6, 0x06, 0x23, page << 4 | 1, 0x01, 0xeb, 0xf9]
}

fn start(rig: &Rig) -> DirtyTracker {
    let slot = RamSlot {
        guest: AddressRange {
            start: 0,
            len: RAM_SIZE as u64,
        },
        host_address: 0,
        file_offset: 0,
    };
    DirtyTracker::start(rig.slots.clone(), &rig.memory, &[slot]).unwrap()
}

fn none() -> DirtyPages {
    DirtyPages::none(RAM_SIZE as u64)
}

fn numbers(pages: &DirtyPages) -> Vec<u64> {
    (0..pages.capacity())
        .filter(|&page| pages.contains(page))
        .collect()
}

#[test]
fn writes_of_vcpus_userspace_and_always_are_one_set() {
    let rig = Rig::new(1, &[0xf4]);
    let tracker = start(&rig);
    let mut pages = none();
    tracker.take(&mut pages, &[]).unwrap();
    pages.clear();
    tracker.take(&mut pages, &[]).unwrap();
    assert_eq!(numbers(&pages), [] as [u64; 0], "no writes");

    for page in [2, 3, 6] {
        rig.load(CODE, &store(page));
        rig.restart();
        tracker.take(&mut pages, &[]).unwrap();
        assert_eq!(numbers(&pages), [1], "this process alone wrote");
        pages.clear();
        rig.vcpus.resume();
        let begun = Instant::now();
        while !pages.contains(page.into()) {
            assert!(begun.elapsed() < PATIENCE, "the write is not logged");
            tracker.take(&mut pages, &[]).unwrap();
        }
        rig.vcpus.pause();
        // The writes between the last read and the pause.
        tracker.take(&mut pages, &[]).unwrap();
        // KVM also counts a page as written when it maps it writable for a fetch (make_spte in
        // arch/x86/kvm/mmu/spte.c): the page of the code may be included.
        let mut found = numbers(&pages);
        found.retain(|&number| number != 1);
        assert_eq!(found, [u64::from(page)], "the vCPU alone wrote");
        pages.clear();
    }

    rig.memory
        .write_slice(&[7; 5000], GuestAddress(0x4800))
        .unwrap();
    tracker
        .take(&mut pages, &[0x2000..0x2001, 0x7fff..u64::MAX])
        .unwrap();
    assert_eq!(numbers(&pages), [2, 4, 5, 7]);
}

#[test]
fn logging_is_switched_under_a_running_guest() {
    let rig = Rig::new(1, SPIN);
    rig.vcpus.resume();
    for _ in 0..20 {
        let tracker = start(&rig);
        assert!(rig.slots.is_logging());
        let (before, begun) = (rig.word(0x500), Instant::now());
        loop {
            let mut pages = none();
            tracker.take(&mut pages, &[]).unwrap();
            if rig.word(0x500) != before && pages.contains(0) {
                break;
            }
            assert!(begun.elapsed() < PATIENCE, "the guest stands still");
        }
        drop(tracker);
        assert!(!rig.slots.is_logging());
        let error = rig.slots.take_dirty_log().err().unwrap();
        assert!(
            error
                .to_string()
                .contains("the log of writes to guest memory is off"),
            "{error}"
        );
    }
    assert_eq!(rig.vcpus.take_report(), None);
}

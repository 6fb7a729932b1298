//! Mappings as an untrusted process may make them.

use std::sync::atomic::Ordering;

use proptest::prelude::*;
use rustix::fs::{MemfdFlags, memfd_create};
use vm_memory::{Bytes as _, GuestMemory as _, Permissions};

use super::*;

fn file(pages: u64) -> File {
    let file = File::from(memfd_create("vduse-test", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(pages * PAGE_SIZE).unwrap();
    file
}

fn entry(page: u64, pages: u64, at: u64, perm: u8) -> vduse_iotlb_entry {
    let start = page * PAGE_SIZE;
    vduse_iotlb_entry {
        offset: at * PAGE_SIZE,
        start,
        last: start + pages * PAGE_SIZE - 1,
        perm,
    }
}

/// As the kernel finds them, without a check.
fn find<'a>(
    entries: &'a [vduse_iotlb_entry],
    file: &'a File,
) -> impl FnMut(u64) -> Result<Option<(vduse_iotlb_entry, File)>, Error> + 'a {
    move |from| {
        let found = entries.iter().find(|entry| entry.last >= from);
        Ok(found.map(|entry| (*entry, file.try_clone().unwrap())))
    }
}

#[test]
fn mappings_reach_their_file_and_unchanged_ones_stay() {
    let file = file(8);
    let mut mappings = Mappings::default();
    let entries = [entry(0x10, 2, 4, 3), entry(0x20, 1, 0, 3)];
    let memory = mappings.replace(find(&entries, &file)).unwrap().unwrap();
    assert!(memory.space().is_none());
    memory.write_obj(7_u8, GuestAddress(0x1_1fff)).unwrap();
    memory.write_obj(9_u8, GuestAddress(0x2_0000)).unwrap();
    memory.write_obj(9_u16, GuestAddress(0x2_0fff)).unwrap_err();
    let region = Arc::clone(&mappings.entries[0].region);
    let entries = [entries[0], entry(0x20, 1, 5, 3)];
    let memory = mappings.replace(find(&entries, &file)).unwrap().unwrap();
    assert!(Arc::ptr_eq(&region, &mappings.entries[0].region));
    // The second one is the last page of the first one now.
    let seen: u8 = memory.read_obj(GuestAddress(0x2_0fff)).unwrap();
    assert_eq!((seen, mappings.files.len()), (7, 1));
    assert!(mappings.replace(|_| Ok(None)).unwrap().is_none());
    assert!(mappings.entries.is_empty() && mappings.files.is_empty());
}

#[test]
fn a_read_only_mapping_is_never_written() {
    let file = file(2);
    let mut mappings = Mappings::default();
    let entries = [entry(0, 1, 0, 3), entry(1, 1, 1, 1)];
    let memory = mappings.replace(find(&entries, &file)).unwrap().unwrap();
    let last = GuestAddress(PAGE_SIZE);
    assert!(memory.check_range(last, 8, Permissions::Read));
    assert!(!memory.check_range(last, 8, Permissions::Write));
    memory.write_obj(1_u64, last).unwrap_err();
    memory.store(1_u16, last, Ordering::Release).unwrap_err();
    memory
        .write_obj(1_u64, GuestAddress(PAGE_SIZE - 4))
        .unwrap_err();
    memory
        .write_obj(1_u64, GuestAddress(PAGE_SIZE - 8))
        .unwrap();
}

#[test]
fn parts_of_reserved_huge_pages_are_refused() {
    let huge = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let file = File::from(memfd_create("vduse-huge", huge).unwrap());
    file.set_len(2 << 21).unwrap();
    let mut mappings = Mappings::default();
    for part in [
        entry(512, 1, 0, 3),
        entry(512, 512, 1, 3),
        entry(1, 512, 0, 3),
        entry(512, 513, 0, 3),
    ] {
        let error = mappings.replace(find(&[part], &file)).unwrap_err();
        assert!(error.to_string().contains("huge page"), "{error}");
        assert!(mappings.entries.is_empty() && mappings.files.is_empty());
    }
    // Nothing is reserved here, so the kernel may map it without pages behind.
    mappings
        .replace(find(&[entry(512, 512, 512, 3)], &file))
        .unwrap();
}

#[test]
fn hostile_mappings_are_refused_and_leave_none() {
    let file = file(8);
    let good = entry(1, 1, 0, 3);
    for bad in [
        // No access; not whole pages; the end of the space; no bytes; backwards.
        entry(4, 1, 0, 0),
        entry(4, 1, 0, 4),
        vduse_iotlb_entry {
            start: 0x4001,
            ..entry(4, 1, 0, 3)
        },
        vduse_iotlb_entry {
            last: 0x4ffe,
            ..entry(4, 1, 0, 3)
        },
        vduse_iotlb_entry {
            offset: 1,
            ..entry(4, 1, 0, 3)
        },
        vduse_iotlb_entry {
            offset: u64::MAX - 0xfff,
            ..entry(4, 1, 0, 3)
        },
        vduse_iotlb_entry {
            start: 0,
            last: u64::MAX,
            ..good
        },
        vduse_iotlb_entry {
            start: 0x4000,
            last: u64::MAX,
            ..good
        },
        vduse_iotlb_entry {
            start: u64::MAX - 0xfff,
            last: u64::MAX,
            ..good
        },
        vduse_iotlb_entry {
            start: 0x5000,
            last: 0x4fff,
            ..good
        },
        // Below the address that was asked for: it overlaps the one before.
        vduse_iotlb_entry {
            start: 0x1000,
            last: 0x4fff,
            ..good
        },
    ] {
        let mut mappings = Mappings::default();
        mappings.replace(find(&[good], &file)).unwrap().unwrap();
        let result = mappings.replace(find(&[good, bad], &file));
        assert!(result.is_err(), "{bad:?}");
        assert!(mappings.entries.is_empty());
    }
}

#[test]
fn more_mappings_than_the_limit_are_refused() {
    let file = file(1);
    let mut mappings = Mappings::default();
    let endless = |from: u64| {
        let page = from.div_ceil(PAGE_SIZE);
        Ok(Some((entry(page, 1, 0, 3), file.try_clone().unwrap())))
    };
    let error = mappings.replace(endless).unwrap_err().to_string();
    assert!(error.contains("4096"), "{error}");
}

proptest! {
    /// No value panics, and what is accepted has the right size.
    #[test]
    fn any_mapping_is_refused_or_whole(
        start: u64,
        last: u64,
        offset: u64,
        perm in 0..6_u8,
        aligned: bool,
    ) {
        let mask = if aligned { !0xfff } else { u64::MAX };
        let mapping = vduse_iotlb_entry {
            start: start & mask,
            last: if aligned { last | 0xfff } else { last },
            offset: (offset >> 20) & mask,
            perm,
        };
        let file = file(1);
        let mut mappings = Mappings::default();
        let mut once = Some((mapping, file));
        if let Ok(Some(memory)) = mappings.replace(|_| Ok(once.take())) {
            prop_assert_eq!(mappings.entries.len(), 1);
            let size = mappings.entries[0].region.size() as u64;
            prop_assert_eq!(size - 1, mapping.last - mapping.start);
            drop(memory);
        }
    }
}

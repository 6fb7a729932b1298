//! Guest RAM saved and restored, and damaged files.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

use proptest::prelude::*;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::config::HugePageSize;
use crate::layout::{HOLE_END, HOLE_START, Layout, PAGE_SIZE};
use crate::memory::GuestRam;

const MIB: u64 = 1 << 20;
/// The smallest RAM, and a last block of one page.
const SIZE: u64 = 16 * MIB + PAGE_SIZE;

fn ram(size: u64) -> GuestRam {
    GuestRam::new(&Layout::new(size, 46).unwrap(), None).unwrap()
}

/// A file without a name, on the file system of temporary files.
fn file() -> File {
    let directory = std::env::temp_dir();
    let flags = rustix::fs::OFlags::TMPFILE | rustix::fs::OFlags::RDWR;
    match rustix::fs::open(&directory, flags, rustix::fs::Mode::RWXU) {
        Ok(file) => File::from(file),
        // Not every file system has O_TMPFILE.
        Err(_) => {
            let path = directory.join(format!(
                "memory-image-{}-{:?}",
                std::process::id(),
                std::thread::current().id()
            ));
            let file = OpenOptions::new()
                .create_new(true)
                .read(true)
                .write(true)
                .open(&path)
                .unwrap();
            std::fs::remove_file(&path).unwrap();
            file
        }
    }
}

fn fill(ram: &GuestRam, pieces: &[(u64, Vec<u8>)]) {
    for (address, bytes) in pieces {
        ram.memory()
            .write_slice(bytes, GuestAddress(*address))
            .unwrap();
    }
}

fn content(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// RAM with data at the edges of pages, blocks and RAM.
fn sample() -> GuestRam {
    let ram = ram(SIZE);
    fill(
        &ram,
        &[
            (0, vec![1]),
            (MIB - 1, vec![2, 3]),
            (2 * MIB + 4096, vec![4; 4096]),
            (2 * MIB + 3 * 4096 + 5, vec![5]),
            (5 * MIB, vec![6; 1 << 20]),
            // Touched, but all zeros.
            (8 * MIB, vec![0; 1 << 20]),
            (SIZE - 1, vec![7]),
        ],
    );
    ram
}

fn saved(ram: &GuestRam) -> (File, MemoryDigest) {
    let file = file();
    let digest = save(ram, &file).unwrap();
    (file, digest)
}

#[test]
fn a_digest_is_the_one_of_a_save_and_finds_each_byte_that_differs() {
    let before = sample();
    let (_, saved) = saved(&before);
    let digest = MemoryDigest::of(&before).unwrap();
    assert_eq!(digest, saved);
    digest.verify(&sample()).unwrap();
    // Written zeros and untouched memory are equal.
    let empty = MemoryDigest::of(&ram(SIZE)).unwrap();
    assert!(empty.checksums.iter().all(|checksum| *checksum == 0));

    for (address, offset) in [(0, 0), (9 * MIB + 77, 9 * MIB), (SIZE - 1, 16 * MIB)] {
        let after = sample();
        fill(&after, &[(address, vec![0xa5])]);
        let error = digest.verify(&after).unwrap_err();
        assert!(
            matches!(
                error,
                DigestError::Differs { differing: 1, blocks: 17, first } if first == offset
            ),
            "{error}"
        );
    }
    // Pages that never arrived read as zeros.
    let error = digest.verify(&ram(SIZE)).unwrap_err();
    assert!(matches!(error, DigestError::Differs { .. }), "{error}");

    fill(&before, &[(0, vec![8]), (5 * MIB, vec![8])]);
    let error = digest.verify(&before).unwrap_err();
    assert!(
        matches!(
            error,
            DigestError::Differs {
                differing: 2,
                first: 0,
                ..
            }
        ),
        "{error}"
    );

    // A digest from another host may have any content.
    let error = digest.verify(&ram(32 * MIB)).unwrap_err();
    assert!(matches!(error, DigestError::Size { .. }), "{error}");
    for checksums in [vec![], vec![0; 16], vec![0; 18]] {
        let wrong = MemoryDigest {
            size: SIZE,
            checksums,
        };
        let error = wrong.verify(&sample()).unwrap_err();
        assert!(matches!(error, DigestError::Size { .. }), "{error}");
    }
}

#[test]
fn a_saved_memory_is_the_same_and_sparse() {
    let before = sample();
    let (file, digest) = saved(&before);
    assert_eq!(digest.size(), SIZE);
    assert_eq!(digest.checksums[8], 0);
    let expected = content(before.file());
    assert!(content(&file) == expected);
    let written = file.metadata().unwrap().blocks() * 512;
    assert!(written < 2 * MIB, "{written} bytes on the disk");

    let after = ram(SIZE);
    restore(&after, &file, &digest).unwrap();
    assert!(content(after.file()) == expected);
    let allocated = after.file().metadata().unwrap().blocks() * 512;
    assert!(allocated < 2 * MIB, "{allocated} bytes in memory");
    let mut byte = [0];
    after
        .memory()
        .read_slice(&mut byte, GuestAddress(SIZE - 1))
        .unwrap();
    assert_eq!(byte, [7]);
}

#[test]
fn memory_that_was_used_is_right_afterwards() {
    let before = sample();
    let (file, digest) = saved(&before);
    let after = ram(SIZE);
    fill(
        &after,
        &[(0, vec![9; 9 << 20]), (SIZE - 4096, vec![9; 4096])],
    );
    restore(&after, &file, &digest).unwrap();
    assert!(content(after.file()) == content(before.file()));
}

#[test]
fn a_copy_without_holes_is_as_good() {
    let before = sample();
    let (sparse, digest) = saved(&before);
    let file = file();
    file.write_all_at(&content(&sparse), 0).unwrap();
    let after = ram(SIZE);
    restore(&after, &file, &digest).unwrap();
    assert!(content(after.file()) == content(before.file()));
    let allocated = after.file().metadata().unwrap().blocks() * 512;
    assert!(allocated < 2 * MIB, "{allocated} bytes in memory");
}

#[test]
fn memory_on_both_sides_of_the_hole() {
    let layout = Layout::new(HOLE_START + 16 * MIB, 46).unwrap();
    let new = || match GuestRam::new(&layout, None) {
        Ok(ram) => Some(ram),
        Err(error) => {
            assert!(error.to_string().contains("more than this host"), "{error}");
            None
        }
    };
    let (Some(before), Some(after)) = (new(), new()) else {
        eprintln!("a host with less than 3 GiB has no guest with more");
        return;
    };
    fill(
        &before,
        &[(HOLE_START - 1, vec![1]), (HOLE_END, vec![2, 3, 4])],
    );
    let (file, digest) = saved(&before);
    restore(&after, &file, &digest).unwrap();
    let mut bytes = [0; 3];
    after
        .memory()
        .read_slice(&mut bytes, GuestAddress(HOLE_END))
        .unwrap();
    assert_eq!(bytes, [2, 3, 4]);
    let mut byte = [0];
    after
        .memory()
        .read_slice(&mut byte, GuestAddress(HOLE_START - 1))
        .unwrap();
    assert_eq!(byte, [1]);
}

#[test]
fn huge_pages_too() {
    let layout = Layout::new(16 * MIB, 46).unwrap();
    let new = || match GuestRam::new(&layout, Some(HugePageSize::Size2M)) {
        Ok(ram) => Some(ram),
        Err(error) => {
            assert!(error.to_string().contains("huge pages"), "{error}");
            None
        }
    };
    let (Some(before), Some(after)) = (new(), new()) else {
        eprintln!("this host has no 16 huge pages to spare");
        return;
    };
    fill(&before, &[(3 * MIB + 5, vec![1; 9000])]);
    let (file, digest) = saved(&before);
    assert!(file.metadata().unwrap().blocks() * 512 < MIB);
    for _ in 0..2 {
        restore(&after, &file, &digest).unwrap();
        assert!(content(after.file()) == content(before.file()));
        // The second time, over used memory.
        fill(&after, &[(0, vec![7; 5 << 20])]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn any_memory_comes_back(
        pieces in prop::collection::vec(
            (0..SIZE - 9000, prop::collection::vec(any::<u8>(), 1..9000)),
            0..20,
        ),
    ) {
        let before = ram(SIZE);
        fill(&before, &pieces);
        let (file, digest) = saved(&before);
        let after = ram(SIZE);
        restore(&after, &file, &digest).unwrap();
        prop_assert!(content(after.file()) == content(before.file()));
    }
}

#[test]
fn a_change_of_any_block_is_noticed() {
    let (file, digest) = saved(&sample());
    for (offset, at) in [
        (0, 0),
        (MIB - 1, 0),
        (2 * MIB + 4096, 2 * MIB),
        (6 * MIB - 1, 5 * MIB),
        // A byte in a hole, and one in a block of zeros.
        (3 * MIB + 17, 3 * MIB),
        (8 * MIB + 17, 8 * MIB),
        (SIZE - 1, 16 * MIB),
    ] {
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], offset).unwrap();
        let error = restore(&ram(SIZE), &file, &digest).unwrap_err();
        assert!(
            matches!(error, RestoreError::Checksum { offset, .. } if offset == at),
            "{offset:#x}: {error}"
        );
        file.write_all_at(&byte, offset).unwrap();
    }
    // A lost block: as written zeros, and as a hole.
    let lost = || {
        let error = restore(&ram(SIZE), &file, &digest).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the saved memory is damaged or from another snapshot: the checksum of 1 MiB from \
             0x500000 on is wrong"
        );
    };
    file.write_all_at(&[0; 1 << 20], 5 * MIB).unwrap();
    lost();
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&file, hole, 5 * MIB, MIB).unwrap();
    lost();
}

#[test]
fn other_sizes_are_refused() {
    let (file, digest) = saved(&sample());
    let error = restore(&ram(32 * MIB), &file, &digest).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the saved state is of a guest with 16 MiB of memory, but this one has 32 MiB; give it as \
         much"
    );
    for count in [0, 16, 18] {
        let mut checksums = digest.checksums.clone();
        checksums.resize(count, 0);
        let lie = MemoryDigest {
            size: SIZE,
            checksums,
        };
        let error = restore(&ram(SIZE), &file, &lie).unwrap_err();
        assert!(
            matches!(error, RestoreError::Checksums { found, expected: 17 } if found == count),
            "{error}"
        );
    }
    for len in [0, SIZE - 1, SIZE + 1] {
        file.set_len(len).unwrap();
        let error = restore(&ram(SIZE), &file, &digest).unwrap_err();
        assert!(
            matches!(error, RestoreError::Length { found, expected: SIZE } if found == len),
            "{error}"
        );
    }
    let null = File::open("/dev/zero").unwrap();
    let error = restore(&ram(SIZE), &null, &digest).unwrap_err();
    assert!(matches!(error, RestoreError::NotRegular), "{error}");
}

#[test]
fn only_an_empty_file_is_written() {
    let used = file();
    used.write_all_at(b"x", 0).unwrap();
    let null = OpenOptions::new().write(true).open("/dev/null").unwrap();
    for file in [used, null] {
        let error = save(&ram(SIZE), &file).unwrap_err();
        assert!(matches!(error, SaveError::NotEmpty), "{error}");
    }
}

/// A file on an unmounted file system of `size` bytes.
fn file_on_small_disk(size: &str) -> io::Result<File> {
    let context = rustix::mount::fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_set_string(&context, "size", size)?;
    rustix::mount::fsconfig_create(&context)?;
    let root = rustix::mount::fsmount(
        &context,
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::empty(),
    )?;
    let flags = rustix::fs::OFlags::CREATE | rustix::fs::OFlags::RDWR;
    Ok(rustix::fs::openat(&root, "memory", flags, rustix::fs::Mode::RWXU)?.into())
}

#[test]
fn the_error_for_a_full_disk_names_the_needed_size() {
    let file = match file_on_small_disk("1m") {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            eprintln!("only root makes a small file system");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let before = sample();
    let error = save(&before, &file).unwrap_err();
    let SaveError::NoRoom { needed, free, .. } = error else {
        panic!("{error}");
    };
    assert_eq!(free, MIB);
    assert!((2 * MIB..3 * MIB).contains(&needed), "{needed}");
    assert_eq!(file.metadata().unwrap().len(), 0);
    assert_eq!(file.metadata().unwrap().blocks(), 0);
}

/// Prints the time for 256 MiB:
/// `cargo test --release -p vmm memory_image -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn how_long_it_takes() {
    for dense in [0, 16, 64, 256] {
        let before = ram(256 * MIB);
        for mib in 0..dense {
            let bytes: Vec<u8> = (0..MIB).map(|at| (at % 251) as u8 | 1).collect();
            fill(&before, &[(mib * MIB * (256 / dense), bytes)]);
        }
        let start = std::time::Instant::now();
        let (file, digest) = saved(&before);
        let saving = start.elapsed();
        let after = ram(256 * MIB);
        let start = std::time::Instant::now();
        restore(&after, &file, &digest).unwrap();
        println!(
            "{dense} of 256 MiB: saved and synced in {saving:?}, restored in {:?}",
            start.elapsed()
        );
    }
}

//! Guest RAM by its file offsets: bounds, zeros, holes.

use std::os::unix::fs::MetadataExt as _;

use super::*;
use crate::layout::Layout;
use crate::snapshot::memory_image::{DigestError, MemoryDigest};

const SIZE: u64 = 16 << 20;

fn image() -> RamImage {
    RamImage::new(&GuestRam::new(&Layout::new(SIZE, 40).unwrap(), None).unwrap())
}

#[test]
fn what_is_written_is_read() {
    let image = image();
    image.write(0x3000, &[5; 8192]).unwrap();
    image.write(SIZE - 4096, &[6; 4096]).unwrap();
    let mut back = [0; 3 * 4096];
    image.read(0x2000, &mut back).unwrap();
    assert!(back[..4096].iter().all(|&b| b == 0) && back[4096..].iter().all(|&b| b == 5));
    assert_eq!(
        image.memory.read_obj::<u8>(GuestAddress(0x4fff)).unwrap(),
        5
    );
    assert_eq!(
        image.memory.read_obj::<u8>(GuestAddress(SIZE - 1)).unwrap(),
        6
    );
}

#[test]
fn nothing_is_written_outside() {
    let image = image();
    for offset in [SIZE, SIZE + STRIPE, u64::MAX - 4095, 1, 0x800] {
        assert!(image.write(offset, &[1; 4096]).is_err(), "{offset:#x}");
        assert!(image.write_zeros(offset, 4096).is_err(), "{offset:#x}");
    }
    assert!(image.write(0, &[1; 100]).is_err());
    assert!(image.write(0, &[]).is_err());
    assert!(image.write_zeros(0, u64::MAX - 4095).is_err());
    assert!(
        image.write_zeros(STRIPE - 4096, 8192).is_err(),
        "two stripes"
    );
    assert!(image.write(SIZE - 4096, &[1; 8192]).is_err());
    assert_eq!(image.file.metadata().unwrap().blocks(), 0);
}

#[test]
fn zeros_cost_nothing_and_are_zeros() {
    let image = image();
    image.write_zeros(0, STRIPE).unwrap();
    assert_eq!(image.file.metadata().unwrap().blocks(), 0, "holes stay");
    image.write(0x5000, &[5; 8192]).unwrap();
    image.write_zeros(0x4000, 0x2000).unwrap();
    let mut back = [1; 4 * 4096];
    image.read(0x4000, &mut back).unwrap();
    assert!(back[..8192].iter().all(|&b| b == 0), "made zero");
    assert!(back[8192..12288].iter().all(|&b| b == 5), "not asked for");
}

#[test]
fn holes_are_known_without_reading_them() {
    let image = image();
    assert_eq!(image.data_after(0x1000, 0x9000), 0x9000);
    image.write(0x5000, &[5; 4096]).unwrap();
    assert_eq!(image.data_after(0x1000, 0x9000), 0x5000);
    assert_eq!(image.data_after(0x5000, 0x9000), 0x5000);
    assert_eq!(image.data_after(0x1000, 0x3000), 0x3000);
}

#[test]
fn what_holds_data_is_counted() {
    let image = image();
    assert_eq!(image.data_bytes(), 0);
    image.write(0x5000, &[5; 8192]).unwrap();
    image.write(STRIPE, &[5; 4096]).unwrap();
    image.write(SIZE - 4096, &[0; 4096]).unwrap();
    // Zeros that were written take room as well.
    assert_eq!(image.data_bytes(), 4 * 4096);
    assert_eq!(image.len(), SIZE);
}

#[test]
fn each_stripe_has_one_carrier() {
    for connections in [1, 2, 3, 16] {
        for page in 0..SIZE / PAGE_SIZE {
            let offset = page * PAGE_SIZE;
            assert_eq!(
                carrier(offset, connections),
                (page / RUN_PAGES_MAX) % u64::from(connections)
            );
        }
    }
}

/// An image whose pages are summed as they come, and the memory behind it.
fn summed(size: u64) -> (GuestRam, RamImage, Arc<PageSums>) {
    let ram = GuestRam::new(&Layout::new(size, 40).unwrap(), None).unwrap();
    let sums = Arc::new(PageSums::zeros(size));
    let image = RamImage::new(&ram).summed_by(Arc::clone(&sums));
    (ram, image, sums)
}

#[test]
fn sums_of_pages_are_the_digest_of_the_memory() {
    // The last block has one page.
    let size = SIZE + PAGE_SIZE;
    let (ram, image, sums) = summed(size);
    assert_eq!(sums.digest(), MemoryDigest::of(&ram).unwrap());
    let mut random = 1_u64;
    for _ in 0..300 {
        random = random.wrapping_mul(6_364_136_223_846_793_005) | 1;
        let page = (random >> 33) % (size / PAGE_SIZE);
        let content = random.to_le_bytes().repeat(512);
        image.write(page * PAGE_SIZE, &content).unwrap();
    }
    image.write(3 * STRIPE, &[7; 1 << 20]).unwrap();
    image.write(size - PAGE_SIZE, &[1; 4096]).unwrap();
    assert_eq!(sums.digest(), MemoryDigest::of(&ram).unwrap());
    // Zeros again, some of pages that are zeros already.
    image.write_zeros(3 * STRIPE, STRIPE / 2).unwrap();
    image.write_zeros(0, STRIPE).unwrap();
    assert_eq!(sums.digest(), MemoryDigest::of(&ram).unwrap());
}

#[test]
fn a_page_that_the_log_has_missed_is_found() {
    let (source, sent, _) = summed(SIZE);
    let (_, arrived, sums) = summed(SIZE);
    for image in [&sent, &arrived] {
        image.write(0, &[1; 8192]).unwrap();
        image.write(5 * STRIPE, &[2; 4096]).unwrap();
    }
    let digest = MemoryDigest::of(&source).unwrap();
    digest.compare(&sums.digest()).unwrap();
    // Written behind the log's back, so that no round sends it.
    source
        .memory()
        .write_obj(3_u8, GuestAddress(5 * STRIPE + 77))
        .unwrap();
    let error = MemoryDigest::of(&source)
        .unwrap()
        .compare(&sums.digest())
        .unwrap_err();
    assert!(
        matches!(error, DigestError::Differs { differing: 1, first, .. } if first == 5 * STRIPE),
        "{error}"
    );
}

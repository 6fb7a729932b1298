//! Guest RAM by its file offsets: bounds, zeros, holes.

use std::collections::VecDeque;
use std::os::unix::fs::MetadataExt as _;
use std::time::Duration;

use super::*;
use crate::layout::Layout;
use crate::migration::channel::{Channel, Connection, Halt};
use crate::migration::dirty::DirtyPages;
use crate::migration::error::Phase;
use crate::migration::progress::Progress;
use crate::snapshot::memory_image::{DigestError, MemoryDigest};

const SIZE: u64 = 16 << 20;

fn image() -> RamImage {
    RamImage::new(&GuestRam::new(&Layout::new(SIZE, 40).unwrap(), None).unwrap())
}

#[test]
fn written_pages_are_read_back() {
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
fn pages_with_data_are_counted() {
    let image = image();
    assert_eq!(image.data_bytes(), 0);
    image.write(0x5000, &[5; 8192]).unwrap();
    image.write(STRIPE, &[5; 4096]).unwrap();
    image.write(SIZE - 4096, &[0; 4096]).unwrap();
    // Written zeros use space as well.
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

/// An image whose pages are summed on arrival, and the memory behind it.
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
    // Zero again, also pages that are zero already.
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
    // Written without the log, so no round sends it.
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

/// One channel is both ends of its connection: it receives its own bytes.
impl Connection for VecDeque<u8> {
    fn set_timeout(&mut self, _: Duration) -> io::Result<()> {
        Ok(())
    }
}

/// The length of a run, its content and its stripes must not matter.
#[test]
fn each_page_of_a_round_arrives_and_no_other_is_touched() {
    const OLD: [u8; 4096] = [0xff; 4096];
    let source = image();
    let mut pages = DirtyPages::none(SIZE);
    let mut first = 1;
    for count in [1, 2, 32, 33, 34, 65, RUN_PAGES_MAX, RUN_PAGES_MAX + 44] {
        // Data, zeros and a hole.
        for content in [Some(&[7; 4096]), Some(&ZEROS), None] {
            let run = first * PAGE_SIZE..(first + count) * PAGE_SIZE;
            for offset in run.clone().step_by(4096) {
                if let Some(content) = content {
                    source.write(offset, content).unwrap();
                }
            }
            pages.mark(run);
            first += count + 1;
        }
    }
    let none = DirtyPages::none(SIZE);
    // All in the first round, or none there and all in the second.
    for (connections, rounds) in [(1, 1), (3, 1), (1, 2), (3, 2)] {
        let arrived = image();
        for offset in (0..SIZE).step_by(4096) {
            arrived.write(offset, &OLD).unwrap();
        }
        let (sent, received) = (Progress::new(), Progress::new());
        let budget = Budget::new(2 * SIZE);
        for index in 0..connections {
            let stream = VecDeque::new();
            let halt = Halt::default();
            let mut channel = Channel::new(stream, index, Duration::from_secs(60), &halt).unwrap();
            for round in 1..=rounds {
                let last = round == rounds;
                let round = Round {
                    ram: &source,
                    pages: if last { &pages } else { &none },
                    connections,
                    phase: Phase::Copy,
                    round,
                    last,
                    progress: &sent,
                };
                send_round(&round, &mut channel).unwrap();
            }
            receive_rounds(
                &arrived,
                connections,
                &mut channel,
                &budget,
                &received,
                None,
            )
            .unwrap();
        }
        for page in 0..SIZE / PAGE_SIZE {
            let (mut there, mut here) = (OLD, OLD);
            arrived.read(page * PAGE_SIZE, &mut there).unwrap();
            if pages.contains(page) {
                source.read(page * PAGE_SIZE, &mut here).unwrap();
            }
            assert!(
                there == here,
                "page {page}, {connections} connections, {rounds} rounds"
            );
        }
        for progress in [sent, received].map(|progress| progress.snapshot()) {
            assert_eq!(progress.pages + progress.zero_pages, pages.count());
        }
    }
}

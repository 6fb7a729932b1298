//! Round trips, other versions, and hostile bytes instead of a state.

use std::io;

use proptest::prelude::*;
use serde::{Deserialize, Serialize};

use super::*;

const MAX: u64 = 1 << 20;
/// Bytes before the body: magic, version, length.
const HEADER_LEN: usize = 8 + 4 + 8;

/// Version 2 of a part of a machine, which added `name`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Vcpus {
    registers: Vec<u64>,
    name: String,
}

impl Saved for Vcpus {
    const NAME: &'static str = "vcpus";
    const VERSION: u32 = 2;
    const MAX_LEN: u64 = 4096;

    fn upgrade(previous: &[u8]) -> Option<Result<Self, postcard::Error>> {
        Some(decode(previous).map(|registers| Self {
            registers,
            name: String::new(),
        }))
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Clock(u64);

impl Saved for Clock {
    const NAME: &'static str = "clock";
    const VERSION: u32 = 3;
    const MAX_LEN: u64 = 10;
}

impl Saved for Vec<u16> {
    const NAME: &'static str = "list";
    const VERSION: u32 = 1;
    const MAX_LEN: u64 = 64;
    const ITEMS_MAX: Option<u32> = Some(2);
}

fn vcpus() -> Vcpus {
    Vcpus {
        registers: (0..40).map(|index| index << 40 | 7).collect(),
        name: "vcpus".to_owned(),
    }
}

fn bytes_of(sections: &Sections) -> Vec<u8> {
    let mut bytes = Vec::new();
    sections.write(&mut bytes).unwrap();
    bytes
}

fn state() -> Vec<u8> {
    let mut sections = Sections::default();
    sections.put(&vcpus()).unwrap();
    sections.put(&Clock(42)).unwrap();
    bytes_of(&sections)
}

/// Sections that a correct program would not write.
fn section(name: &str, version: u32, payload: &[u8]) -> Sections {
    let mut sections = Sections::default();
    sections.insert(name, version, payload.to_vec());
    sections
}

fn read(bytes: &[u8]) -> Result<Sections, ReadError> {
    Sections::read(&mut &*bytes, MAX)
}

/// Reads all sections of a machine of these tests.
fn restore(bytes: &[u8]) -> Result<(Vcpus, Clock), ReadError> {
    let mut sections = read(bytes)?;
    let parts = (sections.take()?, sections.take()?);
    sections.finish()?;
    Ok(parts)
}

#[test]
fn a_state_is_read_as_it_was_written() {
    assert_eq!(restore(&state()).unwrap(), (vcpus(), Clock(42)));
    let mut sections = read(&state()).unwrap();
    assert_eq!(sections.take_optional::<Clock>().unwrap(), Some(Clock(42)));
    assert_eq!(sections.take_optional::<Clock>().unwrap(), None);
    let error = sections.take::<Clock>().unwrap_err();
    assert_eq!(error.to_string(), "the saved state has no section clock");
    let error = sections.finish().unwrap_err();
    assert!(
        matches!(&error, ReadError::Unknown { name } if name == "vcpus"),
        "{error}"
    );
    assert_eq!(read(&frame(&[])).unwrap(), Sections::default());
}

proptest! {
    #[test]
    fn any_sections_are_read_as_they_were_written(
        sections in prop::collection::btree_map(
            "[a-z]{0,32}", (any::<u32>(), prop::collection::vec(any::<u8>(), 0..4096)), 0..8),
    ) {
        let mut written = Sections::default();
        for (name, (version, payload)) in sections {
            written.insert(&name, version, payload);
        }
        prop_assert_eq!(read(&bytes_of(&written)).unwrap(), written);
    }

    #[test]
    fn random_changes_are_noticed(
        at in any::<prop::sample::Index>(),
        with in prop::collection::vec(any::<u8>(), 1..5),
    ) {
        let good = state();
        let mut bytes = good.clone();
        let at = at.index(bytes.len());
        for (byte, with) in bytes[at..].iter_mut().zip(with) {
            *byte = with;
        }
        prop_assert_eq!(bytes == good, read(&bytes).is_ok());
    }

    #[test]
    fn any_body_is_read_without_a_panic(body in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = restore(&frame(&body));
    }
}

#[test]
fn a_state_cut_anywhere_is_refused() {
    let bytes = state();
    for len in 0..bytes.len() {
        let error = read(&bytes[..len]).unwrap_err();
        assert!(matches!(error, ReadError::Truncated), "{len}: {error}");
    }
    for more in [&[0][..], &bytes] {
        let long = [&bytes, more].concat();
        assert!(matches!(read(&long), Err(ReadError::AfterEnd)));
    }
}

#[test]
fn any_flipped_bit_is_noticed() {
    let good = state();
    for at in 0..good.len() {
        for bit in 0..8 {
            let mut bytes = good.clone();
            bytes[at] ^= 1 << bit;
            let error = read(&bytes).unwrap_err();
            assert!(error.to_string().len() < 300, "{error}");
        }
    }
}

#[test]
fn forged_lengths_are_refused() {
    let good = state();
    let body = (good.len() - HEADER_LEN - 4) as u64;
    for len in [u64::MAX, i64::MAX as u64, body + 5, body + 1, body - 1, 0] {
        let mut bytes = good.clone();
        bytes[12..20].copy_from_slice(&len.to_le_bytes());
        let error = read(&bytes).unwrap_err();
        assert_eq!(
            matches!(error, ReadError::Truncated),
            len > body,
            "{len}: {error}"
        );
    }
    // A name, a payload and a list at once: 2^40 elements in a few bytes.
    let lie = [0x80, 0x80, 0x80, 0x80, 0x80, 0x20, 1, 2, 3];
    for body in [&lie[..], &[&b"\x05vcpus\x02"[..], &lie].concat()] {
        assert!(matches!(restore(&frame(body)), Err(ReadError::Malformed)));
    }
    let error = restore(&bytes_of(&section("vcpus", 2, &lie))).unwrap_err();
    assert!(matches!(error, ReadError::Payload { .. }), "{error}");
}

#[test]
fn sizes_are_limited() {
    let bytes = state();
    let len = bytes.len() as u64;
    assert!(Sections::read(&mut &bytes[..], len).is_ok());
    let error = Sections::read(&mut io::repeat(0x89), len).unwrap_err();
    assert!(
        matches!(error, ReadError::StateTooLong { max } if max == len),
        "{error}"
    );

    let error = read(&bytes_of(&section("clock", 3, &[0; 11])))
        .and_then(|mut sections| sections.take::<Clock>())
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "section clock of the saved state has 11 bytes, more than the 10 bytes it may have"
    );

    let list = |items: &[u16]| {
        let payload = postcard::to_stdvec(items).unwrap();
        section("list", 1, &payload).take::<Vec<u16>>()
    };
    assert_eq!(list(&[7, 8]).unwrap(), [7, 8]);
    let error = list(&[7, 8, 9]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "section list of the saved state has 3 items; at most 2 can be read"
    );

    let long = Vcpus {
        registers: Vec::new(),
        name: "x".repeat(5000),
    };
    let error = Sections::default().put(&long).unwrap_err();
    assert_eq!(
        error.to_string(),
        "section vcpus has 4.8 KiB; at most 4 KiB are read back"
    );
}

#[test]
fn forged_sections_are_refused() {
    let body = |sections: &Sections| {
        let bytes = bytes_of(sections);
        bytes[HEADER_LEN..bytes.len() - 4].to_vec()
    };
    let clock = body(&section("clock", 3, &[1]));
    let mut many = Sections::default();
    for index in 0..SECTIONS_MAX {
        many.insert(&format!("section-{index}"), 1, Vec::new());
    }
    assert!(read(&bytes_of(&many)).is_ok());
    for malformed in [
        [clock.clone(), clock.clone()].concat(),
        [body(&many), clock.clone()].concat(),
        body(&section(&"x".repeat(NAME_MAX + 1), 1, &[])),
        b"\x02\xff\xff\x01\x00".to_vec(),
    ] {
        let error = read(&frame(&malformed)).unwrap_err();
        assert!(matches!(error, ReadError::Malformed), "{error}");
    }
    let error = read(&bytes_of(&section("\x1b[31mclock", 3, &[1])))
        .and_then(Sections::finish)
        .unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("section \"\\u{1b}[31mclock\" of the saved state is unknown"),
        "{error}"
    );
}

#[test]
fn anything_else_is_no_state() {
    for other in [
        b"\x7fELF\x02\x01\x01\0\0\0".as_slice(),
        b"{}",
        b"\x89PNG",
        &[0; 100],
    ] {
        assert!(matches!(read(other), Err(ReadError::NotASnapshot)));
    }
    assert!(matches!(read(b""), Err(ReadError::Truncated)));
}

#[test]
fn other_versions_of_the_format_are_refused() {
    let mut bytes = state();
    for version in [0, 1, 2, FORMAT_VERSION + 1, u32::MAX] {
        bytes[8..12].copy_from_slice(&version.to_le_bytes());
        let error = read(&bytes).unwrap_err();
        assert!(
            matches!(error, ReadError::Format { found, .. } if found == version),
            "{error}"
        );
        assert!(error.to_string().contains("that wrote it"), "{error}");
    }
}

#[test]
fn the_current_and_the_previous_version_of_a_section_are_read() {
    let take = |version: u32, payload: &[u8]| section("vcpus", version, payload).take::<Vcpus>();
    let current = postcard::to_stdvec(&vcpus()).unwrap();
    let previous = postcard::to_stdvec(&vcpus().registers).unwrap();
    assert_eq!(take(2, &current).unwrap(), vcpus());
    assert_eq!(take(1, &previous).unwrap().registers, vcpus().registers);
    for version in [0, 3, u32::MAX] {
        let error = take(version, &current).unwrap_err();
        assert!(
            matches!(error, ReadError::Version { found, current: 2, .. } if found == version),
            "{error}"
        );
    }
    // This one has version 3 and no upgrade from version 2.
    for version in [1, 2, 4] {
        let error = section("clock", version, &[1]).take::<Clock>().unwrap_err();
        assert!(matches!(error, ReadError::Version { .. }), "{error}");
    }
    // A payload fills the whole section.
    for (version, good) in [(1, previous), (2, current)] {
        for len in 0..good.len() {
            assert!(take(version, &good[..len]).is_err(), "{len}");
        }
        let long = [&good[..], &[0]].concat();
        let error = take(version, &long).unwrap_err();
        assert!(matches!(error, ReadError::Payload { .. }), "{error}");
    }
}

/// A disk that is full after `room` bytes.
struct Full {
    room: usize,
}

impl Write for Full {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.room.min(bytes.len()) {
            0 => Err(io::ErrorKind::StorageFull.into()),
            len => {
                self.room -= len;
                Ok(len)
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_full_disk_is_an_error() {
    let whole = state().len();
    let sections = read(&state()).unwrap();
    for room in 0..whole {
        let error = sections.write(&mut Full { room }).unwrap_err();
        assert!(matches!(error, WriteError::Io(_)), "{error}");
    }
    sections.write(&mut Full { room: whole }).unwrap();
}

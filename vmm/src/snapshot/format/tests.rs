//! Round trips, and everything that a stream could be instead of one.

mod compatibility;

use std::io::{self, Cursor, Read, Write};

use proptest::prelude::*;
use serde::{Deserialize, Serialize};

use super::*;

/// A part of a machine as the tests have it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Vcpu {
    registers: Vec<u64>,
    name: String,
}

impl Saved for Vcpu {
    const NAME: &'static str = "vcpu";
    const VERSION: u32 = 3;
    const MAX_LEN: u64 = 4096;
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Clock(u64);

impl Saved for Clock {
    const NAME: &'static str = "clock";
    const VERSION: u32 = 1;
    const MAX_LEN: u64 = 10;
}

const KINDS: &[SectionKind] = &[SectionKind::of::<Vcpu>(8), SectionKind::of::<Clock>(1)];
const TABLE: Table<'static> = Table::new(KINDS, 1 << 20);

fn vcpu(number: u64) -> Vcpu {
    Vcpu {
        registers: (0..20).map(|index| number << 40 | index).collect(),
        name: format!("vcpu{number}"),
    }
}

/// A stream with two vCPUs and a clock.
fn stream() -> Vec<u8> {
    Writer::new(Vec::new())
        .and_then(|writer| writer.put(0, &vcpu(0)))
        .and_then(|writer| writer.put(1, &vcpu(1)))
        .and_then(|writer| writer.put(0, &Clock(42)))
        .and_then(Writer::finish)
        .unwrap()
}

fn read(bytes: &[u8]) -> Result<Sections, ReadError> {
    Sections::read_file(&mut &*bytes, TABLE)
}

fn section(name: &str, instance: u32, payload: &[u8]) -> Section {
    Section {
        name: SectionName::new(name).unwrap(),
        instance,
        version: 1,
        payload: payload.to_vec(),
    }
}

/// A stream of sections that a right program would not write like this.
fn stream_of(sections: &[Section]) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new()).unwrap();
    for section in sections {
        writer = writer.section(section).unwrap();
    }
    writer.finish().unwrap()
}

/// The first section, and what is before and after it.
fn cut_first(stream: &[u8]) -> (&[u8], &[u8], &[u8]) {
    let (start, rest) = stream.split_at(MAGIC.len() + 4);
    let len = rest[HEADER_LEN - 8..HEADER_LEN].try_into().unwrap();
    let len = usize::try_from(u64::from_le_bytes(len)).unwrap();
    let (section, rest) = rest.split_at(HEADER_LEN + len + CHECKSUM_LEN);
    (start, section, rest)
}

#[test]
fn what_is_written_is_read() {
    let mut sections = read(&stream()).unwrap();
    assert!(sections.contains::<Clock>(0) && !sections.contains::<Clock>(1));
    assert_eq!(sections.take_all::<Vcpu>().unwrap(), [vcpu(0), vcpu(1)]);
    assert_eq!(sections.take::<Clock>(0).unwrap(), Clock(42));
    assert_eq!(sections.take_optional::<Clock>(0).unwrap(), None);
    sections.finish().unwrap();
}

proptest! {
    #[test]
    fn sections_come_back_as_they_were(
        payloads in prop::collection::vec((0_u32..8, any::<u32>(), prop::collection::vec(any::<u8>(), 0..4096)), 0..8),
    ) {
        let mut sections: Vec<Section> = payloads
            .into_iter()
            .map(|(instance, version, payload)| Section { version, ..section("vcpu", instance, &payload) })
            .collect();
        sections.sort_by_key(Section::id);
        sections.dedup_by_key(|section| section.id());
        let bytes = stream_of(&sections);
        let back: Result<Vec<_>, _> = Reader::new(bytes.as_slice(), TABLE).unwrap().collect();
        prop_assert_eq!(back.unwrap(), sections);
    }

    #[test]
    fn random_changes_are_noticed(at in any::<prop::sample::Index>(), with in prop::collection::vec(any::<u8>(), 1..5)) {
        let good = stream();
        let mut bytes = good.clone();
        let at = at.index(bytes.len());
        for (byte, with) in bytes[at..].iter_mut().zip(with) {
            *byte = with;
        }
        prop_assert_eq!(bytes == good, read(&bytes).is_ok());
    }
}

#[test]
fn nothing_beyond_the_end_is_read() {
    let mut bytes = stream();
    bytes.extend(b"GO");
    let mut source = Cursor::new(bytes);
    Sections::read(&mut source, TABLE).unwrap();
    let mut rest = String::new();
    source.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "GO");

    source.set_position(0);
    let mut reader = Reader::new(source, TABLE).unwrap();
    assert_eq!(reader.by_ref().filter_map(Result::ok).count(), 3);
    assert!(reader.next().is_none());
    assert_eq!(reader.into_inner().bytes().count(), 2);

    let mut bytes = stream();
    bytes.push(0);
    assert!(matches!(read(&bytes), Err(ReadError::AfterEnd)));
}

#[test]
fn cut_anywhere() {
    let bytes = stream();
    for len in 0..bytes.len() {
        let error = read(&bytes[..len]).unwrap_err();
        assert!(
            matches!(error, ReadError::Truncated { .. }),
            "{len}: {error}"
        );
        // An error ends the iterator.
        if let Ok(reader) = Reader::new(&bytes[..len], TABLE) {
            assert_eq!(reader.filter(Result::is_err).count(), 1);
        }
    }
}

#[test]
fn any_bit_flipped() {
    let good = stream();
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
fn lengths_that_lie() {
    let good = stream();
    for (len, too_long) in [
        (u64::MAX, true),
        (i64::MAX as u64, true),
        (Vcpu::MAX_LEN + 1, true),
        (Vcpu::MAX_LEN, false),
        (0, false),
    ] {
        let mut bytes = good.clone();
        let at = MAGIC.len() + 4 + HEADER_LEN - 8;
        bytes[at..at + 8].copy_from_slice(&len.to_le_bytes());
        let error = read(&bytes).unwrap_err();
        assert_eq!(
            matches!(error, ReadError::TooLong { len: found, max: Vcpu::MAX_LEN, .. } if found == len),
            too_long,
            "{error}"
        );
    }
}

/// Gives its bytes and says how much it was asked for at most.
struct Recorder<'a> {
    bytes: &'a [u8],
    largest: usize,
}

impl Read for Recorder<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.largest = self.largest.max(buffer.len());
        self.bytes.read(buffer)
    }
}

#[test]
fn memory_is_taken_as_the_bytes_come() {
    #[derive(Serialize, Deserialize)]
    struct Large(Vec<u8>);
    impl Saved for Large {
        const NAME: &'static str = "large";
        const VERSION: u32 = 1;
        const MAX_LEN: u64 = 1 << 50;
    }
    let kinds = [SectionKind::of::<Large>(1)];
    let table = Table::new(&kinds, u64::MAX);
    let mut bytes = stream_of(&[section("large", 0, &[7; 5000])]);
    let at = MAGIC.len() + 4 + HEADER_LEN - 8;
    bytes[at..at + 8].copy_from_slice(&(Large::MAX_LEN).to_le_bytes());
    let mut source = Recorder {
        bytes: &bytes,
        largest: 0,
    };
    let error = Sections::read(&mut source, table).unwrap_err();
    assert!(matches!(error, ReadError::Truncated { .. }), "{error}");
    assert!(source.largest <= 1 << 16, "{}", source.largest);

    // A list whose length is in the payload: 2^40 numbers in 20 bytes.
    let lie = section("vcpu", 0, &[0x80, 0x80, 0x80, 0x80, 0x80, 0x20, 1, 2, 3]);
    let error = Section { version: 3, ..lie }.decode::<Vcpu>().unwrap_err();
    assert!(matches!(error, ReadError::Payload { .. }), "{error}");
}

#[test]
fn all_of_it_is_limited() {
    let table = Table::new(KINDS, 1000);
    let many: Vec<_> = (0..8).map(|i| section("vcpu", i, &[0; 100])).collect();
    let error = Sections::read(&mut stream_of(&many).as_slice(), table).unwrap_err();
    assert!(
        matches!(error, ReadError::StreamTooLong { max: 1000 }),
        "{error}"
    );

    let unknown = stream_of(&[section("optional-new", 0, &vec![0; (1 << 20) + 1])]);
    assert!(matches!(read(&unknown), Err(ReadError::TooLong { .. })));

    let count = SECTIONS_MAX + 1;
    let many = |count| (0..count).map(|i| section("optional-new", i, &[]));
    let table = Table::new(KINDS, u64::MAX);
    let most: Vec<_> = many(count - 1).collect();
    Sections::read(&mut stream_of(&most).as_slice(), table).unwrap();
    let mut writer = Writer::new(Vec::new()).unwrap();
    for section in &most {
        writer = writer.section(section).unwrap();
    }
    let error = writer.section(&section("clock", 0, &[])).unwrap_err();
    assert!(matches!(error, WriteError::TooManySections), "{error}");

    // One more than a writer writes: two streams' sections without what is between them.
    let mut bytes = stream_of(&most);
    bytes.truncate(bytes.len() - END_SECTION_LEN);
    let other = stream_of(&[section("clock", 0, &[])]);
    bytes.extend(&other[MAGIC.len() + 4..]);
    let error = Sections::read(&mut bytes.as_slice(), table).unwrap_err();
    assert!(matches!(error, ReadError::TooManySections), "{error}");
}

const END_SECTION_LEN: usize = HEADER_LEN + 4 + CHECKSUM_LEN;

#[test]
fn replayed_lost_and_added_sections() {
    let good = stream();
    let (start, first, rest) = cut_first(&good);

    let twice = [start, first, first, rest].concat();
    let error = read(&twice).unwrap_err();
    assert!(matches!(error, ReadError::Twice { .. }), "{error}");
    assert_eq!(
        error.to_string(),
        "section vcpu 0 is twice in the saved state"
    );

    let lost = [start, rest].concat();
    let error = read(&lost).unwrap_err();
    assert!(
        matches!(
            error,
            ReadError::Count {
                found: 2,
                expected: 3
            }
        ),
        "{error}"
    );

    let other = stream_of(&[section("vcpu", 7, &[])]);
    let added = [start, cut_first(&other).1, first, rest].concat();
    let error = read(&added).unwrap_err();
    assert!(
        matches!(
            error,
            ReadError::Count {
                found: 4,
                expected: 3
            }
        ),
        "{error}"
    );

    // A whole stream behind the first one.
    let again = [good.as_slice(), good.as_slice()].concat();
    assert!(matches!(read(&again), Err(ReadError::AfterEnd)));
    let headless = [&good[..good.len() - END_SECTION_LEN], &good].concat();
    assert!(matches!(read(&headless), Err(ReadError::BadName { .. })));
}

/// A stream with one section of our making, checksum included.
fn forged(name: [u8; 32], instance: u32, payload: &[u8]) -> Vec<u8> {
    let good = stream();
    let (start, _, rest) = cut_first(&good);
    let len = payload.len() as u64;
    let mut section = name.to_vec();
    section.extend(instance.to_le_bytes());
    section.extend(1_u32.to_le_bytes());
    section.extend(len.to_le_bytes());
    section.extend(payload);
    let checksum = crc32fast::hash(&section);
    section.extend(checksum.to_le_bytes());
    [start, &section, rest].concat()
}

#[test]
fn forged_sections() {
    let name = |text: &[u8]| {
        let mut name = [0; 32];
        name[..text.len()].copy_from_slice(text);
        name
    };
    for bad in [
        b"".as_slice(),
        b"\x1b[31mvcpu",
        b"../../etc",
        b"vcpu\0evil",
        b"VCPU",
        &[0xff; 32],
    ] {
        let error = read(&forged(name(bad), 0, &[])).unwrap_err();
        assert!(
            matches!(error, ReadError::BadName { number: 1, .. }),
            "{error}"
        );
    }
    let error = read(&forged(name(b"vcpu"), 8, &[])).unwrap_err();
    assert!(
        matches!(error, ReadError::TooManyInstances { instances: 8, .. }),
        "{error}"
    );
    let error = read(&forged(name(b"vcpu-extra"), 0, &[])).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("section vcpu-extra 0 of the saved state is unknown to this program; "),
        "{error}"
    );
    for (instance, payload) in [(1, [0; 4].as_slice()), (0, &[0; 5]), (0, &[])] {
        let error = read(&forged(name(b"end"), instance, payload)).unwrap_err();
        assert!(matches!(error, ReadError::BadEnd), "{error}");
    }
    // An end that is right so far, too early.
    let error = read(&forged(name(b"end"), 0, &[0; 4])).unwrap_err();
    assert!(matches!(error, ReadError::AfterEnd), "{error}");
}

#[test]
fn something_else_altogether() {
    for other in [
        b"\x7fELF\x02\x01\x01\0\0\0".as_slice(),
        b"{}",
        b"\x89PNG",
        &[0; 100],
    ] {
        assert!(matches!(read(other), Err(ReadError::NotASnapshot)));
    }
    assert!(matches!(
        read(b""),
        Err(ReadError::Truncated {
            place: Place::Start
        })
    ));
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
fn a_writer_that_cannot() {
    let whole = stream().len();
    for room in 0..whole {
        let error = Writer::new(Full { room })
            .and_then(|writer| writer.put(0, &vcpu(0)))
            .and_then(|writer| writer.put(1, &vcpu(1)))
            .and_then(|writer| writer.put(0, &Clock(42)))
            .and_then(Writer::finish)
            .map(|_| ())
            .unwrap_err();
        assert!(matches!(error, WriteError::Io { .. }), "{error}");
    }

    let writer = || Writer::new(Vec::new()).unwrap();
    let error = writer()
        .put(0, &Clock(1))
        .and_then(|writer| writer.put(0, &Clock(1)))
        .unwrap_err();
    assert_eq!(error.to_string(), "section clock 0 is written twice");
    let error = writer().section(&section("end", 0, &[])).unwrap_err();
    assert!(matches!(error, WriteError::ReservedName), "{error}");
    let long = Vcpu {
        registers: Vec::new(),
        name: "x".repeat(5000),
    };
    let error = writer().put(2, &long).unwrap_err();
    assert_eq!(
        error.to_string(),
        "section vcpu 2 has 4.8 KiB; at most 4 KiB are read back"
    );
}

#[test]
fn missing_and_left_over() {
    let mut sections = read(&stream_of(&[
        Section::encode(0, &vcpu(0)).unwrap(),
        Section::encode(2, &vcpu(2)).unwrap(),
    ]))
    .unwrap();
    let error = sections.take::<Clock>(0).unwrap_err();
    assert_eq!(error.to_string(), "the saved state has no section clock 0");
    let error = sections.take_all::<Vcpu>().unwrap_err();
    assert!(
        matches!(error, ReadError::Missing { section } if section.instance == 1),
        "{error}"
    );

    let mut sections = read(&stream()).unwrap();
    sections.take::<Vcpu>(1).unwrap();
    sections.take::<Clock>(0).unwrap();
    let error = sections.finish().unwrap_err();
    assert!(
        matches!(error, ReadError::Leftover { section } if section.instance == 0),
        "{error}"
    );
}

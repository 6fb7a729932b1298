//! Files of every version of the format, read for ever.
//!
//! `golden/format-N.state` is what version N wrote. A file that is there is never changed: if a test
//! here fails, the program has lost the ability to read what users have. When the version of the format grows,
//! `BELLHOP_WRITE_GOLDEN=1 cargo test -p vmm golden` writes the new version's file beside them.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::format::{
    FORMAT_VERSION, OLDEST_FORMAT_VERSION, Saved, Section, SectionKind, SectionName, Sections,
    Table, Writer,
};
use super::memory_image::MemoryDigest;

/// One field of each kind that payloads have.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Synthetic {
    byte: u8,
    number: u64,
    negative: i32,
    text: String,
    flag: bool,
    array: [u8; 6],
    registers: Vec<(u32, u64)>,
    absent: Option<u16>,
    present: Option<u16>,
    kind: Kind,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Kind {
    Idle,
    Running { since: u64 },
}

impl Saved for Synthetic {
    const NAME: &'static str = "synthetic";
    const VERSION: u32 = 1;
    const MAX_LEN: u64 = 1024;
}

const KINDS: &[SectionKind] = &[
    SectionKind::of::<Synthetic>(2),
    SectionKind::of::<MemoryDigest>(1),
];

fn synthetic(kind: Kind) -> Synthetic {
    Synthetic {
        byte: 0xa5,
        number: u64::MAX - 1,
        negative: -70_000,
        text: "grüße".to_owned(),
        flag: true,
        array: [0x52, 0x54, 0, 1, 2, 3],
        registers: vec![(0xc000_0080, 0xd01), (0x10, 0), (u32::MAX, u64::MAX)],
        absent: None,
        present: Some(0x1234),
        kind,
    }
}

/// What all versions' files say.
fn values() -> (Vec<Synthetic>, MemoryDigest) {
    let synthetic = vec![
        synthetic(Kind::Idle),
        synthetic(Kind::Running { since: 1 << 40 }),
    ];
    let digest = MemoryDigest {
        size: (3 << 20) + 4096,
        checksums: vec![0, 0xdead_beef, 1, u32::MAX],
    };
    (synthetic, digest)
}

fn write() -> Vec<u8> {
    let (synthetic, digest) = values();
    let mut writer = Writer::new(Vec::new()).unwrap().put(0, &digest).unwrap();
    for (instance, value) in (0..).zip(&synthetic) {
        writer = writer.put(instance, value).unwrap();
    }
    let optional = Section {
        name: SectionName::new("optional-note").unwrap(),
        instance: 9,
        version: 7,
        payload: b"left out".to_vec(),
    };
    writer.section(&optional).unwrap().finish().unwrap()
}

fn check(bytes: &[u8]) {
    let (synthetic, digest) = values();
    let mut sections = Sections::read_file(&mut &*bytes, Table::new(KINDS, 1 << 16)).unwrap();
    assert_eq!(sections.take_all::<Synthetic>().unwrap(), synthetic);
    assert_eq!(sections.take::<MemoryDigest>(0).unwrap(), digest);
    sections.finish().unwrap();
}

/// Writes the current version's file if it is asked for and not there yet.
fn golden_file(version: u32) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join(format!("src/snapshot/golden/format-{version}.state"));
    let asked = std::env::var_os("BELLHOP_WRITE_GOLDEN").is_some();
    if asked && version == FORMAT_VERSION && !path.exists() {
        std::fs::write(&path, write()).unwrap();
    }
    std::fs::read(&path).unwrap()
}

#[test]
fn golden_files_of_all_versions_are_read() {
    for version in OLDEST_FORMAT_VERSION..=FORMAT_VERSION {
        check(&golden_file(version));
    }
}

#[test]
fn the_current_golden_file_is_what_is_written() {
    assert!(
        golden_file(FORMAT_VERSION) == write(),
        "the same state is written differently than before: that is a new version of the format, \
         never a change of the golden file"
    );
}

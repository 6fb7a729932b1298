//! A state in the current version of the format, as a file that never changes.
//!
//! If a test here fails, the program can no longer read its users' states: raise
//! [`FORMAT_VERSION`], or undo the change. `BELLHOP_WRITE_GOLDEN=1 cargo test -p vmm golden` writes
//! the file of a new version. Then delete the old one, since a program reads only its own version.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::format::{FORMAT_VERSION, Saved, Sections};
use super::memory_image::MemoryDigest;

/// One field of each kind in payloads.
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

impl Saved for Vec<Synthetic> {
    const NAME: &'static str = "synthetic";
    const VERSION: u32 = 1;
    const MAX_LEN: u64 = 1024;
}

/// The content of the file.
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
    let mut sections = Sections::default();
    sections.put(&synthetic).unwrap();
    sections.put(&digest).unwrap();
    let mut bytes = Vec::new();
    sections.write(&mut bytes).unwrap();
    bytes
}

/// Writes the file on request if it does not exist yet.
fn golden_file() -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join(format!("src/snapshot/golden/format-{FORMAT_VERSION}.state"));
    if std::env::var_os("BELLHOP_WRITE_GOLDEN").is_some() && !path.exists() {
        std::fs::write(&path, write()).unwrap();
    }
    std::fs::read(&path).unwrap()
}

#[test]
fn the_golden_file_is_read_and_written_alike() {
    let file = golden_file();
    let mut sections = Sections::read(&mut file.as_slice(), 1 << 16).unwrap();
    let read: (Vec<Synthetic>, MemoryDigest) = (sections.take().unwrap(), sections.take().unwrap());
    sections.finish().unwrap();
    assert_eq!(read, values());
    assert!(
        file == write(),
        "the same state is written differently than before: that is a new version of the format"
    );
}

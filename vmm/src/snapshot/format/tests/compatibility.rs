//! What a program reads of other versions of itself.

use super::*;

/// Version 2 of a disk's state: `read_only` came, the path went.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Disk {
    size: u64,
    read_only: bool,
}

#[derive(Serialize, Deserialize)]
struct DiskOfVersion1 {
    path: String,
    size: u64,
}

impl Saved for Disk {
    const NAME: &'static str = "disk";
    const VERSION: u32 = 2;
    const MAX_LEN: u64 = 64;

    fn upgrade(previous: Payload<'_>) -> Result<Self, PayloadError> {
        let DiskOfVersion1 { path, size } = previous.decode()?;
        match path.is_empty() {
            true => Err(PayloadError::Invalid("a disk without a path")),
            false => Ok(Self {
                size,
                read_only: false,
            }),
        }
    }
}

fn disk(version: u32, value: &impl Serialize) -> Section {
    Section {
        version,
        ..section("disk", 0, &postcard::to_stdvec(value).unwrap())
    }
}

#[test]
fn the_current_and_the_previous_version_of_a_section() {
    let old = DiskOfVersion1 {
        path: "a.img".into(),
        size: 7,
    };
    let new = Disk {
        size: 7,
        read_only: false,
    };
    assert_eq!(disk(2, &new).decode::<Disk>().unwrap(), new);
    assert_eq!(disk(1, &old).decode::<Disk>().unwrap(), new);

    let nameless = DiskOfVersion1 {
        path: String::new(),
        size: 7,
    };
    let error = disk(1, &nameless).decode::<Disk>().unwrap_err();
    assert!(
        matches!(
            error,
            ReadError::Payload {
                source: PayloadError::Invalid(_),
                ..
            }
        ),
        "{error}"
    );
    for version in [3, u32::MAX] {
        let error = disk(version, &new).decode::<Disk>().unwrap_err();
        assert!(
            matches!(error, ReadError::NewerVersion { newest: 2, .. }),
            "{error}"
        );
        assert!(error.to_string().contains("a newer one"), "{error}");
    }
    let error = disk(0, &new).decode::<Disk>().unwrap_err();
    assert!(
        matches!(error, ReadError::OlderVersion { oldest: 1, .. }),
        "{error}"
    );
    assert!(error.to_string().contains("save it again"), "{error}");
    // This one has version 3 and no way from version 2.
    for (version, said) in [(0, 2), (1, 2), (2, 3)] {
        let old = Section {
            version,
            ..Section::encode(0, &vcpu(0)).unwrap()
        };
        let error = old.decode::<Vcpu>().unwrap_err();
        assert!(
            matches!(error, ReadError::OlderVersion { oldest, .. } if oldest == said),
            "{error}"
        );
    }
}

#[test]
fn a_payload_is_all_of_the_section() {
    let good = Section::encode(0, &vcpu(0)).unwrap();
    for len in 0..good.payload.len() {
        let short = Section {
            payload: good.payload[..len].to_vec(),
            ..good.clone()
        };
        assert!(short.decode::<Vcpu>().is_err(), "{len}");
    }
    let mut long = good.clone();
    long.payload.push(0);
    assert!(matches!(
        long.decode::<Vcpu>(),
        Err(ReadError::Payload {
            source: PayloadError::TrailingBytes(1),
            ..
        })
    ));
    assert!(matches!(
        good.decode::<Clock>(),
        Err(ReadError::WrongName { .. })
    ));
}

#[test]
fn other_versions_of_the_format() {
    let mut bytes = stream();
    for version in [FORMAT_VERSION + 1, u32::MAX] {
        bytes[8..12].copy_from_slice(&version.to_le_bytes());
        let error = read(&bytes).unwrap_err();
        assert!(
            matches!(error, ReadError::NewerFormat { found, .. } if found == version),
            "{error}"
        );
    }
    bytes[8..12].copy_from_slice(&0_u32.to_le_bytes());
    assert!(matches!(
        read(&bytes),
        Err(ReadError::OlderFormat { found: 0, .. })
    ));
}

#[test]
fn unknown_sections_only_if_they_say_so() {
    let clock = Section::encode(0, &Clock(1)).unwrap();
    let mut sections = read(&stream_of(&[
        section("optional-colour", 5, b"blue"),
        clock.clone(),
    ]))
    .unwrap();
    assert_eq!(sections.take::<Clock>(0).unwrap(), Clock(1));
    sections.finish().unwrap();

    let error = read(&stream_of(&[clock, section("colour", 0, b"blue")])).unwrap_err();
    assert!(matches!(error, ReadError::Unknown { .. }), "{error}");

    // Left out, but not unchecked.
    let mut bytes = stream_of(&[section("optional-colour", 5, b"blue")]);
    let at = bytes.windows(4).position(|bytes| bytes == b"blue").unwrap();
    bytes[at] = b'g';
    assert!(matches!(read(&bytes), Err(ReadError::Checksum { .. })));
}

//! Frames encoded and decoded, damaged, truncated and forged.

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::migration::dirty::PageRun;

fn hello() -> Hello {
    Hello {
        secret: MigrationSecret([9; 32]),
        connections: 4,
        ram: vec![
            RamRange {
                guest_address: 0,
                len: 3 << 30,
                file_offset: 0,
            },
            RamRange {
                guest_address: 4 << 30,
                len: 1 << 30,
                file_offset: 3 << 30,
            },
        ],
        compat: json!({"cpu": {"vendor": "x"}, "nics": [1, 2]}),
    }
}

fn refusal() -> Refusal {
    Refusal {
        what: "features of nic0".to_owned(),
        source: "MRG_RXBUF".to_owned(),
        destination: "absent".to_owned(),
        remedy: "vdpa dev add ... mrg_rxbuf".to_owned(),
    }
}

/// One message of each kind.
fn examples(page: &[u8]) -> Vec<Message<'_>> {
    let session = Session([7; 16]);
    vec![
        Message::Hello(hello()),
        Message::Accept {
            session,
            connections: 16,
        },
        Message::Refuse(vec![refusal(), Refusal::default()]),
        Message::Join {
            session,
            connection: 15,
        },
        Message::Pages {
            offset: 0x7000,
            data: page,
        },
        Message::Zeros(vec![
            PageRun { first: 0, count: 1 },
            PageRun {
                first: 1 << 28,
                count: 256,
            },
        ]),
        Message::RoundEnd {
            round: 3,
            last: true,
        },
        Message::State(page),
        Message::StateEnd { len: 4096 },
        Message::Ready,
        Message::Go(session),
        Message::Done,
        Message::Cancel,
        Message::Failed("no memory".to_owned()),
        Message::Alive,
        Message::Try(hello()),
        Message::Early(page),
    ]
}

/// Decodes a whole frame as a receiver does.
fn read(frame: &[u8], connection: u16, sequence: u32) -> Result<String, FrameError> {
    let (header, payload) = frame.split_first_chunk().ok_or(FrameError::Magic)?;
    let header = Header::decode(*header, connection, sequence)?;
    let Some(payload) = payload.get(..header.payload_len()) else {
        return Err(FrameError::Magic);
    };
    header.check(payload)?;
    decode_message(&header, payload).map(|message| format!("{message:?}"))
}

#[test]
fn every_message_comes_back() {
    let page = [9; 4096];
    for (sequence, message) in (5..).zip(examples(&page)) {
        let mut frame = vec![1; 3];
        encode_message(&message, 2, sequence, &mut frame).unwrap();
        assert_eq!(read(&frame, 2, sequence).unwrap(), format!("{message:?}"));
        assert!(matches!(
            read(&frame, 3, sequence),
            Err(FrameError::Connection {
                found: 2,
                expected: 3
            })
        ));
        assert!(matches!(
            read(&frame, 2, sequence + 1),
            Err(FrameError::Sequence { .. })
        ));
    }
}

#[test]
fn every_flipped_byte_and_every_cut_is_seen() {
    let page = [9; 4096];
    for message in examples(&page) {
        let mut frame = Vec::new();
        encode_message(&message, 0, 0, &mut frame).unwrap();
        for at in 0..frame.len() {
            assert!(read(frame.get(..at).unwrap(), 0, 0).is_err(), "{at}");
            let mut bad = frame.clone();
            bad[at] ^= 0x10;
            assert!(read(&bad, 0, 0).is_err(), "{} at {at}", message.name());
        }
    }
}

/// A frame with a valid CRC and any payload.
fn forge(kind: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    frame.extend(kind.to_le_bytes());
    frame.extend([0, 0]);
    frame.extend(u32::try_from(payload.len()).unwrap().to_le_bytes());
    frame.extend([0; 4]);
    let mut crc = crc32fast::Hasher::new();
    crc.update(&frame);
    crc.update(payload);
    frame.extend(crc.finalize().to_le_bytes());
    frame.extend_from_slice(payload);
    frame
}

fn payload_of(message: &Message<'_>) -> Vec<u8> {
    let mut frame = Vec::new();
    encode_message(message, 0, 0, &mut frame).unwrap();
    frame.split_off(FRAME_HEADER_LEN)
}

#[test]
fn payloads_that_are_too_short_or_too_long_are_refused() {
    let page = [9; 4096];
    for (kind, message) in (1..).zip(examples(&page)) {
        let payload = payload_of(&message);
        assert!(read(&forge(kind, &payload), 0, 0).is_ok());
        // Text and states may end anywhere; every other message has one length.
        let free = matches!(
            message,
            Message::State(_) | Message::Early(_) | Message::Failed(_)
        );
        for len in 0..payload.len() {
            let result = read(&forge(kind, payload.get(..len).unwrap()), 0, 0);
            let whole_runs = kind == 6 && len == 12;
            let fits = whole_runs || (free && len > 0) || kind == 14;
            assert_eq!(result.is_ok(), fits, "{kind} {len}");
        }
        if !free {
            let mut long = payload.clone();
            long.push(0);
            assert!(read(&forge(kind, &long), 0, 0).is_err(), "{kind}");
        }
    }
    for kind in [0, 18, 0x100, u16::MAX] {
        assert_eq!(read(&forge(kind, &[]), 0, 0), Err(FrameError::Kind(kind)));
    }
}

#[test]
fn lengths_are_refused_before_anything_is_read() {
    let mut header: [u8; 16] = forge(14, &[]).try_into().unwrap();
    header[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(
        Header::decode(header, 0, 0),
        Err(FrameError::TooLong {
            name: "FAILED",
            len: u32::MAX,
            max: FAILED_MAX
        })
    );
}

#[test]
fn invalid_messages_are_refused() {
    let refused = |kind, payload: &[u8]| {
        let error = read(&forge(kind, payload), 0, 0).unwrap_err();
        error.to_string()
    };
    let mut other = payload_of(&Message::Hello(hello()));
    other[0] ^= 1;
    assert!(refused(1, &other).contains("does not use"));
    other[0] ^= 1;
    other[8] = 1;
    assert!(refused(1, &other).contains("version 1"));
    other[8] = 2;
    other[44] = 1;
    assert!(refused(1, &other).contains("page size"));
    let with = |hello: Hello| {
        let mut frame = Vec::new();
        encode_message(&Message::Hello(hello), 0, 0, &mut frame)
            .and_then(|()| read(&frame, 0, 0).map(drop))
    };
    for connections in [0, 17] {
        assert!(
            with(Hello {
                connections,
                ..hello()
            })
            .is_err()
        );
    }
    for compat in [json!([]), json!(1), json!({"a": "x".repeat(COMPAT_MAX)})] {
        assert!(with(Hello { compat, ..hello() }).is_err());
    }
    let deep = format!("{{\"a\":{}1{}}}", "[".repeat(30_000), "]".repeat(30_000));
    let mut payload = payload_of(&Message::Hello(Hello {
        ram: Vec::new(),
        compat: json!({}),
        ..hello()
    }));
    payload.truncate(52);
    payload.extend(deep.as_bytes());
    assert!(refused(1, &payload).contains("not JSON"));
    assert!(
        with(Hello {
            ram: vec![hello().ram[0]; RANGES_MAX + 1],
            ..hello()
        })
        .is_err()
    );

    let pages = |offset: u64, len: usize| {
        let mut payload = offset.to_le_bytes().to_vec();
        payload.resize(8 + len, 1);
        payload
    };
    for payload in [
        pages(0, 0),
        pages(1, 4096),
        pages(0, 4095),
        pages(0, 257 * 4096),
        pages(u64::MAX - 4095, 4096),
    ] {
        refused(5, &payload);
    }
    let zeros =
        |offset: u64, count: u32| [&offset.to_le_bytes()[..], &count.to_le_bytes()].concat();
    for payload in [
        zeros(0, 0),
        zeros(0, 257),
        zeros(8, 1),
        zeros(0xffff_ffff_ffff_f000, 1),
        Vec::new(),
    ] {
        refused(6, &payload);
    }
    refused(7, &[1, 0, 0, 0, 2]);
    refused(8, &[]);
    refused(3, &[0, 0]);
    refused(3, &[65, 0]);
    refused(14, &[0xff, 0xfe]);
    for connection in [0_u8, 16] {
        let mut payload = vec![7; 16];
        payload.extend([connection, 0]);
        refused(4, &payload);
    }
}

#[test]
fn texts_are_cut_and_cannot_steer_a_terminal() {
    let long = "ä\x1b[31m\n".repeat(1000);
    let mut frame = Vec::new();
    encode_message(&Message::Failed(long.clone()), 0, 0, &mut frame).unwrap();
    assert!(!read(&frame, 0, 0).unwrap().contains("\\u{1b}"));
    let reason = Refusal {
        what: long.clone(),
        source: long.clone(),
        destination: long.clone(),
        remedy: long,
    };
    encode_message(&Message::Refuse(vec![reason; 100]), 0, 0, &mut frame).unwrap();
    let text = read(&frame, 0, 0).unwrap();
    assert_eq!(text.matches("Refusal").count(), REFUSALS_MAX);
    assert!(!text.contains("\\u{1b}") && !text.contains("\\n"));
}

proptest! {
    #[test]
    fn any_payload_is_decoded_without_a_panic(
        kind in 0_u16..17,
        payload in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        let _ = read(&forge(kind, &payload), 0, 0);
    }

    #[test]
    fn any_bytes_are_decoded_without_a_panic(frame in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = read(&frame, 0, 0);
    }
}

#![allow(clippy::unwrap_used, reason = "tests")]
use netlink_packet_core::{DefaultNla, Emitable, NLM_F_MULTIPART};
use proptest::prelude::*;

use super::super::message::{Request, string};
use super::*;

const SEQUENCE: u32 = 7;
const FAMILY: u16 = 30;

/// An encoded message with this type, flags and payload.
fn wire(kind: u16, flags: u16, sequence: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(NLMSG_HDRLEN + payload.len()).unwrap();
    let mut bytes = length.to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend(sequence.to_ne_bytes());
    bytes.extend(0_u32.to_ne_bytes());
    bytes.extend(payload);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn device(name: &str, flags: u16) -> Vec<u8> {
    let attribute = [string(4, name)];
    let mut payload = vec![3, 1, 0, 0];
    let mut attributes = vec![0; attribute.as_slice().buffer_len()];
    attribute.as_slice().emit(&mut attributes);
    payload.extend(attributes);
    wire(FAMILY, flags, SEQUENCE, &payload)
}

fn end(kind: u16, flags: u16, code: i32, rest: &[u8]) -> Vec<u8> {
    let mut payload = code.to_ne_bytes().to_vec();
    payload.extend(rest);
    wire(kind, flags, SEQUENCE, &payload)
}

const ERROR: u16 = 2;
const DONE: u16 = 3;

fn extended(text: &[u8]) -> Vec<u8> {
    let list = [DefaultNla::new(NLMSGERR_ATTR_MSG, text.to_vec())];
    let mut bytes = vec![0; list.as_slice().buffer_len()];
    list.as_slice().emit(&mut bytes);
    bytes
}

fn refusal(result: Result<Progress, CallError>) -> Refusal {
    match result {
        Err(CallError::Refused(refusal)) => refusal,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_request_is_laid_out_as_the_kernel_reads_it() {
    let request = Request::generic(0x1234, 5, 1, Mode::Dump, vec![string(4, "ab")]);
    let bytes = request.bytes(9);
    let mut expected = 28_u32.to_ne_bytes().to_vec();
    expected.extend(0x1234_u16.to_ne_bytes());
    expected.extend(0x305_u16.to_ne_bytes());
    expected.extend(9_u32.to_ne_bytes());
    expected.extend([0; 4]);
    expected.extend([5, 1, 0, 0]);
    expected.extend(7_u16.to_ne_bytes());
    expected.extend(4_u16.to_ne_bytes());
    expected.extend(*b"ab\0\0");
    assert_eq!(bytes, expected);
}

#[test]
fn messages_then_an_acknowledgement() {
    let mut exchange = Exchange::new(SEQUENCE, Mode::Do, Protocol::Generic);
    assert_eq!(exchange.feed(&device("a", 0)).unwrap(), Progress::Waiting);
    let stale = wire(ERROR, 0, SEQUENCE - 1, &(-1_i32).to_ne_bytes());
    assert_eq!(exchange.feed(&stale).unwrap(), Progress::Waiting);
    let last = end(ERROR, NLM_F_CAPPED, 0, &[0; NLMSG_HDRLEN]);
    assert_eq!(exchange.feed(&last).unwrap(), Progress::Complete);
    assert_eq!(exchange.answer().messages.len(), 1);
}

#[test]
fn a_dump_goes_over_several_datagrams() {
    let mut exchange = Exchange::new(SEQUENCE, Mode::Dump, Protocol::Generic);
    let two = [device("a", NLM_F_MULTIPART), device("b", NLM_F_MULTIPART)].concat();
    assert_eq!(exchange.feed(&two).unwrap(), Progress::Waiting);
    let last = [device("c", NLM_F_MULTIPART), end(DONE, 2, 0, &[])].concat();
    assert_eq!(exchange.feed(&last).unwrap(), Progress::Complete);
    let messages = exchange.answer().messages;
    assert_eq!(messages.len(), 3);
    assert_eq!(
        (messages[0].message_type, messages[0].command()),
        (FAMILY, 3)
    );
}

#[test]
fn an_interrupted_dump_is_reported() {
    let mut exchange = Exchange::new(SEQUENCE, Mode::Dump, Protocol::Generic);
    exchange.feed(&device("a", NLM_F_DUMP_INTR)).unwrap();
    let progress = exchange.feed(&end(DONE, 0, 0, &[])).unwrap();
    assert_eq!(progress, Progress::Interrupted);
    let mut exchange = Exchange::new(SEQUENCE, Mode::Dump, Protocol::Generic);
    let progress = exchange.feed(&end(DONE, NLM_F_DUMP_INTR, 0, &[])).unwrap();
    assert_eq!(progress, Progress::Interrupted);
}

#[test]
fn a_refusal_has_the_kernels_words() {
    let words = extended(b"vdpa: device not found\0");
    let capped = [vec![0; NLMSG_HDRLEN], words.clone()].concat();
    let flags = NLM_F_CAPPED | NLM_F_ACK_TLVS;
    let mut exchange = Exchange::new(SEQUENCE, Mode::Do, Protocol::Generic);
    let found = refusal(exchange.feed(&end(ERROR, flags, -19, &capped)));
    assert_eq!(found, Refusal::of(19, Some("vdpa: device not found")));
    assert!(
        found
            .to_string()
            .contains("\"vdpa: device not found\": No such device")
    );

    // The explanation follows a repeated request.
    let request = wire(FAMILY, 5, SEQUENCE, b"12345");
    let repeated = [request, words.clone()].concat();
    let found = refusal(exchange.feed(&end(ERROR, NLM_F_ACK_TLVS, -19, &repeated)));
    assert_eq!(found.explanation(), Some("vdpa: device not found"));

    // A dump's end has it directly after its code.
    let mut dump = Exchange::new(SEQUENCE, Mode::Dump, Protocol::Generic);
    let found = refusal(dump.feed(&end(DONE, NLM_F_ACK_TLVS, -95, &words)));
    assert_eq!(found, Refusal::of(95, Some("vdpa: device not found")));

    // Without the flag no list follows.
    let found = refusal(exchange.feed(&end(ERROR, NLM_F_CAPPED, -19, &capped)));
    assert_eq!(found.explanation(), None);
}

#[test]
fn success_may_come_with_a_warning() {
    let words = extended(b"vdpa: b0 device not supported\0");
    let capped = [vec![0; NLMSG_HDRLEN], words.clone()].concat();
    let flags = NLM_F_CAPPED | NLM_F_ACK_TLVS;
    for (mode, last) in [
        (Mode::Do, end(ERROR, flags, 0, &capped)),
        (Mode::Dump, end(DONE, NLM_F_ACK_TLVS, 0, &words)),
    ] {
        let mut exchange = Exchange::new(SEQUENCE, mode, Protocol::Generic);
        assert_eq!(exchange.feed(&last).unwrap(), Progress::Complete);
        let warning = exchange.answer().warning;
        assert_eq!(warning.as_deref(), Some("vdpa: b0 device not supported"));
    }
}

#[test]
fn words_are_sanitized_and_shortened() {
    let words = [vec![0; NLMSG_HDRLEN], extended(b" a\x1b[31m\nb \xff\0rest")].concat();
    let flags = NLM_F_CAPPED | NLM_F_ACK_TLVS;
    let mut exchange = Exchange::new(SEQUENCE, Mode::Do, Protocol::Generic);
    let found = refusal(exchange.feed(&end(ERROR, flags, -1, &words)));
    assert_eq!(found.explanation(), Some("a [31m b \u{fffd}"));
    let long = [vec![0; NLMSG_HDRLEN], extended(&[b'x'; 4000])].concat();
    let found = refusal(exchange.feed(&end(ERROR, flags, -1, &long)));
    assert_eq!(found.explanation().unwrap().len(), EXPLANATION_MAX);
}

#[test]
fn codes_that_are_no_errno_and_wrong_ends_are_errors() {
    for code in [1, 4096, -4096, i32::MIN, i32::MAX] {
        for kind in [ERROR, DONE] {
            let mut exchange = Exchange::new(SEQUENCE, Mode::Do, Protocol::Generic);
            let result = exchange.feed(&end(kind, 0, code, &[]));
            assert!(matches!(result, Err(CallError::Malformed(_))), "{code}");
        }
    }
    for (mode, kind) in [(Mode::Do, DONE), (Mode::Dump, ERROR)] {
        let result = Exchange::new(SEQUENCE, mode, Protocol::Generic).feed(&end(kind, 0, 0, &[]));
        assert!(matches!(result, Err(CallError::Malformed(_))));
    }
    let overrun = wire(4, 0, SEQUENCE, &[]);
    assert!(
        Exchange::new(SEQUENCE, Mode::Dump, Protocol::Generic)
            .feed(&overrun)
            .is_err()
    );
}

#[test]
fn too_many_messages_are_refused() {
    let mut exchange = Exchange::new(SEQUENCE, Mode::Dump, Protocol::Generic);
    let many = device("a", 0).repeat(MESSAGES_MAX);
    exchange.feed(&many).unwrap();
    assert!(exchange.feed(&device("a", 0)).is_err());
}

/// An answer of every kind of message.
fn answer() -> Vec<u8> {
    [
        device("first", NLM_F_MULTIPART),
        device("second one", NLM_F_MULTIPART),
        end(
            DONE,
            NLM_F_MULTIPART | NLM_F_ACK_TLVS,
            0,
            &extended(b"a warning\0"),
        ),
    ]
    .concat()
}

#[test]
fn an_answer_cut_anywhere_is_never_complete() {
    let whole = answer();
    let boundaries = [device("first", 0).len(), 0];
    for length in 0..whole.len() {
        let mut exchange = Exchange::new(SEQUENCE, Mode::Dump, Protocol::Generic);
        let result = exchange.feed(&whole[..length]);
        let boundary = boundaries[0] + device("second one", 0).len();
        if boundaries.contains(&length) || length == boundary {
            assert_eq!(result.unwrap(), Progress::Waiting, "{length}");
        } else {
            assert!(matches!(result, Err(CallError::Malformed(_))), "{length}");
        }
    }
}

proptest! {
    #[test]
    fn changed_answers_do_no_harm(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let mut bytes = answer();
        for (index, value) in changes {
            let length = bytes.len();
            bytes[index.index(length)] = value;
        }
        for mode in [Mode::Do, Mode::Dump] {
            let _ = Exchange::new(SEQUENCE, mode, Protocol::Generic).feed(&bytes);
        }
    }

    #[test]
    fn any_bytes_do_no_harm(
        bytes in prop::collection::vec(any::<u8>(), 0..256),
        kind in 0_u16..5,
        flags: u16,
    ) {
        let _ = Exchange::new(SEQUENCE, Mode::Do, Protocol::Generic).feed(&bytes);
        let framed = wire(kind, flags, SEQUENCE, &bytes);
        for mode in [Mode::Do, Mode::Dump] {
            let _ = Exchange::new(SEQUENCE, mode, Protocol::Generic).feed(&framed);
        }
    }
}

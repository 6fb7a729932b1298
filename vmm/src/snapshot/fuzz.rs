//! One entry point to the decoders of this module, for the fuzz target in `tests/fuzz` and for the
//! property test below, which needs no fuzzer.
//!
//! The first byte selects the meaning of the others: a state, the body of one, or pieces of
//! sections. The last two get a valid length and checksum, so that the code after those checks is
//! reached too. Owns nothing else.

use serde::{Deserialize, Serialize};

use super::format::{Saved, Sections, decode, frame};
use super::memory_image::MemoryDigest;

/// A payload with all kinds of fields.
#[derive(Debug, Serialize, Deserialize)]
struct Sample {
    number: u64,
    text: String,
    bytes: Vec<u8>,
    list: Vec<(u16, Option<bool>)>,
}

impl Saved for Sample {
    const NAME: &'static str = "sample";
    const VERSION: u32 = 2;
    const MAX_LEN: u64 = 2048;

    fn upgrade(previous: &[u8]) -> Option<Result<Self, postcard::Error>> {
        // The previous version had no list.
        Some(decode(previous).map(|(number, text, bytes)| Self {
            number,
            text,
            bytes,
            list: Vec::new(),
        }))
    }
}

/// Decodes `input` in every way. For any input nothing panics, and memory use does not exceed the
/// input's size.
pub fn decode_anything(input: &[u8]) {
    let Some((&choice, rest)) = input.split_first() else {
        return;
    };
    match choice % 3 {
        0 => read(rest),
        1 => read(&frame(rest)),
        _ => {
            let mut state = Vec::new();
            if pieces(rest).write(&mut state).is_ok() {
                read(&state);
            }
        }
    }
}

/// Sections, each preceded by name, version and length in one byte each.
fn pieces(mut rest: &[u8]) -> Sections {
    let names = ["sample", "memory-digest", "other"];
    let mut sections = Sections::default();
    while let Some(([name, version, len], after)) = rest.split_first_chunk() {
        let (payload, after) = after.split_at(usize::from(*len).min(after.len()));
        rest = after;
        let name = names.get(usize::from(name % 4)).unwrap_or(&names[0]);
        sections.insert(name, u32::from(version % 4), payload.to_vec());
    }
    sections
}

fn read(state: &[u8]) {
    let Ok(mut sections) = Sections::read(&mut &*state, 8192) else {
        return;
    };
    let _ = sections.take_optional::<MemoryDigest>();
    let _ = sections.take_optional::<Sample>();
    let _ = sections.finish();
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Sections of each name and version, framed in each way.
    fn valid() -> Vec<Vec<u8>> {
        let payload = postcard::to_stdvec(&(7_u64, "text", [1_u8, 2].as_slice())).unwrap();
        let length = u8::try_from(payload.len()).unwrap();
        let mut seeds = Vec::new();
        for name in 0..4 {
            for version in 0..4 {
                seeds.push([&[2, name, version, length][..], &payload].concat());
            }
        }
        let mut state = Vec::new();
        pieces(&seeds[2][1..]).write(&mut state).unwrap();
        seeds.push([&[0][..], &state].concat());
        seeds.push([&[1][..], &state].concat());
        seeds
    }

    #[test]
    fn the_corpus_of_the_snapshots_is_decoded() {
        crate::corpus::replay("snapshot", valid, decode_anything);
    }

    proptest! {
        #[test]
        fn anything_is_decoded_without_a_panic(
            input in prop::collection::vec(any::<u8>(), 0..600),
        ) {
            decode_anything(&input);
        }
    }

    #[test]
    fn pieces_reach_the_payloads() {
        let payload = postcard::to_stdvec(&(7_u64, "text", [1_u8, 2].as_slice())).unwrap();
        let mut input = vec![0, 1, u8::try_from(payload.len()).unwrap()];
        input.extend(payload);
        let sample: Sample = pieces(&input).take().unwrap();
        assert_eq!((sample.number, sample.bytes), (7, vec![1, 2]));
    }
}

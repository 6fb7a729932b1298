//! One way into the decoders of this module, for the fuzz target in `tests/fuzz` and for the property test
//! below, which does the same without it.
//!
//! The first byte chooses what the others are: a stream, or pieces of sections that are framed with
//! right lengths and checksums, so that what lies behind those is reached too. Owns nothing else.

use serde::{Deserialize, Serialize};

use super::format::{
    FORMAT_VERSION, MAGIC, Payload, PayloadError, Saved, Section, SectionKind, SectionName,
    Sections, Table, Writer,
};
use super::memory_image::MemoryDigest;

/// A payload with what payloads are made of.
#[derive(Debug, Serialize, Deserialize)]
struct Sample {
    number: u64,
    text: String,
    bytes: Vec<u8>,
    list: Vec<(u16, Option<bool>)>,
}

/// The same, before it had a list.
#[derive(Debug, Deserialize)]
struct OlderSample {
    number: u64,
    text: String,
    bytes: Vec<u8>,
}

impl Saved for Sample {
    const NAME: &'static str = "sample";
    const VERSION: u32 = 2;
    const MAX_LEN: u64 = 2048;

    fn upgrade(previous: Payload<'_>) -> Result<Self, PayloadError> {
        let OlderSample {
            number,
            text,
            bytes,
        } = previous.decode()?;
        Ok(Self {
            number,
            text,
            bytes,
            list: Vec::new(),
        })
    }
}

const KINDS: &[SectionKind] = &[
    SectionKind::of::<Sample>(4),
    SectionKind::of::<MemoryDigest>(1),
];
const TABLE: Table<'static> = Table::new(KINDS, 8192);

/// Decodes `input` as everything that it could be. Whatever it is, nothing panics, and no more
/// memory is taken than the input has.
pub fn decode_anything(input: &[u8]) {
    let Some((&choice, rest)) = input.split_first() else {
        return;
    };
    match choice % 4 {
        0 => read(rest),
        1 => {
            let mut stream = MAGIC.to_vec();
            stream.extend(FORMAT_VERSION.to_le_bytes());
            stream.extend(rest);
            read(&stream);
        }
        _ => {
            if let Some(stream) = framed(rest) {
                read(&stream);
            }
        }
    }
}

/// Sections, each with name, instance, version and length before it in one byte each.
fn framed(mut rest: &[u8]) -> Option<Vec<u8>> {
    let names = ["sample", "memory-digest", "optional-other", "other"];
    let mut writer = Writer::new(Vec::new()).ok()?;
    while let Some(([name, instance, version, len], after)) = rest.split_first_chunk() {
        let (payload, after) = after.split_at(usize::from(*len).min(after.len()));
        rest = after;
        let name = names.get(usize::from(name % 8)).unwrap_or(&names[0]);
        writer = writer
            .section(&Section {
                name: SectionName::new(name).ok()?,
                instance: u32::from(instance % 6),
                version: u32::from(version % 4),
                payload: payload.to_vec(),
            })
            .ok()?;
    }
    writer.finish().ok()
}

fn read(stream: &[u8]) {
    let Ok(mut sections) = Sections::read_file(&mut &*stream, TABLE) else {
        return;
    };
    let _ = sections.take_optional::<MemoryDigest>(0);
    let _ = sections.take_all::<Sample>();
    let _ = sections.finish();
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn anything_is_decoded_without_a_panic(input in prop::collection::vec(any::<u8>(), 0..600)) {
            decode_anything(&input);
        }
    }

    #[test]
    fn framed_pieces_reach_the_payloads() {
        let payload = postcard::to_stdvec(&(7_u64, "text", [1_u8, 2].as_slice())).unwrap();
        let mut input = vec![0, 0, 1, u8::try_from(payload.len()).unwrap()];
        input.extend(payload);
        let stream = framed(&input).unwrap();
        let mut sections = Sections::read_file(&mut stream.as_slice(), TABLE).unwrap();
        let sample: Sample = sections.take(0).unwrap();
        assert_eq!((sample.number, sample.bytes), (7, vec![1, 2]));
    }
}

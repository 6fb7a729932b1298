//! One entry point to everything that a destination reads from its peer. The fuzz target in
//! `tests/fuzz` uses it, and so does the property test below, which needs no fuzzer.
//!
//! The input is a list of frames: kind, length, payload. Header, sequence and CRC are valid except
//! for those that the first byte selects, so that the fuzzer gets past them. Owns nothing else.

use std::io::{self, Cursor, ErrorKind, Read, Write};
use std::time::Duration;

use super::channel::{Connection, Timeouts};
use super::destination::{DestinationMachine, Go, ReceiveOptions, receive};
use super::protocol::{
    FRAME_HEADER_LEN, Header, Hello, Message, MigrationSecret, RamRange, Refusal, Session,
    decode_message, encode_message,
};
use super::{MachineError, Monitor, Outcome, RamImage};
use crate::layout::Layout;
use crate::memory::GuestRam;

/// Guest RAM of the destination in bytes, the minimum.
const RAM: u64 = crate::layout::RAM_MIN;

/// Reads `input`, discards writes.
struct Script(Cursor<Vec<u8>>);

impl Read for Script {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for Script {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Connection for Script {
    fn set_timeout(&mut self, _: Duration) -> io::Result<()> {
        Ok(())
    }
}

struct Machine {
    ram: RamImage,
}

impl DestinationMachine for Machine {
    fn prepare(&mut self, _: &Hello) -> Result<RamImage, Vec<Refusal>> {
        Ok(self.ram.clone())
    }

    fn try_out(&mut self, _: &Hello) -> Result<Vec<RamRange>, Vec<Refusal>> {
        Ok(self.ram.ranges())
    }

    fn take_early(&mut self, _: &[u8]) -> Result<(), MachineError> {
        Ok(())
    }

    fn restore(&mut self, _: &[u8]) -> Result<(), MachineError> {
        Ok(())
    }

    fn run(&mut self, _: Go) -> Result<(), MachineError> {
        Ok(())
    }
}

/// Lets a destination read `input`. For any input nothing panics, every wait ends, and the guest
/// never runs: the input cannot contain the session that GO needs.
///
/// # Errors
/// Text that names the violated property.
pub fn receive_anything(input: &[u8]) -> Result<(), String> {
    let Some((&choice, rest)) = input.split_first() else {
        return Ok(());
    };
    if let Some((header, payload)) = rest.split_first_chunk::<FRAME_HEADER_LEN>() {
        let [_, _, c0, c1, _, _, _, _, s0, s1, s2, s3, ..] = *header;
        let connection = u16::from_le_bytes([c0, c1]);
        if let Ok(header) =
            Header::decode(*header, connection, u32::from_le_bytes([s0, s1, s2, s3]))
        {
            let _ = header.check(payload);
            // Decode what a matching CRC would let through.
            let _ = decode_message(&header, payload);
        }
    }
    let layout = Layout::new(RAM, 40).map_err(|error| error.to_string())?;
    let ram = GuestRam::new(&layout, None).map_err(|error| error.to_string())?;
    let ram = RamImage::new(&ram);
    let stream = match choice & 1 {
        0 => rest.to_vec(),
        _ => framed(&ram.ranges(), choice & 2 != 0, rest),
    };
    let options = ReceiveOptions {
        connections: 1,
        timeouts: Timeouts {
            frame: Duration::from_secs(1),
            ..Timeouts::default()
        },
        ..ReceiveOptions::default()
    };
    let outcome = receive(
        &mut Machine { ram },
        Script(Cursor::new(stream)),
        &mut || Err(ErrorKind::NotConnected.into()),
        &options,
        &Monitor::default(),
    );
    match outcome {
        Outcome::Destination => Err("the guest runs without a GO".to_owned()),
        _ => Ok(()),
    }
}

/// Valid frames: a HELLO that fits, then the frames of `rest`.
fn framed(ram: &[RamRange], hello: bool, mut rest: &[u8]) -> Vec<u8> {
    let (mut stream, mut frame, mut sequence) = (Vec::new(), Vec::new(), 0);
    let mut add = |message: &Message<'_>| {
        if encode_message(message, 0, sequence, &mut frame).is_ok() {
            stream.extend_from_slice(&frame);
            sequence += 1;
        }
    };
    if hello {
        add(&Message::Hello(Hello {
            secret: MigrationSecret::default(),
            connections: 1,
            ram: ram.to_vec(),
            compat: serde_json::json!({}),
        }));
    }
    while let Some((&[kind, a, b, c], after)) = rest.split_first_chunk() {
        let number = u64::from(u32::from_le_bytes([a, b, c, 0]));
        let page = [b; 8192];
        rest = after;
        let count = u64::from(b) + 1;
        match kind % 10 {
            0 => add(&Message::Pages {
                offset: number << 12,
                data: page
                    .get(..if c & 1 == 0 { 4096 } else { 8192 })
                    .unwrap_or(&[]),
            }),
            1 => add(&Message::Zeros(vec![super::dirty::PageRun {
                first: number >> 8,
                count,
            }])),
            2 => add(&Message::RoundEnd {
                round: a.into(),
                last: b & 1 == 1,
            }),
            3 => add(&Message::State(page.get(..usize::from(a)).unwrap_or(&[]))),
            4 => add(&Message::StateEnd { len: a.into() }),
            5 => add(&Message::Go(Session([a; 16]))),
            6 => add(&Message::Alive),
            7 => add(&Message::Failed(
                String::from_utf8_lossy(&[a, b, c]).into_owned(),
            )),
            8 => add(&Message::Join {
                session: Session([a; 16]),
                connection: b.into(),
            }),
            _ if a & 1 == 1 => add(&Message::Early(page.get(..=usize::from(b)).unwrap_or(&[]))),
            _ => add(&Message::Cancel),
        }
    }
    stream
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Valid streams, each kind of frame at each place, and bytes without frames.
    fn valid() -> Vec<Vec<u8>> {
        let kinds = (0..10u8).flat_map(|kind| [kind, kind, 1, 0]);
        let all: Vec<u8> = kinds.collect();
        let turned = (0..10).map(|first| {
            let mut frames = all.clone();
            frames.rotate_left(4 * first);
            [&[3][..], &frames].concat()
        });
        let good = [
            [3u8, 0, 0, 0, 0],
            [3, 1, 1, 0, 1],
            [1, 0, 0, 0, 0],
            [2, 0, 0, 0, 0],
        ];
        turned.chain(good.map(|input| input.to_vec())).collect()
    }

    #[test]
    fn the_corpus_of_the_migration_starts_no_guest() {
        let check = |input: &[u8]| assert_eq!(receive_anything(input), Ok(()));
        crate::corpus::replay("migration", valid, check);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn anything_is_received_without_a_panic(
            choice in 0_u8..4,
            input in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            let mut all = vec![choice];
            all.extend(input);
            prop_assert_eq!(receive_anything(&all), Ok(()));
        }
    }
}

//! Random numbers: the hardware generator under test, and the reproducible sequence for payloads
//! and disk patterns.

use lab::error::{Error, Result};
use serde_json::{Value, json};
use std::fs::File;
use std::io::Read as _;

/// Most bytes that `rng` reads.
const MAXIMUM: usize = 1 << 20;

/// SplitMix64: the same numbers for the same seed.
#[derive(Debug, Clone)]
pub(crate) struct Sequence {
    state: u64,
}

impl Sequence {
    pub(crate) fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.state;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    }

    pub(crate) fn fill(&mut self, bytes: &mut [u8]) {
        for piece in bytes.chunks_mut(8) {
            let value = self.next().to_le_bytes();
            piece
                .iter_mut()
                .zip(value)
                .for_each(|(to, from)| *to = from);
        }
    }
}

/// A seed that no earlier run had.
pub(crate) fn seed() -> Result<u64> {
    let path = "/dev/urandom";
    let mut bytes = [0; 8];
    File::open(path)
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(Error::file("read", path))?;
    Ok(u64::from_le_bytes(bytes))
}

/// Reads the hardware generator: how many bytes came, and how many different values they have (a
/// broken generator gives few).
pub(crate) fn hardware(count: usize) -> Result<Value> {
    if count == 0 || count > MAXIMUM {
        return Err(Error::invalid(
            "BYTES",
            format!("it is not in 1..={MAXIMUM}"),
        ));
    }
    let path = "/dev/hwrng";
    let mut bytes = vec![0; count];
    let started = std::time::Instant::now();
    File::open(path)
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(Error::file("read", path))?;
    let elapsed = started.elapsed();
    let mut seen = [false; 256];
    for byte in &bytes {
        if let Some(seen) = seen.get_mut(usize::from(*byte)) {
            *seen = true;
        }
    }
    Ok(json!({
        "bytes": bytes.len(),
        "distinct": seen.iter().filter(|seen| **seen).count(),
        "elapsed_us": elapsed.as_micros(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_bytes() {
        let (mut one, mut two) = ([0; 13], [0; 13]);
        Sequence::new(7).fill(&mut one);
        Sequence::new(7).fill(&mut two);
        assert_eq!(one, two);
        Sequence::new(8).fill(&mut two);
        assert_ne!(one, two);
    }

    #[test]
    fn sizes_are_bounded() {
        assert!(hardware(0).is_err());
        assert!(hardware(MAXIMUM + 1).is_err());
    }
}

//! Pseudo-random numbers that are the same for the same seed (SplitMix64, Steele, Lea and Flood
//! 2014).

/// The variable that sets the seed.
pub const SEED: &str = "LAB_SEED";

/// The numbers of a seed.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Starts with this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Starts with the seed in [`SEED`], or with this one. Prints it, so that a failure can be
    /// repeated.
    #[must_use]
    pub fn announced(seed: u64) -> Self {
        let given = std::env::var(SEED).ok().and_then(|text| text.parse().ok());
        let seed = given.unwrap_or(seed);
        println!("seed: {SEED}={seed}");
        Self::new(seed)
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`; 0 for an `end` of 0.
    pub fn below(&mut self, end: usize) -> usize {
        let end = u64::try_from(end).unwrap_or(u64::MAX);
        let number = self.number().checked_rem(end).unwrap_or_default();
        usize::try_from(number).unwrap_or_default()
    }

    /// One of these values.
    pub fn one_of<'a, T>(&mut self, all: &'a [T]) -> Option<&'a T> {
        let at = self.below(all.len());
        all.get(at)
    }

    /// Shuffles the values (Fisher and Yates).
    pub fn shuffle<T>(&mut self, all: &mut [T]) {
        for end in (1..all.len()).rev() {
            let other = self.below(end + 1);
            all.swap(end, other);
        }
    }
}

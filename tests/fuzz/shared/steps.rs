//! An input of a fuzz target as a sequence of steps: the crates include this file by `#[path]`.
//!
//! The first byte selects a variant of the target. The steps follow in the encoding of postcard, so
//! a mutation of a valid sequence is mostly a valid one.

use serde::de::DeserializeOwned;

/// The most steps of one input.
const STEPS_MAX: usize = 512;

/// The steps of an input. A byte with which no step begins is skipped.
pub(crate) fn steps<T: DeserializeOwned>(input: &[u8]) -> impl Iterator<Item = T> {
    let mut rest = input;
    let next = move || {
        while let Some((_, skipped)) = rest.split_first() {
            match postcard::take_from_bytes(rest) {
                Ok((step, after)) => {
                    rest = after;
                    return Some(step);
                }
                Err(_) => rest = skipped,
            }
        }
        None
    };
    std::iter::from_fn(next).take(STEPS_MAX)
}

/// The input with these steps.
#[cfg(test)]
pub(crate) fn encoded<T: serde::Serialize>(variant: u8, steps: &[T]) -> Vec<u8> {
    let mut input = vec![variant];
    for step in steps {
        input.extend(postcard::to_stdvec(step).unwrap());
    }
    input
}

/// Inputs with random steps, always the same: `count` of them, one for each variant.
#[cfg(test)]
pub(crate) fn generated<T: serde::Serialize + std::fmt::Debug>(
    count: u8,
    step: impl proptest::strategy::Strategy<Value = T>,
) -> Vec<Vec<u8>> {
    use proptest::strategy::{Strategy as _, ValueTree as _};
    use proptest::test_runner::TestRunner;

    let mut runner = TestRunner::deterministic();
    let steps = proptest::collection::vec(step, 8..60);
    let input = |variant| encoded(variant, &steps.new_tree(&mut runner).unwrap().current());
    (0..count).map(input).collect()
}

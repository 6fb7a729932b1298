//! How much a run of the tests proves: how often a test repeats what must not leak, and whether each
//! claim is proved in full. The launcher sets both by environment variables; tests read them here.

use crate::error::{Error, Result};

/// How many times, unless [`CYCLES`] says something else.
pub const DEFAULT_CYCLES: u32 = 3;

/// The variable that says how many times; `cargo lab test --cycles` sets it.
pub const CYCLES: &str = "LAB_CYCLES";

/// The variable that asks for each claim in full; `cargo lab soak` sets it.
pub const SOAK: &str = "LAB_SOAK";

/// Whether this run proves each claim in full. Where it does not, a test that does less reports
/// so with [`crate::notice::Kind::Thinned`].
pub fn soak() -> bool {
    std::env::var_os(SOAK).is_some()
}

/// How many times a guest is to do what must not leak.
///
/// # Errors
/// [`Error::Invalid`] when the variable is no positive number.
pub fn cycles() -> Result<u32> {
    let Ok(text) = std::env::var(CYCLES) else {
        return Ok(DEFAULT_CYCLES);
    };
    let number: u32 = text.parse().unwrap_or(0);
    if number == 0 {
        return Err(Error::invalid(
            CYCLES,
            format!("{text:?} is not a number of times"),
        ));
    }
    Ok(number)
}

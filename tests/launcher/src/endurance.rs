//! How much a run of the tests proves: how often a leak test repeats its cycle, and whether each
//! claim is proved in full. The launcher sets both by environment variables; tests read them here.

use crate::error::{Error, Result};

/// The number of cycles unless [`CYCLES`] is set.
pub const DEFAULT_CYCLES: u32 = 3;

/// The variable with the number of cycles; `cargo lab test --cycles` sets it.
pub const CYCLES: &str = "LAB_CYCLES";

/// The variable that requests each claim in full; `cargo lab soak` sets it.
pub const SOAK: &str = "LAB_SOAK";

/// True if this run proves each claim in full. Otherwise a test that does less reports so with
/// [`crate::notice::Kind::Thinned`].
pub fn soak() -> bool {
    std::env::var_os(SOAK).is_some()
}

/// How many times a guest repeats an action that must not leak.
///
/// # Errors
/// [`Error::Invalid`] when the variable is not a positive number.
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

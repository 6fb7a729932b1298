//! `cargo lab clean`: removes the lab's cache.

use crate::cache::Cache;
use crate::error::Result;

/// Arguments of `cargo lab clean`.
#[derive(Debug, clap::Args)]
pub struct CleanArguments {}

/// Removes all that the lab keeps outside cargo's build directory.
///
/// # Errors
/// [`crate::Error::File`].
pub fn clean(_arguments: &CleanArguments) -> Result<u8> {
    let cache = Cache::open()?;
    let directory = cache.directory().to_path_buf();
    cache.remove()?;
    println!(
        "removed {}; `cargo clean` removes what cargo built",
        directory.display()
    );
    Ok(0)
}

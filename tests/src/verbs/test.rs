//! `cargo lab test`.
use crate::error::Result;
/// Arguments of `cargo lab test`.
#[derive(Debug, clap::Args)]
pub struct TestArguments {}
/// Runs tests.
///
/// # Errors
/// None yet.
pub fn test(_arguments: &TestArguments) -> Result<u8> {
    Ok(0)
}

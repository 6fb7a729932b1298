//! `bellhop state-versions`: the state versions that this program accepts in a hand-over. Hidden:
//! other programs run it.

use std::io;

use bellhop_common::error::{Error, ErrorKind};
use bellhop_common::exit::Code;

/// Versions of a saved machine's sections, as JSON
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {}

/// Prints them.
pub(crate) fn execute() -> Result<Code, Error> {
    serde_json::to_writer(io::stdout().lock(), &vmm::machine::requirements())
        .map_err(|error| Error::transparent(ErrorKind::Failed, io::Error::from(error)))?;
    Ok(Code::Success)
}

//! The subcommands, one file each.

mod doctor;
mod probe;
mod run;

use std::error::Error;

use crate::exit::Code;

/// A subcommand and its arguments.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    Run(run::Arguments),
    Probe(probe::Arguments),
    Doctor(doctor::Arguments),
}

impl Command {
    /// Does what was asked.
    pub(crate) fn execute(self) -> Result<Code, Box<dyn Error>> {
        match self {
            Self::Run(arguments) => Ok(run::execute(arguments)?),
            Self::Probe(arguments) => Ok(probe::execute(&arguments)?),
            Self::Doctor(arguments) => Ok(doctor::execute(&arguments)?),
        }
    }
}

//! The subcommands, one file each.

mod bind;
mod dev;
mod doctor;
mod mgmtdev;
mod nic;
mod port;
mod probe;
mod run;
mod serve;
mod topology;
mod vf;
mod words;

use std::error::Error;

use crate::exit::Code;

/// A subcommand and its arguments.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    Run(run::Arguments),
    Serve(serve::Arguments),
    Probe(probe::Arguments),
    Mgmtdev(mgmtdev::Arguments),
    Dev(dev::Arguments),
    Port(port::Arguments),
    Vf(vf::Arguments),
    Bind(bind::Arguments),
    Nic(nic::Arguments),
    Topology(topology::Arguments),
    Doctor(doctor::Arguments),
}

impl Command {
    /// Does what was asked.
    pub(crate) fn execute(self) -> Result<Code, Box<dyn Error>> {
        match self {
            Self::Run(arguments) => Ok(run::execute(arguments)?),
            Self::Serve(arguments) => Ok(serve::execute(&arguments)?),
            Self::Probe(arguments) => Ok(probe::execute(&arguments)?),
            Self::Mgmtdev(arguments) => Ok(mgmtdev::execute(&arguments)?),
            Self::Dev(arguments) => Ok(dev::execute(&arguments)?),
            Self::Port(arguments) => Ok(port::execute(&arguments)?),
            Self::Vf(arguments) => Ok(vf::execute(&arguments)?),
            Self::Bind(arguments) => Ok(bind::execute(&arguments)?),
            Self::Nic(arguments) => Ok(nic::execute(&arguments)?),
            Self::Topology(arguments) => Ok(topology::execute(&arguments)?),
            Self::Doctor(arguments) => Ok(doctor::execute(&arguments)?),
        }
    }
}

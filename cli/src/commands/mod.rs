//! The subcommands, one file each.

mod bind;
mod completions;
pub(crate) mod dev;
mod doctor;
mod machine_arguments;
mod man;
pub(crate) mod mgmtdev;
mod migration_tls;
pub(crate) mod nic;
pub(crate) mod port;
mod probe;
mod report;
mod run;
mod serve;
mod state_versions;
mod topology;
pub(crate) mod vf;
mod vm;
mod words;

pub(crate) use run::{is_handed_over, refuse_hand_over};

use std::error::Error;

use crate::exit::Code;

/// A subcommand and its arguments.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    Run(run::Arguments),
    Vm(vm::Arguments),
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
    Report(report::Arguments),
    Completions(completions::Arguments),
    Man(man::Arguments),
    #[command(hide = true)]
    StateVersions(state_versions::Arguments),
}

/// The only one of them that goes on with another program's machine.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum GoesOn {
    Run(run::Arguments),
}

impl From<GoesOn> for Command {
    fn from(GoesOn::Run(arguments): GoesOn) -> Self {
        Self::Run(arguments)
    }
}

impl Command {
    /// Does what was asked.
    pub(crate) fn execute(self) -> Result<Code, Box<dyn Error>> {
        match self {
            Self::Run(arguments) => Ok(run::execute(arguments)?),
            Self::Vm(arguments) => Ok(vm::execute(&arguments)?),
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
            Self::Report(arguments) => Ok(report::execute(&arguments)?),
            Self::Completions(arguments) => Ok(completions::execute(&arguments)?),
            Self::Man(arguments) => Ok(man::execute(&arguments)?),
            Self::StateVersions(_) => Ok(state_versions::execute()?),
        }
    }
}

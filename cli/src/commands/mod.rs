//! The subcommands, one file each.

mod bind;
mod completions;
mod config;
pub(crate) mod dev;
mod doctor;
mod events;
mod machine_arguments;
mod man;
pub(crate) mod mgmtdev;
mod migration_tls;
pub(crate) mod nic;
mod node;
mod operation;
mod parse;
mod pki;
pub(crate) mod port;
mod probe;
mod remote;
mod report;
mod run;
mod serve;
mod snapshot;
mod state_versions;
mod swnic;
mod token;
mod top;
mod topology;
mod version;
pub(crate) mod vf;
mod vm;

pub(crate) use run::{is_handed_over, refuse_hand_over};
pub(crate) use serve::with_file;

use std::path::Path;

use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::Format;
use bellhop_common::log_rate::Rate;

use crate::logging::{DAEMON_RATE, VM_RATE};

/// A subcommand and its arguments.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    Run(run::Arguments),
    Vm(vm::Arguments),
    Events(events::Arguments),
    Operation(operation::Arguments),
    Top(top::Arguments),
    Snapshot(snapshot::Arguments),
    Serve(serve::Arguments),
    Probe(probe::Arguments),
    Mgmtdev(mgmtdev::Arguments),
    Dev(dev::Arguments),
    Port(port::Arguments),
    Vf(vf::Arguments),
    Bind(bind::Arguments),
    Swnic(swnic::Arguments),
    Nic(nic::Arguments),
    Node(node::Arguments),
    Remote(remote::Arguments),
    Token(token::Arguments),
    Pki(pki::Arguments),
    Topology(topology::Arguments),
    Doctor(doctor::Arguments),
    Report(report::Arguments),
    Config(config::Arguments),
    Completions(completions::Arguments),
    Man(man::Arguments),
    Version(version::Arguments),
    #[command(hide = true)]
    StateVersions(state_versions::Arguments),
}

/// The subcommand that can continue the VM of another program.
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
    /// The limit for log lines of each call site. The others log only what their user requests.
    pub(crate) fn log_rate(&self) -> Option<Rate> {
        match self {
            Self::Run(_) | Self::Swnic(_) => Some(VM_RATE),
            Self::Serve(_) => Some(DAEMON_RATE),
            _ => None,
        }
    }

    /// Confines this process, if it is to run a VM in a sandbox: before it opens its log.
    pub(crate) fn confine(&self, log: Option<&Path>) -> Result<(), Error> {
        match self {
            Self::Run(arguments) => arguments.confine(log),
            _ => Ok(()),
        }
    }

    /// Runs the subcommand, and prints its result in this format. `all` describes all subcommands.
    pub(crate) fn execute(self, format: Format, all: fn() -> clap::Command) -> Result<Code, Error> {
        match self {
            Self::Run(arguments) => run::execute(arguments),
            Self::Vm(arguments) => vm::execute(&arguments, format),
            Self::Events(arguments) => events::execute(&arguments, format),
            Self::Operation(arguments) => operation::execute(&arguments, format),
            Self::Top(arguments) => top::execute(&arguments),
            Self::Snapshot(arguments) => snapshot::execute(&arguments, format),
            Self::Serve(arguments) => serve::execute(&arguments),
            Self::Probe(arguments) => probe::execute(&arguments, format),
            Self::Mgmtdev(arguments) => mgmtdev::execute(&arguments, format),
            Self::Dev(arguments) => {
                dev::execute(&arguments, format).map_err(Error::blame_arguments)
            }
            Self::Port(arguments) => {
                port::execute(&arguments, format).map_err(Error::blame_arguments)
            }
            Self::Vf(arguments) => vf::execute(&arguments, format).map_err(Error::blame_arguments),
            Self::Bind(arguments) => bind::execute(&arguments, format),
            Self::Swnic(arguments) => swnic::execute(&arguments, format),
            Self::Nic(arguments) => nic::execute(&arguments, format),
            Self::Node(arguments) => node::execute(&arguments, format),
            Self::Remote(arguments) => remote::execute(&arguments, format),
            Self::Token(arguments) => token::execute(&arguments, format),
            Self::Pki(arguments) => pki::execute(&arguments, format),
            Self::Topology(arguments) => {
                topology::execute(&arguments, format).map_err(Error::blame_arguments)
            }
            Self::Doctor(arguments) => doctor::execute(&arguments, format),
            Self::Report(arguments) => report::execute(&arguments, format),
            Self::Config(arguments) => config::execute(&arguments, format),
            Self::Completions(arguments) => completions::execute(&arguments),
            Self::Man(arguments) => man::execute(&arguments, all()),
            Self::Version(arguments) => version::execute(&arguments, format),
            Self::StateVersions(_) => state_versions::execute(),
        }
    }
}

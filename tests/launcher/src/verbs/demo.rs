//! `cargo lab demo [--rig RIG] [--json]`: the main job, end to end.
//!
//! This module owns the command line and the boot. The program in the lab host (`lab-demo`) reads
//! the command line again.

use crate::agent::client::{self, Streams};
use crate::error::{Error, Result};
use crate::here::{self, HereArguments};
use crate::host::LabHost;
use crate::rig::Rig;
use crate::setup::{Lab, Needs};
use crate::verbs;

/// Arguments of `cargo lab demo`.
#[derive(Debug, clap::Args)]
pub struct DemoArguments {
    /// The result as one JSON object on the last line
    #[arg(long)]
    pub json: bool,
    /// The lab host's equipment: sim (one guest on the kernel's simulator), sriov (two guests on
    /// virtual functions of one NIC) or vduse (two guests without hardware)
    #[arg(long, value_enum, default_value_t)]
    pub rig: Rig,
    /// With --rig sriov: one guest has one function as a vDPA device and another by VFIO
    #[arg(long)]
    pub vfio: bool,
    #[command(flatten)]
    here: HereArguments,
}

/// Runs the demo and returns its exit code.
///
/// # Errors
/// [`Error::Usage`] for a rig that does not fit; those of [`Lab::prepare`] and [`LabHost::boot`].
pub fn demo(arguments: &DemoArguments) -> Result<u8> {
    if arguments.rig == Rig::Labnic {
        return Err(Error::Usage(
            "the demo has no part for the rig labnic: use sim, sriov or vduse".into(),
        ));
    }
    if arguments.vfio && arguments.rig != Rig::Sriov {
        return Err(Error::Usage(
            "--vfio needs virtual functions: add --rig sriov".into(),
        ));
    }
    let lab = Lab::prepare(&Needs::HOST)?;
    let execute = verbs::own_command(&lab, "lab-demo")?;
    if arguments.here.is_wanted() {
        return here::run(&execute, None);
    }
    let mut host = LabHost::boot(&lab, arguments.rig)?;
    eprintln!(
        "{:>12}  Linux {} with {} processors, {}",
        "lab host",
        host.hello().kernel,
        host.hello().processors,
        host.accelerator()
    );
    let outcome = client::run(&mut host, execute, None, Streams::Own)?;
    host.power_off()?;
    Ok(outcome.exit_code())
}

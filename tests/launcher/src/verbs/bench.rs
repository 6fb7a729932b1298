//! `cargo lab bench WHAT [--json]`: measurements in the lab host.
//!
//! This module owns the command line and the boot. The program in the lab host (`lab-bench`) reads
//! the command line again. A new measurement is a variant here and a module of `lab::bench`.

use crate::agent::client::{self, Streams};
use crate::error::Result;
use crate::here::{self, HereArguments};
use crate::host::LabHost;
use crate::rig::Rig;
use crate::schedstat;
use crate::setup::{Lab, Needs, Profile};
use crate::verbs;
use clap::{Args, Subcommand, value_parser};

/// If a lab host waits for this machine's processors for a larger percentage of its time, its
/// figures are called rough.
const DISTURBED: u128 = 15;

/// Arguments of `cargo lab bench`.
#[derive(Debug, Args)]
pub struct BenchArguments {
    /// What to measure.
    #[command(subcommand)]
    pub bench: Bench,
}

/// What can be measured.
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// VM exits per frame sent, with mapped doorbells and with ioeventfds
    Doorbell(DoorbellArguments),
    /// Memory outside guest RAM and processor time until the API answers, beside QEMU's
    Footprint(FootprintArguments),
    /// Frames per second and VM exits of a guest whose NIC is behind an IOMMU, beside QEMU's
    Iommu(IommuArguments),
    /// Time to create, show and delete vDPA devices, beside iproute2's vdpa
    Mgmt(MgmtArguments),
    /// Traffic pauses when a guest migrates or its device or VMM changes, beside QEMU's migration
    Migration(MigrationArguments),
    /// Frames per second and processor time of relayed rings, beside QEMU's shadow virtqueues
    Rings(RingsArguments),
    /// Frames per second and processor time of a NIC without hardware, beside QEMU's on a tap
    Swnic(SwnicArguments),
    /// Frames per second of a virtual function by VFIO, beside QEMU's, and by vDPA
    Vfio(VfioArguments),
}

/// What every measurement takes.
#[derive(Debug, Args)]
pub struct Common {
    /// The result as one JSON object on the last line
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    here: HereArguments,
}

/// Arguments of `cargo lab bench doorbell`.
#[derive(Debug, Args)]
pub struct DoorbellArguments {
    /// What every measurement takes.
    #[command(flatten)]
    pub common: Common,
    /// Frames to send, each with a pause of 2 ms behind it
    #[arg(long, default_value_t = 1000, value_parser = value_parser!(u32).range(1..=1_000_000))]
    pub frames: u32,
    /// The lab host's equipment; the simulator has no doorbells
    #[arg(long, value_enum, default_value_t = Rig::Sriov)]
    pub rig: Rig,
}

/// Arguments of `cargo lab bench footprint`.
#[derive(Debug, Args)]
pub struct FootprintArguments {
    /// What every measurement takes.
    #[command(flatten)]
    pub common: Common,
    /// Rounds, of which the medians are taken; memory is read in every third
    #[arg(long, default_value_t = 9, value_parser = value_parser!(u32).range(1..=100))]
    pub rounds: u32,
}

/// Arguments of `cargo lab bench iommu`.
#[derive(Debug, Args)]
pub struct IommuArguments {
    /// What every measurement takes.
    #[command(flatten)]
    pub common: Common,
    /// Rounds of each comparison, of which the medians are taken
    #[arg(long, default_value_t = 9, value_parser = value_parser!(u32).range(1..=100))]
    pub rounds: u32,
}

/// Arguments of `cargo lab bench mgmt`.
#[derive(Debug, Args)]
pub struct MgmtArguments {
    /// What every measurement takes.
    #[command(flatten)]
    pub common: Common,
    /// Devices to create
    #[arg(long, default_value_t = 500, value_parser = value_parser!(u32).range(1..=10_000))]
    pub devices: u32,
}

/// Arguments of `cargo lab bench migration`.
#[derive(Debug, Args)]
pub struct MigrationArguments {
    /// What every measurement takes.
    #[command(flatten)]
    pub common: Common,
    /// Migrations of each VMM, of which the medians are taken
    #[arg(long, default_value_t = 6, value_parser = value_parser!(u32).range(1..=100))]
    pub rounds: u32,
}

/// Arguments of `cargo lab bench rings`.
#[derive(Debug, Args)]
#[command(
    after_help = "The cost of one pass of a relay, natively: `cargo bench -p vdpa --bench relay`."
)]
pub struct RingsArguments {
    /// What every measurement takes.
    #[command(flatten)]
    pub common: Common,
    /// Rounds, of which the medians are taken
    #[arg(long, default_value_t = 15, value_parser = value_parser!(u32).range(1..=100))]
    pub rounds: u32,
}

/// Arguments of `cargo lab bench swnic`.
#[derive(Debug, Args)]
pub struct SwnicArguments {
    /// What every measurement takes.
    #[command(flatten)]
    pub common: Common,
    /// Rounds for each load, of which the medians are taken
    #[arg(long, default_value_t = 9, value_parser = value_parser!(u32).range(1..=100))]
    pub rounds: u32,
}

/// Arguments of `cargo lab bench vfio`.
#[derive(Debug, Args)]
pub struct VfioArguments {
    /// What every measurement takes.
    #[command(flatten)]
    pub common: Common,
    /// Rounds, of which the medians are taken
    #[arg(long, default_value_t = 9, value_parser = value_parser!(u32).range(1..=100))]
    pub rounds: u32,
}

impl Bench {
    fn common(&self) -> &Common {
        match self {
            Self::Doorbell(arguments) => &arguments.common,
            Self::Footprint(arguments) => &arguments.common,
            Self::Iommu(arguments) => &arguments.common,
            Self::Mgmt(arguments) => &arguments.common,
            Self::Migration(arguments) => &arguments.common,
            Self::Rings(arguments) => &arguments.common,
            Self::Swnic(arguments) => &arguments.common,
            Self::Vfio(arguments) => &arguments.common,
        }
    }

    /// The lab host's equipment.
    fn rig(&self) -> Rig {
        match self {
            Self::Doorbell(arguments) => arguments.rig,
            // `rings` loads the lab NIC's module only while it needs it.
            Self::Footprint(_)
            | Self::Mgmt(_)
            | Self::Migration(_)
            | Self::Rings(_)
            | Self::Swnic(_) => Rig::Sim,
            // QEMU takes no frames from the simulator behind its virtio-iommu.
            Self::Iommu(_) | Self::Vfio(_) => Rig::Sriov,
        }
    }
}

/// Runs the measurement and returns its exit code: 1 if it failed.
///
/// # Errors
/// Those of [`Lab::prepare`] and [`LabHost::boot`].
pub fn bench(arguments: &BenchArguments) -> Result<u8> {
    let bench = &arguments.bench;
    let lab = Lab::prepare(&Needs {
        profile: Profile::Release,
        ..Needs::HOST_AND_GUEST
    })?;
    let execute = verbs::own_command(&lab, "lab-bench")?;
    if bench.common().here.is_wanted() {
        return here::run(&execute, None);
    }
    let mut host = LabHost::boot(&lab, bench.rig())?;
    let outcome = client::run(&mut host, execute, None, Streams::Own)?;
    let waited = schedstat::waited_percent(host.pid())?;
    if waited > DISTURBED {
        eprintln!(
            "lab: this machine had other work: the lab host waited for a processor in {waited} % \
             of the time in which it had something to do, and took that for its own; above \
             {DISTURBED} % figures are only rough, and times are too long"
        );
    }
    host.power_off()?;
    Ok(outcome.exit_code())
}

//! `bellhop run`: one virtual machine in the foreground.

use std::io;
use std::path::PathBuf;

use vmm::config::{CpuCount, DEFAULT_CMDLINE, DiskConfig, MemoryConfig, VdpaConfig, VmConfig};
use vmm::console::Console;
use vmm::machine::{Exit, Machine, MachineError, StopHandle};

use crate::config_file::{self, ConfigFileError};
use crate::exit::Code;
use crate::signals::{self, StopSignals};
use crate::terminal::Terminal;

/// Run a virtual machine in the foreground, its serial console on this terminal
///
/// Ctrl-A X leaves the console and stops the machine; Ctrl-A Ctrl-A sends one Ctrl-A.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  A guest whose NIC is a vDPA device:
    bellhop dev add name nic0 mgmtdev vdpasim_net mac 52:54:00:12:34:56
    bellhop run --kernel vmlinuz --initramfs initrd.img --vdpa path=/dev/vhost-vdpa-0

  The same from a file (keys are the options' names; --vdpa and --disk are [[vdpa]] and [[disks]]):
    bellhop run --config machine.toml

SIGUSR1 logs what KVM has counted so far, exits of the guest among it (with --log-level info).")]
pub(crate) struct Arguments {
    /// Kernel: an ELF with a PVH note (vmlinux) or a bzImage (vmlinuz)
    #[arg(long, value_name = "PATH", required_unless_present = "config")]
    kernel: Option<PathBuf>,

    /// Initial RAM file system
    #[arg(long, value_name = "PATH")]
    initramfs: Option<PathBuf>,

    /// Kernel command line
    #[arg(long, value_name = "STRING", default_value = DEFAULT_CMDLINE)]
    cmdline: String,

    /// Number of vCPUs, 1 to 32
    #[arg(long, value_name = "N", default_value = "1")]
    cpus: CpuCount,

    /// Guest memory: 512M, 4G, or size=4G,hugepages=2M|1G
    #[arg(long, value_name = "SIZE", default_value = "512M")]
    memory: MemoryConfig,

    // `help` and not a doc comment: rustdoc takes brackets for links.
    #[arg(
        long,
        value_name = "OPTIONS",
        help = "A vDPA device: path=/dev/vhost-vdpa-0[,id=NAME][,mac=MAC][,num_queues=N][,doorbell=auto|on|off] (may be repeated)"
    )]
    vdpa: Vec<VdpaConfig>,

    #[arg(
        long = "disk",
        value_name = "OPTIONS",
        help = "A disk, raw: path=FILE[,id=NAME][,readonly=on] (may be repeated)"
    )]
    disks: Vec<DiskConfig>,

    /// Take everything from this TOML or JSON file instead
    #[arg(long, value_name = "FILE", conflicts_with_all = ["kernel", "initramfs", "cmdline", "cpus", "memory", "vdpa", "disks"])]
    config: Option<PathBuf>,
}

/// Why a machine could not be run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    #[error(transparent)]
    Config(#[from] ConfigFileError),
    #[error("no kernel is given; say --kernel PATH")]
    NoKernel,
    #[error("cannot take signals")]
    Signals(#[source] io::Error),
    #[error("cannot take the terminal")]
    Terminal(#[source] io::Error),
    #[error(transparent)]
    Machine(#[from] MachineError),
}

impl Arguments {
    fn into_config(self) -> Result<VmConfig, RunError> {
        if let Some(path) = self.config {
            return Ok(config_file::read(&path)?);
        }
        Ok(VmConfig {
            kernel: self.kernel.ok_or(RunError::NoKernel)?,
            initramfs: self.initramfs,
            cmdline: self.cmdline,
            cpus: self.cpus,
            memory: self.memory,
            vdpa: self.vdpa,
            disks: self.disks,
        })
    }
}

/// Runs the machine until it ends.
pub(crate) fn execute(arguments: Arguments) -> Result<Code, RunError> {
    let config = arguments.into_config()?;
    let stop = StopHandle::new().map_err(RunError::Signals)?;
    let signals = StopSignals::install(&stop).map_err(RunError::Signals)?;
    let input = Terminal::attach().map_err(RunError::Terminal)?;
    if input.as_ref().is_some_and(Terminal::is_interactive) {
        eprintln!("Ctrl-A X stops the machine.");
    }
    let console = Console {
        input: input.map(|terminal| Box::new(terminal) as _),
        output: rustix::stdio::stdout()
            .try_clone_to_owned()
            .map_err(RunError::Terminal)?,
    };
    let mut machine = Machine::new(&config, console, &stop)?;
    signals::log_statistics_on_sigusr1(machine.statistics_handle()).map_err(RunError::Signals)?;
    let exit = machine.run()?;
    drop(machine);
    Ok(match exit {
        Exit::PoweredOff => Code::Success,
        Exit::Stopped => signals.received().map_or(Code::Success, Code::Signal),
        Exit::Crashed(reason) => {
            eprintln!("error: the guest crashed: {reason}");
            Code::GuestCrashed
        }
    })
}

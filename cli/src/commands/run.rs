//! `bellhop run`: one virtual machine in the foreground.

use std::io;
use std::path::PathBuf;

use vmm::api::{Server, ServerError, StartRequest, Starts};
use vmm::config::{
    CpuCount, DEFAULT_CMDLINE, DiskConfig, MemoryConfig, RingWatch, VdpaConfig, VmConfig,
};
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

  With its API; one that says nothing but the socket is configured and started from there:
    bellhop run --config machine.toml --api-socket vm.socket
    curl --unix-socket vm.socket http://vm/v1/vm

SIGUSR1 logs what KVM has counted so far, exits of the guest among it (with --log-level info).")]
pub(crate) struct Arguments {
    /// Kernel: an ELF with a PVH note (vmlinux) or a bzImage (vmlinuz)
    #[arg(long, value_name = "PATH", required_unless_present_any = ["config", "api_socket"])]
    kernel: Option<PathBuf>,

    /// Initial RAM file system
    #[arg(long, value_name = "PATH", requires = "kernel")]
    initramfs: Option<PathBuf>,

    /// Kernel command line
    #[arg(long, value_name = "STRING", default_value = DEFAULT_CMDLINE, requires = "kernel")]
    cmdline: String,

    /// Number of vCPUs, 1 to 32
    #[arg(long, value_name = "N", default_value = "1", requires = "kernel")]
    cpus: CpuCount,

    /// Guest memory: 512M, 4G, or size=4G,hugepages=2M|1G
    #[arg(long, value_name = "SIZE", default_value = "512M", requires = "kernel")]
    memory: MemoryConfig,

    // `help` and not a doc comment: rustdoc takes brackets for links.
    #[arg(
        long,
        value_name = "OPTIONS",
        requires = "kernel",
        help = "A vDPA device: path=/dev/vhost-vdpa-0[,id=NAME][,mac=MAC][,num_queues=N][,doorbell=auto|on|off][,rescue=on] (may be repeated)"
    )]
    vdpa: Vec<VdpaConfig>,

    #[arg(
        long = "disk",
        value_name = "OPTIONS",
        requires = "kernel",
        help = "A disk, raw: path=FILE[,id=NAME][,readonly=on][,rescue=on] (may be repeated)"
    )]
    disks: Vec<DiskConfig>,

    /// After how many seconds a queue that hangs is logged and shown by the API (and, with
    /// rescue=on, kicked and its driver interrupted once); off: never look
    #[arg(long, value_name = "SECONDS|off", default_value_t, requires = "kernel")]
    ring_watch: RingWatch,

    /// Take everything from this TOML or JSON file instead
    #[arg(long, value_name = "FILE", conflicts_with_all = ["kernel", "initramfs", "cmdline", "cpus", "memory", "vdpa", "disks", "ring_watch"])]
    config: Option<PathBuf>,

    /// Serve the machine's API on this Unix socket; without --kernel or --config the machine waits for
    /// its configuration and start from there
    #[arg(long, value_name = "PATH")]
    api_socket: Option<PathBuf>,
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
    #[error("cannot wait for a start by the API")]
    Wait(#[source] io::Error),
    #[error(transparent)]
    Api(#[from] ServerError),
    #[error(transparent)]
    Machine(#[from] MachineError),
}

impl Arguments {
    /// `None`: the API is to say it.
    fn into_config(self) -> Result<Option<VmConfig>, RunError> {
        if let Some(path) = self.config {
            return Ok(Some(config_file::read(&path)?));
        }
        let Some(kernel) = self.kernel else {
            return Ok(None);
        };
        Ok(Some(VmConfig {
            kernel,
            initramfs: self.initramfs,
            cmdline: self.cmdline,
            cpus: self.cpus,
            memory: self.memory,
            vdpa: self.vdpa,
            disks: self.disks,
            ring_watch: self.ring_watch,
        }))
    }
}

/// Runs the machine until it ends.
pub(crate) fn execute(mut arguments: Arguments) -> Result<Code, RunError> {
    let socket = arguments.api_socket.take();
    let config = arguments.into_config()?;
    let stop = StopHandle::new().map_err(RunError::Signals)?;
    let signals = StopSignals::install(&stop).map_err(RunError::Signals)?;
    let exit = match (socket, config) {
        (None, None) => return Err(RunError::NoKernel),
        (None, Some(config)) => run(power_on(&config, &stop)?)?,
        (Some(socket), config) => {
            let given = config.is_some();
            let (server, starts) = Server::start(&socket, config, &stop)?;
            let exit = match wait_for_start(&starts, given, &stop)? {
                Some(machine) => run(machine)?,
                None => Exit::Stopped,
            };
            // After the machine: who watches is told that it ended.
            drop(server);
            exit
        }
    };
    Ok(match exit {
        Exit::PoweredOff => Code::Success,
        Exit::Stopped => signals.received().map_or(Code::Success, Code::Signal),
        Exit::Crashed(reason) => {
            eprintln!("error: the guest crashed: {reason}");
            Code::GuestCrashed
        }
    })
}

/// The machine that the API asks for, powered on; `None` if it is to stop before. A
/// configuration that was `given` on the command line must work, one of a client's may be
/// followed by another.
fn wait_for_start(
    starts: &Starts,
    given: bool,
    stop: &StopHandle,
) -> Result<Option<Machine>, RunError> {
    while let Some(request) = starts.wait(stop).map_err(RunError::Wait)? {
        match power_on(request.config(), stop) {
            Ok(machine) => {
                request.started(&machine.handle());
                return Ok(Some(machine));
            }
            Err(RunError::Machine(error)) if !given => answer_failure(request, error),
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

fn answer_failure(request: StartRequest, error: MachineError) {
    tracing::warn!(
        error = &error as &dyn std::error::Error,
        "the machine cannot be started; the API may give it another configuration"
    );
    request.failed(error);
}

/// Builds the machine with its console on this terminal, and boots it.
fn power_on(config: &VmConfig, stop: &StopHandle) -> Result<Machine, RunError> {
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
    let mut machine = Machine::new(config, console, stop)?;
    machine.power_on()?;
    Ok(machine)
}

fn run(mut machine: Machine) -> Result<Exit, RunError> {
    signals::log_statistics_on_sigusr1(machine.statistics_handle()).map_err(RunError::Signals)?;
    Ok(machine.run()?)
}

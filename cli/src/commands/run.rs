//! `bellhop run`: one VM in the foreground.

mod hand_over;
pub(super) mod inherited;
mod nics;
mod sandbox;

use std::path::{Path, PathBuf};

use bellhop_common::error::{Error, ErrorKind};
use bellhop_common::exit::{Code, Report};
use vdpa::causes::in_one_line;
use vmm::api::{Server, Starts};
use vmm::config::{
    DeviceSource, HugePageSize, IommuConfig, MemorySize, RingWatch, VdpaConfig, VfioConfig,
    VmConfig, from_key_value,
};
use vmm::console::{Console, ConsoleSocket, TerminalConsole};
use vmm::machine::{Arriving, Exit, Machine, Origin, ReceiveConfig, Snapshot, StopHandle};
use vmm::migration::endpoint::Endpoint;
use vmm::sandbox::{landlock, rings, seccomp};

use hand_over::Taken;
use nics::NewNic;
use sandbox::SandboxArguments;

use crate::commands::machine_arguments::{MachineArguments, json_of};
use crate::commands::migration_tls::TlsArguments;
use crate::config_file;
use crate::signals::{self, StopSignals};
use crate::terminal::{EscapeKey, Terminal};

/// Run a VM in the foreground, its console on this terminal
///
/// Ctrl-A X leaves the console and stops the VM; Ctrl-A Ctrl-A sends one Ctrl-A.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "bellhop run --kernel PATH [OPTIONS]
       bellhop run --file FILE [OPTIONS]
       bellhop run --restore DIRECTORY [OPTIONS]
       bellhop run --receive ENDPOINT --api-socket PATH [OPTIONS]
       bellhop run --api-socket PATH [OPTIONS]",
    group = clap::ArgGroup::new("machine").multiple(true).args(["kernel", "file"]),
    mut_arg("kernel", |kernel| {
        kernel.required_unless_present_any(["file", "api_socket", "restore", "receive"])
    }),
    mut_arg("cpu_affinity", |affinity| affinity.requires("machine")),
)]
#[command(after_long_help = "\
Examples:
  A guest on a bridge, with the best NIC that this host has:
    bellhop run --kernel vmlinuz --initramfs initrd.img --nic bridge=br0

  A guest whose NIC is a vDPA device:
    bellhop dev add name nic0 mgmtdev vdpasim_net mac 52:54:00:12:34:56
    bellhop run --kernel vmlinuz --initramfs initrd.img --vdpa path=/dev/vhost-vdpa-0

  The same from a file, which `bellhop vm create` also reads; options override it:
    bellhop run --file machine.toml --memory 2G

  On one NUMA node, its vCPUs pinned (vCPU 0 on CPUs 8 and 9, vCPU 1 on CPU 10):
    bellhop run --kernel vmlinuz --initramfs initrd.img --cpus 2 --cpu-affinity 8-9:10 \\
        --memory size=4G,hugepages=2M,host_numa_node=1 --vdpa path=/dev/vhost-vdpa-0

  With its API; without a kernel or file, the API configures and starts the VM:
    bellhop run --file machine.toml --api-socket vm.socket
    curl --unix-socket vm.socket http://vm/v1/vm

  From a snapshot, on another vDPA device than before; it may use the files in /srv/web:
    bellhop run --restore vm.snapshot --vdpa id=nic0,path=/dev/vhost-vdpa-3 \\
        --allow-path /srv/web

  A running VM from another host, which sends it to port 7444 of this one. Its next reboot uses the
  kernel on this host (over unix:PATH the kernel of the source, if none is given):
    bellhop run --receive tcp:10.0.0.2:7444 --vdpa id=nic0,path=/dev/vhost-vdpa-0 \\
        --api-socket vm.socket --kernel vmlinuz --initramfs initrd.img \\
        --tls-cert host.pem --tls-key host.key --tls-ca ca.pem

  Without a terminal; a client connects to the console:
    bellhop run --file machine.toml --console-socket console.socket --console-log console.log
    socat -,raw,echo=0,escape=0x1d UNIX-CONNECT:console.socket

Keys in a file are the options' names with _ for -; --vdpa and --disk are [[nics]] and [[disks]].
NICs have id, and path or device; `bellhop vm create` also creates devices (from). Only the daemon
uses name, state, restart, [labels] and [annotations]; here they have no effect.

SIGUSR1 logs KVM's counters, such as VM exits (with --log-level info).")]
pub(crate) struct Arguments {
    #[command(flatten)]
    machine: MachineArguments,

    // `help` instead of a doc comment: rustdoc reads brackets as links.
    #[arg(
        long,
        value_name = "OPTIONS",
        requires = "machine",
        help = "A vDPA device: /dev/vhost-vdpa-0 or path=/dev/vhost-vdpa-0[,id=NAME], or an \
                inherited descriptor of one: fd=N,id=NAME; both with \
                [,mac=MAC][,mac_lock=on][,standby=on][,num_queues=N]\
                [,doorbell=auto|on|off][,iommu=on][,stall_kick=on]\
                [,backup=/dev/vhost-vdpa-1] (may be repeated)"
    )]
    vdpa: Vec<VdpaConfig>,

    #[arg(
        long,
        value_name = "OPTIONS",
        requires = "machine",
        value_parser = NewNic::parse,
        conflicts_with_all = ["restore", "receive"],
        help = "A NIC on a bridge of this host, created for the VM and deleted when it ends: \
                bridge=NAME[,vlan=N][,mac=MAC][,mtu=BYTES][,queue_pairs=N][,id=NAME][,from=NIC]\
                [,poll=PERCENT][,device_features=MASK]. \
                Without from, a function of a NIC that is a port of the bridge; \
                if there is none, or with poll, a NIC without hardware (from=software). Or a NIC \
                without hardware at a queue of a port (AF_XDP): port=INTERFACE,queue=N instead of \
                bridge and vlan. Needs root (may be repeated)"
    )]
    nic: Vec<NewNic>,

    #[arg(
        long,
        value_name = "OPTIONS",
        requires = "machine",
        help = "A PCI function of the host, bound to vfio-pci: host=0000:03:10.1, path=DIRECTORY \
                in sysfs, or fd=N, an inherited descriptor of its /dev/vfio/devices/vfioN; with \
                [,id=NAME][,allow_pf=on] (a function that is not virtual) \
                [,standby=NIC] (the id of a vDPA NIC with standby=on, which the guest uses during \
                a migration) [,iommu=on][,iommufd=off] (a container of VFIO). With --receive: \
                for a function that moves, or plugged when the VM has arrived. With --restore: for \
                the function of that id in the snapshot (may be repeated)"
    )]
    vfio: Vec<VfioConfig>,

    #[arg(
        long,
        value_name = "OPTIONS",
        value_parser = vfio_device,
        requires = "described",
        help = "The same as --vfio, as Cloud Hypervisor has it: path=DIRECTORY in sysfs \
                [,id=NAME][,iommu=on] (may be repeated)"
    )]
    device: Vec<VfioConfig>,

    #[arg(
        long,
        value_name = "SECONDS|off",
        requires = "described",
        help = "Seconds until the log and the API report a queue without progress; with \
                stall_kick=on, the VMM then kicks it and interrupts its driver once. off: never \
                check [default: 5]"
    )]
    ring_watch: Option<RingWatch>,

    #[arg(
        long,
        value_name = "OPTIONS",
        requires = "described",
        help = "A virtio-iommu, also for devices that are plugged in later: boot_bypass=on|off \
                (whether devices reach all memory until the guest's driver takes over) \
                [,mappings=N] (the most of a domain)[,rng=on] (also in front of the random \
                number generator) [default: boot_bypass=on if a --vdpa, --vfio or --disk has \
                iommu=on]"
    )]
    iommu: Option<IommuConfig>,

    /// Resume from this snapshot, a directory of `POST /v1/vm/snapshot`; --vdpa with a NIC's id
    /// names its device here; the NIC keeps its iommu=on. --vfio names each function here
    #[arg(
        long,
        value_name = "DIRECTORY",
        group = "machine",
        conflicts_with_all = [
            "kernel", "initramfs", "cmdline", "cpus", "cpu", "cpu_affinity", "memory", "disks",
            "ring_watch", "iommu", "device", "file", "settings",
        ]
    )]
    restore: Option<PathBuf>,

    /// With --restore: a file that the snapshot may name, or a directory above such files (may be
    /// repeated). Without it the VM opens no kernel, initramfs, disk or device that only the
    /// snapshot names
    // clap does not require an option that conflicts with another one on the command line.
    #[arg(
        long = "allow-path",
        value_name = "PATH",
        requires = "restore",
        conflicts_with_all = ["kernel", "file", "receive"]
    )]
    allow_paths: Vec<PathBuf>,

    /// Wait at unix:/PATH or tcp:HOST:PORT for a running VM from another process
    /// (`POST /v1/vm/migration`)
    ///
    /// --vdpa with a NIC's id names its device here, with iommu=on if the source's NIC has it.
    /// --kernel and --initramfs name the files for its next reboot. They are required over TCP,
    /// because Bellhop opens no path that another host names. The option needs --api-socket: there
    /// `GET /v1/vm/migration` reports the progress. The VM runs as soon as it has arrived.
    #[arg(
        long,
        value_name = "ENDPOINT",
        group = "machine",
        requires = "api_socket",
        conflicts_with_all = [
            "cmdline", "cpus", "cpu", "memory", "disks", "ring_watch", "iommu", "device", "file",
            "settings", "restore",
        ]
    )]
    receive: Option<Endpoint>,

    /// With --receive: the maximum guest memory, such as 16G [default: the free memory when a
    /// source connects, of --host-numa-node and --hugepages if given]
    #[arg(long, value_name = "SIZE", requires = "receive")]
    max_memory: Option<MemorySize>,

    /// With --receive: the huge pages for guest memory on this host (2M or 1G), independent of the
    /// source's
    #[arg(long, value_name = "SIZE", requires = "receive")]
    hugepages: Option<HugePageSize>,

    /// With --receive: the NUMA node of this host for guest memory
    #[arg(long, value_name = "N", requires = "receive")]
    host_numa_node: Option<u16>,

    #[command(flatten)]
    tls: TlsArguments,

    /// Serve the VM's API on this Unix socket; without --kernel or --file the API configures and
    /// starts the VM
    #[arg(long, value_name = "PATH")]
    api_socket: Option<PathBuf>,

    /// Serve the serial console on this Unix socket (mode 0600) instead of this terminal, for one
    /// client at a time. A client first gets the last 64 KiB of output
    #[arg(long, value_name = "PATH")]
    console_socket: Option<PathBuf>,

    /// With --console-socket: also write the guest's output to this file; at 16 MiB it becomes
    /// FILE.1 and replaces an older FILE.1
    #[arg(long, value_name = "FILE", requires = "console_socket")]
    console_log: Option<PathBuf>,

    #[command(flatten)]
    sandbox: SandboxArguments,
}

const NO_SIGNALS: &str = "cannot catch signals";
const NO_TERMINAL: &str = "cannot use the terminal";

/// The output of the serial console. It outlives a failed attempt to start.
#[derive(Debug)]
enum ConsoleTarget {
    Terminal,
    Socket(ConsoleSocket),
}

impl ConsoleTarget {
    fn console(&self) -> Result<Console, Error> {
        match self {
            Self::Terminal => terminal(),
            Self::Socket(socket) => Ok(Console::Socket(socket.clone())),
        }
    }
}

impl Arguments {
    /// Enters the sandbox, if the options request it. `log` is the file of this process's log.
    pub(crate) fn confine(&self, log: Option<&Path>) -> Result<(), Error> {
        if !self.nic.is_empty() {
            // The process of the VM does.
            return Ok(());
        }
        let files = [&self.api_socket, &self.console_socket, &self.console_log];
        let [api, console, output] = files.map(Option::as_deref);
        self.sandbox.enter(&[api, console, output, log])
    }

    /// `None`: the configuration comes by the API.
    fn into_origin(mut self) -> Result<Option<Origin>, Error> {
        if let Some(directory) = self.restore.take() {
            // Takes the descriptors before any other is opened.
            inherited::take(&mut self.vdpa, &mut self.vfio)?;
            let mut snapshot = Snapshot::open(&directory)?;
            snapshot.adapt(self.vdpa, &self.vfio, &self.allow_paths)?;
            return Ok(Some(Origin::Snapshot(Box::new(snapshot))));
        }
        if let Some(listen) = self.receive.take() {
            inherited::take(&mut self.vdpa, &mut self.vfio)?;
            let arriving = Arriving::new(
                ReceiveConfig {
                    listen,
                    vdpa: self.vdpa,
                    vfio: self.vfio,
                    kernel: self.machine.kernel,
                    initramfs: self.machine.initramfs,
                    max_memory: self.max_memory,
                    hugepages: self.hugepages,
                    host_numa_node: self.host_numa_node,
                    cpu_affinity: self.machine.cpu_affinity.unwrap_or_default(),
                    tls: self.tls.files()?,
                    plaintext: self.tls.plaintext,
                    pairing: self.tls.pairing()?,
                    fd: None,
                },
                None,
            )?;
            return Ok(Some(Origin::Migration(Box::new(arriving))));
        }
        let mut config = self.into_config()?;
        if let Some(config) = &mut config {
            inherited::take(&mut config.vdpa, &mut config.vfio)?;
        }
        Ok(config.map(Origin::Boot))
    }

    fn into_config(self) -> Result<Option<VmConfig>, Error> {
        let Some(mut description) = self.machine.description()? else {
            return Ok(None);
        };
        if let Some(watch) = &self.ring_watch {
            let watch = json_of(watch)?;
            description.fields.insert("ring_watch".to_owned(), watch);
        }
        if let Some(iommu) = &self.iommu {
            let iommu = json_of(iommu)?;
            description.fields.insert("iommu".to_owned(), iommu);
        }
        let mut config = bellhop_node::vm_file::machine(description.fields).map_err(|error| {
            match &self.machine.file {
                Some(file) => config_file::wrong(file).because(error),
                None => Error::transparent(ErrorKind::InvalidInput, error),
            }
        })?;
        for nic in self.vdpa {
            if config.replace_nic(nic.clone()).is_err() {
                config.vdpa.push(nic);
            }
        }
        config.vfio.extend(self.vfio);
        config.vfio.extend(self.device);
        Ok(Some(config))
    }
}

/// The options of `--device`: those of Cloud Hypervisor that have a meaning here.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct DeviceOptions {
    path: PathBuf,
    id: Option<String>,
    #[serde(default)]
    iommu: bool,
    #[serde(default)]
    pci_segment: u16,
}

fn vfio_device(text: &str) -> Result<VfioConfig, String> {
    let options: DeviceOptions = from_key_value(text).map_err(|error| error.to_string())?;
    if options.pci_segment != 0 {
        return Err(format!(
            "pci_segment={} is not supported: the guest has one PCI segment, 0",
            options.pci_segment
        ));
    }
    Ok(VfioConfig {
        source: DeviceSource::Path(options.path),
        id: options.id,
        allow_pf: false,
        iommufd: true,
        iommu: options.iommu,
        standby: None,
    })
}

/// Runs the VM until it ends, or another program takes it over.
pub(crate) fn execute(arguments: Arguments) -> Result<Code, Error> {
    if !arguments.nic.is_empty() {
        return nics::run(&arguments.nic);
    }
    let mut taken = hand_over::take()?;
    let ended = serve(arguments, &mut taken);
    if let (Err(error), Some(taken)) = (&ended, &taken) {
        give_back(taken, error);
    }
    ended
}

/// Hands a VM back to the program that handed it over, because of `error`. Does nothing if there is
/// none.
pub(crate) fn refuse_hand_over(error: &dyn std::error::Error) {
    if let Ok(Some(taken)) = hand_over::take() {
        give_back(&taken, error);
    }
}

/// Whether another program has handed a VM over to this one.
pub(crate) fn is_handed_over() -> bool {
    hand_over::is_there()
}

/// Returns only on a failure.
fn give_back(taken: &Taken, error: &dyn std::error::Error) {
    // A program that got its own VM back cannot hand it back again.
    if taken.failed.is_none() {
        let failed = taken.give_back(&in_one_line(error));
        tracing::error!(error = %failed, "the VM is lost: cannot hand it back");
    }
}

/// Gives up system calls and access to files, before the first thread starts. A program that takes
/// over a VM is confined already.
fn confine(sandbox: &SandboxArguments, is_confined: bool) -> Result<(), Error> {
    let filters = sandbox.filters();
    if filters != seccomp::Mode::Off {
        // Also here if an earlier version has handed the VM over: its filters allow it.
        rings::reserve();
    }
    if filters == seccomp::Mode::On && !is_confined {
        let landlock = landlock::restrict(Path::new("/"), sandbox.tcp())?;
        tracing::debug!(?landlock, "confined");
    }
    seccomp::install(filters, is_confined)?;
    Ok(())
}

/// As [`execute`]; clears `taken` once the VM runs here.
fn serve(mut arguments: Arguments, taken: &mut Option<Taken>) -> Result<Code, Error> {
    let socket = arguments.api_socket.take();
    let console_socket = arguments.console_socket.take();
    let console_log = arguments.console_log.take();
    confine(&arguments.sandbox, taken.is_some())?;
    let origin = match taken {
        Some(taken) => Some(taken.origin()?),
        None => arguments.into_origin()?,
    };
    let console_target = match console_socket {
        Some(path) => ConsoleTarget::Socket(ConsoleSocket::new(&path, console_log.as_deref())?),
        None => ConsoleTarget::Terminal,
    };
    let stop = StopHandle::new().map_err(Error::context(NO_SIGNALS))?;
    let signals = StopSignals::install(&stop).map_err(Error::context(NO_SIGNALS))?;
    let exit = match (socket, origin) {
        (None, None) => return Err(Error::failed("no kernel: give --kernel PATH")),
        (None, Some(origin)) => {
            let machine = Machine::bring_up(&origin, console_target.console()?, &stop)?;
            resumes_here(taken);
            run(machine)?
        }
        (Some(socket), origin) => {
            let given = origin.is_some();
            let (server, starts) = Server::start(&socket, origin, &stop)?;
            let ended = match wait_for_start(&starts, given, &console_target, &stop) {
                Ok(Some(machine)) => {
                    resumes_here(taken);
                    run(machine)
                }
                Ok(None) => Ok(Exit::Stopped),
                Err(error) => Err(error),
            };
            // After the VM, so that watchers learn its end and the reason.
            match &ended {
                Ok(_) => drop(server),
                Err(error) => server.end_with(error),
            }
            ended?
        }
    };
    Ok(match exit {
        Exit::PoweredOff => Code::Success,
        Exit::Moved => Code::Moved,
        Exit::Indeterminate => {
            report(
                "the guest runs at the destination or nowhere: check there before you start it \
                 again",
            );
            Code::Indeterminate
        }
        Exit::Stopped => signals.received().map_or(Code::Success, Code::Signal),
        // The next program would run in this process.
        Exit::HandedOver => Code::Failed,
        Exit::Crashed(reason) => {
            report(&format!("the guest crashed: {reason}"));
            Code::GuestCrashed
        }
    })
}

/// Prints an error. Unlike `eprintln!` it does not panic if standard error is on a full disk: the
/// daemon needs the exit code.
fn report(message: &str) {
    Report::from_messages([message.to_owned()]).print();
}

/// From now on the VM cannot be handed back.
fn resumes_here(taken: &mut Option<Taken>) {
    if let Some(taken) = taken.take() {
        taken.resume();
    }
}

/// Waits for the VM that the API configures and powers on; `None` if it must stop before. A
/// configuration that was `given` on the command line must work. After one of a client, another may
/// follow.
fn wait_for_start(
    starts: &Starts,
    given: bool,
    console_target: &ConsoleTarget,
    stop: &StopHandle,
) -> Result<Option<Machine>, Error> {
    let waiting = "cannot wait for the API to start the VM";
    while let Some(request) = starts.wait(stop).map_err(Error::context(waiting))? {
        match Machine::bring_up(request.origin(), console_target.console()?, stop) {
            Ok(machine) => {
                request.started(machine.config().clone(), &machine.handle());
                return Ok(Some(machine));
            }
            Err(error) if !given => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "cannot start the VM; the API may configure it again"
                );
                request.failed(error);
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(None)
}

fn terminal() -> Result<Console, Error> {
    let input = Terminal::attach(EscapeKey::default()).map_err(Error::context(NO_TERMINAL))?;
    if input.as_ref().is_some_and(Terminal::is_interactive) {
        eprintln!("Ctrl-A X stops the VM.");
    }
    Ok(Console::Terminal(TerminalConsole {
        input: input.map(|terminal| Box::new(terminal) as _),
        output: rustix::stdio::stdout()
            .try_clone_to_owned()
            .map_err(Error::context(NO_TERMINAL))?,
    }))
}

fn run(mut machine: Machine) -> Result<Exit, Error> {
    signals::log_statistics_on_sigusr1(machine.statistics_handle())
        .map_err(Error::context(NO_SIGNALS))?;
    loop {
        let exit = machine.run()?;
        let (Exit::HandedOver, Some(hand_over)) = (&exit, machine.take_hand_over()) else {
            return Ok(exit);
        };
        let program = hand_over.program.clone();
        let error = hand_over::hand_over(hand_over);
        tracing::error!(
            program = %program.display(), %error,
            "cannot execute the other program; this one continues with the VM"
        );
        machine.roll_back(&error.to_string());
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct CommandLine {
        #[command(flatten)]
        run: Arguments,
    }

    fn parse(line: &str) -> Result<Arguments, clap::Error> {
        let words = std::iter::once("run").chain(line.split_whitespace());
        CommandLine::try_parse_from(words).map(|line| line.run)
    }

    #[test]
    fn a_receiving_process_may_set_only_boot_files_and_functions() {
        let here = "--receive unix:/run/move --api-socket api";
        let run = parse(&format!(
            "{here} --kernel k --initramfs i --vdpa id=n,path=/dev/v"
        ))
        .unwrap();
        assert_eq!(run.machine.kernel.as_deref(), Some("k".as_ref()));
        assert_eq!(run.machine.initramfs.as_deref(), Some("i".as_ref()));
        let run = parse(&format!(
            "{here} --vdpa id=n,path=/dev/v --vfio host=0000:03:10.1,standby=n"
        ))
        .unwrap();
        assert_eq!(run.vfio[0].standby.as_deref(), Some("n"));
        for more in [
            "--kernel k --cmdline x",
            "--memory 1G",
            "--disk path=d",
            "--kernel k --device path=/sys/bus/pci/devices/0000:03:10.1",
            "--restore s",
            "--file c",
            "--set cpus=2",
        ] {
            assert!(parse(&format!("{here} {more}")).is_err(), "{more}");
        }
        assert!(parse("--restore s --kernel k").is_err());
        let run = parse("--restore s --vfio host=0000:03:10.1,id=vf").unwrap();
        assert_eq!(run.vfio[0].name(), "vf");
        assert!(parse("--restore s --device path=/sys/a").is_err());
        let run = parse("--restore s --allow-path /a --allow-path b").unwrap();
        assert_eq!(run.allow_paths, ["/a", "b"].map(PathBuf::from));
        assert!(parse("--kernel k --allow-path /a").is_err());
        assert!(parse("--restore s --allow-path=").is_err());
        parse("--kernel k --vdpa path=/dev/v").unwrap();
        let both = "--device path=/sys/a,id=b --vfio host=0000:03:10.1,id=a";
        let run = parse(&format!("--kernel k {both}")).unwrap();
        let config = run.into_config().unwrap().unwrap();
        let names: Vec<String> = config.vfio.iter().map(VfioConfig::name).collect();
        assert_eq!(names, ["a", "b"]);
        assert!(parse("--vdpa path=/dev/v --api-socket s").is_err());
    }

    #[test]
    fn a_device_has_the_options_of_cloud_hypervisor() {
        let path = "path=/sys/bus/pci/devices/0000:03:10.1";
        for (more, same) in [("iommu=off,pci_segment=0", ""), ("iommu=on", ",iommu=on")] {
            let read = vfio_device(&format!("{path},id=a,{more}")).unwrap();
            assert_eq!(read, format!("{path},id=a{same}").parse().unwrap());
        }
        for (more, words) in [
            ("pci_segment=1", "one PCI segment"),
            ("x_nv_gpudirect_clique=0", "x_nv_gpudirect_clique"),
        ] {
            let error = vfio_device(&format!("{path},{more}")).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        assert!(vfio_device("id=a").unwrap_err().contains("path"));
    }

    #[test]
    fn options_and_a_file_of_the_daemon_make_one_machine() {
        let file = std::env::temp_dir().join(format!("bellhop-one-{}.toml", std::process::id()));
        let text = "name = 'web'\nkernel = '/k'\nrestart = 'Always'\n\
                    [[nics]]\nid = 'a'\npath = '/dev/vhost-vdpa-3'\n\
                    [[nics]]\nid = 'b'\npath = '/dev/vhost-vdpa-4'\n";
        std::fs::write(&file, text).unwrap();
        let path = file.to_str().unwrap();
        let config = |more: &str| {
            let run = parse(&format!("--config {path} {more}")).unwrap();
            run.into_config().map(Option::unwrap)
        };
        let more = "--vdpa /dev/vhost-vdpa-5 --vdpa id=a,path=/dev/vhost-vdpa-6 --ring-watch off";
        let made = config(more).unwrap();
        assert_eq!(made.ring_watch, RingWatch::Off);
        let paths: Vec<_> = made.vdpa.iter().map(VdpaConfig::shown_path).collect();
        assert_eq!(
            paths,
            [
                "/dev/vhost-vdpa-6",
                "/dev/vhost-vdpa-4",
                "/dev/vhost-vdpa-5"
            ]
        );
        let error = config("--set cpus=0").unwrap_err();
        assert_eq!(error.code(), Code::InvalidInput);
        assert!(error.to_string().contains(path), "{error}");
        std::fs::write(&file, format!("{text}[[nics]]\nid = 'c'\nfrom = 'eth0'\n")).unwrap();
        let error = in_one_line(&config("").unwrap_err());
        assert!(error.contains("bellhop vm create --file"), "{error}");
        std::fs::remove_file(&file).unwrap();
    }
}

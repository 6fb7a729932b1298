//! The agent process: loads the rig's modules, greets, serves commands.
//!
//! Its standard input is the port, its argument the list of modules.

use crate::root::load;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use lab::agent::protocol::{Hello, Module};
use lab::agent::server;
use lab::error::{Error, Result, report};
use lab::files;
use rustix::process::{Resource, Rlimit, setrlimit};
use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::{Command, ExitCode};

pub(crate) fn main() -> ExitCode {
    match serve() {
        Ok(server::Stopped::PowerOff) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lab-host: {}", report(&error));
            ExitCode::FAILURE
        }
    }
}

fn serve() -> Result<server::Stopped> {
    let port = std::io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .map_err(Error::system("duplicate the agent's port"))?;
    let modules: Vec<Module> =
        serde_json::from_str(&std::env::args().nth(2).unwrap_or_default())
            .map_err(|error| Error::invalid("the agent's argument", error.to_string()))?;
    let mut problems = Vec::new();
    let mut note = |result: Result<()>| {
        if let Err(error) = result {
            problems.push(report(&error));
        }
    };
    note(load_kvm());
    // Kept until this process ends.
    let _idle = idle_machine().map_err(|error| note(Err(error)));
    for module in &modules {
        note(match module {
            Module::Stock(name, parameters) => modprobe(name, parameters),
            Module::File(path, parameters) => load(Path::new(path), parameters),
        });
    }
    note(raise_limits());
    note(loopback_up());
    let hello = Hello {
        kernel: rustix::system::uname()
            .release()
            .to_string_lossy()
            .into_owned(),
        processors: std::thread::available_parallelism().map_or(1, usize::from),
        kvm: Path::new("/dev/kvm").exists(),
        uptime: uptime(),
        problems,
    };
    server::serve(File::from(port), hello, lab::evidence::of_all)
        .map_err(Error::system("serve the agent's port"))
}

/// The processor's own virtualization module.
fn load_kvm() -> Result<()> {
    let processor = files::read_text(Path::new("/proc/cpuinfo"))?;
    let has = |flag| processor.split_whitespace().any(|word| word == flag);
    if has("svm") {
        modprobe("kvm_amd", &[])
    } else if has("vmx") {
        modprobe("kvm_intel", &[])
    } else {
        Err(Error::missing(
            "the lab host's processor does not virtualize",
            "report this with the output of `cargo lab run -- cat /proc/cpuinfo`",
        ))
    }
}

/// Creates an idle virtual machine with one vCPU. An emulated host has crashed where the kernel
/// patches its code while other processors run it, and KVM triggers such patches:
///
/// * With the first machine, and when the last one is gone (`preempt_notifier_inc` in
///   virt/kvm/kvm_main.c). KVM then also switches virtualization on and off on all processors.
/// * When a first vCPU has its local APIC disabled by software, and when the last one no longer has
///   (`apic_sw_disabled` in arch/x86/kvm/lapic.c). Each vCPU has from its creation until its guest
///   sets the APIC up.
fn idle_machine() -> Result<(VmFd, VcpuFd)> {
    let failed = |error: kvm_ioctls::Error| io::Error::from_raw_os_error(error.errno());
    let made = Kvm::new().and_then(|kvm| {
        let machine = kvm.create_vm()?;
        machine.create_irq_chip()?;
        let processor = machine.create_vcpu(0)?;
        Ok((machine, processor))
    });
    made.map_err(|error| Error::system("keep KVM in use")(failed(error)))
}

/// Loads a module of the stock kernel. A later `modprobe` of it takes the same parameters. A test
/// may unload the module, and later tests must not run with the kernel's defaults.
fn modprobe(name: &str, parameters: &[String]) -> Result<()> {
    if !parameters.is_empty() {
        let options = format!("options {name} {}\n", parameters.join(" "));
        files::write(
            Path::new(&format!("/etc/modprobe.d/lab-{name}.conf")),
            options,
        )?;
    }
    lab::process::output(Command::new("modprobe").arg(name)).map(drop)
}

/// Devices that pin guest memory count it against the limit, also for root.
fn raise_limits() -> Result<()> {
    let unlimited = Rlimit {
        current: None,
        maximum: None,
    };
    setrlimit(Resource::Memlock, unlimited)
        .map_err(Error::system("raise the memory lock limit"))?;
    let files = Rlimit {
        current: Some(65536),
        maximum: Some(524_288),
    };
    setrlimit(Resource::Nofile, files).map_err(Error::system("raise the open files limit"))
}

fn loopback_up() -> Result<()> {
    lab::process::output(Command::new("ip").args(["link", "set", "lo", "up"])).map(drop)
}

fn uptime() -> f64 {
    files::read_text(Path::new("/proc/uptime"))
        .ok()
        .and_then(|text| text.split(' ').next()?.parse().ok())
        .unwrap_or_default()
}

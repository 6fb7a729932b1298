//! `--here --i-own-this-host`: runs commands on this machine, without a lab host.
//!
//! For machines that have what the lab emulates: a working KVM and a vDPA driver. This module owns
//! the checks; each missing thing is an error with its remedy. It changes nothing itself: tests
//! remove what they create.

use crate::agent::protocol::Execute;
use crate::error::{Error, Result};
use crate::process::{die_with_parent, exit_code};
use std::fs::File;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// The two flags; neither works alone.
#[derive(Debug, clap::Args)]
pub struct HereArguments {
    /// Run on this machine instead of a lab host
    #[arg(long, requires = "i_own_this_host")]
    here: bool,
    /// This machine is mine: tests may create and remove vDPA devices on it
    #[arg(long, requires = "here")]
    i_own_this_host: bool,
}

impl HereArguments {
    /// True if the command runs on this machine.
    pub fn is_wanted(&self) -> bool {
        self.here && self.i_own_this_host
    }
}

/// Checks this machine, then runs the command on it.
///
/// # Errors
/// [`Error::Missing`] for the first missing thing; [`Error::Start`].
pub fn run(execute: &Execute, timeout: Option<Duration>) -> Result<u8> {
    check()?;
    let Some((program, arguments)) = execute.arguments.split_first() else {
        return Err(Error::Usage("no command given".into()));
    };
    let start = |source| Error::Start {
        program: program.clone(),
        source,
    };
    let mut command = Command::new(program);
    command
        .args(arguments)
        .envs(&execute.environment)
        .env("BELLHOP_LAB", "here")
        .current_dir(&execute.directory);
    if timeout.is_some() {
        // The timeout ends the whole process group.
        command.process_group(0);
    }
    let mut child = die_with_parent(&mut command).spawn().map_err(start)?;
    let Some(timeout) = timeout else {
        return child.wait().map(exit_code).map_err(start);
    };
    let deadline = Instant::now() + timeout;
    loop {
        if let Some(status) = child.try_wait().map_err(start)? {
            return Ok(exit_code(status));
        }
        if Instant::now() >= deadline {
            if let Some(group) = i32::try_from(child.id())
                .ok()
                .and_then(rustix::process::Pid::from_raw)
            {
                let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
            }
            let _ = child.wait();
            return Ok(124);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Checks for the equipment of a lab host: root, KVM, vhost-vdpa, the simulator.
///
/// # Errors
/// [`Error::Missing`] for the first missing thing.
pub fn check() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Err(Error::missing(
            "--here creates vDPA devices, which needs root",
            "run it as root, or leave --here out",
        ));
    }
    File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .map_err(|error| {
            Error::missing(
                format!("/dev/kvm cannot be opened ({error})"),
                "load kvm_intel or kvm_amd, or leave --here out",
            )
        })?;
    for (module, presence) in [
        ("vhost_vdpa", "/sys/module/vhost_vdpa"),
        ("vdpa_sim_net", "/sys/module/vdpa_sim_net"),
        ("vdpa_sim_blk", "/sys/module/vdpa_sim_blk"),
    ] {
        if !Path::new(presence).exists() && !loaded(module) {
            return Err(Error::missing(
                format!("the kernel module {module} is not loaded and cannot be"),
                format!("install it for this kernel and `modprobe {module}`, or leave --here out"),
            ));
        }
    }
    let shown = Command::new("vdpa").args(["mgmtdev", "show"]).output();
    match shown {
        Ok(shown) if String::from_utf8_lossy(&shown.stdout).contains("vdpasim_net") => Ok(()),
        Ok(_) => Err(Error::missing(
            "`vdpa mgmtdev show` lists no vdpasim_net",
            "load vdpa_sim_net, or leave --here out",
        )),
        Err(error) => Err(Error::missing(
            format!("the vdpa tool cannot be run ({error})"),
            "install iproute2, or leave --here out",
        )),
    }
}

fn loaded(module: &str) -> bool {
    Command::new("modprobe")
        .arg(module)
        .status()
        .is_ok_and(|status| status.success())
}

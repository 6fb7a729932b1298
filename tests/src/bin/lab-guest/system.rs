//! The guest's system: file systems, modules, console, shell, power.

use lab::error::{Error, Result, report};
use lab::files;
use rustix::mount::{MountFlags, mount};
use rustix::system::{RebootCommand, finit_module};
use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};
use std::fs::File;
use std::path::Path;
use std::process::Command;

/// Mounts, loads modules, brings NICs up. Returns the errors.
pub(crate) fn start() -> Vec<String> {
    let mut problems = Vec::new();
    let mut note = |result: Result<()>| {
        if let Err(error) = result {
            problems.push(report(&error));
        }
    };
    for (kind, target) in [
        ("proc", "/proc"),
        ("sysfs", "/sys"),
        ("devtmpfs", "/dev"),
        ("tmpfs", "/tmp"),
        ("tmpfs", "/run"),
    ] {
        note(
            mount(kind, target, kind, MountFlags::empty(), None)
                .map_err(|error| Error::file("mount", target)(error.into()))
                .or_else(|error| {
                    // The kernel may have mounted it by itself.
                    if is_mounted(target) {
                        Ok(())
                    } else {
                        Err(error)
                    }
                }),
        );
    }
    // Before there is a NIC, so that none ever sends a router solicitation.
    for which in ["all", "default"] {
        let path = format!("/proc/sys/net/ipv6/conf/{which}/disable_ipv6");
        if Path::new(&path).exists() {
            note(files::write(Path::new(&path), "1"));
        }
    }
    // Debian's default is fq_codel. It drops frames that wait for a slow NIC, and no counter of the
    // NIC shows it.
    let discipline = Path::new("/proc/sys/net/core/default_qdisc");
    if discipline.exists() {
        note(files::write(discipline, "pfifo_fast"));
    }
    match files::read_text(Path::new("/modules")) {
        Ok(list) => list.lines().for_each(|name| note(load(name))),
        Err(error) => note(Err(error)),
    }
    for nic in crate::network::names() {
        note(crate::network::bring_up(&nic));
    }
    problems
}

fn is_mounted(target: &str) -> bool {
    files::read_text(Path::new("/proc/mounts")).is_ok_and(|mounts| {
        mounts
            .lines()
            .any(|line| line.split(' ').nth(1) == Some(target))
    })
}

fn load(name: &str) -> Result<()> {
    let path = Path::new("/lib").join(name);
    let file = File::open(&path).map_err(Error::file("open", &path))?;
    match finit_module(&file, c"", 0) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()),
        Err(error) => Err(Error::file("load", path)(error.into())),
    }
}

/// True when the outside, not a human, commands this guest.
pub(crate) fn is_commanded() -> bool {
    files::read_text(Path::new("/proc/cmdline"))
        .is_ok_and(|line| line.split_whitespace().any(|word| word == "lab"))
}

/// Turns off the echo of commands and kernel messages between the answers: `dmesg` has them. A
/// panic or an oops still reaches the console.
pub(crate) fn quiet_console() -> Result<()> {
    files::write(Path::new("/proc/sys/kernel/printk"), "1")?;
    let stdin = rustix::stdio::stdin();
    let mut settings = tcgetattr(stdin).map_err(Error::system("read the console's settings"))?;
    settings.local_modes.remove(LocalModes::ECHO);
    tcsetattr(stdin, OptionalActions::Now, &settings)
        .map_err(Error::system("change the console's settings"))
}

/// Runs a shell on the console until it exits.
pub(crate) fn shell() -> Result<()> {
    // Installs names for busybox's tools; a second call changes nothing.
    let _ = Command::new("/bin/busybox")
        .args(["--install", "-s", "/bin"])
        .status();
    let mut command = Command::new("/bin/busybox");
    command
        .args(["setsid", "-c", "/bin/busybox", "sh", "-l"])
        .env("PATH", "/bin")
        .env("HOME", "/root")
        .env("PS1", "guest# ")
        .current_dir("/root");
    if let Some(console) = real_console() {
        let open = || File::options().read(true).write(true).open(&console);
        let failed = || Error::file("open", console.clone());
        command
            .stdin(open().map_err(failed())?)
            .stdout(open().map_err(failed())?)
            .stderr(open().map_err(failed())?);
    }
    command.status().map(drop).map_err(|source| Error::Start {
        program: "/bin/busybox".into(),
        source,
    })
}

/// The terminal behind /dev/console, which itself cannot control jobs.
fn real_console() -> Option<String> {
    let active = files::read_text(Path::new("/sys/class/tty/console/active")).ok()?;
    let name = active.split_whitespace().last()?;
    Some(format!("/dev/{name}"))
}

/// Switches the guest off.
pub(crate) fn power_off() {
    end(RebootCommand::PowerOff);
}

/// Restarts the guest.
pub(crate) fn reboot() {
    end(RebootCommand::Restart);
}

fn end(how: RebootCommand) {
    rustix::fs::sync();
    // Drains the last output before the serial port is gone.
    let _ = rustix::termios::tcdrain(rustix::stdio::stdout());
    if let Err(error) = rustix::system::reboot(how) {
        eprintln!("lab-guest: cannot end the guest: {error}");
    }
}

//! Ends a machine from outside: signals at every stage, `kill -9`, the console's escape. Afterwards
//! the vDPA device is free and the terminal is restored.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests: clippy.toml allows it only in the test functions themselves"
)]

mod crash_kernel;

use crash_kernel::CrashKernel;
use lab::guest::{BellhopArguments, CRASHED, Guest};
use lab::sim::SimDevice;
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, tcgetattr};
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

const MAC: &str = "02:00:5e:00:53:21";
/// Far longer than any step here takes: a watchdog, not a measurement.
const LIMIT: Duration = Duration::from_secs(60);

fn pid(child: &Child) -> Pid {
    Pid::from_child(child)
}

/// Checks that the device opens at once, so no process has it open.
#[track_caller]
fn assert_free(net: &SimDevice) {
    File::options()
        .read(true)
        .write(true)
        .open(net.path())
        .unwrap_or_else(|error| panic!("{} is not free: {error}", net.path().display()));
}

#[track_caller]
fn wait(child: &mut Child) -> ExitStatus {
    let begin = Instant::now();
    loop {
        match child.try_wait().unwrap() {
            Some(status) => return status,
            None if begin.elapsed() > LIMIT => panic!("it does not end"),
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Signals at moments from before `main` to a running guest. Before the handlers are installed, the
/// signal itself ends the process. Afterwards the process exits with 128 + its number.
#[test]
fn signals_at_every_stage() {
    let net = SimDevice::net("end", MAC, 1500).unwrap();
    let arguments = BellhopArguments::small().unwrap().vdpa(net.path());
    let delays = [0, 5, 20, 60, 120, 180, 240, 320, 450, 700, 1200, 2500];
    let (mut early, mut clean) = (0, 0);
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        for delay in delays {
            let mut child = arguments
                .command()
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            std::thread::sleep(Duration::from_millis(delay));
            kill_process(pid(&child), signal).unwrap();
            let status = wait(&mut child);
            let mut said = String::new();
            child
                .stderr
                .take()
                .unwrap()
                .read_to_string(&mut said)
                .unwrap();
            let number = signal.as_raw();
            match (status.signal(), status.code()) {
                (Some(by), _) if by == number => early += 1,
                (_, Some(code)) if code == 128 + number => clean += 1,
                other => panic!("after {delay} ms, signal {number}: {other:?}: {said}"),
            }
            assert_eq!(said, "", "after {delay} ms, signal {number}");
            assert_free(&net);
        }
    }
    println!("{early} ended before the handlers were there, {clean} cleanly");
    assert!(clean >= 6, "{clean}");
}

/// `kill -9` of a running VMM: the device is usable again at once, by a new guest.
#[test]
fn killed_and_at_once_usable_again() {
    let net = SimDevice::net("end", MAC, 1500).unwrap();
    let arguments = BellhopArguments::small().unwrap().vdpa(net.path());
    let mut guest = Guest::start(&arguments).unwrap();
    guest.send("flood 5").unwrap();
    std::thread::sleep(Duration::from_millis(500));
    let victim = Pid::from_raw(i32::try_from(guest.pid()).unwrap()).unwrap();
    kill_process(victim, Signal::KILL).unwrap();
    let status = guest.wait_exit(LIMIT).unwrap();
    assert_eq!(status.signal(), Some(Signal::KILL.as_raw()));
    assert_free(&net);
    let mut guest = Guest::start(&arguments).unwrap();
    let frames = guest.command("frames 200 256 32").unwrap();
    assert_eq!(frames["rx"], 200, "{frames}");
    guest.power_off().unwrap();
}

/// The daemon decides by the exit code whether the guest may start again.
#[test]
fn a_full_disk_does_not_change_the_exit_code() {
    let kernel = CrashKernel::at_once();
    let arguments = BellhopArguments::small().unwrap().kernel(kernel.path());
    let full = || File::options().write(true).open("/dev/full").unwrap();
    let mut child = arguments
        .command()
        .stdin(Stdio::null())
        .stdout(full())
        .stderr(full())
        .spawn()
        .unwrap();
    assert_eq!(wait(&mut child).code(), Some(CRASHED));
}

/// The standard input of a VMM whose user closes the pipe early.
#[test]
fn a_guest_lives_on_without_input() {
    let mut child = BellhopArguments::small()
        .unwrap()
        .command()
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    let mut output = child.stdout.take().unwrap();
    let mut seen = Vec::new();
    let mut buffer = [0; 4096];
    while !String::from_utf8_lossy(&seen).contains("@lab ready") {
        let count = output.read(&mut buffer).unwrap();
        assert_ne!(count, 0, "{}", String::from_utf8_lossy(&seen));
        seen.extend_from_slice(&buffer[..count]);
    }
    kill_process(pid(&child), Signal::TERM).unwrap();
    assert_eq!(wait(&mut child).code(), Some(143));
}

/// A VMM on a pseudo-terminal.
struct OnTerminal {
    child: Child,
    controller: File,
    terminal: OwnedFd,
}

impl OnTerminal {
    fn start() -> Self {
        Self::run(&BellhopArguments::small().unwrap())
    }

    fn run(arguments: &BellhopArguments) -> Self {
        let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&controller).unwrap();
        unlockpt(&controller).unwrap();
        let name = ptsname(&controller, Vec::new()).unwrap();
        let open = || {
            let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY;
            rustix::fs::open(&*name, flags, rustix::fs::Mode::empty()).unwrap()
        };
        let mut command = arguments.command();
        command.stdin(open()).stdout(open()).stderr(open());
        // SAFETY: needed to make the terminal the child's controlling one, as under a shell. The
        // closure makes two system calls between fork and exec, without allocation or locks.
        unsafe {
            command.pre_exec(|| {
                rustix::process::setsid()?;
                rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
                Ok(())
            });
        }
        Self {
            child: command.spawn().unwrap(),
            terminal: open(),
            controller: File::from(controller),
        }
    }

    fn is_raw(&self) -> bool {
        let modes = tcgetattr(self.terminal.as_fd()).unwrap();
        !modes
            .local_modes
            .intersects(LocalModes::ICANON | LocalModes::ECHO)
    }

    /// Reads the output until `text` appears.
    fn wait_for(&mut self, text: &str) -> String {
        let mut seen = Vec::new();
        let mut buffer = [0; 4096];
        loop {
            let count = self.controller.read(&mut buffer).unwrap();
            seen.extend_from_slice(&buffer[..count]);
            let shown = String::from_utf8_lossy(&seen).into_owned();
            if shown.contains(text) {
                return shown;
            }
        }
    }
}

#[test]
fn ctrl_a_x_leaves_and_the_terminal_is_as_before() {
    let mut vmm = OnTerminal::start();
    assert!(!vmm.is_raw());
    vmm.wait_for("@lab ready");
    assert!(vmm.is_raw());
    // A lone Ctrl-A does nothing, and typing reaches the guest.
    vmm.controller.write_all(b"\x01qinfo\n").unwrap();
    let shown = vmm.wait_for("\"uptime_ms\"");
    assert!(!shown.contains("error"), "{shown}");
    vmm.controller.write_all(b"\x01x").unwrap();
    assert_eq!(wait(&mut vmm.child).code(), Some(0));
    assert!(!vmm.is_raw());
}

#[test]
fn a_signal_restores_the_terminal_too() {
    for signal in [Signal::TERM, Signal::HUP] {
        let mut vmm = OnTerminal::start();
        vmm.wait_for("Ctrl-A X");
        kill_process(pid(&vmm.child), signal).unwrap();
        assert_eq!(wait(&mut vmm.child).code(), Some(128 + signal.as_raw()));
        assert!(!vmm.is_raw());
    }
}

/// Even before the guest has printed anything.
#[test]
fn ctrl_a_x_leaves_at_once() {
    let mut vmm = OnTerminal::start();
    vmm.controller.write_all(b"\x01x").unwrap();
    assert_eq!(wait(&mut vmm.child).code(), Some(0));
    assert!(!vmm.is_raw());
}

#[test]
fn an_error_restores_the_terminal_too() {
    let kernel = CrashKernel::when_typed();
    let arguments = BellhopArguments::small().unwrap().kernel(kernel.path());
    let mut vmm = OnTerminal::run(&arguments);
    let begin = Instant::now();
    while !vmm.is_raw() {
        assert!(begin.elapsed() < LIMIT, "the terminal does not become raw");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(vmm.child.try_wait().unwrap().is_none());
    vmm.controller.write_all(b"x").unwrap();
    let said = vmm.wait_for("triple-faulted");
    assert!(said.contains("the guest crashed"), "{said}");
    assert_eq!(wait(&mut vmm.child).code(), Some(CRASHED));
    assert!(!vmm.is_raw());
}

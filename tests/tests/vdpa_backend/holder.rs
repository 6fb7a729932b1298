//! Only one process at a time has a device open, and a process that dies releases it.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use vdpa::device::Device;

use lab::sim::Mapping;

use super::support::frames::exchange;
use super::support::nic::Rig;
use super::support::{MAC, net};

/// A process that holds a device open and runs it, killed at the end.
struct Holder(Child);

impl Holder {
    fn start(device: &Path) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_lab-holder"))
            .arg(device)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let output = child.stdout.take().unwrap();
        BufReader::new(output).read_line(&mut line).unwrap();
        assert_eq!(line, "running\n");
        Self(child)
    }

    /// SIGKILL and no more: the kernel must clean up the rest.
    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = (self.0.kill(), self.0.wait());
    }
}

/// Checks that the device's only named holder is `pid`; returns the text.
fn busy(path: &Path, pid: u32) -> String {
    let text = Device::open(path).unwrap_err().to_string();
    assert!(text.contains(" is in use by "), "{text}");
    assert!(text.contains(&format!("PID {pid}")), "{text}");
    assert_eq!(text.matches("PID ").count(), 1, "{text}");
    text
}

/// Far longer than the kernel takes: a watchdog, not a measurement.
const WATCHDOG: Duration = Duration::from_secs(60);

/// The kernel may close a dead process's files even after the process was reaped.
fn open_soon(path: &Path) -> Device {
    let begin = Instant::now();
    loop {
        match Device::open(path) {
            Ok(device) => return device,
            Err(error) => {
                assert!(error.to_string().contains(" is in use by "), "{error}");
                assert!(begin.elapsed() < WATCHDOG, "{error}");
                std::thread::yield_now();
            }
        }
    }
}

#[test]
fn a_second_open_names_this_process() {
    let net = net(Mapping::DEFAULT);
    let first = Device::open(net.path()).unwrap();
    busy(net.path(), std::process::id());
    drop(first);
    drop(Device::open(net.path()).unwrap());
}

#[test]
fn a_killed_holder_is_named_and_then_leaves_the_device_usable() {
    for mapping in [Mapping::DEFAULT, Mapping::PINNED] {
        let net = net(mapping);
        for _ in 0..3 {
            let mut holder = Holder::start(net.path());
            let text = busy(net.path(), holder.0.id());
            assert!(text.contains("lab-holder"), "{text}");
            holder.kill();
            drop(open_soon(net.path()));
            let mut rig = Rig::start(&net, vdpa::uapi::BackendFeatures::all());
            exchange(&mut rig.nic, 10, &[MAC]);
        }
    }
}

//! One process at a time has a device, and who dies gives it back.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use vdpa::device::{Device, OpenError};

use super::support::frames::exchange;
use super::support::nic::Rig;
use super::support::{MAC, PINNING, SHARED, net};

/// A process that has a device and runs it, killed at the end.
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

    /// SIGKILL, and no more: what is left is the kernel's to clean up.
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

fn busy(path: &Path) -> (String, Vec<u32>) {
    match Device::open(path).unwrap_err() {
        error @ OpenError::Busy { .. } => {
            let text = error.to_string();
            let OpenError::Busy { holders, .. } = error else {
                unreachable!()
            };
            (text, holders.iter().map(|holder| holder.pid).collect())
        }
        other => panic!("{other}"),
    }
}

/// Far more than the kernel takes: a watchdog, not a measurement.
const WATCHDOG: Duration = Duration::from_secs(60);

/// The kernel closes a dead process's files after it has been waited for, too.
fn open_soon(path: &Path) -> Device {
    let begin = Instant::now();
    loop {
        match Device::open(path) {
            Ok(device) => return device,
            Err(OpenError::Busy { .. }) if begin.elapsed() < WATCHDOG => {
                std::thread::yield_now();
            }
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn a_second_open_names_this_process() {
    let net = net(SHARED);
    let first = Device::open(net.path()).unwrap();
    let own = std::process::id();
    let (text, holders) = busy(net.path());
    assert_eq!(holders, [own]);
    assert!(text.contains(&format!("PID {own}")), "{text}");
    drop(first);
    drop(Device::open(net.path()).unwrap());
}

#[test]
fn a_killed_holder_is_named_and_then_leaves_the_device_usable() {
    for mapping in [SHARED, PINNING] {
        let net = net(mapping);
        for _ in 0..3 {
            let mut holder = Holder::start(net.path());
            let (text, holders) = busy(net.path());
            assert_eq!(holders, [holder.0.id()], "{text}");
            assert!(text.contains("lab-holder"), "{text}");
            holder.kill();
            drop(open_soon(net.path()));
            let mut rig = Rig::start(&net, vdpa::uapi::BackendFeatures::all());
            exchange(&mut rig.nic, 10, &[MAC]);
        }
    }
}

//! Runs `bellhop probe` as a user does.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;
use vdpa::device::Device;
use vdpa::netdev::{Netdev, Options};

/// Runs `bellhop probe` with these arguments.
pub(crate) fn probe(device: &Path, arguments: &[&str]) -> Output {
    lab::sim::require_lab().unwrap();
    Command::new(std::env::var_os("BELLHOP").unwrap())
        .arg("probe")
        .arg(device)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

/// Its answer as JSON, after checking that the exit code is `code`.
#[track_caller]
pub(crate) fn json(device: &Path, arguments: &[&str], code: i32) -> Value {
    let output = probe(device, &[arguments, &["--json"]].concat());
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{text}{errors}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The outcome of a check.
#[track_caller]
pub(crate) fn outcome<'a>(report: &'a Value, check: &str) -> &'a str {
    let checks = report["checks"].as_array().unwrap();
    let found = checks.iter().find(|one| one["name"] == check);
    found
        .and_then(|one| one["outcome"].as_str())
        .unwrap_or_else(|| panic!("no {check} in {report:#}"))
}

/// IDs of the rules with this verdict.
pub(crate) fn rules(report: &Value, verdict: &str) -> Vec<String> {
    let lines = report["lines"].as_array().unwrap();
    lines
        .iter()
        .filter(|line| line["verdict"] == verdict)
        .map(|line| line["id"].as_str().unwrap().to_owned())
        .collect()
}

/// Sends received frames back, with swapped addresses, until `stop` is set.
#[allow(dead_code, reason = "not every test has a peer")]
pub(crate) fn echo(device: &Path, stop: &AtomicBool) {
    let (device, iotlb) = Device::open(device).unwrap().own().unwrap();
    let mut netdev = Netdev::start(device, iotlb, &Options::default()).unwrap();
    let pair = &mut netdev.driver.pairs[0];
    let mut copy = [0; 2048];
    while !stop.load(Ordering::Relaxed) {
        let transmit = &mut pair.transmit;
        let taken = pair.receive.poll(32, |frame| {
            let len = frame.copy_to(&mut copy).unwrap().len();
            let (to, from) = copy[..12].split_at_mut(6);
            to.swap_with_slice(from);
            assert!(transmit.send(&copy[..len]).unwrap());
        });
        if taken.unwrap() > 0 {
            pair.transmit.flush().unwrap();
        } else {
            std::thread::yield_now();
        }
    }
}

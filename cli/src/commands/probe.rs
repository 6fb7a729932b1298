//! `bellhop probe`: describes and tests a vDPA device.

use std::path::{Path, PathBuf};
use std::time::Duration;

use bellhop_common::error::Error;
use bellhop_common::exit::Code;
use bellhop_common::listing::{self, Format};
use bellhop_common::table::Table;
use bellhop_diagnostics::probe as shown;
use vdpa::conformance;
use vdpa::probe::{self, ProbeOptions};
use vdpa_mgmt::bus::Bus;
use vmm::config::MacAddress;

use crate::progress::ProgressLine;
use crate::units::seconds;

/// Describe a vDPA device, and test it without a VM
///
/// The command opens the device, which resets it. A small network driver inside the command tests
/// it. The command does not touch a device in use.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Tests, each with ok, failed, not offered or inconclusive:
  start       negotiation, memory, rings
  traffic     frames to the device's own address, which simulators send back; behind a switch
              no frame returns, and the result says so. With --peer, to a station that echoes
  doorbell    a store to the queue's doorbell page instead of a kick by eventfd
  interrupt   the call eventfd
  suspend, ring state, resume
              the requirements of live migration

--conformance reports on the parent driver instead. Each line is a rule of the virtio specification
or of the kernel's vhost-vdpa interface, with its source, and whether the driver follows it. The
test opens and resets the device many times. It is for NIC vendors and kernel developers.

Examples:
  bellhop probe /dev/vhost-vdpa-0
  bellhop probe nic0
  bellhop probe /dev/vhost-vdpa-0 --peer 52:54:00:12:34:56 --timeout 10s
  bellhop probe /dev/vhost-vdpa-0 -j | jq .checks
  bellhop probe /dev/vhost-vdpa-0 --conformance

The exit code is 0 if nothing failed.")]
pub(crate) struct Arguments {
    /// The device: /dev/vhost-vdpa-N, or its name
    #[arg(value_name = "DEV")]
    device: PathBuf,

    /// Time limit for sending frames, such as 10s or 2m; without a unit in seconds
    #[arg(
        long,
        alias = "seconds",
        value_name = "DURATION",
        default_value_t = 3,
        value_parser = seconds(1..=3600)
    )]
    timeout: u32,

    /// Send frames to this address, whose station sends them back
    #[arg(long, value_name = "MAC", conflicts_with = "conformance")]
    peer: Option<MacAddress>,

    /// Report on the parent driver's conformance instead
    #[arg(long)]
    conformance: bool,
}

/// Probes and prints.
pub(crate) fn execute(arguments: &Arguments, format: Format) -> Result<Code, Error> {
    let device = character_device(&Bus::default(), &arguments.device)?;
    let mut progress = ProgressLine::new();
    let is_good = if arguments.conformance {
        let report =
            conformance::report(&device, &mut |what| progress.show(format_args!("{what} …")))?;
        drop(progress);
        show(&report, format, shown::conformance, shown::rules)?;
        report.is_good()
    } else {
        let options = ProbeOptions {
            peer: arguments.peer.map(MacAddress::bytes),
            traffic: Duration::from_secs(arguments.timeout.into()),
        };
        let report = probe::probe(&device, &options, &mut |what| {
            progress.show(format_args!("{what} …"))
        })?;
        drop(progress);
        show(&report, format, shown::probe, shown::checks)?;
        report.is_good()
    };
    Ok(if is_good { Code::Success } else { Code::Failed })
}

/// The character device of a vDPA device, which is named by its file or by its own name.
fn character_device(bus: &Bus, device: &Path) -> Result<PathBuf, Error> {
    let is_file = device.components().count() != 1 || device.exists();
    let Some(name) = device.to_str().filter(|_| !is_file) else {
        return Ok(device.to_owned());
    };
    let found = bus.device(name)?;
    found.path().ok_or_else(|| {
        let driver = found.driver.as_deref().unwrap_or("no driver");
        Error::failed(format!(
            "{name} is bound to {driver}: `bellhop bind {name} vhost_vdpa` gives it to guests"
        ))
    })
}

fn show<T: serde::Serialize>(
    report: &T,
    format: Format,
    text: impl FnOnce(&T) -> String,
    table: impl FnOnce(&T) -> Table,
) -> Result<Code, Error> {
    if format.is_text() {
        listing::print(text(report).as_bytes())
    } else {
        format.print_table(report, || table(report))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_device_is_named_by_file_or_name() {
        let sysfs = std::env::temp_dir().join(format!("bellhop-probe-{}", std::process::id()));
        let devices = sysfs.join("bus/vdpa/devices");
        fs::create_dir_all(devices.join("nic0/vhost-vdpa-3")).unwrap();
        fs::create_dir_all(devices.join("nic1")).unwrap();
        let bus = Bus::at(&sysfs);
        let find = |device: &str| character_device(&bus, Path::new(device));
        for device in ["/dev/vhost-vdpa-3", "nic0"] {
            assert_eq!(find(device).unwrap(), Path::new("/dev/vhost-vdpa-3"));
        }
        let error = find("nic1").unwrap_err().to_string();
        assert!(error.contains("bellhop bind nic1 vhost_vdpa"), "{error}");
        let error = find("nic2").unwrap_err().to_string();
        assert!(error.contains("no vDPA device nic2"), "{error}");
        fs::remove_dir_all(&sysfs).unwrap();
    }
}

//! The lab NIC (`tests/kmod`), for tests in the lab host.
//!
//! This module loads the kernel module with the parameters that a test needs. Dropping the value
//! unloads it, so every test begins with the defaults. A parameter that is set later affects
//! devices added later. Devices are [`SimDevice`]s: the same tools create and delete them.

pub mod sf;

use crate::error::{Error, Result};
use crate::files;
use crate::notice;
use crate::process::output;
use crate::sim::{self, SimDevice};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The name of the module and of its management device.
pub const NAME: &str = "labnic";
const MODULE: &std::ffi::CStr = c"labnic";

/// Words in the kernel's log that no test may cause.
const TROUBLE: [&str; 5] = ["WARNING:", "BUG:", "Oops", "Call Trace", "UBSAN:"];

/// The loaded module. All its devices must be gone when this is dropped.
#[derive(Debug)]
pub struct Labnic(());

impl Labnic {
    /// Loads the module with parameters like `("ring_state", "used")`; a loaded module is reloaded.
    /// All other parameters have their defaults.
    ///
    /// # Errors
    /// [`Error::Missing`] outside the lab, [`Error::System`] while a device is in use,
    /// [`Error::File`] when the kernel refuses it.
    pub fn load(parameters: &[(&str, &str)]) -> Result<Self> {
        sim::require_lab()?;
        sim::unload(MODULE)?;
        output(Command::new("modprobe").arg("vhost_vdpa"))?;
        if !Path::new("/sys/module/vringh").exists() {
            sim::load("vringh.ko", "")?;
        }
        let parameters: Vec<String> = parameters
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        sim::load("labnic.ko", &parameters.join(" "))?;
        Ok(Self(()))
    }

    /// Sets a parameter for devices that are added from now on.
    ///
    /// # Errors
    /// [`Error::File`] for an unknown parameter or a wrong value.
    pub fn set(&self, parameter: &str, value: &str) -> Result<()> {
        let path = Path::new("/sys/module/labnic/parameters").join(parameter);
        // With a newline: the kernel never sees an empty write.
        files::write(&path, format!("{value}\n"))
    }

    /// Adds a device with the attributes of `vdpa dev add`.
    ///
    /// # Errors
    /// As [`SimDevice::add`]; the reason for a refusal is in the kernel's log.
    pub fn add(&self, name: &str, attributes: &[&str]) -> Result<SimDevice> {
        SimDevice::add(name, NAME, attributes)
    }
}

impl Drop for Labnic {
    fn drop(&mut self) {
        notice::left_behind(sim::unload(MODULE));
    }
}

/// A knob or counter of a device: `link`, `needs_reset`, `drop_kicks`, `link_down`,
/// `filtered`, `ignored_enables`, `bad_doorbells`.
fn attribute(device: &str, name: &str) -> PathBuf {
    Path::new("/sys/bus/vdpa/devices")
        .join(device)
        .join(NAME)
        .join(name)
}

/// Takes a device's link up or down.
///
/// # Errors
/// [`Error::File`].
pub fn set_link(device: &SimDevice, up: bool) -> Result<()> {
    files::write(
        &attribute(device.name(), "link"),
        if up { "1" } else { "0" },
    )
}

/// Breaks a device until its driver resets it (DEVICE_NEEDS_RESET).
///
/// # Errors
/// [`Error::File`].
pub fn break_down(device: &SimDevice) -> Result<()> {
    break_down_named(device.name())
}

/// Like [`break_down`], for a device that another process has created, by its name on the vdpa bus.
///
/// # Errors
/// [`Error::File`].
pub fn break_down_named(device: &str) -> Result<()> {
    files::write(&attribute(device, "needs_reset"), "1")
}

/// Makes a device lose the next kicks and doorbells of its transmit queues. The [`counter`]
/// `drop_kicks` shows how many it will still lose.
///
/// # Errors
/// [`Error::File`].
pub fn lose_kicks(device: &SimDevice, count: u16) -> Result<()> {
    files::write(&attribute(device.name(), "drop_kicks"), count.to_string())
}

/// Reads one of a device's counters.
///
/// # Errors
/// [`Error::File`]; [`Error::Invalid`] for a value that is not a number.
pub fn counter(device: &SimDevice, name: &str) -> Result<u64> {
    let path = attribute(device.name(), name);
    let text = files::read_text(&path)?;
    text.trim()
        .parse()
        .map_err(|_| Error::invalid(path.display().to_string(), format!("it says {text:?}")))
}

/// Lines of the kernel's log that report a fault in the kernel.
///
/// # Errors
/// [`Error::Program`].
pub fn trouble() -> Result<Vec<String>> {
    let log = output(&mut Command::new("dmesg"))?;
    Ok(String::from_utf8_lossy(&log)
        .lines()
        .filter(|line| TROUBLE.iter().any(|word| line.contains(word)))
        .map(str::to_owned)
        .collect())
}

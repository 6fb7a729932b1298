//! netdevsim: a NIC without hardware that has devlink, for tests in the lab host.
//!
//! This module owns the simulated NIC and its module. There is one NIC at a time, and dropping it
//! removes both. Ports are set up by hand through sysfs, so that tests do not depend on Bellhop's
//! own code for it.

use crate::error::{Error, Result};
use crate::files;
use crate::notice;
use crate::process::output;
use crate::sim::{load, require_lab, unload};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Its bus in sysfs.
const BUS: &str = "/sys/bus/netdevsim";

/// Dependents first.
const MODULES: [&std::ffi::CStr; 3] = [c"netdevsim", c"psample", c"macsec"];

static ONE: Mutex<()> = Mutex::new(());

/// A simulated NIC. Dropping it removes it with its module.
#[derive(Debug)]
pub struct Netdevsim {
    number: u32,
    /// Makes other tests of this process wait.
    _only: MutexGuard<'static, ()>,
}

impl Netdevsim {
    /// Adds a NIC with this many physical ports. Waits for the end of the previous one.
    ///
    /// # Errors
    /// [`Error::Missing`] outside the lab; [`Error::Program`], [`Error::File`] if it cannot be
    /// created.
    pub fn add(number: u32, ports: u32) -> Result<Self> {
        require_lab()?;
        // A failed test has still removed its own NIC.
        let only = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        if !Path::new(BUS).exists() {
            output(Command::new("modprobe").args(["-a", "psample", "macsec"]))?;
            load("netdevsim.ko", "")?;
        }
        let text = format!("{number} {ports}");
        files::write(&Path::new(BUS).join("new_device"), text)?;
        Ok(Self {
            number,
            _only: only,
        })
    }

    /// Its directory in sysfs.
    pub fn directory(&self) -> PathBuf {
        let name = format!("devices/netdevsim{}", self.number);
        Path::new(BUS).join(name)
    }

    /// Its name for devlink.
    pub fn handle(&self) -> String {
        format!("netdevsim/netdevsim{}", self.number)
    }

    /// The network interface of its first physical port.
    ///
    /// # Errors
    /// [`Error::File`]; [`Error::Invalid`] without one.
    pub fn interface(&self) -> Result<String> {
        let found = files::list(&self.directory().join("net"))?;
        found
            .first()
            .and_then(|path| path.file_name()?.to_str().map(str::to_owned))
            .ok_or_else(|| Error::invalid(self.handle(), "it has no network interface"))
    }

    /// Gives it this many virtual functions.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn set_virtual_functions(&self, count: u32) -> Result<()> {
        let path = self.directory().join("sriov_numvfs");
        files::write(&path, count.to_string())
    }

    /// Sets the mode of its switch: `legacy` or `switchdev`.
    ///
    /// # Errors
    /// [`Error::Program`].
    pub fn set_eswitch_mode(&self, mode: &str) -> Result<()> {
        let words = ["dev", "eswitch", "set", &self.handle(), "mode", mode];
        output(Command::new("devlink").args(words)).map(drop)
    }

    /// Makes the part fail that its health reporter `dummy` watches.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn break_health(&self, message: &str) -> Result<()> {
        let name = format!("netdevsim{}/health/break_health", self.number);
        let path = Path::new("/sys/kernel/debug/netdevsim").join(name);
        files::write(&path, message)
    }
}

impl Drop for Netdevsim {
    fn drop(&mut self) {
        let number = self.number.to_string();
        notice::left_behind(files::write(&Path::new(BUS).join("del_device"), number));
        for module in MODULES {
            notice::left_behind(unload(module));
        }
    }
}

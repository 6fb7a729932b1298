//! Subfunctions of the lab NIC, created with iproute2's `devlink` and `vdpa`.
//!
//! This module owns a port from `devlink port add` to `devlink port del`. It does not know what
//! runs on the vDPA device. Users of the device must be gone before the port is deleted.
//!
//! ```text
//!   add --> inactive --activate--> attached --enable_vnet--> a management device
//! ```

use crate::error::{Error, Result};
use crate::notice;
use crate::process::output;
use crate::sim::SimDevice;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// The NIC's devlink instance.
pub const NIC: &str = "platform/labnic.0";

/// How long an attachment may take: the emulated processor may be busy.
const PATIENCE: Duration = Duration::from_secs(20);

/// Runs iproute2's devlink tool and returns its output.
///
/// # Errors
/// [`Error::Program`] with its message.
pub fn devlink(arguments: &[&str]) -> Result<Vec<u8>> {
    output(Command::new("devlink").args(arguments))
}

/// Like [`devlink`], with its answer in JSON.
///
/// # Errors
/// As [`devlink`]; [`Error::Invalid`] for an answer that is not JSON.
pub fn devlink_json(arguments: &[&str]) -> Result<Value> {
    let answer = devlink(&[&["-j"], arguments].concat())?;
    serde_json::from_slice(&answer)
        .map_err(|error| Error::invalid("the devlink tool's answer", error.to_string()))
}

/// Sets the eswitch's mode: `legacy`, the mode after loading, or `switchdev`.
///
/// # Errors
/// As [`devlink`].
pub fn set_eswitch_mode(mode: &str) -> Result<()> {
    devlink(&["dev", "eswitch", "set", NIC, "mode", mode]).map(drop)
}

/// A file of the NIC in debugfs (`tests/kmod/health.c`).
///
/// # Errors
/// [`Error::Program`] when debugfs cannot be mounted.
pub fn debug_file(name: &str) -> Result<PathBuf> {
    let directory = Path::new("/sys/kernel/debug/labnic");
    if !directory.exists() {
        output(Command::new("mount").args(["-t", "debugfs", "none", "/sys/kernel/debug"]))?;
    }
    Ok(directory.join(name))
}

/// A port of flavour pcisf with its subfunction. Dropping it deletes the port.
#[derive(Debug)]
pub struct Subfunction {
    port: String,
    representor: String,
}

impl Subfunction {
    /// Adds the port; the function is inactive. The mode must be `switchdev`.
    ///
    /// # Errors
    /// As [`devlink_json`]; [`Error::Invalid`] for an answer without a port.
    pub fn add(sfnum: u32) -> Result<Self> {
        let number = sfnum.to_string();
        devlink(&[
            "port", "add", NIC, "flavour", "pcisf", "pfnum", "0", "sfnum", &number,
        ])?;
        // The answer of `devlink -j port add` is not JSON: it has no outer braces.
        let answer = devlink_json(&["port", "show"])?;
        let ports = answer.get("port").and_then(Value::as_object);
        let found = ports
            .into_iter()
            .flatten()
            .find(|(_, port)| port.get("sfnum").and_then(Value::as_u64) == Some(sfnum.into()))
            .and_then(|(name, port)| Some((name, port.get("netdev")?.as_str()?)));
        let (port, representor) = found.ok_or_else(|| {
            Error::invalid(
                format!("the answer of `devlink port show`: it has no sfnum {sfnum}"),
                answer.to_string(),
            )
        })?;
        Ok(Self {
            port: port.clone(),
            representor: representor.to_owned(),
        })
    }

    /// The port: `platform/labnic.0/INDEX`.
    pub fn port(&self) -> &str {
        &self.port
    }

    /// The name of the representor's netdev.
    pub fn representor(&self) -> &str {
        &self.representor
    }

    /// The port as `devlink port show` prints it.
    ///
    /// # Errors
    /// As [`devlink_json`]; [`Error::Invalid`] where the port is missing in it.
    pub fn show(&self) -> Result<Value> {
        let answer = devlink_json(&["port", "show", &self.port])?;
        answer
            .get("port")
            .and_then(|ports| ports.get(&self.port))
            .cloned()
            .ok_or_else(|| Error::invalid("the answer of `devlink port show`", answer.to_string()))
    }

    /// Sets attributes of the function, names and values.
    ///
    /// # Errors
    /// As [`devlink`].
    pub fn set(&self, attributes: &[&str]) -> Result<()> {
        devlink(&[&["port", "function", "set", &self.port], attributes].concat()).map(drop)
    }

    /// Activates the function with a MAC address and waits until it is
    /// attached. Returns the handle of its devlink instance.
    ///
    /// # Errors
    /// As [`devlink`]; [`Error::Invalid`] when it does not attach in time.
    pub fn activate(&self, mac: &str) -> Result<String> {
        self.set(&["hw_addr", mac, "state", "active"])?;
        let shown = self.wait_for("attached")?;
        nested(&shown)
            .ok_or_else(|| Error::invalid(format!("the port {}", self.port), shown.to_string()))
    }

    /// Waits until the function is `attached` or `detached`; returns the port.
    ///
    /// # Errors
    /// As [`Self::show`]; [`Error::Invalid`] when it takes too long.
    pub fn wait_for(&self, opstate: &str) -> Result<Value> {
        let started = Instant::now();
        loop {
            let shown = self.show()?;
            let is = shown.pointer("/function/opstate").and_then(Value::as_str);
            // The kernel reports the instance an instant after the state.
            if is == Some(opstate) && (opstate != "attached" || nested(&shown).is_some()) {
                return Ok(shown);
            }
            if started.elapsed() > PATIENCE {
                return Err(Error::invalid(
                    format!("the port {}, which should be {opstate}", self.port),
                    shown.to_string(),
                ));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Activates the function, enables its vDPA side and adds a device there. The device must be
    /// dropped before the subfunction.
    ///
    /// # Errors
    /// Those of the steps.
    pub fn device(&self, name: &str, mac: &str) -> Result<SimDevice> {
        let instance = self.activate(mac)?;
        enable_vnet(&instance, true)?;
        SimDevice::add(name, &instance, &[])
    }
}

impl Drop for Subfunction {
    fn drop(&mut self) {
        // A test may have deleted it.
        if self.show().is_ok() {
            notice::left_behind(devlink(&["port", "del", &self.port]));
        }
    }
}

/// The function's own instance, as `devlink port show` names it.
fn nested(port: &Value) -> Option<String> {
    let function = port.get("function")?;
    let instance = function.get("nested_devlink")?.as_object()?;
    instance.keys().next().cloned()
}

/// Sets `enable_vnet` of a function's instance and reloads it, so that its management device
/// appears or vanishes.
///
/// # Errors
/// As [`devlink`].
pub fn enable_vnet(instance: &str, enable: bool) -> Result<()> {
    let value = if enable { "true" } else { "false" };
    devlink(&[
        "dev",
        "param",
        "set",
        instance,
        "name",
        "enable_vnet",
        "value",
        value,
        "cmode",
        "driverinit",
    ])?;
    devlink(&["dev", "reload", instance]).map(drop)
}

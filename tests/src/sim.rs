//! vDPA devices on the kernel's simulator, for tests in the lab host.
//!
//! This module owns the devices that it creates: their names start with [`PREFIX`], and dropping
//! them deletes them. The management tool is iproute2's `vdpa`, so that tests check Bellhop's own
//! management with independent code.

use crate::error::{Error, Result};
use crate::files;
use crate::notice;
use crate::process::output;
use serde_json::Value;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// The prefix of all device names of the lab.
pub const PREFIX: &str = "lab-";

/// How long the kernel may take to show a device file.
const DEVICE_LIMIT: Duration = Duration::from_secs(10);

/// How long closing files may hold a module.
const UNLOAD_LIMIT: Duration = Duration::from_secs(5);

/// The simulator's modules, dependents first.
const MODULES: [&CStr; 3] = [c"vdpa_sim_net", c"vdpa_sim_blk", c"vdpa_sim"];

pub use launcher::rig::Mapping;

/// Fails unless this process runs in a lab host, or the user has declared that tests may change
/// this machine. Every test calls it first.
///
/// # Errors
/// [`Error::Missing`] with the remedy.
pub fn require_lab() -> Result<()> {
    if std::env::var_os("BELLHOP_LAB").is_some() {
        return Ok(());
    }
    Err(Error::missing(
        "this test needs the lab's kernel",
        "run it with `cargo lab test`",
    ))
}

/// Reloads the simulator with other parameters. No device may be in use.
///
/// # Errors
/// [`Error::File`], [`Error::System`], [`Error::Missing`] without `LAB_MODULES`, which `cargo lab`
/// sets.
pub fn reload(mapping: Mapping) -> Result<()> {
    reload_with(&mapping.parameters())
}

fn reload_with(parameters: &str) -> Result<()> {
    for module in MODULES {
        unload(module)?;
    }
    load("vdpa_sim.ko", parameters)?;
    load("vdpa_sim_net.ko", "")?;
    load("vdpa_sim_blk.ko", "")
}

/// The simulator with other parameters. Dropping it restores the defaults for later tests. Drop it
/// after its devices.
#[derive(Debug)]
#[must_use]
pub struct OtherMapping(());

impl OtherMapping {
    /// Reloads the simulator.
    ///
    /// # Errors
    /// Those of [`reload`].
    pub fn load(mapping: Mapping) -> Result<Self> {
        Self::load_with(&mapping.parameters())
    }

    /// Like [`Self::load`]; each address space has at most so many entries.
    ///
    /// # Errors
    /// Those of [`reload`].
    pub fn with_entries(mapping: Mapping, entries: u32) -> Result<Self> {
        Self::load_with(&mapping.parameters_with(entries))
    }

    fn load_with(parameters: &str) -> Result<Self> {
        // A failure may leave no module.
        let guard = Self(());
        reload_with(parameters)?;
        Ok(guard)
    }
}

impl Drop for OtherMapping {
    fn drop(&mut self) {
        notice::left_behind(reload(Mapping::DEFAULT));
    }
}

/// Unloads a module, if it is loaded. A device that was closed a moment ago may still hold it: the
/// kernel drops the module's reference when it closes the file. It closes the files of a killed
/// process after the process's end.
///
/// # Errors
/// [`Error::System`] when it stays in use for longer than `UNLOAD_LIMIT`.
pub fn unload(module: &CStr) -> Result<()> {
    let started = Instant::now();
    loop {
        match rustix::system::delete_module(module, libc::O_NONBLOCK) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => return Ok(()),
            Err(rustix::io::Errno::AGAIN) if started.elapsed() < UNLOAD_LIMIT => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(error) => {
                return Err(Error::system("unload a kernel module")(
                    std::io::Error::other(format!("{}: {error}", users(module))),
                ));
            }
        }
    }
}

/// The users of a module, as far as the kernel reports them.
fn users(module: &CStr) -> String {
    let name = module.to_string_lossy();
    let directory = Path::new("/sys/module").join(&*name);
    let count = files::read_text(&directory.join("refcnt")).unwrap_or_default();
    let holders: Vec<String> = files::list(&directory.join("holders"))
        .unwrap_or_default()
        .iter()
        .filter_map(|path| Some(path.file_name()?.to_str()?.to_owned()))
        .collect();
    format!(
        "{name} has {} users, modules {holders:?} among them",
        count.trim()
    )
}

/// Loads a module that the lab built.
///
/// # Errors
/// [`Error::File`]; [`Error::Missing`] without `LAB_MODULES`.
pub fn load(name: &str, parameters: &str) -> Result<()> {
    let directory = std::env::var_os("LAB_MODULES").ok_or_else(|| {
        Error::missing(
            "LAB_MODULES is not set",
            "run the test with `cargo lab test`",
        )
    })?;
    let path = Path::new(&directory).join(name);
    let file = File::open(&path).map_err(Error::file("open", &path))?;
    let parameters = CString::new(parameters)
        .map_err(|_| Error::invalid("module parameters", "they have a NUL"))?;
    rustix::system::finit_module(&file, &parameters, 0)
        .map_err(|error| Error::file("load", &path)(error.into()))
}

/// A device on the simulator, bound to vhost-vdpa. Dropping it deletes it.
#[derive(Debug)]
pub struct SimDevice {
    name: String,
    path: PathBuf,
}

impl SimDevice {
    /// Creates a network device. `mac` is like "02:00:5e:00:53:01"; `mtu` is in bytes.
    ///
    /// # Errors
    /// [`Error::Program`] with the tool's message; [`Error::Invalid`] when no device file appears.
    pub fn net(name: &str, mac: &str, mtu: u16) -> Result<Self> {
        let mtu = mtu.to_string();
        Self::add(name, "vdpasim_net", &["mac", mac, "mtu", &mtu])
    }

    /// Creates a block device; its size is the simulator's (128 MiB).
    ///
    /// # Errors
    /// As [`Self::net`].
    pub fn block(name: &str) -> Result<Self> {
        Self::add(name, "vdpasim_blk", &[])
    }

    /// Creates a device on any management device, with the attributes of `vdpa dev add`, names and
    /// values.
    ///
    /// # Errors
    /// As [`Self::net`].
    pub fn add(name: &str, mgmtdev: &str, attributes: &[&str]) -> Result<Self> {
        let name = format!("{PREFIX}{name}");
        vdpa(
            &[
                &["dev", "add", "name", &name, "mgmtdev", mgmtdev],
                attributes,
            ]
            .concat(),
        )?;
        // From here on a failure must not leave the device behind.
        let mut device = Self {
            name,
            path: PathBuf::new(),
        };
        device.path = device_file(&device.name)?;
        Ok(device)
    }

    /// The device's name on the vdpa bus.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its `/dev/vhost-vdpa-N`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its configuration, as `vdpa -j dev config show` prints it.
    ///
    /// # Errors
    /// [`Error::Program`]; [`Error::Invalid`] for an answer without it.
    pub fn config(&self) -> Result<Value> {
        self.member(&["dev", "config", "show", &self.name], "config")
    }

    /// The device's own statistics of a queue, as `vdpa -j dev vstats show` prints them:
    /// descriptors received and completed.
    ///
    /// # Errors
    /// As [`Self::config`].
    pub fn vstats(&self, queue: u32) -> Result<Value> {
        let queue = queue.to_string();
        self.member(
            &["dev", "vstats", "show", &self.name, "qidx", &queue],
            "vstats",
        )
    }

    fn member(&self, arguments: &[&str], member: &str) -> Result<Value> {
        let answer = vdpa(&[&["-j"], arguments].concat())?;
        let answer: Value = serde_json::from_slice(&answer)
            .map_err(|error| Error::invalid("the vdpa tool's answer", error.to_string()))?;
        answer
            .get(member)
            .and_then(|devices| devices.get(&self.name))
            .cloned()
            .ok_or_else(|| {
                Error::invalid(
                    "the vdpa tool's answer",
                    format!("it has no {member} of {}", self.name),
                )
            })
    }
}

impl Drop for SimDevice {
    fn drop(&mut self) {
        remove(&self.name);
    }
}

/// Deletes a device that a test may have deleted before. The kernel waits until its file is closed.
pub(crate) fn remove(name: &str) {
    if Path::new("/sys/bus/vdpa/devices").join(name).exists() {
        notice::left_behind(vdpa(&["dev", "del", name]));
    }
}

/// Runs iproute2's vdpa tool and returns its output.
///
/// # Errors
/// [`Error::Program`] with its message.
pub fn vdpa(arguments: &[&str]) -> Result<Vec<u8>> {
    output(Command::new("vdpa").args(arguments))
}

/// The vhost-vdpa device file of a vdpa device, by sysfs.
///
/// # Errors
/// [`Error::Invalid`] when none appears within ten seconds.
pub fn device_file(name: &str) -> Result<PathBuf> {
    let directory = Path::new("/sys/bus/vdpa/devices").join(name);
    let started = Instant::now();
    loop {
        let found = files::list(&directory)
            .unwrap_or_default()
            .into_iter()
            .filter_map(|path| path.file_name()?.to_str().map(str::to_owned))
            .find(|name| name.starts_with("vhost-vdpa-"))
            .map(|name| Path::new("/dev").join(name))
            .filter(|path| path.exists());
        if let Some(path) = found {
            return Ok(path);
        }
        if started.elapsed() > DEVICE_LIMIT {
            return Err(Error::invalid(
                format!("the vdpa device {name}"),
                "it has no vhost-vdpa device file: load vhost_vdpa, and bind the device to it",
            ));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_are_all_different() {
        let parameters: std::collections::BTreeSet<String> =
            Mapping::ALL.iter().map(|one| one.parameters()).collect();
        assert_eq!(parameters.len(), 4);
        let wanted = "use_va=0 batch_mapping=1 ";
        assert!(parameters.iter().any(|one| one.starts_with(wanted)));
    }
}

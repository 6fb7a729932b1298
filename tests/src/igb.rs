//! The igb NIC of the SR-IOV rig, for tests in the lab host. Linux's drivers of its functions (igb,
//! igbvf) bind to the PCI functions themselves, unlike those of virtio devices.
//!
//! ```text
//!   IgbNic::plug: QEMU plugs it ─▶ igb ─▶ virtual functions ─▶ their MAC addresses
//!   dropped: no virtual functions ─▶ QEMU unplugs it
//! ```
//! Its port is on the switch of the rig's other NIC.

use crate::agent::protocol::Request;
use crate::agent::request;
use crate::error::{Error, Result};
use crate::files;
use crate::notice;
use crate::process::output;
use crate::sriov::{DEVICES, DRIVER_LIMIT, SriovNic, VirtualFunction, driver_of};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// The driver of the physical function.
const DRIVER: &str = "igb";

/// Has the NIC plugged into the lab host, or unplugged.
///
/// # Errors
/// Those of [`request::ask`].
pub fn set_present(present: bool) -> Result<()> {
    request::ask(&Request::SetIgb { present })
}

/// The NIC with its virtual functions. Dropping it unplugs it.
#[derive(Debug)]
pub struct IgbNic {
    // Dropped in this order.
    nic: SriovNic,
    _plugged: Plugged,
    address: String,
    port: String,
}

#[derive(Debug)]
struct Plugged;

impl Drop for Plugged {
    fn drop(&mut self) {
        notice::left_behind(set_present(false));
    }
}

impl IgbNic {
    /// Plugs the NIC and creates `count` virtual functions with their MAC addresses.
    ///
    /// # Errors
    /// Those of [`set_present`]; [`Error::Missing`] when its driver does not take it;
    /// [`Error::Program`], [`Error::File`].
    pub fn plug(count: u32) -> Result<Self> {
        output(Command::new("modprobe").arg(DRIVER))?;
        set_present(true)?;
        let plugged = Plugged;
        let (directory, netdev) = physical_function()?;
        let address = directory.file_name().unwrap_or_default();
        let address = address.to_string_lossy().into_owned();
        // The virtual functions have no link while the physical one is down.
        ip(&["link", "set", &netdev, "up"])?;
        let nic = SriovNic::enable_at(directory, count, mac)?;
        for index in 0..count {
            let mac = mac(index as usize);
            let index = index.to_string();
            ip(&["link", "set", &netdev, "vf", &index, "mac", &mac])?;
        }
        Ok(Self {
            nic,
            _plugged: plugged,
            address,
            port: netdev,
        })
    }

    /// The PCI address of the physical function.
    pub fn physical(&self) -> &str {
        &self.address
    }

    /// The interface of the physical function, which is up.
    pub fn port(&self) -> &str {
        &self.port
    }

    /// A virtual function, counted from 0. It has no driver.
    ///
    /// # Errors
    /// As [`SriovNic::vf`].
    pub fn vf(&self, index: usize) -> Result<VirtualFunction<'_>> {
        self.nic.vf(index)
    }
}

/// The MAC address of a virtual function.
fn mac(index: usize) -> String {
    format!("02:00:5e:00:54:{:02x}", index + 0x11)
}

fn ip(arguments: &[&str]) -> Result<()> {
    output(Command::new("ip").args(arguments)).map(drop)
}

/// Waits for the physical function and its network device.
fn physical_function() -> Result<(PathBuf, String)> {
    let started = Instant::now();
    while started.elapsed() < DRIVER_LIMIT {
        for directory in files::list(Path::new(DEVICES))? {
            if driver_of(&directory).as_deref() != Some(DRIVER) {
                continue;
            }
            let netdev = files::list(&directory.join("net")).unwrap_or_default();
            if let Some(name) = netdev.first().and_then(|path| path.file_name()) {
                let name = name.to_string_lossy().into_owned();
                return Ok((directory, name));
            }
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    Err(Error::missing(
        format!("{DRIVER} did not take the NIC that was plugged"),
        "the kernel's log (dmesg) says more",
    ))
}

//! Finds the network interface of a device that `virtio_vdpa` drives, in sysfs:
//! `virtioN/net/INTERFACE/ifindex` below the device that makes its memory accesses.
//!
//! `virtio_vdpa` makes the virtio device a child of that one (`dma_dev`,
//! drivers/virtio/virtio_vdpa.c). For software devices that is the vDPA device itself, for those of
//! NICs the parent, such as the PCI function.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::Bus;
use crate::error::Error;
use crate::sysfs::names;

/// The location of a device's network interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Netdev {
    /// No interface: there is no virtio device, or no network driver for it yet.
    None,
    /// In the network namespace that this sysfs shows.
    Here {
        /// Its name.
        name: String,
        /// Its index.
        index: u32,
    },
    /// In a network namespace that this sysfs does not show.
    Elsewhere,
}

impl Bus {
    /// Finds the network interface of the device called `name`.
    ///
    /// # Errors
    /// As [`Bus::device`].
    pub fn netdev(&self, name: &str) -> Result<Netdev, Error> {
        if self.device(name)?.driver.as_deref() != Some("virtio_vdpa") {
            return Ok(Netdev::None);
        }
        let directory = self.devices.join(name);
        let mut virtio = virtio_devices(&directory)?;
        if virtio.is_empty()
            && let Ok(directory) = fs::canonicalize(&directory)
            && let Some(parent) = directory.parent()
        {
            virtio = virtio_devices(parent)?;
        }
        // With several vDPA devices on one function the owner of each is unknown.
        if let [virtio] = &virtio[..] {
            let net = virtio.join("net");
            if !net.is_dir() {
                return Ok(Netdev::None);
            }
            // The directory stays when its interface moves to another namespace.
            let mut found = Netdev::Elsewhere;
            for name in names(&net)? {
                let path = net.join(&name).join("ifindex");
                let index = match fs::read_to_string(&path) {
                    // The interface was renamed, moved or removed meanwhile.
                    Err(error) if is_gone(&error) => continue,
                    text => text.map_err(Error::read(&path))?,
                };
                if let Ok(index) = index.trim().parse() {
                    found = Netdev::Here { name, index };
                }
            }
            return Ok(found);
        }
        Ok(Netdev::None)
    }
}

/// The virtio devices that are children of this device.
fn virtio_devices(directory: &Path) -> Result<Vec<PathBuf>, Error> {
    let names = names(directory)?.into_iter();
    Ok(names
        .filter(|name| is_virtio(name))
        .map(|name| directory.join(name))
        .collect())
}

fn is_gone(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV)
}

fn is_virtio(name: &str) -> bool {
    let number = name.strip_prefix("virtio");
    number.is_some_and(|number| number.parse::<u32>().is_ok())
}

//! The network interface of a device that `virtio_vdpa` drives, in sysfs:
//! `/sys/bus/vdpa/devices/NAME/virtioN/net/INTERFACE/ifindex`.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;

use super::{Bus, BusError, read_error};

/// Where a device's network interface is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Netdev {
    /// There is none: no virtio device, or no network driver for it yet.
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
    /// Where the network interface of the device called `name` is.
    ///
    /// # Errors
    /// As [`Bus::device`].
    pub fn netdev(&self, name: &str) -> Result<Netdev, BusError> {
        // That there is such a device.
        self.device(name)?;
        let directory = self.devices.join(name);
        for entry in names(&directory)? {
            if !is_virtio(OsStr::new(&entry)) {
                continue;
            }
            let net = directory.join(&entry).join("net");
            if !net.is_dir() {
                continue;
            }
            // The directory stays when its interface goes to another namespace.
            let mut found = Netdev::Elsewhere;
            for name in names(&net)? {
                let path = net.join(&name).join("ifindex");
                let index = match fs::read_to_string(&path) {
                    // It was renamed, moved or removed since.
                    Err(error) if is_gone(&error) => continue,
                    text => text.map_err(|source| read_error(&path, source))?,
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

/// Names in a directory; none if it is gone.
fn names(directory: &Path) -> Result<Vec<String>, BusError> {
    let entries = match fs::read_dir(directory) {
        Err(error) if is_gone(&error) => return Ok(Vec::new()),
        entries => entries.map_err(|source| read_error(directory, source))?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|source| read_error(directory, source))?;
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    Ok(names)
}

fn is_gone(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV)
}

fn is_virtio(name: &OsStr) -> bool {
    let number = name.to_str().and_then(|name| name.strip_prefix("virtio"));
    number.is_some_and(|number| number.parse::<u32>().is_ok())
}

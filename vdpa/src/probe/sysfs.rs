//! Finds a device's name, parent and driver in sysfs.
//!
//! ```text
//!   /sys/dev/char/MAJOR:MINOR -> …/PARENT/NAME/vhost-vdpa-N
//!   …/PARENT/driver -> the parent's driver
//!   /sys/devices/NAME/vhost-vdpa-N          a simulator's device has no parent
//! ```

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{major, minor};

/// The names of a device and its parent; `None` if sysfs has none.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize)]
pub struct Place {
    /// The vdpa device, named as in `vdpa dev show`.
    pub name: Option<String>,
    /// The parent device, such as a PCI function.
    pub parent: Option<String>,
    /// The parent's driver.
    pub driver: Option<String>,
}

impl Place {
    /// Reads the names for the character device at `path`.
    pub(super) fn of(path: &Path) -> Self {
        let Ok(metadata) = fs::metadata(path) else {
            return Self::default();
        };
        let number = metadata.rdev();
        let link = format!("/sys/dev/char/{}:{}", major(number), minor(number));
        match fs::canonicalize(link) {
            Ok(directory) => Self::around(&directory),
            Err(_) => Self::default(),
        }
    }

    /// Reads the names from the device's sysfs directory.
    fn around(directory: &Path) -> Self {
        let device = directory.parent();
        let parent = device
            .and_then(Path::parent)
            .filter(|&parent| parent != Path::new("/sys/devices"));
        Self {
            name: device.and_then(name),
            parent: parent.and_then(name),
            driver: parent
                .and_then(|parent| fs::read_link(parent.join("driver")).ok())
                .and_then(|driver: PathBuf| name(&driver)),
        }
    }
}

fn name(path: &Path) -> Option<String> {
    Some(path.file_name()?.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_from_the_path() {
        let place = Place::around(Path::new("/sys/devices/pci0/0000:01:00.1/vf0/vhost-vdpa-3"));
        assert_eq!(place.name.as_deref(), Some("vf0"));
        assert_eq!(place.parent.as_deref(), Some("0000:01:00.1"));
        assert_eq!(place.driver, None);
        let place = Place::around(Path::new("/sys/devices/sim0/vhost-vdpa-0"));
        assert_eq!((place.name.as_deref(), place.parent), (Some("sim0"), None));
        assert_eq!(Place::of(Path::new("/dev/none")), Place::default());
    }
}

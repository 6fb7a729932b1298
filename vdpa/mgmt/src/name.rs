//! Names of management devices and of vDPA devices.

use std::fmt;
use std::str::FromStr;

use netlink_packet_core::DefaultNla;
use serde::{Deserialize, Serialize};

use super::error::{Error, ErrorKind};
use super::netlink::attributes::Attributes;
use super::netlink::error::Malformed;
use super::netlink::message::string;
use super::uapi::{VDPA_ATTR_MGMTDEV_BUS_NAME, VDPA_ATTR_MGMTDEV_DEV_NAME};

/// The longest name of a directory in sysfs, in bytes (NAME_MAX).
const NAME_MAX: usize = 255;

/// Whether sysfs can have a directory of this name.
pub(super) fn is_name(text: &str) -> bool {
    let length = text.len();
    (1..=NAME_MAX).contains(&length)
        && text != "."
        && text != ".."
        && !text.contains(|c: char| c == '/' || c.is_control())
}

/// Checks the name of an existing vDPA device before it is sent.
pub(super) fn device(text: &str) -> Result<&str, Error> {
    if is_name(text) {
        return Ok(text);
    }
    let message = format!(
        "{text:?} does not name a vDPA device: names have 1 to 255 bytes, without slashes and \
         control characters"
    );
    Err(Error::new(ErrorKind::BadName, message))
}

/// The name of a management device, in iproute2's form: `vdpasim_net`, or with its bus
/// `pci/0000:01:00.1`, `auxiliary/mlx5_core.sf.1`. Serde uses the same form.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MgmtDeviceName {
    bus: Option<String>,
    name: String,
}

impl MgmtDeviceName {
    /// The bus of the device, if it has one.
    #[must_use]
    pub fn bus(&self) -> Option<&str> {
        self.bus.as_deref()
    }

    /// The name without the bus.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The name of the management device for the device `name` of the bus `bus`.
    pub(super) fn on(bus: &str, name: &str) -> Self {
        Self {
            bus: Some(bus.to_owned()),
            name: name.to_owned(),
        }
    }

    pub(super) fn of(attributes: &Attributes<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            bus: attributes.string(VDPA_ATTR_MGMTDEV_BUS_NAME),
            name: attributes.needed_string(VDPA_ATTR_MGMTDEV_DEV_NAME)?,
        })
    }

    pub(super) fn attributes(&self) -> Vec<DefaultNla> {
        let bus = self.bus.as_deref();
        bus.map(|bus| string(VDPA_ATTR_MGMTDEV_BUS_NAME, bus))
            .into_iter()
            .chain([string(VDPA_ATTR_MGMTDEV_DEV_NAME, &self.name)])
            .collect()
    }
}

vdpa::text_form!(MgmtDeviceName, Error);

impl FromStr for MgmtDeviceName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let (bus, name) = match text.split_once('/') {
            Some((bus, name)) => (Some(bus), name),
            None => (None, text),
        };
        if !is_name(name) || bus.is_some_and(|bus| !is_name(bus)) {
            let message = format!(
                "{text:?} does not name a management device: write it as NAME or BUS/NAME, such as \
                 pci/0000:01:00.1"
            );
            return Err(Error::new(ErrorKind::BadName, message));
        }
        Ok(Self {
            bus: bus.map(str::to_owned),
            name: name.to_owned(),
        })
    }
}

impl fmt::Display for MgmtDeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.bus {
            Some(bus) => write!(f, "{bus}/{}", self.name),
            None => f.write_str(&self.name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_and_without_a_bus_are_read_and_written() {
        for (text, bus, name) in [
            ("vdpasim_net", None, "vdpasim_net"),
            ("pci/0000:01:00.1", Some("pci"), "0000:01:00.1"),
        ] {
            let read: MgmtDeviceName = text.parse().unwrap();
            assert_eq!((read.bus(), read.name()), (bus, name));
            assert_eq!(read.to_string(), text);
        }
    }

    #[test]
    fn invalid_names_are_refused() {
        let long = "x".repeat(256);
        for text in [
            "", "/", "pci/", "/x", "a/b/c", ".", "pci/..", "a\0b", "a\nb", &long,
        ] {
            assert!(text.parse::<MgmtDeviceName>().is_err(), "{text:?}");
            assert!(device(text).is_err(), "{text:?}");
        }
        assert!(device(&long[1..]).is_ok());
    }
}

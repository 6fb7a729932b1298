//! Names of devlink objects: an instance is a device on its bus, a port a number in an instance.

use std::fmt;
use std::str::FromStr;

use netlink_packet_core::DefaultNla;
use serde::{Deserialize, Serialize};

use super::uapi::*;
use crate::error::{Error, ErrorKind};
use crate::name::is_name;
use crate::netlink::attributes::Attributes;
use crate::netlink::error::Malformed;
use crate::netlink::message::{string, value};

/// A devlink instance: `pci/0000:06:00.0`, `auxiliary/mlx5_core.sf.4`, `netdevsim/netdevsim10`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Handle {
    bus: Box<str>,
    device: Box<str>,
}

impl Handle {
    /// The device called `device` on this bus of sysfs.
    ///
    /// # Errors
    /// `BadName` for an impossible name of a sysfs directory.
    pub fn new(bus: &str, device: &str) -> Result<Self, Error> {
        if !is_name(bus) || !is_name(device) {
            return Err(bad_instance(&format!("{bus}/{device}")));
        }
        Ok(Self {
            bus: bus.into(),
            device: device.into(),
        })
    }

    /// The bus, such as `pci`.
    #[must_use]
    pub fn bus(&self) -> &str {
        &self.bus
    }

    /// The device on that bus, such as `0000:06:00.0`.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.device
    }

    /// One of its ports.
    #[must_use]
    pub fn port(&self, index: u32) -> PortHandle {
        PortHandle {
            handle: self.clone(),
            index,
        }
    }

    pub(super) fn of(attributes: &Attributes<'_>) -> Result<Self, Malformed> {
        let bus = attributes.needed_string(DEVLINK_ATTR_BUS_NAME)?;
        let device = attributes.needed_string(DEVLINK_ATTR_DEV_NAME)?;
        Self::new(&bus, &device).map_err(|error| Malformed::new("handle", error.to_string()))
    }

    pub(super) fn attributes(&self) -> Vec<DefaultNla> {
        vec![
            string(DEVLINK_ATTR_BUS_NAME, &self.bus),
            string(DEVLINK_ATTR_DEV_NAME, &self.device),
        ]
    }
}

fn bad_instance(text: &str) -> Error {
    let message = format!(
        "{text:?} does not name a devlink instance: write it as BUS/DEVICE, such as \
         pci/0000:06:00.0"
    );
    Error::new(ErrorKind::BadName, message)
}

vdpa::text_form!(Handle, Error);

impl FromStr for Handle {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let (bus, device) = text.split_once('/').unwrap_or_default();
        Self::new(bus, device).map_err(|_| bad_instance(text))
    }
}

impl fmt::Display for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.bus, self.device)
    }
}

/// A port of an instance: `pci/0000:06:00.0/32768`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PortHandle {
    handle: Handle,
    index: u32,
}

impl PortHandle {
    /// The instance of the port.
    #[must_use]
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Its number in the instance, chosen by the driver.
    #[must_use]
    pub fn index(&self) -> u32 {
        self.index
    }

    pub(super) fn of(attributes: &Attributes<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            handle: Handle::of(attributes)?,
            index: attributes.needed_u32(DEVLINK_ATTR_PORT_INDEX)?,
        })
    }

    pub(super) fn attributes(&self) -> Vec<DefaultNla> {
        let mut attributes = self.handle.attributes();
        attributes.push(value(DEVLINK_ATTR_PORT_INDEX, &self.index.to_ne_bytes()));
        attributes
    }
}

vdpa::text_form!(PortHandle, Error);

impl FromStr for PortHandle {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let read = || {
            let (handle, index) = text.rsplit_once('/')?;
            Some(Self {
                handle: handle.parse().ok()?,
                index: port_index(index)?,
            })
        };
        read().ok_or_else(|| {
            let message = format!(
                "{text:?} does not name a devlink port: write it as BUS/DEVICE/INDEX, such as \
                 pci/0000:06:00.0/1"
            );
            Error::new(ErrorKind::BadName, message)
        })
    }
}

impl fmt::Display for PortHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.handle, self.index)
    }
}

/// Parses a port's number in decimal. `parse` alone would accept a sign.
pub(super) fn port_index(text: &str) -> Option<u32> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().ok())?
}

/// An instance that belongs to another one: a subfunction's, to its port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NestedDevlink {
    /// The instance.
    pub handle: Handle,
    /// Its network namespace, as this namespace's number for it; `None` if it is this one. −1 if
    /// this namespace has no number for it.
    pub namespace: Option<i32>,
}

impl NestedDevlink {
    pub(super) fn of(attributes: &Attributes<'_>) -> Result<Self, Malformed> {
        let namespace = attributes.u32(DEVLINK_ATTR_NETNS_ID)?;
        Ok(Self {
            handle: Handle::of(attributes)?,
            namespace: namespace.map(u32::cast_signed),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_read_and_written() {
        for (text, bus, device) in [
            ("pci/0000:06:00.0", "pci", "0000:06:00.0"),
            ("auxiliary/mlx5_core.sf.4", "auxiliary", "mlx5_core.sf.4"),
            ("netdevsim/netdevsim10", "netdevsim", "netdevsim10"),
        ] {
            let handle: Handle = text.parse().unwrap();
            assert_eq!((handle.bus(), handle.device()), (bus, device));
            assert_eq!(handle.to_string(), text);
            let port: PortHandle = format!("{text}/4294967295").parse().unwrap();
            assert_eq!((port.handle(), port.index()), (&handle, u32::MAX));
            assert_eq!(port, handle.port(u32::MAX));
            assert_eq!(port.to_string(), format!("{text}/4294967295"));
        }
    }

    #[test]
    fn invalid_handles_are_refused() {
        let long = format!("pci/{}", "x".repeat(256));
        for text in [
            "", "/", "pci", "pci/", "/x", "pci/..", "../x", "a/b/c", "a\0/b", "pci/a\n", &long,
        ] {
            assert!(text.parse::<Handle>().is_err(), "{text:?}");
        }
        for text in [
            "",
            "1",
            "pci/0000:06:00.0",
            "pci/0000:06:00.0/",
            "pci/0000:06:00.0/+1",
            "pci/0000:06:00.0/-1",
            "pci/0000:06:00.0/4294967296",
            "pci/0000:06:00.0/x",
            "pci/a/b/1",
        ] {
            assert!(text.parse::<PortHandle>().is_err(), "{text:?}");
        }
    }
}

//! Rate objects: a function by its port, or a node of an instance.

use std::fmt;
use std::str::FromStr;

use netlink_packet_core::DefaultNla;

use super::handle::{Handle, PortHandle, port_index};
use super::uapi::*;
use crate::error::{Error, ErrorKind};
use crate::name::is_name;
use crate::netlink::attributes::Attributes;
use crate::netlink::error::Malformed;
use crate::netlink::message::string;

/// An object with a rate: `pci/0000:06:00.0/1`, a port; `pci/0000:06:00.0/group1`, a node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RateObject {
    /// A function, by its port.
    Leaf(PortHandle),
    /// A group of functions and of groups.
    Node(NodeName),
}

/// A rate node of an instance.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeName {
    handle: Handle,
    name: Box<str>,
}

impl NodeName {
    /// The node called `name`.
    ///
    /// # Errors
    /// `BadName` for a name that is a number, empty, too long or has slashes.
    pub fn new(handle: Handle, name: &str) -> Result<Self, Error> {
        let number = name.bytes().all(|byte| byte.is_ascii_digit());
        if !is_name(name) || number {
            return Err(bad_node(name));
        }
        Ok(Self {
            handle,
            name: name.into(),
        })
    }

    /// The instance of the node.
    #[must_use]
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Its name in the instance.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
}

pub(super) fn bad_node(name: &str) -> Error {
    let message = format!(
        "{name:?} does not name a rate node: names have 1 to 255 bytes, without slashes and \
         control characters, and are not numbers"
    );
    Error::new(ErrorKind::BadName, message)
}

impl FromStr for NodeName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text.parse()? {
            RateObject::Node(node) => Ok(node),
            RateObject::Leaf(_) => Err(bad_node(text)),
        }
    }
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.handle, self.name)
    }
}

impl RateObject {
    /// The instance of the object.
    #[must_use]
    pub fn handle(&self) -> &Handle {
        match self {
            Self::Leaf(port) => port.handle(),
            Self::Node(node) => &node.handle,
        }
    }

    pub(super) fn of(attributes: &Attributes<'_>) -> Result<Self, Malformed> {
        let handle = Handle::of(attributes)?;
        if let Some(name) = attributes.string(DEVLINK_ATTR_RATE_NODE_NAME) {
            return NodeName::new(handle, &name)
                .map(Self::Node)
                .map_err(|error| Malformed::new("rate", error.to_string()));
        }
        Ok(Self::Leaf(
            handle.port(attributes.needed_u32(DEVLINK_ATTR_PORT_INDEX)?),
        ))
    }

    pub(super) fn attributes(&self) -> Vec<DefaultNla> {
        match self {
            Self::Leaf(port) => port.attributes(),
            Self::Node(node) => {
                let mut attributes = node.handle.attributes();
                attributes.push(string(DEVLINK_ATTR_RATE_NODE_NAME, &node.name));
                attributes
            }
        }
    }
}

impl FromStr for RateObject {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let bad = || {
            let message = format!(
                "{text:?} names neither a port nor a rate node: write it as BUS/DEVICE/INDEX or \
                 BUS/DEVICE/NODE"
            );
            Error::new(ErrorKind::BadName, message)
        };
        let (handle, last) = text.rsplit_once('/').ok_or_else(bad)?;
        let handle: Handle = handle.parse().map_err(|_| bad())?;
        match port_index(last) {
            Some(index) => Ok(Self::Leaf(handle.port(index))),
            None => NodeName::new(handle, last).map(Self::Node),
        }
    }
}

impl fmt::Display for RateObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Leaf(port) => port.fmt(f),
            Self::Node(node) => node.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_ports_and_words_are_nodes() {
        let object = |text: &str| text.parse::<RateObject>();
        let handle: Handle = "netdevsim/netdevsim1".parse().unwrap();
        let leaf = RateObject::Leaf(handle.port(128));
        assert_eq!(object("netdevsim/netdevsim1/128").unwrap(), leaf);
        let node = RateObject::Node(NodeName::new(handle, "1st").unwrap());
        assert_eq!(object("netdevsim/netdevsim1/1st").unwrap(), node);
        assert_eq!(node.to_string(), "netdevsim/netdevsim1/1st");
        assert!("netdevsim/netdevsim1/1".parse::<NodeName>().is_err());
        for bad in [
            "",
            "pci",
            "pci/x",
            "pci/x/",
            "pci/x/99999999999",
            "pci/x/..",
        ] {
            assert!(object(bad).is_err(), "{bad:?}");
        }
    }
}

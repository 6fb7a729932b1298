//! Rates: what functions may send, each by itself (a leaf) and in groups (nodes).

use std::fmt;
use std::str::FromStr;

use netlink_packet_core::DefaultNla;

use super::connection::Devlink;
use super::handle::{Handle, PortHandle, port_index};
use super::operation::{Operation, invalid, nothing};
use super::uapi::*;
use crate::error::{Error, ErrorKind};
use crate::name::is_name;
use crate::netlink::attributes::Attributes;
use crate::netlink::exchange::Malformed;
use crate::netlink::message::{Message, string, value};

/// enum devlink_rate_type.
const DEVLINK_RATE_TYPE_LEAF: u16 = 0;
const DEVLINK_RATE_TYPE_NODE: u16 = 1;

/// What has a rate: `pci/0000:06:00.0/1`, a port; `pci/0000:06:00.0/group1`, a node.
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

    /// The instance that has it.
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

fn bad_node(name: &str) -> Error {
    let message = format!(
        "{name:?} does not name a rate node: names have 1 to 255 bytes, without slashes and control \
         characters, and are no number"
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
    /// The instance that has it.
    #[must_use]
    pub fn handle(&self) -> &Handle {
        match self {
            Self::Leaf(port) => port.handle(),
            Self::Node(node) => &node.handle,
        }
    }

    fn of(attributes: &Attributes<'_>) -> Result<Self, Malformed> {
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

    fn attributes(&self) -> Vec<DefaultNla> {
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

/// The rate of something (`DEVLINK_CMD_RATE_GET`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rate {
    /// What has it.
    pub object: RateObject,
    /// What it is sure to get, in bytes per second; 0 is nothing.
    pub tx_share: u64,
    /// What it gets at most, in bytes per second; 0 is no limit.
    pub tx_max: u64,
    /// Those of higher priority send first (kernel 6.3 and later).
    pub tx_priority: Option<u32>,
    /// Its part among those of the same priority (kernel 6.3 and later).
    pub tx_weight: Option<u32>,
    /// The node that it is in.
    pub parent: Option<String>,
}

impl Rate {
    pub(super) fn of(message: &Message) -> Result<Self, Malformed> {
        let attributes = Attributes::parse(&message.attributes)?;
        let object = RateObject::of(&attributes)?;
        let expected = match &object {
            RateObject::Leaf(_) => DEVLINK_RATE_TYPE_LEAF,
            RateObject::Node(_) => DEVLINK_RATE_TYPE_NODE,
        };
        let kind = attributes.u16(DEVLINK_ATTR_RATE_TYPE)?;
        if kind.is_some_and(|kind| kind != expected) {
            let kind = DEVLINK_ATTR_RATE_TYPE;
            return Err(Malformed::attribute(kind, "it does not fit the name"));
        }
        let parent = attributes.string(DEVLINK_ATTR_RATE_PARENT_NODE_NAME);
        Ok(Self {
            object,
            tx_share: attributes.u64(DEVLINK_ATTR_RATE_TX_SHARE)?.unwrap_or(0),
            tx_max: attributes.u64(DEVLINK_ATTR_RATE_TX_MAX)?.unwrap_or(0),
            tx_priority: attributes.u32(DEVLINK_ATTR_RATE_TX_PRIORITY)?,
            tx_weight: attributes.u32(DEVLINK_ATTR_RATE_TX_WEIGHT)?,
            parent: parent.filter(|parent| !parent.is_empty()),
        })
    }
}

/// What a rate is to be. None is left as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RateSettings {
    /// What it is sure to get, in bytes per second; 0 is nothing.
    pub tx_share: Option<u64>,
    /// What it gets at most, in bytes per second; 0 is no limit.
    pub tx_max: Option<u64>,
    /// Its priority.
    pub tx_priority: Option<u32>,
    /// Its weight.
    pub tx_weight: Option<u32>,
    /// Where it is to be.
    pub parent: Option<RateParent>,
}

/// Where a rate is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RateParent {
    /// In no node.
    None,
    /// In the node of this name, of the same instance.
    Node(String),
}

impl RateSettings {
    fn attributes(&self) -> Result<Vec<DefaultNla>, Error> {
        if let (Some(share), Some(max)) = (self.tx_share, self.tx_max)
            && max != 0
            && share > max
        {
            return Err(invalid(format!(
                "tx_share {share} is above tx_max {max} (bytes per second; 0 is no limit)"
            )));
        }
        let parent = match &self.parent {
            None => None,
            Some(RateParent::None) => Some(""),
            Some(RateParent::Node(name)) if is_name(name) => Some(name.as_str()),
            Some(RateParent::Node(name)) => return Err(bad_node(name)),
        };
        let rate = |kind, rate: Option<u64>| rate.map(|rate| value(kind, &rate.to_ne_bytes()));
        let number = |kind, number: Option<u32>| number.map(|one| value(kind, &one.to_ne_bytes()));
        Ok([
            rate(DEVLINK_ATTR_RATE_TX_SHARE, self.tx_share),
            rate(DEVLINK_ATTR_RATE_TX_MAX, self.tx_max),
            number(DEVLINK_ATTR_RATE_TX_PRIORITY, self.tx_priority),
            number(DEVLINK_ATTR_RATE_TX_WEIGHT, self.tx_weight),
            parent.map(|name| string(DEVLINK_ATTR_RATE_PARENT_NODE_NAME, name)),
        ]
        .into_iter()
        .flatten()
        .collect())
    }
}

/// What is asked with, and what answers.
const GET: (u8, u8) = (DEVLINK_CMD_RATE_GET, DEVLINK_CMD_RATE_NEW);

impl Devlink {
    /// All rates of all instances, in the kernel's order.
    ///
    /// # Errors
    /// [`Error`].
    pub fn rates(&self) -> Result<Vec<Rate>, Error> {
        let operation = Operation::List("rates");
        self.family.dump(&operation, GET, Vec::new(), Rate::of)
    }

    /// One rate.
    ///
    /// # Errors
    /// `NotFound`, or another one.
    pub fn rate(&self, object: &RateObject) -> Result<Rate, Error> {
        let operation = Operation::ShowRate(object.clone());
        self.family
            .get(&operation, GET, object.attributes(), Rate::of)
    }

    /// Adds a node.
    ///
    /// # Errors
    /// `Invalid` before anything is sent; `NameTaken`, `Refused`, `NotSupported`, `NotPermitted`,
    /// `NotFound`, or another one.
    pub fn add_rate(&self, node: &NodeName, settings: &RateSettings) -> Result<(), Error> {
        let object = RateObject::Node(node.clone());
        let attributes = [object.attributes(), settings.attributes()?].concat();
        let operation = Operation::AddRate(object);
        self.family
            .change(&operation, DEVLINK_CMD_RATE_NEW, attributes)
    }

    /// Changes the rate of a function or a node. Drivers take what is given one by one: what comes before a
    /// refusal stays.
    ///
    /// # Errors
    /// `Invalid` before anything is sent; `NotFound`, `NotSupported`, `NotPermitted`, or another
    /// one.
    pub fn set_rate(&self, object: &RateObject, settings: &RateSettings) -> Result<(), Error> {
        let changes = settings.attributes()?;
        if changes.is_empty() {
            return Err(nothing());
        }
        let operation = Operation::SetRate(object.clone());
        let attributes = [object.attributes(), changes].concat();
        self.family
            .change(&operation, DEVLINK_CMD_RATE_SET, attributes)
    }

    /// Deletes a node that nothing is in.
    ///
    /// # Errors
    /// `NotFound`, `Refused` if something is in it, `NotPermitted`, or another one.
    pub fn delete_rate(&self, node: &NodeName) -> Result<(), Error> {
        let object = RateObject::Node(node.clone());
        let attributes = object.attributes();
        let operation = Operation::DeleteRate(object);
        self.family
            .change(&operation, DEVLINK_CMD_RATE_DEL, attributes)
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

//! Rates: limits on what functions send, individually (a leaf) and in groups (nodes).

use netlink_packet_core::DefaultNla;

use super::connection::Devlink;
use super::operation::{Operation, invalid, nothing};
use super::rate_object::{NodeName, RateObject, bad_node};
use super::uapi::*;
use crate::error::Error;
use crate::name::is_name;
use crate::netlink::attributes::Attributes;
use crate::netlink::error::Malformed;
use crate::netlink::message::{Message, string, value};

/// enum devlink_rate_type.
const DEVLINK_RATE_TYPE_LEAF: u16 = 0;
const DEVLINK_RATE_TYPE_NODE: u16 = 1;

/// The rate of an object (`DEVLINK_CMD_RATE_GET`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rate {
    /// The object.
    pub object: RateObject,
    /// Guaranteed rate in bytes per second; 0 is no guarantee.
    pub tx_share: u64,
    /// Maximum rate in bytes per second; 0 is no limit.
    pub tx_max: u64,
    /// Objects of higher priority send first (kernel 6.3 and later).
    pub tx_priority: Option<u32>,
    /// Its share among objects of the same priority (kernel 6.3 and later).
    pub tx_weight: Option<u32>,
    /// The node that contains it.
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

/// The settings of a rate. `None` leaves one unchanged.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RateSettings {
    /// Guaranteed rate in bytes per second; 0 is no guarantee.
    pub tx_share: Option<u64>,
    /// Maximum rate in bytes per second; 0 is no limit.
    pub tx_max: Option<u64>,
    /// Its priority.
    pub tx_priority: Option<u32>,
    /// Its weight.
    pub tx_weight: Option<u32>,
    /// Its parent.
    pub parent: Option<RateParent>,
}

/// The parent of a rate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RateParent {
    /// No node.
    None,
    /// The node of this name, of the same instance.
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

/// The command of a request, and that of its answers.
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
        let operation = Operation::ShowRate(object);
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
        let operation = Operation::AddRate(&object);
        self.family
            .change(&operation, DEVLINK_CMD_RATE_NEW, attributes)
    }

    /// Changes the rate of a function or a node. Drivers apply the settings one by one: those
    /// before a refusal stay.
    ///
    /// # Errors
    /// `Invalid` before anything is sent; `NotFound`, `NotSupported`, `NotPermitted`, or another
    /// one.
    pub fn set_rate(&self, object: &RateObject, settings: &RateSettings) -> Result<(), Error> {
        let changes = settings.attributes()?;
        if changes.is_empty() {
            return Err(nothing());
        }
        let operation = Operation::SetRate(object);
        let attributes = [object.attributes(), changes].concat();
        self.family
            .change(&operation, DEVLINK_CMD_RATE_SET, attributes)
    }

    /// Deletes an empty node.
    ///
    /// # Errors
    /// `NotFound`, `Refused` if the node is not empty, `NotPermitted`, or another one.
    pub fn delete_rate(&self, node: &NodeName) -> Result<(), Error> {
        let object = RateObject::Node(node.clone());
        let attributes = object.attributes();
        let operation = Operation::DeleteRate(&object);
        self.family
            .change(&operation, DEVLINK_CMD_RATE_DEL, attributes)
    }
}

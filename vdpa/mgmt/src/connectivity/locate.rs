//! The place where a function of a NIC is connected: its representor, or the function itself in
//! legacy mode.

use super::error::ConnectivityError;
use crate::link::{Link, Links, PhysPortName};
use crate::pci::{Address, Pci};

/// The place where a function is connected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A host-side interface: a representor of switchdev mode, or any other that can be a bridge's
    /// port.
    Link(Link),
    /// A virtual function of a NIC in legacy mode, which has no host-side interface.
    VirtualFunction {
        /// The network interface of its physical function.
        physical: String,
        /// Its number, from 0.
        number: u32,
    },
}

impl Place {
    /// The place of the virtual function at this PCI address.
    ///
    /// # Errors
    /// [`ConnectivityError::NotVirtual`], [`ConnectivityError::NoInterface`] if its physical
    /// function has none here, or another one.
    pub fn of_virtual_function(
        links: &Links,
        pci: &Pci,
        address: Address,
    ) -> Result<Self, ConnectivityError> {
        let physical = pci.function(address)?.physical_function;
        let physical = physical.ok_or(ConnectivityError::NotVirtual(address))?;
        let function = pci.function(physical)?;
        let mut numbers = function.virtual_functions.iter();
        let number = numbers.find(|one| one.1 == address).map(|one| one.0);
        let number = number.ok_or(ConnectivityError::NotVirtual(address))?;
        let interface = function.netdevs.first();
        let interface = interface.ok_or(ConnectivityError::NoInterface(physical))?;
        let in_legacy_mode = || Self::VirtualFunction {
            physical: interface.clone(),
            number,
        };
        // No port name has such a number, so the function has no representor.
        let Ok(vf) = u16::try_from(number) else {
            return Ok(in_legacy_mode());
        };
        let port = PhysPortName::VirtualFunction {
            controller: None,
            pf: u16::from(physical.function()),
            vf,
        };
        match representor(links, interface, port) {
            Ok(link) => Ok(Self::Link(link)),
            Err(
                ConnectivityError::NotSwitchdev { .. } | ConnectivityError::NoRepresentor { .. },
            ) => Ok(in_legacy_mode()),
            Err(error) => Err(error),
        }
    }
}

/// The interface that represents a port of the same switch as `physical`.
///
/// # Errors
/// [`ConnectivityError::NotSwitchdev`], [`ConnectivityError::NoRepresentor`],
/// [`ConnectivityError::Ambiguous`], or another one.
pub fn representor(
    links: &Links,
    physical: &str,
    port: PhysPortName,
) -> Result<Link, ConnectivityError> {
    let physical = links.link(physical)?;
    among(links.links()?, &physical, port)
}

/// The representor among these interfaces.
pub(super) fn among(
    links: Vec<Link>,
    physical: &Link,
    port: PhysPortName,
) -> Result<Link, ConnectivityError> {
    let switch = physical.phys_switch_id.as_ref();
    let switch = switch.ok_or_else(|| ConnectivityError::NotSwitchdev {
        interface: physical.name.clone(),
    })?;
    let mut found: Vec<Link> = links
        .into_iter()
        .filter(|link| {
            let name = link.phys_port_name.as_ref();
            link.phys_switch_id.as_ref() == Some(switch)
                && name.and_then(|name| name.parse().ok()) == Some(port)
        })
        .collect();
    match (found.pop(), found.len()) {
        (Some(link), 0) => Ok(link),
        (Some(one), _) => Err(ConnectivityError::Ambiguous {
            port: port.to_string(),
            one: one.name,
            other: found.pop().map(|link| link.name).unwrap_or_default(),
        }),
        (None, _) => Err(ConnectivityError::NoRepresentor {
            interface: physical.name.clone(),
            port: port.to_string(),
        }),
    }
}

//! Ports of NICs' switches: maps network interfaces to the virtual functions or subfunctions that
//! they represent.
//!
//! The only sources are `/sys/class/net/*/phys_port_name` and `phys_switch_id`. Drivers with port
//! names other than the kernel's (`__devlink_port_phys_port_name_get`) have none here.

use std::path::Path;

use super::tree::Representor;
use crate::error::Error;
use crate::link::PhysPortName;
use crate::pci::{Address, Pci};
use crate::sysfs::{attribute, link_name, names};

/// The peer of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    /// A virtual function by its number.
    VirtualFunction(u32),
    /// A subfunction by its number.
    Subfunction(u32),
}

impl Target {
    /// The peer of a port with this name, and the number of its physical function. Functions of
    /// another machine have no peer here. `None` for ports of no function: they are no
    /// representors.
    fn of(name: PhysPortName) -> Option<(Option<Self>, u16)> {
        let (controller, pf, target) = match name {
            PhysPortName::VirtualFunction { controller, pf, vf } => {
                (controller, pf, Self::VirtualFunction(u32::from(vf)))
            }
            PhysPortName::Subfunction { controller, pf, sf } => {
                (controller, pf, Self::Subfunction(sf))
            }
            PhysPortName::Physical { .. } | PhysPortName::PhysicalFunction { .. } => return None,
        };
        let here = matches!(controller, None | Some(0));
        Some((here.then_some(target), pf))
    }
}

/// A representor, with its peer.
#[derive(Debug, Clone)]
pub(super) struct Port {
    pub(super) target: Option<Target>,
    pub(super) representor: Representor,
    physical_function: u16,
    switch_id: Option<String>,
    /// The PCI function on which its driver created it.
    function: Option<Address>,
}

/// All network interfaces of a network namespace that are related to switches.
#[derive(Debug, Clone, Default)]
pub(super) struct Ports {
    /// Representors.
    ports: Vec<Port>,
    /// Switches, by the interfaces that are no representors.
    switches: Vec<(String, String)>,
}

impl Ports {
    /// Reads the ports from the sysfs at `sysfs`.
    pub(super) fn read(sysfs: &Path, pci: &Pci) -> Result<Self, Error> {
        let interfaces = sysfs.join("class/net");
        let mut found = Self::default();
        for netdev in names(&interfaces)? {
            let directory = interfaces.join(&netdev);
            // Most drivers have no such names and return an error; a vanished interface is no port.
            let text = |file: &str| attribute(&directory.join(file)).ok().flatten();
            let Some(switch_id) = text("phys_switch_id") else {
                continue;
            };
            let port_name = text("phys_port_name");
            match port_name
                .as_deref()
                .and_then(|name| Some((name, Target::of(name.parse().ok()?)?)))
            {
                Some((port_name, (target, physical_function))) => found.ports.push(Port {
                    target,
                    physical_function,
                    representor: Representor {
                        port_name: port_name.to_owned(),
                        state: text("operstate"),
                        master: link_name(&directory.join("master")).ok().flatten(),
                        netdev: netdev.clone(),
                    },
                    switch_id: Some(switch_id),
                    function: pci.behind(&netdev).ok().flatten(),
                }),
                None => found.switches.push((netdev, switch_id)),
            }
        }
        found.ports.sort_by(|a, b| {
            let netdev = |port: &Port| port.representor.netdev.clone();
            netdev(a).cmp(&netdev(b))
        });
        Ok(found)
    }

    /// The switch of one of these interfaces.
    pub(super) fn switch_of(&self, netdevs: &[String]) -> Option<&str> {
        let mut switches = self.switches.iter();
        let (_, switch_id) = switches.find(|(netdev, _)| netdevs.contains(netdev))?;
        Some(switch_id)
    }

    /// The ports of a physical function: those that its driver created on it, otherwise those on
    /// its switch with its number.
    pub(super) fn of(&self, function: Address, switch_id: Option<&str>) -> Vec<&Port> {
        let ports = self.ports.iter();
        ports
            .filter(|port| match port.function {
                Some(address) => address == function,
                None => {
                    port.switch_id.as_deref() == switch_id
                        && switch_id.is_some()
                        && port.physical_function == u16::from(function.function())
                }
            })
            .collect()
    }
}

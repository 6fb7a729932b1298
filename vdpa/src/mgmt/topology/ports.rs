//! Ports of NICs' switches: which network interface stands for which virtual function or
//! subfunction.
//!
//! From `/sys/class/net/*/phys_port_name` and `phys_switch_id` alone. A driver that names its ports otherwise
//! than the kernel does (`__devlink_port_phys_port_name_get`) has none here.

use std::path::Path;

use super::tree::Representor;
use crate::mgmt::pci::{Address, Pci, PciError, attribute, link_name, names};

/// What a port stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    /// A virtual function by its number.
    VirtualFunction(u32),
    /// A subfunction by its number.
    Subfunction(u32),
}

/// A port's name: `[cCONTROLLER]pfPFvfVF` or `[cCONTROLLER]pfPFsfSF`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PortName {
    /// Another machine's functions have a controller other than 0.
    pub(super) controller: u32,
    /// Number of the physical function.
    pub(super) physical_function: u32,
    pub(super) target: Target,
}

impl PortName {
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (controller, rest) = match text.strip_prefix('c') {
            Some(rest) => number(rest)?,
            None => (0, text),
        };
        let (physical_function, rest) = number(rest.strip_prefix("pf")?)?;
        let (target, rest) = if let Some(rest) = rest.strip_prefix("vf") {
            let (index, rest) = number(rest)?;
            (Target::VirtualFunction(index), rest)
        } else {
            let (index, rest) = number(rest.strip_prefix("sf")?)?;
            (Target::Subfunction(index), rest)
        };
        rest.is_empty().then_some(Self {
            controller,
            physical_function,
            target,
        })
    }
}

/// The number at the beginning, and what follows it.
fn number(text: &str) -> Option<(u32, &str)> {
    let end = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (digits, rest) = text.split_at(end);
    Some((digits.parse().ok()?, rest))
}

/// A representor and what it belongs to.
#[derive(Debug, Clone)]
pub(super) struct Port {
    pub(super) name: PortName,
    pub(super) representor: Representor,
    switch_id: Option<String>,
    /// The PCI function that its driver made it on.
    function: Option<Address>,
}

/// All network interfaces of a network namespace that have something to do with switches.
#[derive(Debug, Clone, Default)]
pub(super) struct Ports {
    /// Representors.
    ports: Vec<Port>,
    /// Switches by the interfaces that are no representors.
    switches: Vec<(String, String)>,
}

impl Ports {
    /// Those of the sysfs at `sysfs`.
    pub(super) fn read(sysfs: &Path, pci: &Pci) -> Result<Self, PciError> {
        let interfaces = sysfs.join("class/net");
        let mut found = Self::default();
        for netdev in names(&interfaces)? {
            let directory = interfaces.join(&netdev);
            // Most drivers have no such names and say so by an error; an interface that is gone is no port.
            let text = |file: &str| attribute(&directory.join(file)).ok().flatten();
            let Some(switch_id) = text("phys_switch_id") else {
                continue;
            };
            let port_name = text("phys_port_name");
            match port_name
                .as_deref()
                .and_then(|name| Some((name, PortName::parse(name)?)))
            {
                Some((port_name, name)) => found.ports.push(Port {
                    name,
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

    /// The switch that one of these interfaces is on.
    pub(super) fn switch_of(&self, netdevs: &[String]) -> Option<&str> {
        let mut switches = self.switches.iter();
        let (_, switch_id) = switches.find(|(netdev, _)| netdevs.contains(netdev))?;
        Some(switch_id)
    }

    /// The ports of a physical function: those that its driver made on it, else those on its switch
    /// with its number.
    pub(super) fn of(&self, function: Address, switch_id: Option<&str>) -> Vec<&Port> {
        let ports = self.ports.iter();
        ports
            .filter(|port| match port.function {
                Some(address) => address == function,
                None => {
                    port.switch_id.as_deref() == switch_id
                        && switch_id.is_some()
                        && port.name.physical_function == u32::from(function.function())
                }
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn names_of_ports_are_the_kernels() {
        let vf = PortName::parse("pf0vf12").unwrap();
        assert_eq!((vf.controller, vf.physical_function), (0, 0));
        assert_eq!(vf.target, Target::VirtualFunction(12));
        let sf = PortName::parse("c1pf3sf88").unwrap();
        assert_eq!((sf.controller, sf.physical_function), (1, 3));
        assert_eq!(sf.target, Target::Subfunction(88));
        for other in [
            "",
            "p0",
            "p0s1",
            "pf0",
            "pf0vf",
            "vf0",
            "cpf0vf0",
            "pf0vf1x",
            "pf-1vf0",
            "pf0vf99999999999",
            "pf0sf1\n",
            "pf0vf+1",
        ] {
            assert_eq!(PortName::parse(other), None, "{other:?}");
        }
    }
}

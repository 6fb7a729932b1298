//! Ports of a NIC's switch. A port leads to a cable, or to a PCI function of this host or another
//! one.

use std::str::FromStr;

use super::handle::{NestedDevlink, PortHandle};
use super::numbered::numbered;
use super::uapi::*;
use crate::error::{Error, ErrorKind};
use crate::netlink::attributes::{Attributes, Bitfield32};
use crate::netlink::error::Malformed;
use crate::netlink::message::Message;

/// A port (`DEVLINK_CMD_PORT_GET`). `None` is a field that the driver does not report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// Its name.
    pub handle: PortHandle,
    /// Its network type.
    pub port_type: Option<PortType>,
    /// Its network type after the next change, if different.
    pub desired_type: Option<PortType>,
    /// Its network interface in this network namespace; for an eswitch port, the representor.
    pub netdev: Option<Netdev>,
    /// Its InfiniBand device.
    pub ibdev: Option<String>,
    /// Its flavour.
    pub flavour: Option<Flavour>,
    /// Whether its lanes can become separate ports.
    pub splittable: Option<bool>,
    /// Its lanes.
    pub lanes: Option<u32>,
    /// The function behind it.
    pub function: Option<PortFunction>,
}

/// A port's network interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Netdev {
    /// Its index, if the kernel reports it.
    pub index: Option<u32>,
    /// Its name.
    pub name: String,
}

numbered! {
    /// The network type of a port.
    PortType: u16, "type" {
        /// Not set yet.
        NotSet = 0 "notset",
        /// Detected automatically.
        Auto = 1 "auto",
        /// Ethernet.
        Ethernet = 2 "eth",
        /// InfiniBand.
        InfiniBand = 3 "ib",
    }
}

/// The flavour of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flavour {
    /// It has a cable.
    Physical(FrontPanel),
    /// It leads to the processor that runs the switch.
    Cpu(FrontPanel),
    /// It leads to another switch of the same tree.
    Dsa(FrontPanel),
    /// It leads to a physical function.
    PciPf(PciNumbers),
    /// It leads to a virtual function.
    PciVf {
        /// The location of the function.
        pci: PciNumbers,
        /// Its number.
        vfnum: u16,
    },
    /// It leads to a subfunction.
    PciSf {
        /// The location of the function.
        pci: PciNumbers,
        /// Its number.
        sfnum: u32,
    },
    /// It belongs to no device.
    Virtual,
    /// It is in the switch, and not used.
    Unused,
    /// A flavour of a newer kernel.
    Other(u16),
}

/// The location of a port on the front panel. `None` is a field that the driver does not report.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FrontPanel {
    /// Its number.
    pub number: Option<u32>,
    /// The port that it was split from.
    pub split_group: Option<u32>,
    /// The number of this part.
    pub split_subport: Option<u32>,
}

/// The location of a PCI function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PciNumbers {
    /// The number of the PCI controller; 0 is the host that has the eswitch. `None` on kernels
    /// before 5.10.
    pub controller: Option<u32>,
    /// The number of the physical function.
    pub pfnum: u16,
    /// Whether it belongs to another host. `None` for subfunctions on kernels that do not report
    /// it.
    pub external: Option<bool>,
}

/// The function behind a port. `None` is a field that the driver does not report.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PortFunction {
    /// Its address, of at most 32 bytes; zero if it has none yet.
    pub hw_addr: Option<Vec<u8>>,
    /// The requested state.
    pub state: Option<FunctionState>,
    /// The actual state.
    pub opstate: Option<FunctionOpstate>,
    /// Its capabilities.
    pub capabilities: Capabilities,
    /// Maximum number of event queues.
    pub max_io_eqs: Option<u32>,
    /// Its own instance.
    pub devlink: Option<NestedDevlink>,
}

numbered! {
    /// The requested state of a function.
    FunctionState: u8, "state" {
        /// It is being set up.
        Inactive = 0 "inactive",
        /// A driver may use it.
        Active = 1 "active",
    }
}

impl FromStr for FunctionState {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "inactive" => Ok(Self::Inactive),
            "active" => Ok(Self::Active),
            _ => {
                let message =
                    format!("{text:?} is not a state of a function: use active or inactive");
                Err(Error::new(ErrorKind::BadName, message))
            }
        }
    }
}

numbered! {
    /// Whether a driver uses a function.
    FunctionOpstate: u8, "state" {
        /// No driver uses it: it can be deleted.
        Detached = 0 "detached",
        /// A driver uses it.
        Attached = 1 "attached",
    }
}

/// The capabilities of a function. As its state, `None` is one that its driver does not have; as
/// settings, `None` leaves one unchanged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// RDMA over Converged Ethernet, for which the NIC keeps memory.
    pub roce: Option<bool>,
    /// Migration to another host; virtual functions only.
    pub migratable: Option<bool>,
    /// Encryption of IPsec; virtual functions only.
    pub ipsec_crypto: Option<bool>,
    /// Complete IPsec offload; virtual functions only.
    pub ipsec_packet: Option<bool>,
}

impl Capabilities {
    fn of(flags: Bitfield32) -> Self {
        let flag =
            |bit: u32| (flags.selector & 1 << bit != 0).then_some(flags.value & 1 << bit != 0);
        Self {
            roce: flag(0),
            migratable: flag(1),
            ipsec_crypto: flag(2),
            ipsec_packet: flag(3),
        }
    }

    /// `None` if there is nothing to set.
    pub(super) fn flags(self) -> Option<Bitfield32> {
        let all = [
            self.roce,
            self.migratable,
            self.ipsec_crypto,
            self.ipsec_packet,
        ];
        let (mut value, mut selector) = (0, 0);
        for (flag, bit) in all.into_iter().zip([1, 2, 4, 8]) {
            selector |= if flag.is_some() { bit } else { 0 };
            value |= if flag == Some(true) { bit } else { 0 };
        }
        (selector != 0).then_some(Bitfield32 { value, selector })
    }
}

impl Port {
    pub(super) fn of(message: &Message) -> Result<Self, Malformed> {
        let attributes = Attributes::parse(&message.attributes)?;
        let port_type = |kind| Ok(attributes.u16(kind)?.map(PortType::from));
        let index = attributes.u32(DEVLINK_ATTR_PORT_NETDEV_IFINDEX)?;
        let name = attributes.string(DEVLINK_ATTR_PORT_NETDEV_NAME);
        let function = attributes.nested(DEVLINK_ATTR_PORT_FUNCTION)?;
        Ok(Self {
            handle: PortHandle::of(&attributes)?,
            port_type: port_type(DEVLINK_ATTR_PORT_TYPE)?,
            desired_type: port_type(DEVLINK_ATTR_PORT_DESIRED_TYPE)?,
            netdev: name.map(|name| Netdev { index, name }),
            ibdev: attributes.string(DEVLINK_ATTR_PORT_IBDEV_NAME),
            flavour: Flavour::of(&attributes)?,
            splittable: attributes.flag(DEVLINK_ATTR_PORT_SPLITTABLE)?,
            lanes: attributes.u32(DEVLINK_ATTR_PORT_LANES)?,
            function: function.as_ref().map(PortFunction::of).transpose()?,
        })
    }

    /// The number of its subfunction, if it leads to one of this physical function.
    pub(crate) fn sfnum(&self, of: u16) -> Option<u32> {
        match &self.flavour {
            Some(Flavour::PciSf { pci, sfnum }) if pci.pfnum == of => Some(*sfnum),
            _ => None,
        }
    }
}

impl Flavour {
    fn of(attributes: &Attributes<'_>) -> Result<Option<Self>, Malformed> {
        let Some(number) = attributes.u16(DEVLINK_ATTR_PORT_FLAVOUR)? else {
            return Ok(None);
        };
        let front_panel = || -> Result<FrontPanel, Malformed> {
            Ok(FrontPanel {
                number: attributes.u32(DEVLINK_ATTR_PORT_NUMBER)?,
                split_group: attributes.u32(DEVLINK_ATTR_PORT_SPLIT_GROUP)?,
                split_subport: attributes.u32(DEVLINK_ATTR_PORT_SPLIT_SUBPORT_NUMBER)?,
            })
        };
        let pci = || -> Result<PciNumbers, Malformed> {
            Ok(PciNumbers {
                controller: attributes.u32(DEVLINK_ATTR_PORT_CONTROLLER_NUMBER)?,
                pfnum: attributes.needed_u16(DEVLINK_ATTR_PORT_PCI_PF_NUMBER)?,
                external: attributes.flag(DEVLINK_ATTR_PORT_EXTERNAL)?,
            })
        };
        Ok(Some(match number {
            DEVLINK_PORT_FLAVOUR_PHYSICAL => Self::Physical(front_panel()?),
            DEVLINK_PORT_FLAVOUR_CPU => Self::Cpu(front_panel()?),
            DEVLINK_PORT_FLAVOUR_DSA => Self::Dsa(front_panel()?),
            DEVLINK_PORT_FLAVOUR_PCI_PF => Self::PciPf(pci()?),
            DEVLINK_PORT_FLAVOUR_PCI_VF => Self::PciVf {
                pci: pci()?,
                vfnum: attributes.needed_u16(DEVLINK_ATTR_PORT_PCI_VF_NUMBER)?,
            },
            DEVLINK_PORT_FLAVOUR_PCI_SF => Self::PciSf {
                pci: pci()?,
                sfnum: attributes.needed_u32(DEVLINK_ATTR_PORT_PCI_SF_NUMBER)?,
            },
            DEVLINK_PORT_FLAVOUR_VIRTUAL => Self::Virtual,
            DEVLINK_PORT_FLAVOUR_UNUSED => Self::Unused,
            other => Self::Other(other),
        }))
    }
}

impl PortFunction {
    fn of(attributes: &Attributes<'_>) -> Result<Self, Malformed> {
        let hw_addr = attributes.bytes(DEVLINK_PORT_FUNCTION_ATTR_HW_ADDR);
        if hw_addr.is_some_and(|address| address.len() > MAX_ADDR_LEN) {
            let kind = DEVLINK_PORT_FUNCTION_ATTR_HW_ADDR;
            return Err(Malformed::attribute(kind, "the address is too long"));
        }
        let state = attributes.u8(DEVLINK_PORT_FN_ATTR_STATE)?;
        let opstate = attributes.u8(DEVLINK_PORT_FN_ATTR_OPSTATE)?;
        let flags = attributes.bitfield32(DEVLINK_PORT_FN_ATTR_CAPS)?;
        let devlink = attributes.nested(DEVLINK_PORT_FN_ATTR_DEVLINK)?;
        Ok(Self {
            hw_addr: hw_addr.map(<[u8]>::to_vec),
            state: state.map(FunctionState::from),
            opstate: opstate.map(FunctionOpstate::from),
            capabilities: flags.map(Capabilities::of).unwrap_or_default(),
            max_io_eqs: attributes.u32(DEVLINK_PORT_FN_ATTR_MAX_IO_EQS)?,
            devlink: devlink.as_ref().map(NestedDevlink::of).transpose()?,
        })
    }
}

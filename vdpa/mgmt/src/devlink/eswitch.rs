//! The switch in a NIC: in legacy mode it forwards by MAC and VLAN as the NIC likes, in switchdev mode
//! each port has a representor that the kernel's networking steers.

use std::fmt;
use std::str::FromStr;

use netlink_packet_core::DefaultNla;

use super::connection::Devlink;
use super::handle::Handle;
use super::operation::{Operation, nothing};
use super::uapi::{
    DEVLINK_ATTR_ESWITCH_ENCAP_MODE, DEVLINK_ATTR_ESWITCH_INLINE_MODE, DEVLINK_ATTR_ESWITCH_MODE,
    DEVLINK_CMD_ESWITCH_GET, DEVLINK_CMD_ESWITCH_SET,
};
use crate::error::{Error, ErrorKind};
use crate::netlink::attributes::Attributes;
use crate::netlink::exchange::Malformed;
use crate::netlink::message::{Message, Mode, value};

/// How the switch is steered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EswitchMode {
    /// By the NIC.
    Legacy,
    /// By the kernel, through representors.
    Switchdev,
    /// A mode of a newer kernel.
    Other(u16),
}

/// How much of each frame's headers a virtual function hands to the switch with the descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InlineMode {
    /// Nothing.
    None,
    /// The Ethernet header.
    Link,
    /// To the IP header.
    Network,
    /// To the TCP or UDP header.
    Transport,
    /// A mode of a newer kernel.
    Other(u8),
}

/// Whether the switch encapsulates frames in tunnels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EncapMode {
    /// No.
    None,
    /// Yes.
    Basic,
    /// A mode of a newer kernel.
    Other(u8),
}

impl FromStr for EswitchMode {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "legacy" => Ok(Self::Legacy),
            "switchdev" => Ok(Self::Switchdev),
            _ => {
                let message =
                    format!("{text:?} is no mode of an eswitch: they are legacy and switchdev");
                Err(Error::new(ErrorKind::BadName, message))
            }
        }
    }
}

impl EswitchMode {
    fn of(number: u16) -> Self {
        match number {
            0 => Self::Legacy,
            1 => Self::Switchdev,
            other => Self::Other(other),
        }
    }

    fn number(self) -> u16 {
        match self {
            Self::Legacy => 0,
            Self::Switchdev => 1,
            Self::Other(other) => other,
        }
    }
}

impl fmt::Display for EswitchMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Legacy => f.write_str("legacy"),
            Self::Switchdev => f.write_str("switchdev"),
            Self::Other(other) => write!(f, "mode {other}"),
        }
    }
}

impl InlineMode {
    fn of(number: u8) -> Self {
        match number {
            0 => Self::None,
            1 => Self::Link,
            2 => Self::Network,
            3 => Self::Transport,
            other => Self::Other(other),
        }
    }

    fn number(self) -> u8 {
        match self {
            Self::None => 0,
            Self::Link => 1,
            Self::Network => 2,
            Self::Transport => 3,
            Self::Other(other) => other,
        }
    }
}

impl fmt::Display for InlineMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Link => f.write_str("link"),
            Self::Network => f.write_str("network"),
            Self::Transport => f.write_str("transport"),
            Self::Other(other) => write!(f, "mode {other}"),
        }
    }
}

impl EncapMode {
    fn of(number: u8) -> Self {
        match number {
            0 => Self::None,
            1 => Self::Basic,
            other => Self::Other(other),
        }
    }

    fn number(self) -> u8 {
        match self {
            Self::None => 0,
            Self::Basic => 1,
            Self::Other(other) => other,
        }
    }
}

impl fmt::Display for EncapMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Basic => f.write_str("basic"),
            Self::Other(other) => write!(f, "mode {other}"),
        }
    }
}

/// The modes of an eswitch: as they are, where None is what its driver does not have; and as they are to
/// be, where None is left as it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Eswitch {
    /// How it is steered.
    pub mode: Option<EswitchMode>,
    /// What virtual functions hand over.
    pub inline_mode: Option<InlineMode>,
    /// Whether it encapsulates.
    pub encap_mode: Option<EncapMode>,
}

impl Eswitch {
    pub(super) fn of(message: &Message) -> Result<Self, Malformed> {
        let attributes = Attributes::parse(&message.attributes)?;
        let inline_mode = attributes.u8(DEVLINK_ATTR_ESWITCH_INLINE_MODE)?;
        let encap_mode = attributes.u8(DEVLINK_ATTR_ESWITCH_ENCAP_MODE)?;
        Ok(Self {
            mode: attributes
                .u16(DEVLINK_ATTR_ESWITCH_MODE)?
                .map(EswitchMode::of),
            inline_mode: inline_mode.map(InlineMode::of),
            encap_mode: encap_mode.map(EncapMode::of),
        })
    }

    fn attributes(&self) -> Vec<DefaultNla> {
        let mode = self.mode.map(EswitchMode::number);
        let inline_mode = self.inline_mode.map(InlineMode::number);
        let encap_mode = self.encap_mode.map(EncapMode::number);
        let mode = mode.map(|mode| value(DEVLINK_ATTR_ESWITCH_MODE, &mode.to_ne_bytes()));
        let inline = inline_mode.map(|mode| value(DEVLINK_ATTR_ESWITCH_INLINE_MODE, &[mode]));
        let encap = encap_mode.map(|mode| value(DEVLINK_ATTR_ESWITCH_ENCAP_MODE, &[mode]));
        [mode, inline, encap].into_iter().flatten().collect()
    }
}

impl Devlink {
    /// The modes of an instance's eswitch.
    ///
    /// # Errors
    /// `NotSupported` if it has none, `NotFound`, or another one.
    pub fn eswitch(&self, handle: &Handle) -> Result<Eswitch, Error> {
        let operation = Operation::Show {
            what: "eswitch",
            handle: handle.clone(),
        };
        let commands = (DEVLINK_CMD_ESWITCH_GET, DEVLINK_CMD_ESWITCH_GET);
        self.get(&operation, commands, handle.attributes(), Eswitch::of)
    }

    /// Changes modes of an instance's eswitch. Between legacy and switchdev the driver takes away and makes
    /// anew what hangs on the switch: representors, and with some drivers virtual functions' links.
    ///
    /// # Errors
    /// `Invalid` if there is nothing to change; `NotSupported`, `NotPermitted`, `NotFound`, or
    /// another one.
    pub fn set_eswitch(&self, handle: &Handle, eswitch: Eswitch) -> Result<(), Error> {
        let changes = eswitch.attributes();
        if changes.is_empty() {
            return Err(nothing());
        }
        let operation = Operation::SetEswitch(handle.clone());
        let attributes = [handle.attributes(), changes].concat();
        self.call(&operation, DEVLINK_CMD_ESWITCH_SET, Mode::Do, attributes)
            .map(drop)
    }
}

//! The switch in a NIC. In legacy mode the NIC forwards by MAC and VLAN itself. In switchdev mode
//! each port has a representor that the kernel's networking steers.

use netlink_packet_core::DefaultNla;

use super::connection::Devlink;
use super::handle::Handle;
use super::numbered::numbered;
use super::operation::{Operation, nothing};
use super::uapi::*;
use crate::error::Error;
use crate::netlink::attributes::Attributes;
use crate::netlink::error::Malformed;
use crate::netlink::message::{Message, value};

numbered! {
    /// The mode of the switch.
    EswitchMode: u16, "mode" {
        /// The NIC forwards by itself.
        Legacy = 0 "legacy",
        /// The kernel steers it, through representors.
        Switchdev = 1 "switchdev",
    }
}

numbered! {
    /// The part of each frame's headers that a virtual function passes to the switch with the
    /// descriptor.
    InlineMode: u8, "mode" {
        /// Nothing.
        None = 0 "none",
        /// The Ethernet header.
        Link = 1 "link",
        /// To the IP header.
        Network = 2 "network",
        /// To the TCP or UDP header.
        Transport = 3 "transport",
    }
}

numbered! {
    /// Whether the switch encapsulates frames in tunnels.
    EncapMode: u8, "mode" {
        /// No.
        None = 0 "none",
        /// Yes.
        Basic = 1 "basic",
    }
}

/// The modes of an eswitch. As its state, `None` is a mode that its driver does not have; as
/// settings, `None` leaves a mode unchanged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Eswitch {
    /// Its mode.
    pub mode: Option<EswitchMode>,
    /// The headers that virtual functions pass.
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
                .map(EswitchMode::from),
            inline_mode: inline_mode.map(InlineMode::from),
            encap_mode: encap_mode.map(EncapMode::from),
        })
    }

    fn attributes(&self) -> Vec<DefaultNla> {
        let mode = self.mode.map(u16::from);
        let inline_mode = self.inline_mode.map(u8::from);
        let encap_mode = self.encap_mode.map(u8::from);
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
            handle,
        };
        let commands = (DEVLINK_CMD_ESWITCH_GET, DEVLINK_CMD_ESWITCH_GET);
        self.family
            .get(&operation, commands, handle.attributes(), Eswitch::of)
    }

    /// Changes modes of an instance's eswitch. A change between legacy and switchdev makes the
    /// driver delete and recreate dependent objects: representors, and with some drivers virtual
    /// functions' links.
    ///
    /// # Errors
    /// `Invalid` if there is nothing to change; `NotSupported`, `NotPermitted`, `NotFound`, or
    /// another one.
    pub fn set_eswitch(&self, handle: &Handle, eswitch: Eswitch) -> Result<(), Error> {
        let changes = eswitch.attributes();
        if changes.is_empty() {
            return Err(nothing());
        }
        let operation = Operation::SetEswitch(handle);
        let attributes = [handle.attributes(), changes].concat();
        self.family
            .change(&operation, DEVLINK_CMD_ESWITCH_SET, attributes)
    }
}

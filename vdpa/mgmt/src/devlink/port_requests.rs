//! Requests about ports: show, add, delete, and set their functions.
//!
//! The life of a subfunction, in which this file has the requests of the first two arrows:
//!
//! ```text
//!   (none) ─ add ──> inactive, detached ─ active ──> active, detached ─(driver)─> active, attached
//!     ^                     │    ^                                                        │
//!     └────── delete ───────┘    └────────────────────── inactive ────────────────────────┘
//! ```

use netlink_packet_core::DefaultNla;

use super::connection::Devlink;
use super::handle::{Handle, PortHandle};
use super::operation::{Operation, invalid, nothing};
use super::port::{Capabilities, FunctionState, Port};
use super::uapi::*;
use crate::error::{self, Error};
use crate::netlink::message::{nested_flagged, value};

/// A subfunction's port, to be added (`flavour pcisf`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NewSubfunction {
    /// The number of its physical function; pci/0000:06:00.0 has 0.
    pub pfnum: u16,
    /// Its number, chosen by the user. Drivers that choose one themselves accept none; mlx5 needs
    /// it.
    pub sfnum: Option<u32>,
    /// The PCI controller, if the eswitch serves several hosts.
    pub controller: Option<u32>,
    /// The new port's index. Drivers choose it themselves.
    pub port_index: Option<u32>,
}

impl NewSubfunction {
    pub(super) fn attributes(&self) -> Vec<DefaultNla> {
        let number =
            |kind, number: Option<u32>| number.map(|number| value(kind, &number.to_ne_bytes()));
        let flavour = DEVLINK_PORT_FLAVOUR_PCI_SF.to_ne_bytes();
        let pfnum = self.pfnum.to_ne_bytes();
        [
            number(DEVLINK_ATTR_PORT_INDEX, self.port_index),
            Some(value(DEVLINK_ATTR_PORT_FLAVOUR, &flavour)),
            Some(value(DEVLINK_ATTR_PORT_PCI_PF_NUMBER, &pfnum)),
            number(DEVLINK_ATTR_PORT_PCI_SF_NUMBER, self.sfnum),
            number(DEVLINK_ATTR_PORT_CONTROLLER_NUMBER, self.controller),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

/// The settings of a port's function. `None` leaves one unchanged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FunctionSettings {
    /// Its address.
    pub hw_addr: Option<[u8; 6]>,
    /// Its capabilities.
    pub capabilities: Capabilities,
    /// Maximum number of event queues.
    pub max_io_eqs: Option<u32>,
    /// The requested state.
    pub state: Option<FunctionState>,
}

impl From<FunctionState> for FunctionSettings {
    /// Sets the state alone.
    fn from(state: FunctionState) -> Self {
        Self {
            state: Some(state),
            ..Self::default()
        }
    }
}

impl FunctionSettings {
    /// The requests for these settings, one after the other: the subject of each, and the
    /// attributes in DEVLINK_ATTR_PORT_FUNCTION. A driver may refuse settings of an active
    /// function, so the state comes last, in a separate request.
    pub(super) fn requests(&self) -> Result<Vec<(&'static str, Vec<DefaultNla>)>, Error> {
        let mut settings = Vec::new();
        let mut names = Vec::new();
        if let Some(address) = self.hw_addr {
            if address[0] & 1 != 0 || address == [0; 6] {
                return Err(invalid(format!(
                    "a function needs a unicast MAC address, not {}",
                    error::mac(address)
                )));
            }
            settings.push(value(DEVLINK_PORT_FUNCTION_ATTR_HW_ADDR, &address));
            names.push("hw_addr");
        }
        if let Some(flags) = self.capabilities.flags() {
            settings.push(value(DEVLINK_PORT_FN_ATTR_CAPS, &flags.bytes()));
            names.push("capabilities");
        }
        if let Some(number) = self.max_io_eqs {
            settings.push(value(
                DEVLINK_PORT_FN_ATTR_MAX_IO_EQS,
                &number.to_ne_bytes(),
            ));
            names.push("max_io_eqs");
        }
        let mut requests = Vec::new();
        match names.as_slice() {
            [] => {}
            [name] => requests.push((*name, settings)),
            _ => requests.push(("settings", settings)),
        }
        if let Some(state) = self.state {
            let state = value(DEVLINK_PORT_FN_ATTR_STATE, &[state.into()]);
            requests.push(("state", vec![state]));
        }
        if requests.is_empty() {
            return Err(nothing());
        }
        Ok(requests)
    }
}

/// The command of a request, and that of its answers.
const GET: (u8, u8) = (DEVLINK_CMD_PORT_GET, DEVLINK_CMD_PORT_NEW);
const NEW: (u8, u8) = (DEVLINK_CMD_PORT_NEW, DEVLINK_CMD_PORT_NEW);

impl Devlink {
    /// All ports of all instances, in the kernel's order.
    ///
    /// # Errors
    /// [`Error`].
    pub fn ports(&self) -> Result<Vec<Port>, Error> {
        let operation = Operation::List("ports");
        self.family.dump(&operation, GET, Vec::new(), Port::of)
    }

    /// All ports of one instance.
    ///
    /// # Errors
    /// `NotFound`, or another one.
    pub fn ports_of(&self, handle: &Handle) -> Result<Vec<Port>, Error> {
        // Kernels before 6.6 do not filter by instance, and none reports a missing instance.
        self.instance(handle)?;
        let operation = Operation::Show {
            what: "ports",
            handle,
        };
        let mut ports = self
            .family
            .dump(&operation, GET, handle.attributes(), Port::of)?;
        ports.retain(|port| port.handle.handle() == handle);
        Ok(ports)
    }

    /// One port.
    ///
    /// # Errors
    /// `NotFound`, or another one.
    pub fn port(&self, port: &PortHandle) -> Result<Port, Error> {
        let operation = Operation::ShowPort(port);
        self.family
            .get(&operation, GET, port.attributes(), Port::of)
    }

    /// Adds the port of a new subfunction, which is inactive, and returns it.
    ///
    /// # Errors
    /// `NameTaken`, `Refused`, `NotSupported`, `NotPermitted`, `NotFound`, or another one. After
    /// `NoAnswer` with `sent` and after `Malformed` the port may exist nevertheless.
    pub fn add_port(&self, handle: &Handle, subfunction: &NewSubfunction) -> Result<Port, Error> {
        let operation = Operation::AddPort {
            handle,
            sfnum: subfunction.sfnum,
        };
        let attributes = [handle.attributes(), subfunction.attributes()].concat();
        self.family.get(&operation, NEW, attributes, Port::of)
    }

    /// Deletes an added port, and its subfunction. A driver that uses the subfunction is unbound
    /// first.
    ///
    /// # Errors
    /// `NotFound`, `NotSupported`, `NotPermitted`, or another one.
    pub fn delete_port(&self, port: &PortHandle) -> Result<(), Error> {
        let operation = Operation::DeletePort(port);
        let command = DEVLINK_CMD_PORT_DEL;
        self.family.change(&operation, command, port.attributes())
    }

    /// Applies settings to a port's function: first everything else, then its state. If the state
    /// is refused, the other settings stay.
    ///
    /// # Errors
    /// `Invalid` before anything is sent; `NotSupported`, `NotPermitted`, `NotFound`, or another
    /// one.
    pub fn set_function(
        &self,
        port: &PortHandle,
        settings: &FunctionSettings,
    ) -> Result<(), Error> {
        for (setting, function) in settings.requests()? {
            let operation = Operation::SetFunction { port, setting };
            let mut attributes = port.attributes();
            attributes.push(nested_flagged(DEVLINK_ATTR_PORT_FUNCTION, &function));
            self.family
                .change(&operation, DEVLINK_CMD_PORT_SET, attributes)?;
        }
        Ok(())
    }
}

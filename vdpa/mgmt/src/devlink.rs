//! devlink: the NIC itself, as its driver presents it. Instances, ports, the eswitch, parameters,
//! rates, and the life of subfunctions.
//!
//! ```text
//!   Devlink ── requests of the family "devlink" ──> netlink (a thread) ──> kernel ──> NIC's driver
//!     Instance, Info, Port, Eswitch, Param, Rate, HealthReporter <── attributes, checked
//!   Events  <── added, removed, changed and failed objects (multicast group "config")
//! ```
//!
//! This module owns the generic netlink family of include/uapi/linux/devlink.h, as far as vDPA
//! needs it: no traps, regions, shared buffers, line cards, flashing. Each file is one kind of
//! object with its requests; `connection` is the path to the kernel, `uapi` has the numbers.
//! Decoded data is untrusted: each length is checked, and only known levels of nesting are entered.
//! It does not depend on the use of a port.
//!
//! ```no_run
//! use vdpa_mgmt::devlink::{Cmode, Devlink, FunctionSettings, FunctionState, NewSubfunction};
//! use vdpa_mgmt::devlink::{ParamValue, ReloadAction};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let devlink = Devlink::open()?;
//! let new = NewSubfunction { sfnum: Some(88), ..Default::default() };
//! let port = devlink.add_port(&"pci/0000:06:00.0".parse()?, &new)?;
//! let settings = FunctionSettings {
//!     hw_addr: Some([0x52, 0x54, 0, 0x12, 0x34, 0x56]),
//!     state: Some(FunctionState::Active),
//!     ..Default::default()
//! };
//! devlink.set_function(&port.handle, &settings)?;
//! // Once its driver has it, it has an instance of its own.
//! let function = devlink.port(&port.handle)?.function.and_then(|function| function.devlink);
//! if let Some(nested) = function {
//!     let value = ParamValue::Flag(true);
//!     devlink.set_param(&nested.handle, "enable_vnet", Cmode::Driverinit, &value)?;
//!     devlink.reload(&nested.handle, ReloadAction::DriverReinit)?;
//! }
//! devlink.delete_port(&port.handle)?;
//! # Ok(())
//! # }
//! ```

mod connection;
mod eswitch;
mod events;
mod handle;
mod health;
mod instance;
mod numbered;
mod operation;
mod param;
mod port;
mod port_requests;
mod rate;
mod rate_object;
mod reload;
mod uapi;

pub use connection::{Devlink, PATIENCE};
pub use eswitch::{EncapMode, Eswitch, EswitchMode, InlineMode};
pub use events::{Event, Events, Notice};
pub use handle::{Handle, NestedDevlink, PortHandle};
pub use health::{HealthReporter, HealthState};
pub use instance::{Info, Instance};
pub use param::{Cmode, Param, ParamValue};
pub use port::{
    Capabilities, Flavour, FrontPanel, FunctionOpstate, FunctionState, Netdev, PciNumbers, Port,
    PortFunction, PortType,
};
pub use port_requests::{FunctionSettings, NewSubfunction};
pub use rate::{Rate, RateParent, RateSettings};
pub use rate_object::{NodeName, RateObject};
pub use reload::{ReloadAction, ReloadLimit, ReloadStat};

/// Runs every decoder on any message: for the fuzz target and the tests.
#[cfg(any(test, feature = "fuzz"))]
pub(super) fn decode_anything(message: &super::netlink::message::Message) {
    let _ = (Port::of(message), Param::of(message), Instance::of(message));
    let _ = (Info::of(message), Rate::of(message), Eswitch::of(message));
    let _ = (HealthReporter::of(message), reload::performed(message));
    let _ = Event::of(message);
}

#[cfg(test)]
mod tests;

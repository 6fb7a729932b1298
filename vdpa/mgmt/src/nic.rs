//! Creates a connected vDPA device on a NIC in one call, and removes it.
//!
//! ```text
//!   Nics::make ── check, nothing changed ──> step ──> step ──> … ──> /dev/vhost-vdpa-N
//!                                                     └─fails or interrupted──> undone, last first
//!   Nics::remove ── not open ──> undone, last first
//! ```
//!
//! The steps depend on the request ([`Origin`], [`Kind`]):
//!
//! ```text
//!   virtual function   count them (only from 0) ─> choose a free one ─> address, rates
//!                      ─> a driver that is a vDPA parent ─> its management device ─┐
//!   subfunction        port (switchdev mode only) ─> address, rates ─> active ─> its device
//!                      ─> enable_vnet and reload ─> its management device ────────┤
//!   management device  it is there ───────────────────────────────────────────────┤
//!   software           a process that serves a tap or a port through VDUSE ───────┤
//!                      device added <─────────────────────────────────────────────┘
//!                      ─> /dev/vhost-vdpa-N ─> connected (bridge, VLAN)
//! ```
//!
//! Steps are data ([`Step`]), with everything needed to undo them. The [`Observer`] gets each
//! *before* it is done ([`journal`](super::journal)). So a stored record ([`Store`]) shows another
//! process the possible steps of a killed one. Undoing a step that was not done, or that another
//! process has undone, changes nothing.
//!
//! [`Nics::plan_steps`] returns the steps without doing them.
//!
//! This module owns the order of steps, their undoing, and the records. The modules beside this one
//! carry out the steps. They do not depend on the use of the device.
//!
//! ```no_run
//! use vdpa_mgmt::nic::{Nics, NicRequest, Store};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let nics = Nics::open()?;
//! let mut store = Store::open_default()?.lock()?;
//! let request = NicRequest::new("nic0", "enp1s0f0");
//! let nic = nics.make(&request, &store.nics()?, &mut store)?;
//! println!("{}", nics.character_device(&nic)?.display());
//! nics.remove(&nic, &mut store)?;
//! # Ok(())
//! # }
//! ```

mod addresses;
mod best;
mod choose;
mod connect;
mod device;
mod error;
mod make;
mod making;
mod nics;
mod observer;
mod origin;
mod phase;
mod planned;
mod port_queue;
mod record;
mod request;
pub mod server;
mod software;
mod step;
mod store;
mod subfunction;
mod taken;
mod undo;
mod virtual_function;
mod wait;

pub use best::Choice;
pub use choose::host_use;
pub use error::{MakeError, NicError, NotUndone, RemoveError};
pub use nics::{DEFAULT_PATIENCE, Nics};
pub use observer::{Activity, Observer, Progress, Silent};
pub use origin::Origin;
pub use phase::Phase;
pub use planned::PlannedStep;
pub use port_queue::PortQueue;
pub use record::{BadOwner, MadeNic, State};
pub use request::{Kind, NicRequest};
pub use software::SOFTWARE;
pub use step::{Settings, Step};
pub use store::{LockedStore, Store, StoreError};
pub use taken::{Taken, TakenBecause};

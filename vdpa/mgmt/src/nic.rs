//! From a NIC to a vDPA device that is connected, as one call, and back.
//!
//! ```text
//!   Nics::make ── looked at, nothing touched ──> step ──> step ──> … ──> /dev/vhost-vdpa-N
//!                                                  └─fails, or interrupted──> undone, the last first
//!   Nics::remove ── nobody has it open ──> undone, the last first
//! ```
//!
//! What is made on depends on what is asked for ([`Origin`], [`Kind`]):
//!
//! ```text
//!   virtual function   count them (only from 0) ─> choose a free one ─> address, rates
//!                      ─> a driver that is a vDPA parent ─> its management device ─┐
//!   subfunction        port (switchdev mode only) ─> address, rates ─> active ─> its device comes
//!                      ─> enable_vnet and reload ─> its management device ────────┤
//!   management device  it is there ───────────────────────────────────────────────┤
//!                      device added <─────────────────────────────────────────────┘
//!                      ─> /dev/vhost-vdpa-N ─> connected (bridge, VLAN)
//! ```
//!
//! Steps are data ([`Step`]): each says what is needed to undo it. They are handed to the [`Observer`]
//! *before* they are done ([`journal`](super::journal)), so a record that was stored ([`Store`]) tells
//! another process what a killed one may have done; undoing a step that was not done, or that somebody
//! else has undone, changes nothing.
//!
//! [`Nics::plan_steps`] tells the steps without taking any.
//!
//! Owns the order of steps, what undoes each, and the records. How one step is done belongs to
//! the modules beside this one. Must not know what the device is used for.
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
mod record;
mod request;
mod step;
mod store;
mod subfunction;
mod taken;
mod undo;
mod virtual_function;
mod wait;

pub use error::{MakeError, NicError, NotUndone, RemoveError};
pub use nics::{DEFAULT_PATIENCE, Nics};
pub use observer::{Activity, Observer, Progress, Silent};
pub use origin::Origin;
pub use phase::Phase;
pub use planned::PlannedStep;
pub use record::{BadOwner, MadeNic, State};
pub use request::{Kind, NicRequest};
pub use step::{Settings, Step};
pub use store::{LockedStore, Store, StoreError};
pub use taken::{Taken, TakenBecause};

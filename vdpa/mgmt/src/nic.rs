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
mod making;
mod observer;
mod origin;
mod record;
mod request;
mod step;
mod store;
mod subfunction;
mod undo;
mod virtual_function;
mod wait;

use std::path::PathBuf;
use std::time::Duration;

pub use choose::{Taken, TakenBecause};
pub use error::{MakeError, NicError, NotUndone, RemoveError};
pub use observer::{Activity, Observer, Phase, Progress, Silent};
pub use origin::Origin;
pub use record::{BadOwner, MadeNic, State};
pub use request::{Kind, NicRequest};
pub use step::{Settings, Step};
pub use store::{LockedStore, Store, StoreError};

use super::bus::Bus;
use super::pci::Pci;
use super::{Connection, in_use};
use making::Making;

/// How long each thing is waited for that the kernel does by itself, unless something else is asked
/// for. Functions of real NICs take seconds to start.
pub const DEFAULT_PATIENCE: Duration = Duration::from_secs(30);

/// The bus driver through which guests have devices.
const VHOST_DRIVER: &str = "vhost_vdpa";

/// The machine's NICs, to make vDPA devices on.
#[derive(Debug)]
pub struct Nics {
    connection: Connection,
    pci: Pci,
    bus: Bus,
    patience: Duration,
}

impl Nics {
    /// Connects to the kernel; what it does by itself is waited for [`DEFAULT_PATIENCE`].
    ///
    /// # Errors
    /// As [`Connection::open`].
    pub fn open() -> Result<Self, NicError> {
        Self::with_patience(DEFAULT_PATIENCE)
    }

    /// Connects to the kernel; what it does by itself is waited for this long.
    ///
    /// # Errors
    /// As [`Connection::open`].
    pub fn with_patience(patience: Duration) -> Result<Self, NicError> {
        Ok(Self {
            connection: Connection::open()?,
            pci: Pci::default(),
            bus: Bus::default(),
            patience,
        })
    }

    /// Makes a NIC: everything from what `request` names to a vDPA device behind
    /// `/dev/vhost-vdpa-N`. `others` are the NICs that were made before and still are there, so that
    /// virtual functions that were counted for one of them go with the last one.
    ///
    /// # Errors
    /// [`MakeError`], with what failed and what could not be undone, after everything else was.
    pub fn make(
        &self,
        request: &NicRequest,
        others: &[MadeNic],
        observer: &mut dyn Observer,
    ) -> Result<MadeNic, MakeError> {
        let nic = MadeNic::new(&request.name, &request.from, request.owner.as_deref());
        let mut making = Making::new(self, nic, others, observer);
        match making.run(request) {
            Ok(()) => Ok(making.into_nic()),
            Err(error) => Err(making.roll_back_after(error)),
        }
    }

    /// Takes a NIC back: undoes its steps, the last one first. What others have changed since is
    /// left as it is, and said to the observer.
    ///
    /// # Errors
    /// [`RemoveError::InUse`] or [`RemoveError::NotForGuests`] before anything is touched;
    /// [`RemoveError::Incomplete`] with what could not be undone: it is still in the record.
    pub fn remove(&self, nic: &MadeNic, observer: &mut dyn Observer) -> Result<(), RemoveError> {
        self.check_removable(nic)?;
        let not_undone = Making::new(self, nic.clone(), &[], observer).remove();
        if not_undone.is_empty() {
            Ok(())
        } else {
            Err(RemoveError::Incomplete {
                name: nic.name().to_owned(),
                not_undone,
            })
        }
    }

    /// The NIC's `/dev/vhost-vdpa-N` as it is now; it changes when the device is bound anew.
    ///
    /// # Errors
    /// [`NicError::Mgmt`]; [`NicError::NoCharacterDevice`] while another bus driver has it.
    pub fn character_device(&self, nic: &MadeNic) -> Result<PathBuf, NicError> {
        let device = self.bus.device(nic.name())?;
        device
            .path()
            .ok_or_else(|| NicError::NoCharacterDevice(nic.name().to_owned()))
    }

    fn check_removable(&self, nic: &MadeNic) -> Result<(), RemoveError> {
        // Without a device of ours there is nothing that anybody could have.
        let mgmtdev = nic.steps().iter().find_map(|step| match step {
            Step::AddDevice { mgmtdev } => Some(mgmtdev),
            _ => None,
        });
        let Some(mgmtdev) = mgmtdev else {
            return Ok(());
        };
        let Ok(shown) = self.connection.device(nic.name()) else {
            return Ok(());
        };
        let Ok(device) = self.bus.device(nic.name()) else {
            return Ok(());
        };
        if shown.mgmtdev != *mgmtdev {
            return Ok(());
        }
        in_use::check(&device).map_err(RemoveError::InUse)?;
        match device.driver {
            // It is only a few moments old then, and nobody has it yet.
            Some(driver) if driver != VHOST_DRIVER && nic.state() != State::Making => {
                Err(RemoveError::NotForGuests {
                    name: device.name,
                    driver,
                })
            }
            _ => Ok(()),
        }
    }
}

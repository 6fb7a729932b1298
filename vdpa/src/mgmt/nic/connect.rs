//! The last phase: the function is connected, through its representor or its settings.

use super::making::{Failure, Making};
use super::observer::Phase;
use super::{NicError, Nics};
use crate::mgmt::connectivity::{Connectivity, Place};
use crate::mgmt::devlink::{Devlink, PortHandle};
use crate::mgmt::link::Links;
use crate::mgmt::pci::Address;

/// What is connected.
pub(super) enum Subject {
    /// The virtual function at this address.
    VirtualFunction(Address),
    /// The function behind this port.
    Port(PortHandle),
}

impl Nics {
    /// Whether there is what is to be connected with.
    pub(super) fn check_connectivity(&self, wanted: &Connectivity) -> Result<(), NicError> {
        Ok(wanted.check(&Links::open()?)?)
    }
}

impl Making<'_> {
    /// Connects it, if that is asked for.
    pub(super) fn connect(
        &mut self,
        wanted: Option<&Connectivity>,
        subject: &Subject,
    ) -> Result<(), Failure> {
        let Some(wanted) = wanted else {
            return Ok(());
        };
        let links = Links::open().map_err(Failure::of(Phase::Connect))?;
        let place = self.place(&links, subject);
        let place = place.map_err(Failure::of(Phase::Connect))?;
        self.connect_at(wanted, &links, &place)
    }

    fn place(&mut self, links: &Links, subject: &Subject) -> Result<Place, NicError> {
        match subject {
            Subject::VirtualFunction(address) => {
                Ok(Place::of_virtual_function(links, &self.nics.pci, *address)?)
            }
            Subject::Port(port) => {
                let devlink = Devlink::open()?;
                let link = self.wait(&format!("the representor of the port {port}"), || {
                    // Its index is known once it is registered.
                    let netdev = devlink.port(port)?.netdev;
                    match netdev.and_then(|netdev| netdev.index) {
                        Some(index) => Ok(Some(links.link_at(index)?)),
                        None => Ok(None),
                    }
                })?;
                Ok(Place::Link(link))
            }
        }
    }
}

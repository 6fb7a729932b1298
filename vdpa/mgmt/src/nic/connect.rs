//! The last phase: connects the function, through its representor or its settings.

use std::fs;
use std::path::Path;

use super::error::NicError;
use super::making::Making;
use super::nics::Nics;
use super::phase::Phase;
use crate::connectivity::{Connectivity, Place};
use crate::devlink::{Devlink, PortHandle};
use crate::link::Links;
use crate::pci::Address;

/// The directory of network interfaces in sysfs.
const INTERFACES: &str = "/sys/class/net";

/// The function to connect.
pub(super) enum Subject {
    /// The virtual function at this address.
    VirtualFunction(Address),
    /// The function behind this port.
    Port(PortHandle),
    /// This network interface itself.
    Interface(String),
}

impl Nics {
    /// Checks that the bridge of a connection exists and is suitable.
    pub(super) fn check_connectivity(&self, wanted: &Connectivity) -> Result<(), NicError> {
        Ok(wanted.check(&Links::open()?)?)
    }
}

impl Making<'_> {
    /// Connects the function, if requested.
    pub(super) fn connect(
        &mut self,
        wanted: Option<&Connectivity>,
        subject: &Subject,
    ) -> Result<(), NicError> {
        let Some(wanted) = wanted else {
            return Ok(());
        };
        self.phase = Phase::Connect;
        let links = Links::open()?;
        let place = self.place(&links, subject)?;
        self.connect_at(wanted, &links, &place)?;
        match &place {
            Place::Link(link) => {
                let what = format!("the bridge's forwarding to {}", link.name);
                let port = Path::new(INTERFACES).join(&link.name);
                self.wait(&what, || Ok(forwards(&port).then_some(())))
            }
            Place::VirtualFunction { .. } => Ok(()),
        }
    }

    fn place(&mut self, links: &Links, subject: &Subject) -> Result<Place, NicError> {
        match subject {
            Subject::VirtualFunction(address) => {
                Ok(Place::of_virtual_function(links, &self.nics.pci, *address)?)
            }
            Subject::Interface(name) => Ok(Place::Link(links.link(name)?)),
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

/// Whether a port of a bridge forwards, or need not be waited for. A bridge notices a carrier up to
/// a second after the port is up. There is no wait without a carrier, or with a spanning tree,
/// which takes long.
fn forwards(port: &Path) -> bool {
    let is = |file: &str, expected: &str| {
        fs::read_to_string(port.join(file)).is_ok_and(|text| text.trim() == expected)
    };
    let waits = is("carrier", "1") && is("brport/bridge/bridge/stp_state", "0");
    // BR_STATE_FORWARDING (include/uapi/linux/if_bridge.h).
    !waits || is("brport/state", "3")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_port_that_will_forward_is_waited_for() {
        let port = std::env::temp_dir().join(format!("bellhop-port-{}", std::process::id()));
        fs::create_dir_all(port.join("brport/bridge/bridge")).unwrap();
        let put = |file: &str, text: &str| fs::write(port.join(file), text).unwrap();
        // Without these files there is nothing to wait for.
        assert!(forwards(&port));
        put("carrier", "1\n");
        put("brport/state", "0\n");
        put("brport/bridge/bridge/stp_state", "0\n");
        assert!(!forwards(&port));
        put("brport/state", "3\n");
        assert!(forwards(&port));
        put("brport/state", "1\n");
        put("brport/bridge/bridge/stp_state", "1\n");
        assert!(forwards(&port));
        put("brport/bridge/bridge/stp_state", "0\n");
        put("carrier", "0\n");
        assert!(forwards(&port));
        fs::remove_dir_all(&port).unwrap();
    }
}

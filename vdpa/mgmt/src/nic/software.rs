//! A NIC without hardware: a process of this host serves it through VDUSE.
//!
//! ```text
//!   process (tap, VDUSE device) ─> vDPA device on the management device `vduse` ─> tap connected
//! ```
//! Instead of a tap the process can have a queue of a port, which needs no connection.
//! The process answers the kernel while the vDPA device is added and deleted. So it is started
//! first and ends last.

use std::path::Path;

use vdpa::vduse::Control;
use vdpa::vduse::nic::{PAIRS_MAX, Tap, xdp};

use super::connect::Subject;
use super::error::NicError;
use super::making::Making;
use super::nics::Nics;
use super::observer::Observer as _;
use super::record::{MadeNic, State};
use super::request::NicRequest;
use super::server::{self, Service};
use super::step::Step;
use super::store::{LockedStore, StoreError};
use super::wait;
use crate::MgmtDeviceName;
use crate::connectivity::{Connectivity, Place};
use crate::error::existing;
use crate::journal::Outcome;
use crate::link::{Links, is_interface_name};

/// The source of such a NIC, in a request.
pub const SOFTWARE: &str = "software";
/// The management device of devices in userspace.
const MGMTDEV: &str = "vduse";
/// The usual size of packets, in bytes.
const MTU: u16 = 1500;

/// The kernel's management device of devices in userspace.
pub(super) fn mgmtdev() -> Result<MgmtDeviceName, NicError> {
    Ok(MGMTDEV.parse()?)
}

impl Nics {
    /// Checks whether a software NIC can be created, as far as that is known before any change.
    pub(super) fn check_software(&self, request: &NicRequest) -> Result<(), NicError> {
        let settings = [
            (request.rates.is_some(), "rates"),
            (request.virtual_functions.is_some(), "virtual functions"),
            (
                request.port.is_some() && (request.tap.is_some() || request.connectivity.is_some()),
                "bridge, VLAN or tap, beside a port",
            ),
        ];
        if let Some(&(_, what)) = settings.iter().find(|one| one.0) {
            let from = request.from.clone();
            return Err(NicError::NoSettings { from, what });
        }
        let service = service(request)?;
        if !(1..=PAIRS_MAX).contains(&service.pairs) {
            return Err(NicError::QueuePairs(service.pairs));
        }
        if service.port.is_some() && service.pairs != 1 {
            return Err(NicError::PortPairs(service.pairs));
        }
        if let Some(tap) = service.own_tap()
            && existing(Links::open()?.link(tap))?.is_some()
        {
            return Err(NicError::TapTaken(tap.to_owned()));
        }
        self.check_network(&mgmtdev()?)
    }

    /// Starts the processes of a NIC again, if it should have one and has none: it was killed. One
    /// that is stopped continues. The guest does not notice. Returns whether this did something.
    ///
    /// The lock of `store` keeps others from deleting the NIC meanwhile.
    ///
    /// # Errors
    /// [`NicError::Server`]: it cannot be started or continued. [`NicError::Store`]: its record
    /// cannot be read.
    pub fn serve_again(&self, name: &str, store: &mut LockedStore) -> Result<bool, NicError> {
        let Some((nic, service)) = to_serve(name, store)? else {
            return Ok(false);
        };
        if server::is_served(name).map_err(NicError::Server)? {
            return Ok(false);
        }
        if !server::resume(name).map_err(NicError::Server)? {
            self.serve(name, &service)?;
            connect_again(nic, store)?;
        }
        Ok(true)
    }

    fn serve(&self, name: &str, service: &Service) -> Result<(), NicError> {
        let program = Path::new("/proc/self/exe");
        server::start(program, name, service, self.patience).map_err(NicError::Server)
    }

    /// Ends the process of a NIC, and deletes its VDUSE device and tap.
    pub(super) fn unserve(&self, name: &str, service: &Service) -> Result<(), NicError> {
        server::stop(name, self.patience).map_err(NicError::Server)?;
        if Control::exists(name) {
            let control = Control::open()?;
            let what = format!("the end of the process that has the VDUSE device {name} open");
            // The worker of a killed process ends a moment after it.
            wait::until(
                &what,
                self.patience,
                || false,
                || (),
                || Ok(control.destroy(name)?.then_some(())),
            )?;
        }
        if let Some(tap) = service.own_tap()
            && existing(Links::open()?.link(tap))?.is_some()
        {
            // A process before the taps with several queues has created one with one.
            let queues = Tap::open(tap, service.pairs).or_else(|_| Tap::open(tap, 1))?;
            for queue in queues {
                queue.set_persistent(false)?;
            }
        }
        server::forget(name);
        Ok(())
    }
}

impl Making<'_> {
    /// All phases of a software NIC.
    pub(super) fn software(&mut self, request: &NicRequest) -> Result<(), NicError> {
        let service = service(request)?;
        let step = Step::Serve {
            service: service.clone(),
        };
        self.step(step, |nics| {
            match nics.serve(&request.name, &service) {
                Ok(()) => Outcome::Done(()),
                // A part may exist.
                Err(error) => Outcome::Unknown(error),
            }
        })?;
        // The process has the settings, and VDUSE takes none with the vDPA device.
        let device = NicRequest::new(&request.name, &request.from);
        self.add_device_with_address(&device, &mgmtdev()?, false)?;
        let wanted = request.connectivity.as_ref().map(|wanted| Connectivity {
            mtu: wanted.mtu.or(Some(service.mtu.into())),
            ..wanted.clone()
        });
        match service.tap {
            Some(tap) => self.connect(wanted.as_ref(), &Subject::Interface(tap)),
            None => Ok(()),
        }
    }
}

/// The record of a complete NIC, with the settings for its process. Others have none, or none any
/// more.
fn to_serve(name: &str, store: &LockedStore) -> Result<Option<(MadeNic, Service)>, StoreError> {
    let nic = match store.nic(name) {
        Err(StoreError::NoNic(_)) => return Ok(None),
        nic => nic?,
    };
    let service = nic.service().filter(|_| nic.state() == State::Made);
    Ok(service.cloned().map(|service| (nic, service)))
}

/// Connects the tap if it is a new one in the place of one that was deleted.
fn connect_again(mut nic: MadeNic, store: &mut LockedStore) -> Result<(), NicError> {
    let links = Links::open()?;
    let Some(attached) = nic.connection() else {
        return Ok(());
    };
    let (Some(wanted), Some(tap)) = (attached.lost(&links)?, attached.interface()) else {
        return Ok(());
    };
    let place = Place::Link(links.link(tap)?);
    let before = nic.clone();
    let connected = wanted.attach_noting(&links, &place, &mut |attached| {
        nic.set_connection(attached);
        store.keep(&nic)
    });
    if connected.is_err() {
        // The record keeps how the NIC was connected.
        store.keep(&before).map_err(NicError::Record)?;
    }
    Ok(connected.map(drop)?)
}

/// The settings for the process of a requested NIC.
fn service(request: &NicRequest) -> Result<Service, NicError> {
    let bridge = request
        .connectivity
        .as_ref()
        .and_then(|one| one.bridge.as_deref());
    let port = request.port.as_ref();
    let mtu = match (request.mtu, bridge.or(port.map(|port| &*port.interface))) {
        (Some(mtu), _) => mtu,
        (None, Some(interface)) => {
            let link = existing(Links::open()?.link(interface))?;
            // One that is missing is reported when it is connected.
            let mtu = link.map_or(MTU, |link| u16::try_from(link.mtu).unwrap_or(u16::MAX));
            let max = port.map_or(u16::MAX, |_| xdp::MTU_MAX);
            mtu.min(max)
        }
        (None, None) => MTU,
    };
    let tap = || request.tap.clone().unwrap_or_else(|| tap_of(&request.name));
    Ok(Service {
        tap: port.is_none().then(tap),
        is_own_tap: port.is_none() && request.tap.is_none(),
        port: port.cloned(),
        mac: request.mac.unwrap_or_else(|| address(&request.name)),
        mtu,
        features: request.device_features.unwrap_or(u64::MAX),
        pairs: request.max_vqp.unwrap_or(1),
        poll_percent: request.poll_percent.unwrap_or_default(),
    })
}

/// The tap of a NIC: its name, if that is one for an interface.
fn tap_of(name: &str) -> String {
    if is_interface_name(name) {
        return name.to_owned();
    }
    format!("sw{:012x}", hash(name.as_bytes()) >> 16)
}

/// A local address for a NIC of this name: the same at each start, another one on other hosts.
fn address(name: &str) -> [u8; 6] {
    let mut host = std::fs::read("/etc/machine-id").unwrap_or_default();
    host.extend(name.as_bytes());
    let [a, b, c, d, e, ..] = hash(&host).to_le_bytes();
    [0x52, a, b, c, d, e]
}

/// FNV-1a.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::super::store::Store;
    use super::*;

    #[test]
    fn a_tap_has_the_name_of_its_nic_or_a_short_one() {
        assert_eq!(tap_of("sw0"), "sw0");
        let long = ["web-1234567890/net0", "web-1234567890/net1"].map(tap_of);
        assert!(long.iter().all(|tap| is_interface_name(tap)));
        assert_ne!(long[0], long[1]);
    }

    #[test]
    fn the_process_of_a_nic_polls_as_requested() {
        let mut request = NicRequest {
            mtu: Some(1500),
            ..NicRequest::new("sw0", SOFTWARE)
        };
        assert_eq!(service(&request).unwrap().poll_percent, 0);
        request.poll_percent = Some(30);
        assert_eq!(service(&request).unwrap().poll_percent, 30);
    }

    #[test]
    fn only_a_complete_nic_gets_a_process_again() {
        let directory = std::env::temp_dir().join(format!("bellhop-again-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&directory);
        let mut store = Store::open(&directory).unwrap().lock().unwrap();
        let request = NicRequest {
            mtu: Some(1500),
            ..NicRequest::new("sw0", SOFTWARE)
        };
        let service = service(&request).unwrap();
        let mut nic = MadeNic::new("sw0", SOFTWARE, None);
        nic.steps_mut().push(Step::Serve {
            service: service.clone(),
        });
        assert_eq!(to_serve("sw0", &store).unwrap(), None);
        for (state, expected) in [
            (State::Making, None),
            (State::Made, Some(service.clone())),
            (State::Removing, None),
        ] {
            nic.set_state(state);
            store.keep(&nic).unwrap();
            let found = to_serve("sw0", &store).unwrap();
            let expected = expected.map(|service| (nic.clone(), service));
            assert_eq!(found, expected, "{state:?}");
        }
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn addresses_depend_on_the_name_and_stay() {
        let addresses = ["sw0", "sw1", "sw2"].map(address);
        assert_eq!(addresses, ["sw0", "sw1", "sw2"].map(address));
        for (index, one) in addresses.iter().enumerate() {
            // Unicast and local.
            assert_eq!(one[0] & 3, 2);
            assert!(!addresses[..index].contains(one));
        }
    }
}

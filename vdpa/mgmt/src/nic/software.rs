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
use super::record::MadeNic;
use super::request::NicRequest;
use super::server::{self, Service};
use super::step::Step;
use super::store::LockedStore;
use super::wait;
use crate::MgmtDeviceName;
use crate::connectivity::{Connectivity, Place};
use crate::error::existing;
use crate::journal::Outcome;
use crate::link::{Link, Links, is_interface_name};

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

    /// Repairs a software NIC that [needs](MadeNic::needs_repair) it, and returns whether it did. A
    /// process that was killed is started again, and one that was stopped continues. A new tap is
    /// connected. The guest does not notice.
    ///
    /// `nic` is its record in `store`. The lock keeps others from deleting the NIC meanwhile.
    ///
    /// # Errors
    /// [`NicError::Server`]: the process cannot be started or continued. [`NicError::OtherTap`]:
    /// another interface has the tap's name. [`NicError::Connectivity`]: the tap cannot be
    /// connected. [`NicError::Record`]: the record cannot be stored.
    pub fn repair(&self, nic: &mut MadeNic, store: &mut LockedStore) -> Result<bool, NicError> {
        let Some(service) = nic.service().filter(|_| nic.needs_repair()).cloned() else {
            return Ok(false);
        };
        let links = Links::open()?;
        if !server::resume(nic.name()).map_err(NicError::Server)? {
            if forget_tap(nic, &service, &links)? {
                // Before there is another tap.
                store.keep(nic).map_err(NicError::Record)?;
            }
            self.serve(nic.name(), &service)?;
        }
        connect_tap(nic, &service, &links, store)?;
        Ok(true)
    }

    fn serve(&self, name: &str, service: &Service) -> Result<(), NicError> {
        let program = Path::new("/proc/self/exe");
        server::start(program, name, service, self.patience).map_err(NicError::Server)
    }

    /// Ends the process of a NIC, and deletes its VDUSE device and tap. Returns the reason if it
    /// leaves an interface of the tap's name.
    pub(super) fn unserve(
        &self,
        name: &str,
        service: &Service,
    ) -> Result<Option<String>, NicError> {
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
        let mut left = None;
        if let Some(tap) = service.own_tap()
            && let Some(link) = existing(Links::open()?.link(tap))?
        {
            if may_be_tap(&link, service.tap_index) {
                // A process before the taps with several queues has created one with one.
                let queues = Tap::open(tap, service.pairs).or_else(|_| Tap::open(tap, 1))?;
                for queue in queues {
                    queue.set_persistent(false)?;
                }
            } else {
                left = Some(format!("the interface {tap}, which is not this NIC's tap"));
            }
        }
        server::forget(name);
        Ok(left)
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
        if let Some(tap) = service.tap {
            let wanted = service.connectivity.as_ref();
            self.connect(wanted, &Subject::Interface(tap.clone()))?;
            self.set_tap_index(Links::open()?.link(&tap)?.index);
        }
        Ok(())
    }
}

/// Notes that the process will create another tap if its own was deleted. Returns whether `nic` has
/// changed.
fn forget_tap(nic: &mut MadeNic, service: &Service, links: &Links) -> Result<bool, NicError> {
    let (Some(tap), Some(index)) = (&service.tap, service.tap_index) else {
        return Ok(false);
    };
    match existing(links.link(tap))? {
        Some(link) if link.index == index => return Ok(false),
        Some(_) if service.is_own_tap => return Err(NicError::OtherTap(tap.clone())),
        _ => nic.set_tap_index(None),
    }
    Ok(true)
}

/// Connects the tap of a NIC, unless it is connected.
fn connect_tap(
    nic: &mut MadeNic,
    service: &Service,
    links: &Links,
    store: &mut LockedStore,
) -> Result<(), NicError> {
    let Some(tap) = &service.tap else {
        return Ok(());
    };
    let link = links.link(tap)?;
    if service.tap_index == Some(link.index) {
        return Ok(());
    }
    let index = link.index;
    let former = nic.connection().cloned();
    let mut is_connected = false;
    if let (None, Some(former)) = (&service.connectivity, &former) {
        // The record of an older program.
        nic.set_connectivity(former.connectivity(links)?);
        is_connected = former.is_of(&link);
    }
    let wanted = nic.service().and_then(|now| now.connectivity.clone());
    if let Some(wanted) = wanted.filter(|_| !is_connected) {
        let place = Place::Link(link);
        wanted.attach_again(links, former.as_ref(), &place, &mut |attached| {
            nic.set_connection(attached);
            store.keep(nic)
        })?;
    }
    nic.set_tap_index(Some(index));
    store.keep(nic).map_err(NicError::Record)
}

/// Whether this interface may be the tap of a NIC: the one with the recorded index. Without one it
/// is a tap that the NIC's process created.
fn may_be_tap(link: &Link, index: Option<u32>) -> bool {
    // A tun has the same kind, and no Ethernet address.
    let is_tap = link.kind.as_deref() == Some("tun") && link.mac.is_some();
    is_tap && index.is_none_or(|index| index == link.index)
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
    let connectivity = request.connectivity.as_ref().map(|wanted| Connectivity {
        mtu: wanted.mtu.or(Some(mtu.into())),
        ..wanted.clone()
    });
    Ok(Service {
        tap: port.is_none().then(tap),
        is_own_tap: port.is_none() && request.tap.is_none(),
        port: port.cloned(),
        mac: request.mac.unwrap_or_else(|| address(&request.name)),
        mtu,
        features: request.device_features.unwrap_or(u64::MAX),
        pairs: request.max_vqp.unwrap_or(1),
        poll_percent: request.poll_percent.unwrap_or_default(),
        connectivity,
        tap_index: None,
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
    use super::super::record::State;
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
    fn the_record_has_the_whole_connection() {
        let request = NicRequest {
            mtu: Some(9000),
            connectivity: Some("bridge=br0,vlan=100".parse().unwrap()),
            ..NicRequest::new("sw0", SOFTWARE)
        };
        let expected = "bridge=br0,vlan=100,mtu=9000".parse().unwrap();
        assert_eq!(service(&request).unwrap().connectivity, Some(expected));
    }

    /// A NIC without a process, and its request.
    fn nowhere() -> (NicRequest, MadeNic) {
        let request = NicRequest {
            mtu: Some(1500),
            ..NicRequest::new("nowhere", SOFTWARE)
        };
        (request, MadeNic::new("nowhere", SOFTWARE, None))
    }

    #[test]
    fn only_a_complete_nic_is_repaired() {
        let (request, mut nic) = nowhere();
        nic.set_state(State::Made);
        assert!(!nic.needs_repair(), "it has no process");
        nic.steps_mut().push(Step::Serve {
            service: service(&request).unwrap(),
        });
        // Only its process is missing.
        nic.set_tap_index(Some(7));
        for (state, expected) in [
            (State::Making, false),
            (State::Made, true),
            (State::Removing, false),
        ] {
            nic.set_state(state);
            assert_eq!(nic.needs_repair(), expected, "{state:?}");
        }
    }

    #[test]
    fn a_tap_is_connected_once_its_index_is_recorded() {
        let (request, mut nic) = nowhere();
        let service = service(&request).unwrap();
        nic.steps_mut().push(Step::Serve { service });
        assert!(!nic.service().unwrap().is_connected());
        nic.set_tap_index(Some(7));
        assert!(nic.service().unwrap().is_connected());
        // A port has no tap.
        let service = Service {
            tap: None,
            tap_index: None,
            ..nic.service().unwrap().clone()
        };
        assert!(service.is_connected());
    }

    #[test]
    fn only_the_tap_of_the_nic_is_deleted() {
        let links = Links::open().unwrap();
        let mut tap = Link {
            kind: Some("tun".to_owned()),
            mac: Some([2, 0, 0, 0, 0, 1]),
            ..links.link("lo").unwrap()
        };
        assert!(may_be_tap(&tap, None) && may_be_tap(&tap, Some(tap.index)));
        assert!(!may_be_tap(&tap, Some(tap.index + 1)));
        let tun = Link {
            mac: None,
            ..tap.clone()
        };
        assert!(!may_be_tap(&tun, None));
        tap.kind = Some("dummy".to_owned());
        assert!(!may_be_tap(&tap, None));
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

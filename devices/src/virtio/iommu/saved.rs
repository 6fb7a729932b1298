//! The domains of a saved machine.
//!
//! The state comes from a file or another host: every mapping is checked as a MAP of a guest. The
//! request queue is part of the device's own state.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vdpa::iotlb::Access;
use vdpa::iova::IovaRange;
use vdpa::memory::{Mode, Piece};

use super::domains::{Domain, Domains, Edit, LAST_DOMAIN};
use super::request::Status;
use crate::Error;

/// Version of [`DomainsState`].
pub const DOMAINS_STATE_VERSION: u32 = 1;

/// The domains of an IOMMU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DomainsState {
    bypass: bool,
    /// The last device address that the guest may map. The first one is 0.
    last: u64,
    domains: Vec<DomainState>,
}

/// A domain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct DomainState {
    id: u32,
    bypass: bool,
    mappings: Vec<MappingState>,
    endpoints: Vec<u32>,
}

/// A mapping.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct MappingState {
    first: u64,
    last: u64,
    gpa: u64,
    reads: bool,
    writes: bool,
}

impl Domains {
    /// Returns the state to save. The vCPUs are parked.
    #[must_use]
    pub fn save(&self) -> DomainsState {
        let domain = |(&id, domain): (&u32, &Domain)| {
            let space = domain.space.read();
            let mapping = |(range, piece): (IovaRange, &Piece)| MappingState {
                first: range.first(),
                last: range.last(),
                gpa: piece.gpa,
                reads: piece.access != Access::WriteOnly,
                writes: piece.access != Access::ReadOnly,
            };
            let members = self.endpoints.iter();
            DomainState {
                id,
                bypass: space.mode() == Mode::Identity,
                mappings: space.mappings().iter().map(mapping).collect(),
                endpoints: members
                    .filter(|(_, member)| member.domain == Some(id))
                    .map(|(endpoint, _)| *endpoint)
                    .collect(),
            }
        };
        DomainsState {
            bypass: self.bypass,
            last: self.limits.input.last(),
            domains: self.domains.iter().map(domain).collect(),
        }
    }

    /// Checks whether [`Domains::restore`] accepts a state, as far as possible without the devices.
    ///
    /// # Errors
    /// No guest could have reached this state, or it does not fit this machine.
    pub fn check(&self, state: &DomainsState) -> Result<(), Error> {
        self.read(state).map(drop)
    }

    /// Restores a saved state, before the devices start. It replaces what there is.
    ///
    /// # Errors
    /// As [`Domains::check`], and nothing has changed then. Or a device refuses its domain.
    pub fn restore(&mut self, state: &DomainsState) -> Result<(), Error> {
        let domains = self.read(state)?;
        self.reset();
        for (saved, domain) in domains {
            let space = Arc::clone(&domain.space);
            self.domains.insert(saved.id, domain);
            for endpoint in &saved.endpoints {
                if let Some(member) = self.endpoints.get_mut(endpoint) {
                    member.device.enter(&space)?;
                    member.domain = Some(saved.id);
                }
            }
        }
        self.set_bypass(state.bypass);
        Ok(())
    }

    /// Returns the mappings of each domain.
    fn read<'a>(&self, state: &'a DomainsState) -> Result<Vec<(&'a DomainState, Domain)>, Error> {
        let last = self.limits.input.last();
        if state.last != last {
            return Err(Error::other(format!(
                "the guest's IOMMU has addresses up to {:#x}, and this machine's up to {last:#x}: \
                 its devices reach other addresses",
                state.last
            )));
        }
        let (mut ids, mut attached) = (BTreeSet::new(), BTreeSet::new());
        let domains = state.domains.iter().map(|state| {
            let mut endpoints = state.endpoints.iter();
            let possible = state.id <= LAST_DOMAIN
                && ids.insert(state.id)
                && !state.endpoints.is_empty()
                && endpoints.all(|endpoint| {
                    self.endpoints.contains_key(endpoint) && attached.insert(*endpoint)
                });
            let read = if possible {
                self.read_domain(state)
            } else {
                Err(Error::other("its number or its endpoints are not possible"))
            };
            let id = state.id;
            let domain = read.map_err(Error::context(format!(
                "cannot restore domain {id} of the guest's IOMMU"
            )))?;
            Ok((state, domain))
        });
        domains.collect()
    }

    fn read_domain(&self, state: &DomainState) -> Result<Domain, Error> {
        let mode = if state.bypass {
            Mode::Identity
        } else {
            Mode::Mapped
        };
        let edits = state.mappings.iter().map(MappingState::edit);
        let (domain, statuses) = self.filled(mode, &edits.collect::<Result<Vec<_>, _>>()?);
        if statuses.iter().any(|status| *status != Status::Ok) {
            return Err(Error::other("a guest cannot have one of its mappings"));
        }
        Ok(domain)
    }
}

impl MappingState {
    fn edit(&self) -> Result<Edit, Error> {
        let range = IovaRange::new(self.first, self.last);
        let access = match (self.reads, self.writes) {
            (true, true) => Some(Access::ReadWrite),
            (true, false) => Some(Access::ReadOnly),
            (false, true) => Some(Access::WriteOnly),
            (false, false) => None,
        };
        let (range, access) = range
            .zip(access)
            .ok_or_else(|| Error::other("a mapping is empty"))?;
        Ok(Edit::Map(
            range,
            Piece {
                gpa: self.gpa,
                access,
            },
        ))
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;
    use proptest::prelude::*;

    use super::super::domains::MAPPINGS_MAX;
    use super::super::recorder::{Recorder, domains};
    use super::super::request::Request;
    use super::*;

    fn with_recorders() -> (Domains, [Arc<Mutex<Recorder>>; 3]) {
        let mut domains = domains(true, MAPPINGS_MAX);
        let recorders = [Recorder::new(), Recorder::new(), Recorder::new()];
        for (number, recorder) in (0..).zip(&recorders) {
            domains.add(number, recorder.clone()).unwrap();
        }
        (domains, recorders)
    }

    fn attach(domain: u32, endpoint: u32, bypass: bool) -> Request {
        Request::Attach {
            domain,
            endpoint,
            bypass,
        }
    }

    fn saved() -> DomainsState {
        let (mut domains, _) = with_recorders();
        let map = |first: u64, access| Request::Map {
            domain: 7,
            range: IovaRange::from_size(first, 0x2000).unwrap(),
            gpa: 0x3000,
            access,
        };
        let served = domains.serve(&[
            attach(7, 0, false),
            attach(7, 1, false),
            attach(8, 2, true),
            map(0x10_0000_0000, Access::ReadOnly),
            map(0x8000, Access::WriteOnly),
            map(0xa000, Access::ReadWrite),
        ]);
        assert!(served.iter().all(|status| *status == Status::Ok));
        domains.set_bypass(false);
        domains.save()
    }

    #[test]
    fn a_saved_state_is_restored_and_saved_alike() {
        let state = saved();
        let (mut domains, recorders) = with_recorders();
        domains.check(&state).unwrap();
        domains.restore(&state).unwrap();
        assert_eq!(domains.save(), state);
        assert!(!domains.bypass);
        for recorder in &recorders {
            assert!(recorder.lock().follows());
        }
        let modes = recorders.map(|recorder| recorder.lock().mode);
        assert_eq!(modes, [Mode::Mapped, Mode::Mapped, Mode::Identity]);
    }

    #[test]
    fn states_that_no_guest_can_reach_are_refused() {
        type Change = fn(&mut DomainsState);
        let changes: [(&str, Change); 11] = [
            ("addresses", |state| state.last -= 1),
            ("domain number", |state| state.domains[0].id = 0x1_0000),
            ("two of a number", |state| state.domains[0].id = 8),
            ("no endpoint", |state| state.domains[0].endpoints.clear()),
            ("unknown endpoint", |state| {
                state.domains[0].endpoints[0] = 9
            }),
            ("endpoint twice", |state| state.domains[0].endpoints[0] = 2),
            ("overlap", |state| {
                state.domains[0].mappings[1].first -= 0x1000
            }),
            ("empty", |state| state.domains[0].mappings[1].last = 0),
            ("no access", |state| {
                state.domains[0].mappings[0].writes = false
            }),
            ("outside RAM", |state| {
                state.domains[0].mappings[0].gpa = 1 << 40
            }),
            ("bypass", |state| state.domains[0].bypass = true),
        ];
        for (name, change) in changes {
            let mut state = saved();
            change(&mut state);
            let (mut domains, _) = with_recorders();
            domains.serve(&[attach(1, 0, false)]);
            let before = domains.save();
            assert!(domains.check(&state).is_err(), "{name}");
            assert!(domains.restore(&state).is_err(), "{name}");
            assert_eq!(domains.save(), before, "{name}");
        }
    }

    proptest! {
        #[test]
        fn altered_states_are_harmless(at in 0..200usize, value in any::<u8>()) {
            let mut bytes = postcard::to_stdvec(&saved()).unwrap();
            let at = at % bytes.len();
            bytes[at] = value;
            if let Ok(state) = postcard::from_bytes::<DomainsState>(&bytes) {
                let (mut domains, recorders) = with_recorders();
                if domains.restore(&state).is_ok() {
                    for recorder in &recorders {
                        prop_assert!(recorder.lock().follows());
                    }
                }
            }
        }
    }
}

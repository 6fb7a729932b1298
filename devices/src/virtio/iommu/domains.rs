//! Domains: which mappings each device behind the IOMMU has.
//!
//! ```text
//!                       ATTACH                        ATTACH to another domain
//!   without a domain ------------> in domain D ----------------------+
//!   (bypass: identity,  <--------    ^                               |
//!    else blocked)       DETACH,     +-------------------------------+
//!                        reset
//! ```
//! A domain exists while an endpoint is attached to it. It has mappings, or is of the kind
//! *bypass*: device addresses are guest-physical. There are at most as many domains as endpoints,
//! so guests cannot make more.
//!
//! **Order.** An ATTACH changes the endpoint before the domains, which a refused ATTACH does not
//! change. MAP and UNMAP change the domain's [`AddressSpace`] first, which waits for readers in
//! this process, then every endpoint. Then the VMM answers them.
//!
//! **Refusals.** Adjacent MAPs and UNMAPs of a pass are one change set for each domain. If an
//! endpoint refuses the set, it is rolled back in all of them. Then its requests are served one by
//! one, so that only the cause gets an error. That matters because Linux ignores the status of an
//! UNMAP: its pages must not stay mapped. If an endpoint refuses even a lone UNMAP, or a roll-back,
//! it is blocked until its driver resets it.
//!
//! Owns the books and their limits. It must not know the layout of requests, nor how a device
//! changes its mappings.

use std::collections::BTreeMap;
use std::sync::Arc;

use tracing::warn;
use vdpa::causes::in_one_line;
use vdpa::iova::{IovaRange, PAGE_SIZE};
use vdpa::memory::{AddressSpace, Change, GuestMemory, GuestRegion, Mode, Piece, Writer};

use super::endpoint::Endpoint;
use super::request::{MSI, Request, Status};
use crate::Error;

/// The largest number of a domain, for the configuration field `domain_range`.
pub(super) const LAST_DOMAIN: u32 = 0xffff;
/// The default of the mappings of a domain.
pub const MAPPINGS_MAX: u32 = 65_536;

/// Bytes of mappings of a domain beyond twice the size of guest RAM. The kernel counts each mapping
/// as locked memory, even if its pages are locked already.
const BYTES_BEYOND_RAM: u64 = 1 << 30;

const LIMIT: &str = "the domain has all its mappings, or all the bytes that it may map";

/// What guests may map.
#[derive(Debug)]
pub(super) struct Limits {
    /// Device addresses, for the configuration field `input_range`.
    pub(super) input: IovaRange,
    /// Guest RAM, the only memory that can be mapped.
    ram: Vec<IovaRange>,
    /// Mappings of a domain.
    mappings: u32,
    /// Their bytes.
    bytes: u64,
}

impl Limits {
    fn new(memory: &GuestMemory, input: IovaRange, mappings: u32) -> Self {
        let regions = GuestRegion::all(memory).into_iter();
        let ram: Vec<IovaRange> = regions.filter_map(|region| region.range()).collect();
        let size: u64 = ram.iter().filter_map(IovaRange::size).sum();
        Self {
            input,
            ram,
            mappings,
            bytes: size.saturating_mul(2).saturating_add(BYTES_BEYOND_RAM),
        }
    }
}

/// The mappings of an IOMMU, and how often it served requests in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Mappings of all domains now.
    pub mappings: usize,
    /// Passes over the request queue that found requests.
    pub kicks: u64,
    /// MAP requests that succeeded.
    pub maps: u64,
    /// UNMAP requests that succeeded.
    pub unmaps: u64,
    /// Requests that an endpoint or a limit of a domain refused.
    pub refused: u64,
    /// Change sets that devices got.
    pub sets: u64,
}

/// A request that an endpoint or a limit of its domain refused. Linux ignores the status of a MAP,
/// so the guest does not report it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The endpoint; for a limit, one of its domain.
    pub endpoint: u32,
    /// The addresses of the MAP or UNMAP; `None` for an ATTACH or a DETACH.
    pub range: Option<IovaRange>,
    /// The cause, in one line.
    pub cause: String,
}

/// The domains and endpoints of an IOMMU; see the module.
#[derive(Debug)]
pub struct Domains {
    pub(super) limits: Limits,
    /// Where endpoints without a domain are in bypass.
    identity: Arc<AddressSpace>,
    pub(super) bypass: bool,
    boot_bypass: bool,
    pub(super) domains: BTreeMap<u32, Domain>,
    pub(super) endpoints: BTreeMap<u32, Member>,
    counters: Counters,
    last_refusal: Option<Refusal>,
}

#[derive(Debug)]
pub(super) struct Domain {
    pub(super) space: Arc<AddressSpace>,
    bytes: u64,
}

#[derive(Debug)]
pub(super) struct Member {
    endpoint: u32,
    pub(super) device: Arc<dyn Endpoint>,
    pub(super) domain: Option<u32>,
}

impl Member {
    /// Puts an endpoint without a domain where it belongs.
    fn settle(&self, identity: Option<&Arc<AddressSpace>>) -> Result<(), Error> {
        let Some(identity) = identity else {
            return self.device.leave();
        };
        self.device.enter(identity).inspect_err(|_| {
            // The first error has the cause.
            let _ = self.device.leave();
        })
    }

    /// As [`Member::settle`], but an endpoint that cannot be there only has to leave its domain.
    ///
    /// # Errors
    /// The host still works on its requests.
    fn settle_or_leave(&self, identity: Option<&Arc<AddressSpace>>) -> Result<(), Error> {
        let endpoint = self.endpoint;
        if let Some(identity) = identity {
            let Err(error) = self.device.enter(identity) else {
                return Ok(());
            };
            warn!(
                endpoint,
                error = in_one_line(&error),
                "a device cannot bypass the IOMMU and reaches no memory"
            );
        }
        self.device.leave().inspect_err(|error| {
            let error = in_one_line(error);
            warn!(endpoint, error, "a device is blocked by its requests");
        })
    }
}

/// A MAP or an UNMAP of a domain.
#[derive(Debug, Clone, Copy)]
pub(super) enum Edit {
    Map(IovaRange, Piece),
    Unmap(IovaRange),
}

impl Edit {
    /// The change of a domain that `request` asks for.
    fn of(request: &Request) -> Option<(u32, Self)> {
        match *request {
            Request::Map {
                domain,
                range,
                gpa,
                access,
            } => Some((domain, Self::Map(range, Piece { gpa, access }))),
            Request::Unmap { domain, range } => Some((domain, Self::Unmap(range))),
            _ => None,
        }
    }

    fn range(&self) -> IovaRange {
        let (Self::Map(range, _) | Self::Unmap(range)) = *self;
        range
    }
}

/// Changes that a domain made, and those that undo them, in the order in which they are applied.
#[derive(Debug, Default)]
struct ChangeSet {
    forward: Vec<Change>,
    backward: Vec<Change>,
}

impl Domains {
    /// Creates an IOMMU without endpoints. Guests may map guest RAM at the addresses `input`, with
    /// so many `mappings` in a domain. `bypass`: endpoints reach all of guest RAM until they are
    /// attached to a domain.
    #[must_use]
    pub fn new(memory: &GuestMemory, input: IovaRange, mappings: u32, bypass: bool) -> Self {
        Self {
            limits: Limits::new(memory, input, mappings),
            identity: new_space(input, Mode::Identity),
            bypass,
            boot_bypass: bypass,
            domains: BTreeMap::new(),
            endpoints: BTreeMap::new(),
            counters: Counters::default(),
            last_refusal: None,
        }
    }

    /// Returns the device addresses that guests may map.
    #[must_use]
    pub fn input(&self) -> IovaRange {
        self.limits.input
    }

    /// Returns the number of mappings, and how often requests were served.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let domains = self.domains.values();
        let mappings = domains.map(|domain| domain.space.read().mappings().len());
        Counters {
            mappings: mappings.sum(),
            ..self.counters
        }
    }

    /// Returns how many requests were refused.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.counters.refused
    }

    /// Returns the last request that was refused.
    #[must_use]
    pub fn last_refusal(&self) -> Option<&Refusal> {
        self.last_refusal.as_ref()
    }

    fn refuse(&mut self, endpoint: u32, range: Option<IovaRange>, cause: String) {
        self.counters.refused += 1;
        self.last_refusal = Some(Refusal {
            endpoint,
            range,
            cause,
        });
    }

    /// Puts a device behind the IOMMU. `endpoint` is its number in requests.
    ///
    /// # Errors
    /// The number is in use. The device does not reach all addresses that guests may map. Or it
    /// cannot map guest RAM, which it reaches in bypass.
    pub fn add(&mut self, endpoint: u32, device: Arc<dyn Endpoint>) -> Result<(), Error> {
        if self.endpoints.contains_key(&endpoint) {
            return Err(Error::other(format!("endpoint {endpoint:#x} is in use")));
        }
        let (reach, input) = (device.reach()?, self.limits.input);
        if !reach.contains(&input) {
            return Err(Error::other(format!(
                "the device reaches the addresses {reach}, and the guest's IOMMU has {input}: \
                 give the machine such a device when it starts, or leave out iommu=on"
            )));
        }
        let member = Member {
            endpoint,
            device,
            domain: None,
        };
        member.settle(self.bypass_space())?;
        self.endpoints.insert(endpoint, member);
        Ok(())
    }

    /// Removes a device that is unplugged.
    pub fn remove(&mut self, endpoint: u32) {
        if let Some(member) = self.endpoints.remove(&endpoint) {
            self.drop_unused(member.domain);
        }
    }

    /// Sets bypass as at power-on.
    pub fn power_on(&mut self) {
        self.set_bypass(self.boot_bypass);
    }

    /// Sets whether endpoints without a domain bypass the IOMMU.
    pub(super) fn set_bypass(&mut self, bypass: bool) {
        if self.bypass == bypass {
            return;
        }
        self.bypass = bypass;
        for member in self.endpoints.values() {
            if member.domain.is_none() {
                // No answer can report it, and the log has it.
                let _ = member.settle_or_leave(self.bypass_space());
            }
        }
    }

    /// Detaches all endpoints: the driver resets the IOMMU.
    pub(super) fn reset(&mut self) {
        self.domains.clear();
        let identity = self.bypass_space().cloned();
        for member in self.endpoints.values_mut() {
            if member.domain.take().is_some() {
                // No answer can report it, and the log has it.
                let _ = member.settle_or_leave(identity.as_ref());
            }
        }
    }

    /// Creates a domain with mappings, as a guest would. Returns the status of each.
    pub(super) fn filled(&self, mode: Mode, edits: &[Edit]) -> (Domain, Vec<Status>) {
        let mut domain = Domain::new(self.limits.input, mode);
        let (statuses, _) = domain.edit(&self.limits, edits);
        (domain, statuses)
    }

    fn bypass_space(&self) -> Option<&Arc<AddressSpace>> {
        self.bypass.then_some(&self.identity)
    }

    /// Serves the requests of one pass, in their order. Returns the status of each.
    pub(super) fn serve(&mut self, requests: &[Request]) -> Vec<Status> {
        let mut statuses = Vec::with_capacity(requests.len());
        self.counters.kicks += u64::from(!requests.is_empty());
        while let Some(rest) = requests.get(statuses.len()..)
            && let Some(first) = rest.first()
        {
            let edits: Vec<(u32, Edit)> = rest.iter().map_while(Edit::of).collect();
            if edits.is_empty() {
                statuses.push(self.serve_one(first));
            } else {
                self.edit_all(&edits, &mut statuses);
            }
        }
        statuses
    }

    fn serve_one(&mut self, request: &Request) -> Status {
        match *request {
            Request::Attach {
                domain,
                endpoint,
                bypass,
            } => self.attach(domain, endpoint, bypass),
            Request::Detach { domain, endpoint } => self.detach(domain, endpoint),
            Request::Probe { endpoint } if self.endpoints.contains_key(&endpoint) => Status::Ok,
            Request::Probe { .. } => Status::NoEntry,
            Request::Refused(status) => status,
            // Served by `edit_all`.
            Request::Map { .. } | Request::Unmap { .. } => Status::Invalid,
        }
    }

    /// As a DETACH and an ATTACH (virtio 1.3, 5.13.6.3.2): a domain that the endpoint has alone
    /// begins again without mappings.
    fn attach(&mut self, domain: u32, endpoint: u32, bypass: bool) -> Status {
        let shared = self
            .endpoints
            .iter()
            .any(|(&other, member)| other != endpoint && member.domain == Some(domain));
        let Some(member) = self.endpoints.get_mut(&endpoint) else {
            return Status::NoEntry;
        };
        if domain > LAST_DOMAIN {
            return Status::OutOfRange;
        }
        let mode = if bypass { Mode::Identity } else { Mode::Mapped };
        let known = self.domains.get(&domain).filter(|_| shared);
        let fresh = Domain::new(self.limits.input, mode);
        let space = &known.unwrap_or(&fresh).space;
        if space.read().mode() != mode {
            return Status::Invalid;
        }
        if let Err(error) = member.device.enter(space) {
            let error = in_one_line(&error);
            warn!(
                domain,
                endpoint, error, "a device refuses the domain of the guest's IOMMU"
            );
            self.refuse(endpoint, None, error);
            return Status::DeviceError;
        }
        let old = member.domain.replace(domain);
        if !shared {
            self.domains.insert(domain, fresh);
        }
        self.drop_unused(old);
        Status::Ok
    }

    fn detach(&mut self, domain: u32, endpoint: u32) -> Status {
        let identity = self.bypass_space().cloned();
        let known = self.domains.contains_key(&domain);
        let Some(member) = self.endpoints.get_mut(&endpoint).filter(|_| known) else {
            return Status::NoEntry;
        };
        if member.domain != Some(domain) {
            return Status::Invalid;
        }
        member.domain = None;
        let left = member.settle_or_leave(identity.as_ref());
        self.drop_unused(Some(domain));
        let Err(error) = left else {
            return Status::Ok;
        };
        self.refuse(endpoint, None, in_one_line(&error));
        Status::DeviceError
    }

    /// Drops a domain to which no endpoint is attached.
    fn drop_unused(&mut self, domain: Option<u32>) {
        let mut members = self.endpoints.values();
        if let Some(domain) = domain
            && members.all(|member| member.domain != Some(domain))
        {
            self.domains.remove(&domain);
        }
    }

    /// Serves MAPs and UNMAPs, with one change set for each domain.
    fn edit_all(&mut self, edits: &[(u32, Edit)], statuses: &mut Vec<Status>) {
        let mut by_domain: BTreeMap<u32, Vec<(usize, Edit)>> = BTreeMap::new();
        let first = statuses.len();
        for (number, &(domain, edit)) in (first..).zip(edits) {
            by_domain.entry(domain).or_default().push((number, edit));
            statuses.push(Status::NoEntry);
        }
        for (domain, edits) in by_domain {
            let own: Vec<Edit> = edits.iter().map(|&(_, edit)| edit).collect();
            let served = self.edit_domain(domain, &own);
            for ((number, _), status) in edits.into_iter().zip(served) {
                if let Some(place) = statuses.get_mut(number) {
                    *place = status;
                }
            }
        }
    }

    /// Serves the edits of one domain; returns no status if there is no such domain.
    fn edit_domain(&mut self, id: u32, edits: &[Edit]) -> Vec<Status> {
        let Some(domain) = self.domains.get_mut(&id) else {
            return Vec::new();
        };
        let members = self.endpoints.values();
        let members: Vec<&Member> = members.filter(|member| member.domain == Some(id)).collect();
        let (statuses, set) = domain.edit(&self.limits, edits);
        self.counters.sets += u64::from(!set.forward.is_empty());
        let lone_unmap = matches!(edits, [Edit::Unmap(_)]);
        let given = if lone_unmap {
            force(&members, &set)
        } else {
            give(&members, &set)
        };
        let Err((endpoint, error)) = given else {
            let endpoint = members.first().map(|member| member.endpoint);
            self.count(endpoint, edits, &statuses);
            return statuses;
        };
        if !lone_unmap {
            domain.revert(&set);
        }
        if edits.len() > 1 {
            let one = |edit| self.edit_domain(id, std::slice::from_ref(edit));
            return edits.iter().flat_map(one).collect();
        }
        let error = in_one_line(&error);
        warn!(
            domain = id,
            endpoint,
            ?edits,
            error,
            "a device refuses a change of the guest's IOMMU"
        );
        self.refuse(endpoint, edits.first().map(Edit::range), error);
        vec![Status::DeviceError]
    }

    /// Counts the edits of a domain that has this endpoint.
    fn count(&mut self, endpoint: Option<u32>, edits: &[Edit], statuses: &[Status]) {
        for (edit, status) in edits.iter().zip(statuses) {
            match (edit, status) {
                (Edit::Map(..), Status::Ok) => self.counters.maps += 1,
                (Edit::Unmap(_), Status::Ok) => self.counters.unmaps += 1,
                (_, Status::NoMemory) => {
                    let endpoint = endpoint.unwrap_or_default();
                    self.refuse(endpoint, Some(edit.range()), LIMIT.to_owned());
                }
                _ => {}
            }
        }
    }
}

/// Gives all members a change set, or none of them. A member that cannot go back is blocked. An
/// error has the endpoint that refuses.
fn give(members: &[&Member], set: &ChangeSet) -> Result<(), (u32, Error)> {
    if set.forward.is_empty() {
        return Ok(());
    }
    for (number, member) in members.iter().enumerate() {
        if let Err(error) = member.device.change(&set.forward) {
            for earlier in members.iter().take(number) {
                // It is blocked if it refuses.
                let _ = change_or_block(earlier, &set.backward);
            }
            return Err((member.endpoint, error));
        }
    }
    Ok(())
}

/// As [`give`], but all members get it. A member that refuses it is blocked.
fn force(members: &[&Member], set: &ChangeSet) -> Result<(), (u32, Error)> {
    let mut result = Ok(());
    for member in members.iter().filter(|_| !set.forward.is_empty()) {
        if let Err(error) = change_or_block(member, &set.forward) {
            result = Err((member.endpoint, error));
        }
    }
    result
}

fn change_or_block(member: &Member, changes: &[Change]) -> Result<(), Error> {
    let changed = member.device.change(changes);
    changed.inspect_err(|_| member.device.block())
}

impl Domain {
    /// Creates a domain without mappings.
    fn new(input: IovaRange, mode: Mode) -> Self {
        Self {
            space: new_space(input, mode),
            bytes: 0,
        }
    }

    /// Changes the mappings, which waits for readers.
    fn edit(&mut self, limits: &Limits, edits: &[Edit]) -> (Vec<Status>, ChangeSet) {
        let mut set = ChangeSet::default();
        let bytes = &mut self.bytes;
        let statuses = self.space.change(|space| {
            let one = |edit: &Edit| match *edit {
                Edit::Map(range, piece) => map(space, bytes, limits, (range, piece), &mut set),
                Edit::Unmap(range) => unmap(space, bytes, range, &mut set),
            };
            edits.iter().map(one).collect()
        });
        set.backward.reverse();
        (statuses, set)
    }

    /// Undoes a change set.
    fn revert(&mut self, set: &ChangeSet) {
        let bytes = &mut self.bytes;
        let size = |range: &IovaRange| range.size().unwrap_or(0);
        self.space.change(|space| {
            for change in &set.backward {
                let done = match change {
                    Change::Map { range, piece } => {
                        *bytes = bytes.saturating_add(size(range));
                        space.map(*range, *piece)
                    }
                    Change::Unmap { range } => {
                        *bytes = bytes.saturating_sub(size(range));
                        space.unmap(*range).map(drop)
                    }
                };
                if let Err(error) = done {
                    // It was so a moment ago, under the same lock.
                    tracing::error!(error = in_one_line(&error), "cannot roll back a mapping");
                }
            }
        });
    }
}

fn new_space(input: IovaRange, mode: Mode) -> Arc<AddressSpace> {
    let space = AddressSpace::new(input);
    space.change(|space| space.set_mode(mode));
    Arc::new(space)
}

/// Serves a MAP.
fn map(
    space: &mut Writer<'_>,
    bytes: &mut u64,
    limits: &Limits,
    (range, piece): (IovaRange, Piece),
    set: &mut ChangeSet,
) -> Status {
    let ends = [range.first(), range.last().wrapping_add(1), piece.gpa];
    let aligned = ends.iter().all(|end| end.is_multiple_of(PAGE_SIZE));
    let Some(size) = range.size().filter(|_| aligned) else {
        return Status::OutOfRange;
    };
    if !limits.input.contains(&range) {
        return Status::OutOfRange;
    }
    let target = IovaRange::from_size(piece.gpa, size);
    let in_ram = target.is_some_and(|target| limits.ram.iter().any(|ram| ram.contains(&target)));
    let msi = MSI.is_some_and(|msi| msi.overlaps(&range));
    if space.mode() != Mode::Mapped || !in_ram || msi {
        return Status::Invalid;
    }
    let total = bytes.saturating_add(size);
    let room = u64::try_from(space.mappings().len()).is_ok_and(|len| len < limits.mappings.into());
    if !room || total > limits.bytes {
        return Status::NoMemory;
    }
    if space.map(range, piece).is_err() {
        // Something is mapped there.
        return Status::Invalid;
    }
    *bytes = total;
    set.forward.push(Change::Map { range, piece });
    set.backward.push(Change::Unmap { range });
    Status::Ok
}

/// Serves an UNMAP.
fn unmap(space: &mut Writer<'_>, bytes: &mut u64, range: IovaRange, set: &mut ChangeSet) -> Status {
    if space.mode() != Mode::Mapped {
        return Status::Invalid;
    }
    let Ok(removed) = space.unmap(range) else {
        return Status::OutOfRange;
    };
    // A driver may unmap the whole space. A device is asked only for the addresses of mappings: it
    // may have others of the VMM.
    if let (Some((first, _)), Some((last, _))) = (removed.first(), removed.last())
        && let Some(range) = IovaRange::new(first.first(), last.last())
    {
        set.forward.push(Change::Unmap { range });
    }
    for (range, piece) in removed {
        *bytes = bytes.saturating_sub(range.size().unwrap_or(0));
        set.backward.push(Change::Map { range, piece });
    }
    Status::Ok
}

#[cfg(test)]
mod tests;

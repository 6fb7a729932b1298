//! The books against a naive model, and a recorder in place of a device.

use parking_lot::Mutex;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use vdpa::iotlb::Access;

use super::super::recorder::{INPUT, Recorder, domains};
use super::*;
use crate::virtio::userspace_queue::driver::RAM;

/// Two devices, with the numbers 0 and 1.
fn with_recorders(bypass: bool) -> (Domains, [Arc<Mutex<Recorder>>; 2]) {
    let mut domains = domains(bypass, 1000);
    let recorders = [Recorder::new(), Recorder::new()];
    for (number, recorder) in (0..).zip(&recorders) {
        domains.add(number, recorder.clone()).unwrap();
    }
    (domains, recorders)
}

fn attach(domain: u32, endpoint: u32) -> Request {
    Request::Attach {
        domain,
        endpoint,
        bypass: false,
    }
}

fn pages(first: u64, count: u64) -> IovaRange {
    IovaRange::from_size(first * PAGE_SIZE, count * PAGE_SIZE).unwrap()
}

fn map_pages(domain: u32, first: u64, count: u64, target: u64) -> Request {
    Request::Map {
        domain,
        range: pages(first, count),
        gpa: target * PAGE_SIZE,
        access: Access::ReadWrite,
    }
}

fn unmap_pages(domain: u32, first: u64, count: u64) -> Request {
    Request::Unmap {
        domain,
        range: pages(first, count),
    }
}

const OK: Status = Status::Ok;

#[test]
fn every_rule_of_a_mapping_has_its_status() {
    let (mut domains, _) = with_recorders(false);
    let bypass = Request::Attach {
        domain: 2,
        endpoint: 1,
        bypass: true,
    };
    assert_eq!(domains.serve(&[attach(1, 0), bypass]), [OK, OK]);
    let map = |domain, first, last, gpa| Request::Map {
        domain,
        range: IovaRange::new(first, last).unwrap(),
        gpa,
        access: Access::ReadOnly,
    };
    let end = RAM as u64;
    for (request, status) in [
        (map(3, 0, 0xfff, 0), Status::NoEntry),
        (map(2, 0, 0xfff, 0), Status::Invalid),
        (map(1, 0, 0xffe, 0), Status::OutOfRange),
        (map(1, 1, 0xfff, 0), Status::OutOfRange),
        (map(1, 0, 0xfff, 0x800), Status::OutOfRange),
        (map(1, 0, u64::MAX, 0), Status::OutOfRange),
        (map(1, 0, (1 << 63) - 1, 0), Status::OutOfRange),
        (map(1, u64::MAX - 0xfff, u64::MAX, 0), Status::OutOfRange),
        (map(1, INPUT - 0xfff, INPUT + 0x1000, 0), Status::OutOfRange),
        // Beyond RAM: the end, a BAR, an address that wraps; from one region into the next one.
        (map(1, 0, 0xfff, end), Status::Invalid),
        (map(1, 0, 0x1fff, end - 0x1000), Status::Invalid),
        (map(1, 0, 0xfff, 0xc000_0000), Status::Invalid),
        (map(1, 0, 0x1fff, u64::MAX - 0xfff), Status::Invalid),
        (map(1, 0, 0x1fff, end / 2 - 0x1000), Status::Invalid),
        // Interrupts.
        (map(1, 0xfedf_f000, 0xfee0_0fff, 0), Status::Invalid),
        (map(1, 0xfeef_f000, 0xfeef_ffff, 0), Status::Invalid),
        (map(1, 0xfedf_f000, 0xfedf_ffff, 0), OK),
        (map(1, INPUT - 0xfff, INPUT, end - 0x1000), OK),
        (map(1, 0x4000, 0x5fff, 0x1000), OK),
        (map(1, 0x5000, 0x5fff, 0x1000), Status::Invalid),
        (map(1, 0x3000, 0x6fff, 0x1000), Status::Invalid),
        (unmap_pages(3, 0, 1), Status::NoEntry),
        (unmap_pages(2, 0, 1), Status::Invalid),
        (unmap_pages(1, 5, 1), Status::OutOfRange),
        (unmap_pages(1, 3, 2), Status::OutOfRange),
        (unmap_pages(1, 7, 100), OK),
        (unmap_pages(1, 3, 4), OK),
        (map(1, 0x5000, 0x5fff, 0x1000), OK),
        (Request::Probe { endpoint: 1 }, OK),
        (Request::Probe { endpoint: 2 }, Status::NoEntry),
        (Request::Refused(Status::Unsupported), Status::Unsupported),
    ] {
        assert_eq!(domains.serve(&[request]), [status], "{request:?}");
    }
    // All of it, from the first address to the last one.
    let range = IovaRange::ALL;
    assert_eq!(domains.serve(&[Request::Unmap { domain: 1, range }]), [OK]);
    assert_eq!(domains.counters().mappings, 0);
}

#[test]
fn endpoints_enter_leave_and_share_domains() {
    let (mut domains, [first, second]) = with_recorders(true);
    assert_eq!(first.lock().mode, Mode::Identity);
    let bypass = |domain| Request::Attach {
        domain,
        endpoint: 1,
        bypass: true,
    };
    let detach = |domain, endpoint| Request::Detach { domain, endpoint };
    for (request, status) in [
        (attach(1, 2), Status::NoEntry),
        (attach(0xffff_ffff, 0), Status::OutOfRange),
        (attach(LAST_DOMAIN + 1, 0), Status::OutOfRange),
        (detach(1, 0), Status::NoEntry),
        (attach(LAST_DOMAIN, 0), OK),
        (detach(LAST_DOMAIN, 1), Status::Invalid),
        (detach(1, 0), Status::NoEntry),
        (detach(LAST_DOMAIN, 2), Status::NoEntry),
        (bypass(LAST_DOMAIN), Status::Invalid),
        (map_pages(LAST_DOMAIN, 1, 1, 1), OK),
        (attach(LAST_DOMAIN, 1), OK),
    ] {
        assert_eq!(domains.serve(&[request]), [status], "{request:?}");
    }
    // The second one has the mapping of the domain that it entered.
    assert_eq!(second.lock().entries().len(), 1);
    assert!(second.lock().follows() && first.lock().follows());
    // Each UNMAP reaches both.
    assert_eq!(domains.serve(&[unmap_pages(LAST_DOMAIN, 0, 9)]), [OK]);
    assert!(second.lock().entries().is_empty() && first.lock().entries().is_empty());
    // The last one to leave takes the domain with it.
    let moves = [attach(2, 0), detach(LAST_DOMAIN, 1)];
    assert_eq!(domains.serve(&moves), [OK, OK]);
    assert_eq!(second.lock().mode, Mode::Identity);
    let gone = [map_pages(LAST_DOMAIN, 1, 1, 1), bypass(LAST_DOMAIN)];
    assert_eq!(domains.serve(&gone), [Status::NoEntry, OK]);
    domains.remove(1);
    assert_eq!(domains.domains.len(), 1);
}

#[test]
fn a_domain_that_an_endpoint_enters_again_begins_without_mappings() {
    let (mut domains, [first, _]) = with_recorders(true);
    // Linux replays the mappings then.
    for _ in 0..2 {
        let requests = [attach(1, 0), map_pages(1, 1, 1, 1)];
        assert_eq!(domains.serve(&requests), [OK, OK]);
        assert!(first.lock().follows());
    }
    // As another kind, too.
    let bypass = Request::Attach {
        domain: 1,
        endpoint: 0,
        bypass: true,
    };
    assert_eq!(domains.serve(&[bypass]), [OK]);
    assert_eq!(
        (first.lock().mode, domains.counters().mappings),
        (Mode::Identity, 0)
    );
}

#[test]
fn bypass_moves_endpoints_without_a_domain_and_outlives_a_reset() {
    let (mut domains, [first, second]) = with_recorders(true);
    domains.serve(&[attach(1, 0), map_pages(1, 1, 1, 1)]);
    domains.set_bypass(false);
    assert_eq!(
        (first.lock().mode, second.lock().mode),
        (Mode::Mapped, Mode::Blocked)
    );
    domains.reset();
    assert_eq!(first.lock().mode, Mode::Blocked);
    assert!(first.lock().follows());
    assert_eq!(domains.serve(&[map_pages(1, 1, 1, 1)]), [Status::NoEntry]);
    domains.power_on();
    assert_eq!(
        (first.lock().mode, second.lock().mode),
        (Mode::Identity, Mode::Identity)
    );
    // A device that cannot map all of RAM reaches nothing.
    domains.set_bypass(false);
    first.lock().broken = true;
    domains.set_bypass(true);
    assert_eq!(
        (first.lock().mode, second.lock().mode),
        (Mode::Blocked, Mode::Identity)
    );
}

#[test]
fn a_detach_of_a_device_with_requests_in_flight_is_an_error() {
    let (mut domains, recorders) = with_recorders(false);
    assert_eq!(domains.serve(&[attach(1, 0), attach(1, 1)]), [OK, OK]);
    recorders[0].lock().busy = true;
    let detach = |endpoint| Request::Detach {
        domain: 1,
        endpoint,
    };
    let statuses = domains.serve(&[detach(0), detach(1)]);
    assert_eq!(statuses, [Status::DeviceError, OK]);
    // It is not in the domain any more.
    assert_eq!(domains.serve(&[detach(0)]), [Status::NoEntry]);
    assert_eq!(domains.refused(), 1);
    assert_eq!(domains.last_refusal().unwrap().cause, "busy");
}

#[test]
fn devices_are_refused_that_cannot_do_what_the_guest_may_ask() {
    let (mut domains, _) = with_recorders(true);
    assert!(domains.add(1, Recorder::new()).is_err());
    let narrow = Recorder::new();
    narrow.lock().reach = IovaRange::new(0, INPUT - 1).unwrap();
    let error = domains.add(2, narrow).unwrap_err();
    assert!(error.to_string().contains("leave out iommu=on"), "{error}");
    let poor = Recorder::new();
    poor.lock().broken = true;
    domains.add(2, poor.clone()).unwrap_err();
    assert!(poor.lock().follows() && !domains.endpoints.contains_key(&2));
    domains.set_bypass(false);
    domains.add(2, poor.clone()).unwrap();
    // Refused later: the device stays where it was.
    assert_eq!(domains.serve(&[attach(1, 2)]), [Status::DeviceError]);
    assert!(poor.lock().follows() && domains.domains.is_empty());
    assert_eq!(domains.refused(), 1);
    assert_eq!(domains.last_refusal().unwrap().range, None);
}

/// The requests of one kick: a lazy flush and a new mapping, in a domain of two devices.
fn kick() -> Vec<Request> {
    let mut requests: Vec<Request> = (0..4).map(|page| unmap_pages(1, 2 * page, 2)).collect();
    requests.insert(2, map_pages(1, 20, 1, 5));
    requests.push(map_pages(1, 0, 8, 9));
    requests
}

fn before_the_kick() -> (Domains, [Arc<Mutex<Recorder>>; 2]) {
    let (mut domains, recorders) = with_recorders(false);
    let mut requests = vec![attach(1, 0), attach(1, 1)];
    requests.extend((0..8).map(|page| map_pages(1, page, 1, page)));
    assert!(domains.serve(&requests).iter().all(|status| *status == OK));
    (domains, recorders)
}

#[test]
fn the_requests_of_a_kick_are_one_change_set() {
    let (mut domains, recorders) = before_the_kick();
    let sets = recorders.each_ref().map(|recorder| recorder.lock().sets);
    assert_eq!(domains.serve(&kick()), [OK; 6]);
    for (recorder, sets) in recorders.iter().zip(sets) {
        let recorder = recorder.lock();
        assert_eq!((recorder.sets, recorder.entries().len()), (sets + 1, 2));
        assert!(recorder.follows());
    }
    let counters = domains.counters();
    assert_eq!((counters.maps, counters.unmaps), (10, 4));
    assert_eq!((counters.kicks, counters.sets), (2, 2));
}

#[test]
fn a_refusal_at_any_position_of_a_kick_leaves_no_trace() {
    for device in 0..2 {
        for position in 0..kick().len() {
            let (mut domains, recorders) = before_the_kick();
            recorders[device].lock().refuse_after = Some(position);
            // Once: the set is rolled back, and each request then succeeds alone.
            assert_eq!(domains.serve(&kick()), [OK; 6], "{device} {position}");
            for recorder in &recorders {
                assert!(recorder.lock().follows() && recorder.lock().blocked == 0);
                assert_eq!(recorder.lock().entries().len(), 2);
            }
        }
    }
}

#[test]
fn only_the_request_that_a_device_refuses_gets_an_error() {
    for device in 0..2 {
        let (mut domains, recorders) = before_the_kick();
        recorders[device].lock().refused.push(5 * PAGE_SIZE);
        let expected = [OK, OK, Status::DeviceError, OK, OK, OK];
        assert_eq!(domains.serve(&kick()), expected);
        for recorder in &recorders {
            let recorder = recorder.lock();
            assert!(recorder.follows() && recorder.blocked == 0);
            assert_eq!(recorder.entries(), [(pages(0, 8), piece(9))]);
        }
        let refusal = domains.last_refusal().unwrap();
        assert_eq!(usize::try_from(refusal.endpoint).unwrap(), device);
        assert_eq!(refusal.cause, "refused");
        // What was rolled back is not counted.
        let all = (0..LIMIT).map(|page| map_pages(1, 100 + page, 1, 0));
        let statuses = domains.serve(&all.collect::<Vec<_>>());
        assert!(statuses.iter().all(|status| *status == OK));
        assert_eq!(domains.serve(&[map_pages(1, 90, 1, 0)]), [Status::NoMemory]);
    }
}

/// The mappings that are left to a domain with one mapping.
const LIMIT: u64 = 999;

fn piece(page: u64) -> Piece {
    Piece {
        gpa: page * PAGE_SIZE,
        access: Access::ReadWrite,
    }
}

#[test]
fn a_device_that_cannot_unmap_or_go_back_is_blocked() {
    // A lone UNMAP: the other device has carried it out.
    let (mut domains, [first, second]) = before_the_kick();
    first.lock().broken = true;
    assert_eq!(
        domains.serve(&[unmap_pages(1, 0, 2)]),
        [Status::DeviceError]
    );
    assert_eq!(first.lock().blocked, 1);
    assert_eq!(first.lock().mode, Mode::Blocked);
    assert!(second.lock().follows() && second.lock().blocked == 0);
    assert_eq!(
        (second.lock().entries().len(), domains.counters().mappings),
        (6, 6)
    );
    // The blocked one follows nothing until its driver starts it again.
    assert_eq!(domains.serve(&[unmap_pages(1, 2, 1)]), [OK]);
    first.lock().broken = false;
    first.lock().restart();
    assert!(first.lock().follows());

    // A roll-back: the first device gets the set, the second one refuses, then the first one.
    let (mut domains, [first, second]) = before_the_kick();
    second.lock().refused.push(5 * PAGE_SIZE);
    first.lock().refuse_after = Some(kick().len());
    domains.serve(&kick());
    assert_eq!((first.lock().blocked, second.lock().blocked), (1, 0));
    assert!(second.lock().follows());
}

#[test]
fn mappings_and_their_bytes_are_limited() {
    let mut domains = domains(false, MAPPINGS_MAX);
    let recorder = Recorder::new();
    domains.add(0, recorder.clone()).unwrap();
    domains.serve(&[attach(1, 0)]);
    let many: Vec<Request> = (0..70_000).map(|page| map_pages(1, page, 1, 3)).collect();
    let mut served = Vec::new();
    for kick in many.chunks(1024) {
        served.extend(domains.serve(kick));
    }
    let limit = usize::try_from(MAPPINGS_MAX).unwrap();
    assert!(served[..limit].iter().all(|status| *status == OK));
    assert!(
        served[limit..]
            .iter()
            .all(|status| *status == Status::NoMemory)
    );
    assert_eq!(domains.counters().mappings, limit);
    assert_eq!(domains.refused(), 70_000 - u64::from(MAPPINGS_MAX));
    let refusal = domains.last_refusal().unwrap();
    assert_eq!(
        (refusal.endpoint, refusal.range),
        (0, Some(pages(69_999, 1)))
    );
    assert_eq!(domains.serve(&[unmap_pages(1, 0, 70_000)]), [OK]);
    assert!(recorder.lock().entries().is_empty());

    // 1 GiB and twice the RAM, by mappings of half of it.
    let half = RAM as u64 / 2 / PAGE_SIZE;
    let fit = (BYTES_BEYOND_RAM + 2 * RAM as u64) / (half * PAGE_SIZE);
    for number in 0..=fit {
        let status = domains.serve(&[map_pages(1, number * half, half, 0)]);
        let expected = if number < fit { OK } else { Status::NoMemory };
        assert_eq!(status, [expected], "{number}");
    }
}

/// First page, last page, target, access.
type ModelMapping = (u64, u64, u64, Access);

/// The expected domains, page by page and request by request.
#[derive(Debug, Default)]
struct Model {
    bypass: bool,
    /// Kind and mappings.
    domains: BTreeMap<u32, (bool, Vec<ModelMapping>)>,
    endpoints: [Option<u32>; 2],
}

/// A page that devices refuse to map.
const BAD: u64 = 13;

impl Model {
    fn detach(&mut self, endpoint: usize) {
        if let Some(old) = self.endpoints[endpoint].take()
            && !self.endpoints.contains(&Some(old))
        {
            self.domains.remove(&old);
        }
    }

    fn serve(&mut self, request: &Request) -> Status {
        match *request {
            Request::Attach {
                domain,
                endpoint,
                bypass,
            } => {
                let endpoint = endpoint as usize;
                if endpoint > 1 {
                    return Status::NoEntry;
                }
                let shared = self.endpoints[1 - endpoint] == Some(domain);
                if shared && self.domains[&domain].0 != bypass {
                    return Status::Invalid;
                }
                self.detach(endpoint);
                self.endpoints[endpoint] = Some(domain);
                self.domains.entry(domain).or_insert((bypass, Vec::new()));
                OK
            }
            Request::Detach { domain, endpoint } => {
                let endpoint = endpoint as usize;
                if endpoint > 1 || !self.domains.contains_key(&domain) {
                    return Status::NoEntry;
                }
                if self.endpoints[endpoint] != Some(domain) {
                    return Status::Invalid;
                }
                self.detach(endpoint);
                OK
            }
            Request::Map {
                domain,
                range,
                gpa,
                access,
            } => {
                let Some((bypass, mappings)) = self.domains.get_mut(&domain) else {
                    return Status::NoEntry;
                };
                let (first, last) = (range.first() / PAGE_SIZE, range.last() / PAGE_SIZE);
                if range.first() % PAGE_SIZE != 0 || range.last() % PAGE_SIZE != PAGE_SIZE - 1 {
                    return Status::OutOfRange;
                }
                let free = mappings.iter().all(|m| last < m.0 || m.1 < first);
                if *bypass || !free {
                    return Status::Invalid;
                }
                if gpa == BAD * PAGE_SIZE {
                    return Status::DeviceError;
                }
                mappings.push((first, last, gpa, access));
                OK
            }
            Request::Unmap { domain, range } => {
                let Some((bypass, mappings)) = self.domains.get_mut(&domain) else {
                    return Status::NoEntry;
                };
                if *bypass {
                    return Status::Invalid;
                }
                let bytes = |m: &(u64, u64, u64, Access)| {
                    IovaRange::new(m.0 * PAGE_SIZE, m.1 * PAGE_SIZE + PAGE_SIZE - 1).unwrap()
                };
                if mappings
                    .iter()
                    .any(|m| range.overlaps(&bytes(m)) && !range.contains(&bytes(m)))
                {
                    return Status::OutOfRange;
                }
                mappings.retain(|m| !range.overlaps(&bytes(m)));
                OK
            }
            Request::Probe { endpoint } if endpoint < 2 => OK,
            Request::Probe { .. } => Status::NoEntry,
            Request::Refused(status) => status,
        }
    }

    fn check(&self, number: usize, recorder: &Recorder) {
        assert_eq!(recorder.blocked, 0);
        assert!(recorder.follows());
        let none = (true, Vec::new());
        let domain = match self.endpoints[number] {
            Some(domain) => &self.domains[&domain],
            None if self.bypass => &none,
            None => return assert_eq!(recorder.mode, Mode::Blocked),
        };
        let mode = if domain.0 {
            Mode::Identity
        } else {
            Mode::Mapped
        };
        assert_eq!(recorder.mode, mode);
        let mut expected = domain.1.clone();
        expected.sort_unstable_by_key(|m| m.0);
        let entries = recorder.entries().into_iter();
        let entries: Vec<_> = entries
            .map(|(range, piece)| {
                let (first, last) = (range.first() / PAGE_SIZE, range.last() / PAGE_SIZE);
                (first, last, piece.gpa, piece.access)
            })
            .collect();
        assert_eq!(entries, expected);
    }
}

fn request() -> impl Strategy<Value = Request> {
    let domain = 0..3u32;
    let endpoint = prop_oneof![9 => 0..2u32, 1 => Just(2)];
    let range = (
        0..24u64,
        1..6u64,
        prop_oneof![15 => Just(0u64), 1 => Just(1)],
    );
    let range = range.prop_map(|(first, count, odd)| {
        let whole = pages(first, count);
        IovaRange::new(whole.first() + odd, whole.last()).unwrap()
    });
    let access = prop_oneof![
        Just(Access::ReadOnly),
        Just(Access::WriteOnly),
        Just(Access::ReadWrite)
    ];
    prop_oneof![
        2 => (domain.clone(), endpoint.clone(), prop::bool::weighted(0.2)).prop_map(
            |(domain, endpoint, bypass)| Request::Attach { domain, endpoint, bypass }
        ),
        1 => (domain.clone(), endpoint.clone())
            .prop_map(|(domain, endpoint)| Request::Detach { domain, endpoint }),
        8 => (domain.clone(), range.clone(), 0..15u64, access).prop_map(
            |(domain, range, page, access)| {
                let gpa = page * PAGE_SIZE;
                Request::Map { domain, range, gpa, access }
            }
        ),
        6 => (domain, range).prop_map(|(domain, range)| Request::Unmap { domain, range }),
        1 => endpoint.prop_map(|endpoint| Request::Probe { endpoint }),
    ]
}

/// A kick, after which bypass may change, or the IOMMU may be reset.
fn step() -> impl Strategy<Value = (Vec<Request>, bool, bool)> {
    let kick = prop::collection::vec(request(), 1..12);
    (kick, prop::bool::weighted(0.1), prop::bool::weighted(0.02))
}

/// Any requests do what the naive model does: about 30,000 of them, and in a soak a million.
#[test]
fn any_requests_do_what_the_naive_model_does() {
    let wanted = if std::env::var_os("LAB_SOAK").is_some() {
        1_000_000
    } else {
        1
    };
    let served = std::cell::Cell::new(0);
    let sequence = (any::<bool>(), prop::collection::vec(step(), 1..40));
    while served.get() < wanted {
        let mut runner = TestRunner::new(ProptestConfig::with_source_file(file!()));
        let ended = runner.run(&sequence, |(bypass, steps)| {
            let requests: usize = steps.iter().map(|(kick, ..)| kick.len()).sum();
            served.set(served.get() + requests);
            as_the_naive_model(bypass, steps)
        });
        ended.unwrap_or_else(|failure| panic!("{failure}"));
    }
    println!("{} requests", served.get());
}

fn as_the_naive_model(
    bypass: bool,
    steps: Vec<(Vec<Request>, bool, bool)>,
) -> Result<(), TestCaseError> {
    let (mut domains, recorders) = with_recorders(bypass);
    for recorder in &recorders {
        recorder.lock().refused.push(BAD * PAGE_SIZE);
    }
    let mut model = Model {
        bypass,
        ..Model::default()
    };
    for (kick, toggles, resets) in steps {
        let expected: Vec<Status> = kick.iter().map(|request| model.serve(request)).collect();
        prop_assert_eq!(domains.serve(&kick), expected, "{:?}", kick);
        if toggles {
            model.bypass = !model.bypass;
            domains.set_bypass(model.bypass);
        }
        if resets {
            model.detach(0);
            model.detach(1);
            domains.reset();
        }
        for (number, recorder) in recorders.iter().enumerate() {
            model.check(number, &recorder.lock());
        }
        let mappings = model.domains.values().map(|domain| domain.1.len());
        prop_assert_eq!(domains.counters().mappings, mappings.sum::<usize>());
        prop_assert_eq!(domains.domains.len(), model.domains.len());
    }
    Ok(())
}

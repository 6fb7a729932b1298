//! All interleavings of an UNMAP with accesses to the page that it removes.
//!
//! ```text
//!   vCPU     UNMAP in the ring, kick | INVALIDATE | own space, dirty marks, answer
//!   pass     translates | writes | releases           a thread of the VMM, per access
//!   device   writes, as long as the kernel has the mapping
//!   copier   asks for untracked pages | takes the dirty bitmap and copies        per look
//! ```
//! **Rules.** No write after the answer. Each write is copied: by a look after it, or by the scan
//! of the stop phase, when everything else has come to rest.
//!
//! **Real:** the IOMMU with its ring and its answer, its domains, the vDPA backend, its IOTLB. Also
//! address spaces and their locks, [`DeviceMemory`]'s translations, the dirty bitmap and the
//! untracked writes. The vCPU is a thread. It stops before and after each INVALIDATE, and where the
//! lock of an address space holds it.
//!
//! **Modelled:** the kernel ([`fake_kernel`](crate::virtio::vdpa::fake_kernel)), the device's own
//! writes, which only count, and the order of a look, which is that of `vmm`. An access of the pass
//! makes the calls of vm-memory's `Bytes` one by one.
//!
//! **Not split:** vm-memory marks a page in the call that writes it. The vCPU changes the own
//! space, marks and answers without a stop, unless it waits for a lock.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use parking_lot::Mutex;
use vdpa::iova::PAGE_SIZE;
use vm_memory::bitmap::{AtomicBitmap, BS, Bitmap as _};
use vm_memory::{
    GuestAddress, GuestMemory as _, GuestMemoryBackend as _, GuestMemoryRegion as _,
    GuestMemoryResult, Permissions, VolatileSlice,
};

use super::recorder::domains;
use super::request::encode;
use super::*;
use crate::virtio::backend::Hardware as _;
use crate::virtio::userspace_queue::driver::{BUFFERS, Driver, memory, readable, writable};
use crate::virtio::vdpa::VdpaBackend;
use crate::virtio::vdpa::fake_kernel::{self, Kernel};

const DOMAIN: u32 = 1;
const NIC: u32 = 0x80;
/// The page that the guest unmaps: device address, and target.
const IOVA: u64 = 0x4000_0000;
const TARGET: u64 = 0x8_0000;
const ANSWER: u64 = BUFFERS + 0x1000;
/// How long the vCPU has if nothing holds it. More means that it failed.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long a vCPU that a lock does not hold has to answer. A vCPU that is slower only hides a
/// missing lock in this schedule.
const PROMPT: Duration = Duration::from_micros(300);

/// Where the vCPU is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Vcpu {
    /// The page is mapped, and the UNMAP not yet in the ring.
    Mapped,
    /// At the kernel, before INVALIDATE has its effect, or after.
    Before,
    After,
    /// It waits for a lock.
    Waits,
    Answered,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Actor {
    Vcpu,
    Pass,
    Device,
    Copier,
}
const ACTORS: [Actor; 4] = [Actor::Vcpu, Actor::Pass, Actor::Device, Actor::Copier];

/// How often the actors move: the vCPU three times, the others by the scenario.
#[derive(Debug, Clone, Copy)]
struct Scenario {
    accesses: usize,
    device_writes: usize,
    looks: usize,
    /// A fault of the pass: it releases its translation before it writes.
    releases_early: bool,
}

struct Rig {
    kernel: Arc<Mutex<Kernel>>,
    nic: Arc<Mutex<VdpaBackend>>,
    memory: DeviceMemory,
    grants: Sender<()>,
    events: Receiver<Vcpu>,
}

/// The vCPU and the IOMMU that it kicks.
struct Guest {
    driver: Driver,
    iommu: Iommu,
}

type Granted = Arc<Mutex<Receiver<()>>>;

impl Guest {
    fn request(&mut self, request: &[u8]) {
        self.driver.fill(BUFFERS, request);
        let len = u32::try_from(request.len()).unwrap();
        self.driver
            .add(&[readable(BUFFERS, len), writable(ANSWER, 4)]);
        assert!(!self.iommu.kicked(0).needs_reset);
        assert!(self.driver.take_used().is_some());
        assert_eq!(self.driver.read::<u8>(ANSWER), 0);
    }

    /// Maps the page, and unmaps it step by step, until there are no more grants.
    fn run(mut self, kernel: &Arc<Mutex<Kernel>>, granted: &Granted, events: &Sender<Vcpu>) {
        fake_kernel::enter(kernel);
        let last = IOVA + PAGE_SIZE - 1;
        let may_go = || granted.lock().recv().is_ok();
        while may_go() {
            self.request(&encode::map(DOMAIN, [IOVA, last, TARGET], 3));
            let _ = events.send(Vcpu::Mapped);
            if !may_go() {
                return;
            }
            self.request(&encode::unmap(DOMAIN, [IOVA, last]));
            let _ = events.send(Vcpu::Answered);
        }
    }
}

impl Rig {
    /// A running device behind an IOMMU, whose writes are recorded, and a vCPU.
    fn new<'scope>(scope: &'scope std::thread::Scope<'scope, '_>) -> Self {
        let kernel: Arc<Mutex<Kernel>> = Arc::default();
        fake_kernel::enter(&kernel);
        let driver = Driver::new(&memory(), 16);
        let mut domains = domains(false, 16);
        let nic = Arc::new(Mutex::new(fake_kernel::open(&driver.memory)));
        domains.add(NIC, nic.clone()).unwrap();
        let ram = Arc::clone(&driver.memory);
        let mut iommu = Iommu::new(Arc::clone(&ram), Arc::new(Mutex::new(domains)));
        iommu.events(&[Arc::clone(&driver.kick)]);
        iommu.activate(driver.activation(FEATURES)).unwrap();
        let mut guest = Guest { driver, iommu };
        guest.request(&encode::attach(DOMAIN, NIC, 0));
        let memory = {
            let mut nic = nic.lock();
            nic.negotiate(fake_kernel::FEATURES).unwrap();
            let queue = Driver::new(&ram, 16).activation(fake_kernel::FEATURES);
            nic.activate(queue).unwrap();
            nic.log_writes(true).unwrap();
            nic.memory().unwrap().clone()
        };
        let (grants, granted) = channel();
        let (happens, events) = channel();
        let granted = Arc::new(Mutex::new(granted));
        let (at_kernel, happened) = (Arc::clone(&granted), Mutex::new(happens.clone()));
        kernel.lock().gate = Some(Arc::new(move |has_effect| {
            let at = if has_effect {
                Vcpu::After
            } else {
                Vcpu::Before
            };
            // Without a scheduler the test has failed, and the vCPU ends.
            let _ = happened.lock().send(at);
            let _ = at_kernel.lock().recv();
        }));
        let of_guest = Arc::clone(&kernel);
        scope.spawn(move || guest.run(&of_guest, &granted, &happens));
        Self {
            kernel,
            nic,
            memory,
            grants,
            events,
        }
    }

    fn next_event(&self) -> Vcpu {
        self.events.recv_timeout(PATIENCE).expect("the vCPU fails")
    }

    fn take_dirty(&self) -> bool {
        let (region, at) = self
            .memory
            .ram()
            .to_region_addr(GuestAddress(TARGET))
            .unwrap();
        let is_dirty = region.bitmap().dirty_at(at.0.try_into().unwrap());
        for region in self.memory.ram().iter() {
            (**region).bitmap().reset();
        }
        is_dirty
    }

    /// Runs one schedule. A step that its actor cannot take yet comes later.
    fn run(&self, scenario: Scenario, schedule: &[Actor]) -> Result<(), &'static str> {
        self.grants.send(()).unwrap();
        assert_eq!(self.next_event(), Vcpu::Mapped);
        self.take_dirty();
        let mut state = State {
            rig: self,
            scenario,
            vcpu: Vcpu::Mapped,
            translation: None,
            page: None,
            access: 0,
            writes: 0,
            copied: 0,
            asked: None,
            late: false,
        };
        let mut left = schedule.to_vec();
        while !left.is_empty() {
            let next = left.iter().position(|&actor| state.step(actor));
            left.remove(next.expect("no actor can move"));
        }
        assert_eq!(state.vcpu, Vcpu::Answered);
        // The stop phase.
        assert!(state.step(Actor::Copier) && state.step(Actor::Copier));
        match (state.late, state.copied == state.writes) {
            (true, _) => Err("a write after the answer"),
            (_, false) => Err("a write that no look copies"),
            _ => Ok(()),
        }
    }
}

type Translation<'a> =
    Box<dyn Iterator<Item = GuestMemoryResult<VolatileSlice<'a, BS<'a, AtomicBitmap>>>> + 'a>;

/// The actors in one schedule.
struct State<'a> {
    rig: &'a Rig,
    scenario: Scenario,
    vcpu: Vcpu,
    /// Holds the translation of the access under way, if it has one.
    translation: Option<Translation<'a>>,
    page: Option<VolatileSlice<'a, BS<'a, AtomicBitmap>>>,
    access: usize,
    /// Writes to the page so far, and how many of them the copy has.
    writes: u32,
    copied: u32,
    /// A look has asked for untracked pages: whether the page is one.
    asked: Option<bool>,
    /// There was a write after the answer.
    late: bool,
}

impl State<'_> {
    /// Makes one step; false: the actor cannot move now.
    fn step(&mut self, actor: Actor) -> bool {
        match actor {
            Actor::Vcpu => return self.vcpu(),
            Actor::Pass => self.pass(),
            Actor::Device => {
                if self.rig.kernel.lock().mapped.contains_key(&IOVA) {
                    self.write();
                }
            }
            Actor::Copier => return self.look(),
        }
        true
    }

    fn write(&mut self) {
        self.writes += 1;
        self.late |= self.vcpu == Vcpu::Answered;
    }

    fn vcpu(&mut self) -> bool {
        if self.vcpu == Vcpu::Waits {
            return false;
        }
        self.rig.grants.send(()).unwrap();
        self.vcpu = if self.vcpu == Vcpu::After && self.translation.is_some() {
            let happened = self.rig.events.recv_timeout(PROMPT);
            happened.unwrap_or(Vcpu::Waits)
        } else {
            self.rig.next_event()
        };
        true
    }

    /// One of the three steps of an access.
    fn pass(&mut self) {
        match self.access % 3 {
            0 => {
                let memory = &self.rig.memory;
                let slices = memory.get_slices(GuestAddress(IOVA), 8, Permissions::Write);
                let mut slices: Translation<'_> = Box::new(slices.unwrap());
                self.page = slices.next().and_then(Result::ok);
                self.translation = Some(slices).filter(|_| !self.scenario.releases_early);
            }
            1 => {
                if let Some(page) = self.page.take() {
                    page.copy_from(&[1u8; 8]);
                    self.write();
                }
            }
            _ => {
                self.translation = None;
                if self.vcpu == Vcpu::Waits {
                    self.vcpu = self.rig.next_event();
                }
            }
        }
        self.access += 1;
    }

    /// One of the two steps of a look. The vCPU holds the device's function while it is changed.
    fn look(&mut self) -> bool {
        let Some(is_untracked) = self.asked.take() else {
            let Some(nic) = self.rig.nic.try_lock() else {
                return false;
            };
            let untracked = nic.untracked_writes();
            let is_there = untracked
                .iter()
                .any(|&(at, len)| (at..at + len).contains(&TARGET));
            self.asked = Some(is_there);
            return true;
        };
        if self.rig.take_dirty() || is_untracked {
            self.copied = self.writes;
        }
        true
    }
}

/// Calls `run` with each order in which the actors take all their steps.
fn each_schedule(left: [usize; 4], schedule: &mut Vec<Actor>, run: &mut impl FnMut(&[Actor])) {
    if left == [0; 4] {
        return run(schedule);
    }
    for (number, actor) in ACTORS.into_iter().enumerate() {
        let mut after = left;
        if let Some(fewer) = left[number].checked_sub(1) {
            after[number] = fewer;
            schedule.push(actor);
            each_schedule(after, schedule, run);
            schedule.pop();
        }
    }
}

/// Returns the number of schedules, and the failures with their schedules.
fn explore(scenario: Scenario) -> (usize, Vec<(&'static str, Vec<Actor>)>) {
    std::thread::scope(|scope| {
        let rig = Rig::new(scope);
        let (mut count, mut failures) = (0, Vec::new());
        let steps = [
            3,
            3 * scenario.accesses,
            scenario.device_writes,
            2 * scenario.looks,
        ];
        each_schedule(steps, &mut Vec::new(), &mut |schedule| {
            count += 1;
            if let Err(failure) = rig.run(scenario, schedule) {
                failures.push((failure, schedule.to_vec()));
            }
        });
        (count, failures)
    })
}

const fn scenario(accesses: usize, device_writes: usize, looks: usize) -> Scenario {
    Scenario {
        accesses,
        device_writes,
        looks,
        releases_early: false,
    }
}

#[test]
fn no_interleaving_writes_after_the_answer_or_loses_a_write() {
    let started = std::time::Instant::now();
    for (scenario, schedules) in [
        (scenario(2, 0, 0), 84),
        (scenario(1, 0, 2), 4200),
        (scenario(0, 2, 2), 1260),
        (scenario(1, 1, 1), 5040),
    ] {
        let (count, failures) = explore(scenario);
        assert_eq!(
            failures.first(),
            None,
            "{scenario:?}: {} failures",
            failures.len()
        );
        assert_eq!(count, schedules);
        println!("{scenario:?} {:?}", started.elapsed());
    }
}

#[test]
fn a_pass_that_releases_its_translation_early_is_found() {
    let faulty = Scenario {
        releases_early: true,
        ..scenario(1, 0, 0)
    };
    let (_, failures) = explore(faulty);
    assert!(
        failures
            .iter()
            .any(|failure| failure.0 == "a write after the answer")
    );
}

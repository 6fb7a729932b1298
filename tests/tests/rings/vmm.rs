//! The VMM's side of one guest's device. It brings the device up with the guest's rings direct,
//! changes how they reach the device, and relays. It has no thread of its own.

use std::collections::VecDeque;
use std::error::Error;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use vdpa::control_queue::{Answer, Command, ControlQueue, Placement, RxMode, queue_index};
use vdpa::device::{Device, State, VringBase, VringConfig};
use vdpa::doorbell::{Doorbell, DoorbellAnswer};
use vdpa::iotlb::Iotlb;
use vdpa::iova::IovaRange;
use vdpa::memory::{DeviceMemory, GuestMemory};
use vdpa::relay::{Dirty, Pause, Reason, RelayedQueue, Strategy, SvqSet, choose};
use vdpa::ring::RingFeatures;
use vdpa::uapi::BackendFeatures;
use vdpa::window::PrivateWindow;

use super::guest::{Guest, Notifier, RAM, SIZE, View};

/// Features by number (virtio 1.3, 5.1.3 and 6): MTU, MAC, STATUS, INDIRECT_DESC, EVENT_IDX,
/// VERSION_1, ACCESS_PLATFORM, and those of the control queue.
const DATA: u64 = 1 << 3 | 1 << 5 | 1 << 16 | 1 << 28 | 1 << EVENT_IDX | 1 << 32 | 1 << 33;
const CONTROL: u64 = 1 << 17 | 1 << 18 | 1 << 22 | 1 << 23;
const EVENT_IDX: u32 = 29;
const INDIRECT: u32 = 28;
const CTRL_VQ: u32 = 17;
const MQ: u32 = 22;
/// A time limit for slow steps on a loaded machine that have no watchdog.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// How many changes a report shows.
const HISTORY: usize = 8;

/// A test's requirements for a device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setup {
    pub(crate) event_idx: bool,
    pub(crate) indirect: bool,
    /// Drive the control queue, and all queue pairs with it.
    pub(crate) control: bool,
    /// Kick through doorbells where the device reads the guest's ring.
    pub(crate) doorbells: bool,
    /// Queue pairs.
    pub(crate) pairs: u16,
    /// The start index of all rings.
    pub(crate) start: u16,
    /// Backend features not to acknowledge.
    pub(crate) without: BackendFeatures,
}

/// One of the guest's queues, as the VMM knows it.
#[derive(Debug)]
pub(crate) struct Port {
    pub(crate) view: View,
    pub(crate) notifier: Arc<Notifier>,
    queue: RelayedQueue,
    /// Withdrawn from the guest while its ring is shadowed.
    doorbell: Option<Doorbell>,
}

/// The part of a caller of [`SvqSet::start`].
#[derive(Debug)]
struct Again {
    iotlb: Iotlb,
    features: u64,
    pairs: u16,
    control: Option<(ControlQueue, u16)>,
}

impl Again {
    /// Sets the control queue up.
    fn prepare(&mut self, device: &mut Device) {
        let Some((control, index)) = &mut self.control else {
            return;
        };
        let placement = Placement::choose(device.info(), device.backend_features(), *index);
        if let Placement::OwnAddressSpace { group, asid } = placement {
            device.set_group_asid(group, asid).unwrap();
        }
        control.restart(RingFeatures::of(self.features)).unwrap();
        device
            .set_vring(*index, &control.vring_config(), &[control.range()])
            .unwrap();
        device.enable_vring(*index).unwrap();
    }

    fn replay(&mut self) -> Result<(), Box<dyn Error + Send + Sync>> {
        // Even for one pair, as Linux does: the device need not begin with one.
        if let Some((control, _)) = &mut self.control
            && self.features & (1 << MQ) != 0
        {
            let answer = control.execute(&Command::VqPairsSet(self.pairs), PATIENCE)?;
            assert_eq!(answer, Answer::Ok);
        }
        Ok(())
    }
}

/// A guest's device and its relays.
#[derive(Debug)]
pub(crate) struct Machine {
    name: &'static str,
    device: Device,
    set: SvqSet,
    again: Again,
    pub(crate) ports: Vec<Port>,
    memory: Arc<GuestMemory>,
    /// The next value of AllMulticast.
    all_multicast: bool,
    /// The number of executed control commands.
    pub(crate) commands: u32,
    /// The last changes.
    history: VecDeque<String>,
    /// How long each change took.
    pub(crate) times: Vec<Duration>,
}

impl Machine {
    /// Starts a device with all queues direct.
    pub(crate) fn start(name: &'static str, path: &Path, guest: &Guest, setup: Setup) -> Self {
        let wanted = BackendFeatures::all() - setup.without;
        let (mut device, mut iotlb) = Device::open(path).unwrap().own_with(wanted).unwrap();
        iotlb.map_guest_memory(0, &guest.memory).unwrap();
        let mut features = device.info().features & (DATA | CONTROL);
        for (bit, keep) in [(EVENT_IDX, setup.event_idx), (INDIRECT, setup.indirect)] {
            if !keep {
                features &= !(1 << bit);
            } else {
                assert!(features & (1 << bit) != 0, "feature {bit} is not offered");
            }
        }
        if !setup.control {
            features &= !CONTROL;
        }
        let mut window = PrivateWindow::new(device.info().iova_range, RAM).unwrap();
        let queues: Vec<RelayedQueue> = guest.rings().map(|ring| ring.relayed()).collect();
        let set = SvqSet::new(
            device.info(),
            features,
            queues.clone(),
            &mut iotlb,
            &mut window,
        );
        // struct virtio_net_config: max_virtqueue_pairs is at 8.
        let mut most = [0; 2];
        device.read_config(8, &mut most).unwrap();
        let most = u16::from_le_bytes(most).max(1);
        let control = queue_index(features, most)
            .filter(|_| features & (1 << CTRL_VQ) != 0)
            .map(|index| {
                let iova = window
                    .allocate(ControlQueue::memory_size().unwrap())
                    .unwrap();
                let queue = ControlQueue::new(iova, RingFeatures::of(features)).unwrap();
                let placement = Placement::choose(device.info(), device.backend_features(), index);
                queue.map(&mut iotlb, placement.asid()).unwrap();
                (queue, index)
            });
        let again = Again {
            iotlb,
            features,
            pairs: setup.pairs,
            control,
        };
        device.negotiate(features).unwrap();
        let mut machine = Self {
            name,
            device,
            set: set.unwrap(),
            again,
            ports: guest
                .rings()
                .zip(queues)
                .map(|(ring, queue)| Port {
                    view: ring.view.clone(),
                    notifier: Arc::clone(&ring.notifier),
                    queue,
                    doorbell: None,
                })
                .collect(),
            memory: Arc::clone(&guest.memory),
            all_multicast: true,
            commands: 0,
            history: VecDeque::new(),
            times: Vec::new(),
        };
        machine.start_direct(setup.start);
        if setup.doorbells {
            for port in &mut machine.ports {
                let answer = machine.device.map_doorbell(port.view.queue).unwrap();
                let DoorbellAnswer::Mapped(doorbell) = answer else {
                    panic!("queue {} has no doorbell", port.view.queue);
                };
                port.doorbell = Some(doorbell);
            }
        }
        machine.grant_doorbells();
        machine
    }

    fn start_direct(&mut self, start: u16) {
        let device = &mut self.device;
        self.again.prepare(device);
        let ram = [IovaRange::from_size(0, RAM).unwrap()];
        for Port { queue, .. } in &self.ports {
            let config = VringConfig {
                size: SIZE,
                addresses: queue.ring.addresses(),
                base: VringBase::Split { index: start },
                kick: Some(&queue.kick),
                call: Some(&queue.call),
            };
            device.set_vring(queue.index, &config, &ram).unwrap();
            device.enable_vring(queue.index).unwrap();
        }
        device.start().unwrap();
        self.again.replay().unwrap();
        for port in &self.ports {
            port.queue.kick.write(1).unwrap();
        }
    }

    /// All queues of the guest, each with this strategy.
    pub(crate) fn all(&self, how: Strategy) -> Vec<(u16, Strategy)> {
        let queues = self.ports.iter().map(|port| port.view.queue);
        queues.map(|queue| (queue, how)).collect()
    }

    /// The strategy for receive queues, and its reason.
    pub(crate) fn chosen(&self) -> (Strategy, Reason) {
        let device = &self.device;
        choose(device.info(), device.backend_features(), device.features())
    }

    pub(crate) fn strategy(&self, queue: u16) -> Strategy {
        self.set.strategy(queue).unwrap()
    }

    fn grant_doorbells(&mut self) {
        for port in &mut self.ports {
            if self.set.strategy(port.view.queue) != Some(Strategy::FullShadow)
                && let Some(doorbell) = port.doorbell.take()
            {
                port.notifier.grant(doorbell);
            }
        }
    }

    /// The doorbell must be gone before its ring is shadowed: otherwise the guest would kick the
    /// device and not the relay.
    fn withdraw_doorbells(&mut self, targets: &[(u16, Strategy)]) {
        for port in &mut self.ports {
            if targets.contains(&(port.view.queue, Strategy::FullShadow)) && port.doorbell.is_none()
            {
                port.doorbell = port.notifier.withdraw();
            }
        }
    }

    /// Changes in place. A control command in flight stays in flight.
    pub(crate) fn change(
        &mut self,
        targets: &[(u16, Strategy)],
        dirty: &dyn Dirty,
    ) -> Result<(), vdpa::Error> {
        self.withdraw_doorbells(targets);
        let from: Vec<_> = self
            .ports
            .iter()
            .map(|port| self.strategy(port.view.queue))
            .collect();
        let stood: Vec<_> = (self.ports.iter())
            .map(|port| (port.view.avail(), port.view.used()))
            .collect();
        self.history.push_back(format!(
            "{from:?} at (avail, used) {stood:?} to {targets:?}"
        ));
        if self.history.len() > HISTORY {
            self.history.pop_front();
        }
        let before = Instant::now();
        let changed = self.set.change(&mut self.device, targets, dirty);
        let took = before.elapsed();
        let result = match changed {
            Ok(()) => {
                self.times.push(took);
                Ok(())
            }
            Err(error) if self.device.state() == State::Running => Err(error),
            Err(error) => panic!("{}: {error}; {error:?}", self.name),
        };
        self.grant_doorbells();
        result
    }

    /// Resets the device and restarts it with changed rings.
    pub(crate) fn restart(&mut self, targets: &[(u16, Strategy)], dirty: &dyn Dirty) {
        self.withdraw_doorbells(targets);
        let device = &mut self.device;
        if device.can_suspend() {
            device.suspend().unwrap();
        }
        device.reset().unwrap();
        let rings = self.set.prepare_start(targets, &[], dirty).unwrap();
        self.again.iotlb.remap_after_reset().unwrap();
        device.negotiate(self.again.features).unwrap();
        self.again.prepare(device);
        let started = self.set.start(device, rings, || self.again.replay());
        started.unwrap();
        self.grant_doorbells();
    }

    /// Suspends and resumes; returns for each queue how many chains the device held, if it reports
    /// that.
    pub(crate) fn held(&mut self) -> Vec<(u16, Option<u16>)> {
        let device = &mut self.device;
        device.suspend().unwrap();
        let held = self
            .ports
            .iter()
            .filter(|port| self.set.strategy(port.view.queue) == Some(Strategy::Direct))
            .map(|port| {
                let base = device.vring_base(port.view.queue).ok();
                let held = base.and_then(|base| match base {
                    VringBase::Split { index } => Some(index.wrapping_sub(port.view.used())),
                    VringBase::Packed { .. } => None,
                });
                (port.view.queue, held)
            })
            .collect();
        device.resume().unwrap();
        self.spurious_notify();
        held
    }

    fn spurious_notify(&self) {
        for port in &self.ports {
            port.queue.kick.write(1).unwrap();
            port.queue.call.write(1).unwrap();
        }
        self.spurious_notify_control();
    }

    /// Sends the device a control command, if none is in flight.
    pub(crate) fn submit(&mut self) {
        let on = self.all_multicast;
        if let Some((control, _)) = &mut self.again.control
            && !control.is_busy()
        {
            let mode = RxMode::AllMulticast;
            control.submit(&Command::Rx { mode, on }).unwrap();
            self.all_multicast = !on;
        }
    }

    /// Reads an answer; returns true if a command is still in flight.
    pub(crate) fn is_command_under_way(&mut self) -> bool {
        let Some((control, _)) = &mut self.again.control else {
            return false;
        };
        if !control.is_busy() {
            return false;
        }
        match control.poll().unwrap() {
            Some(answer) => {
                assert_eq!(answer, Answer::Ok);
                self.commands += 1;
                false
            }
            None => true,
        }
    }

    /// Kicks again: a suspended device may have missed the kick of a command.
    pub(crate) fn spurious_notify_control(&self) {
        if let Some((control, _)) = &self.again.control {
            control.spurious_notify();
        }
    }

    /// One poll of the relays.
    pub(crate) fn poll(&mut self, dirty: &dyn Dirty) -> Pause {
        let polled = self.set.poll(dirty);
        match polled {
            Ok(progress) => progress.pause,
            Err(failed) => {
                let describe = self.describe();
                panic!("{}: {failed:?}\n{describe}", self.name)
            }
        }
    }

    pub(crate) fn memory(&self) -> DeviceMemory {
        Arc::clone(&self.memory).into()
    }

    /// Formats the positions: the indices of the guest's rings and the device's base.
    pub(crate) fn describe(&mut self) -> String {
        let mut text = String::new();
        let suspended = self.device.suspend();
        for port in &self.ports {
            let base = match &suspended {
                Ok(()) => format!("{:?}", self.device.vring_base(port.view.queue)),
                Err(error) => format!("{error:?}"),
            };
            let strategy = self.set.strategy(port.view.queue);
            let (view, kicks) = (port.view.describe(), port.notifier.counts());
            let _ = writeln!(
                text,
                "{}: {view}; {strategy:?}, base {base}, kicks {kicks:?}",
                self.name
            );
        }
        for line in &self.history {
            let _ = writeln!(text, "{}: {line}", self.name);
        }
        text
    }
}

/// Polls machines until `done`, with the pauses that they request.
pub(crate) fn pump(machines: &mut [&mut Machine], mut done: impl FnMut() -> bool) {
    while !done() {
        let mut longest = Duration::from_millis(1);
        let mut work = false;
        for machine in &mut *machines {
            let memory = machine.memory();
            match machine.poll(&memory) {
                Pause::None => work = true,
                Pause::AtMost(pause) => longest = longest.min(pause),
                Pause::Forever => {}
            }
        }
        if work {
            thread::yield_now();
        } else {
            thread::sleep(longest);
        }
    }
}

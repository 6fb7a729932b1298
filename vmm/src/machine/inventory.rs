//! The virtio devices of a machine: which there are, under which names, in which slots.
//!
//! Owns the list, the numbers by which the event loop knows devices, and what has
//! to be done, in order, for one to come or to go. It must not know who wants that,
//! nor when.
//!
//! ```text
//!   attach: vectors, doorbells --> on the bus --> in the event loop --> listed
//!   swap:   in the event loop --> behind the same function --> the old one's out of it
//!   detach: off the bus --> out of the event loop --> stopped --> closed --> unlisted
//! ```

mod exchange;
mod saved;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use bellhop_api::machine::{AlarmInfo, InFlight};
use devices::hypervisor::Doorbells;
use devices::pci::{PciBus, PciFunction, Slot};
use devices::virtio::backend::Event;
use devices::virtio::pci::{Relied, VirtioPciDevice};
use vdpa::memory::GuestMemory;

pub(super) use self::exchange::Exchanged;
use super::board::DeviceStatus;
use super::devices::Device;
use super::error::RequestError;
use super::pluggable::{DeviceConfig, DeviceKind, Failover, FailoverState, PlugState, Pluggable};
use super::ring_watch::{Alarm, DeviceWatch, in_flight};
use crate::config::{RingWatch, VdpaConfig};
use crate::event_loop::{EventLoop, Token};
use crate::host::numa_warning;
use crate::kvm::doorbells::KvmDoorbells;
use crate::kvm::msi::KvmMsiVectors;
use crate::{Error, ErrorKind};

/// How long a vCPU may take to leave a device that is off the bus already. It has
/// one register access to finish.
const LEAVE: Duration = Duration::from_secs(1);

/// A device that the guest sees.
struct Entry {
    id: String,
    slot: Slot,
    device: Arc<VirtioPciDevice>,
    removable: Option<Removable>,
    /// `None` where the watch is off.
    watch: Option<DeviceWatch>,
}

/// What a device that can be unplugged has more than others.
struct Removable {
    config: DeviceConfig,
    numa_node: Option<u16>,
    numa_warning: Option<String>,
    serial: u64,
    state: PlugState,
    failover: Option<Failover>,
}

impl Removable {
    /// Where a NIC is to go whose device fails.
    fn stand_by(&self) -> Option<(&VdpaConfig, &Path)> {
        match &self.config {
            DeviceConfig::Nic(nic) => Some((nic, nic.failover.as_deref()?)),
            DeviceConfig::Disk(_) => None,
        }
    }

    /// Its failover, if that is under way.
    fn under_way(&self) -> Option<&Failover> {
        let failover = self.failover.as_ref();
        failover.filter(|failover| failover.state == FailoverState::UnderWay)
    }
}

/// See the module.
pub(super) struct Inventory {
    /// By the number in [`Token::Device`].
    entries: BTreeMap<u16, Entry>,
    /// Where the search for a free number begins: a number is used again as late as
    /// possible, because events of a device that went may still be under way.
    next_number: u16,
    next_serial: u64,
    pci: Arc<PciBus>,
    msi: KvmMsiVectors,
    doorbells: Arc<KvmDoorbells>,
    /// The NUMA node that guest memory is bound to.
    memory_node: Option<u16>,
    ring_watch: RingWatch,
}

impl Inventory {
    /// An empty list for devices on `pci`, of a machine whose memory is bound to `memory_node`. They are
    /// watched as `ring_watch` says.
    pub(super) fn new(
        pci: Arc<PciBus>,
        msi: KvmMsiVectors,
        doorbells: Arc<KvmDoorbells>,
        memory_node: Option<u16>,
        ring_watch: RingWatch,
    ) -> Self {
        Self {
            ring_watch,
            entries: BTreeMap::new(),
            next_number: 0,
            next_serial: 0,
            pci,
            msi,
            doorbells,
            memory_node,
        }
    }

    /// The device whose events have this number.
    pub(super) fn device(&self, number: u16) -> Option<&VirtioPciDevice> {
        self.entries.get(&number).map(|entry| &*entry.device)
    }

    /// The device with this name.
    pub(super) fn named(&self, id: &str) -> Option<&VirtioPciDevice> {
        self.entry(id).map(|entry| &*entry.device)
    }

    fn entry(&self, id: &str) -> Option<&Entry> {
        self.entries.values().find(|entry| entry.id == id)
    }

    /// # Errors
    /// There is no device of this name.
    fn entry_mut(&mut self, id: &str) -> Result<&mut Entry, RequestError> {
        let entry = self.entries.values_mut().find(|entry| entry.id == id);
        entry.ok_or_else(|| RequestError::NoSuchDevice(id.to_owned()))
    }

    /// Puts a device into this slot, or the first free one, and polls its descriptors.
    ///
    /// # Errors
    /// Nothing has changed then, and the device is closed.
    pub(super) fn attach(
        &mut self,
        device: Device,
        slot: Option<Slot>,
        events: &EventLoop,
    ) -> Result<Slot, Error> {
        let Device {
            id,
            backend,
            config,
            rescue,
            numa_node,
        } = device;
        if self.named(&id).is_some() {
            return Err(Error::new(
                ErrorKind::NoRoom,
                format!("two devices are called {id}; give one of them another id"),
            ));
        }
        let number = self.free_number()?;
        let doorbells: Arc<dyn Doorbells> = self.doorbells.clone();
        let device = match VirtioPciDevice::new(backend, &self.msi, doorbells) {
            Ok(device) => Arc::new(device),
            Err(source) => {
                let message = format!("device {id} cannot be shown to the guest");
                return Err(Error::unusable(message).because(source));
            }
        };
        let slot = match self.pci.add(slot, device.clone()) {
            Ok(slot) => slot,
            Err(source) => {
                let message = format!("device {id} cannot be plugged in");
                return Err(Error::new(ErrorKind::NoRoom, message).because(source));
            }
        };
        if let Err(error) = poll(events, number, &device.events()) {
            self.pci.remove(slot);
            return Err(Error::failed("epoll_ctl")(error));
        }
        tracing::debug!(%id, %slot, "device attached");
        let numa_warning = numa_warning(numa_node, self.memory_node);
        if let Some(warning) = &numa_warning {
            tracing::warn!(%id, "{warning}");
        }
        let removable = config.map(|config| {
            self.next_serial = self.next_serial.wrapping_add(1);
            Removable {
                config,
                numa_node,
                numa_warning,
                serial: self.next_serial,
                state: PlugState::Plugged,
                failover: None,
            }
        });
        device.set_failover(removable.as_ref().and_then(Removable::stand_by).is_some());
        self.next_number = number.wrapping_add(1);
        let watch = self
            .ring_watch
            .threshold()
            .map(|threshold| DeviceWatch::new(device.queue_count(), threshold, rescue));
        let entry = Entry {
            id,
            slot,
            device,
            removable,
            watch,
        };
        self.entries.insert(number, entry);
        Ok(slot)
    }

    fn free_number(&self) -> Result<u16, Error> {
        (0..=u16::MAX)
            .map(|step| self.next_number.wrapping_add(step))
            .find(|number| !self.entries.contains_key(number))
            .ok_or_else(|| {
                let message = format!("{} devices are too many", self.entries.len());
                Error::new(ErrorKind::NoRoom, message)
            })
    }

    /// Notes that the guest is to give a device up, and says where it is.
    ///
    /// # Errors
    /// There is no device of this name, or it is of another kind.
    pub(super) fn request_unplug(
        &mut self,
        id: &str,
        kind: DeviceKind,
    ) -> Result<Pluggable<DeviceConfig>, RequestError> {
        let entry = self.entry_mut(id)?;
        match &mut entry.removable {
            Some(removable) if removable.config.kind() == kind => {
                removable.state = PlugState::UnplugRequested;
            }
            _ => {
                return Err(RequestError::OtherKind {
                    id: id.to_owned(),
                    wanted: kind,
                });
            }
        }
        entry
            .status()
            .ok_or_else(|| RequestError::NoSuchDevice(id.to_owned()))
    }

    /// Lets the devices go that are to be unplugged and that `ready` gives free, whether
    /// they are on the bus still or not. Returns how many went.
    pub(super) fn detach(&mut self, events: &EventLoop, ready: impl Fn(Slot) -> bool) -> usize {
        let gone: Vec<u16> = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.is_unplugging() && ready(entry.slot))
            .map(|(number, _)| *number)
            .collect();
        for number in &gone {
            if let Some(entry) = self.entries.remove(number) {
                self.close(entry, events);
            }
        }
        gone.len()
    }

    fn close(&self, entry: Entry, events: &EventLoop) {
        let Entry {
            id, slot, device, ..
        } = entry;
        // An ejected function left the bus when the guest said so, and another one may
        // have its slot by now.
        let ours: Arc<dyn PciFunction> = device.clone();
        self.pci.remove_function(slot, &ours);
        drop(ours);
        unpoll(events, &id, &device.events());
        // From here on it touches no guest memory, also if the guest's driver never let go.
        device.reset();
        let start = Instant::now();
        while Arc::strong_count(&device) > 1 && start.elapsed() < LEAVE {
            thread::sleep(Duration::from_micros(50));
        }
        if Arc::strong_count(&device) > 1 {
            tracing::warn!(%id, "a vCPU is still inside an unplugged device: it closes later");
        }
        drop(device);
        tracing::info!(%id, %slot, "device unplugged");
    }

    /// What there is to say about each device of the kind that `C` configures, in the order of
    /// their attachment as long as numbers do not wrap.
    pub(super) fn pluggable<C>(&self) -> Vec<Pluggable<C>>
    where
        C: TryFrom<DeviceConfig, Error = DeviceKind>,
    {
        let removable = self.entries.values().filter_map(Entry::status);
        removable.filter_map(|device| device.of().ok()).collect()
    }

    /// The same about the device with this name, if it can be unplugged.
    pub(super) fn pluggable_named(&self, id: &str) -> Option<Pluggable<DeviceConfig>> {
        self.entry(id)?.status()
    }

    /// Pages that devices write are marked in guest memory from when this returns, for all devices or none; or, with
    /// `on` false, no longer.
    ///
    /// # Errors
    /// Which device can't, and why; at the end of a record, the first one that could not be brought back to what it was.
    pub(super) fn log_writes(&self, on: bool) -> Result<(), RequestError> {
        let mut result = Ok(());
        for entry in self.entries.values() {
            let logged = entry.device.log_writes(on);
            let logged = logged.map_err(|source| RequestError::DirtyLog {
                id: entry.id.clone(),
                source,
            });
            if on && logged.is_err() {
                // What fails here is in the log, and the first error says why.
                let _ = self.log_writes(false);
                return logged;
            }
            result = result.and(logged);
        }
        result
    }

    /// What devices may write without a mark meanwhile: guest-physical addresses and lengths in bytes.
    pub(super) fn always_dirty(&self) -> Vec<(u64, u64)> {
        let devices = self.entries.values();
        devices
            .flat_map(|entry| entry.device.always_dirty())
            .collect()
    }

    /// What NICs have been given and have not used; of saved ones, when they were.
    pub(super) fn in_flight(&self, memory: &GuestMemory) -> InFlight {
        let mut count = InFlight::default();
        for entry in self.entries.values() {
            in_flight::add(&mut count, &entry.device, memory);
        }
        count
    }

    /// All devices as they are now, in the order of their attachment as long as numbers do
    /// not wrap.
    pub(super) fn devices(&self) -> Vec<DeviceStatus> {
        let status = |entry: &Entry| DeviceStatus {
            id: entry.id.clone(),
            address: entry.slot,
            description: entry.device.describe(),
            watch: entry.watch.iter().flat_map(DeviceWatch::status).collect(),
        };
        self.entries.values().map(status).collect()
    }

    /// A device that the guest was asked to eject, if there is one.
    pub(super) fn unplugging(&self) -> Option<&str> {
        let mut entries = self.entries.values();
        let leaves = entries.find(|entry| entry.is_unplugging());
        leaves.map(|entry| entry.id.as_str())
    }

    /// Stops all devices and forgets what drivers made of them.
    pub(super) fn reset_all(&self) {
        for entry in self.entries.values() {
            entry.device.reset();
        }
    }

    /// What the guest relies on of each device, by their names.
    pub(super) fn relied(&self) -> Vec<(String, Slot, Relied)> {
        let entries = self.entries.values();
        let relied = |entry: &Entry| (entry.id.clone(), entry.slot, entry.device.relied());
        entries.map(relied).collect()
    }

    /// Looks at the rings of all devices that are watched. `true`: an alarm began or ended.
    pub(super) fn sample_rings(&mut self, memory: &GuestMemory) -> bool {
        let now = Instant::now();
        let mut changed = false;
        for entry in self.entries.values_mut() {
            if let Some(watch) = &mut entry.watch {
                changed |= watch.sample(&entry.id, &entry.device, memory, now);
            }
        }
        changed
    }

    /// The time until now does not count for the watch of rings: the vCPUs were parked.
    pub(super) fn resume_watch(&mut self) {
        let now = Instant::now();
        for watch in self
            .entries
            .values_mut()
            .filter_map(|entry| entry.watch.as_mut())
        {
            watch.resume(now);
        }
    }

    /// What is wrong with the queues of all devices.
    pub(super) fn alarms(&self) -> Vec<AlarmInfo> {
        let of_entry = |entry: &Entry| {
            let alarms = entry.watch.iter().flat_map(DeviceWatch::alarms);
            let alarm = |(queue, alarm): (u16, Alarm)| AlarmInfo {
                device: entry.id.clone(),
                queue,
                alarm: alarm.into(),
            };
            alarms.map(alarm).collect::<Vec<_>>()
        };
        self.entries.values().flat_map(of_entry).collect()
    }
}

/// Has the event loop poll all descriptors of the device with this number, or none.
fn poll(events: &EventLoop, number: u16, wanted: &[Event]) -> io::Result<()> {
    for (count, event) in wanted.iter().enumerate() {
        let token = Token::Device {
            device: number,
            token: event.token,
        };
        if let Err(error) = events.add(event.fd, token) {
            for added in wanted.iter().take(count) {
                // It was added a moment ago.
                let _ = events.remove(added.fd);
            }
            return Err(error);
        }
    }
    Ok(())
}

/// Has the event loop forget descriptors, before they are closed.
fn unpoll(events: &EventLoop, id: &str, polled: &[Event]) {
    for event in polled {
        if let Err(error) = events.remove(event.fd) {
            tracing::warn!(%id, %error, "an event of a device that goes was not polled");
        }
    }
}

impl Entry {
    /// Whether the guest was asked to eject it.
    fn is_unplugging(&self) -> bool {
        let removable = self.removable.as_ref();
        removable.is_some_and(|removable| removable.state == PlugState::UnplugRequested)
    }

    fn status(&self) -> Option<Pluggable<DeviceConfig>> {
        self.removable.as_ref().map(|removable| Pluggable {
            id: self.id.clone(),
            config: removable.config.clone(),
            address: self.slot,
            state: removable.state,
            numa_node: removable.numa_node,
            numa_warning: removable.numa_warning.clone(),
            serial: removable.serial,
            failover: removable.failover.clone().map(Box::new),
        })
    }
}

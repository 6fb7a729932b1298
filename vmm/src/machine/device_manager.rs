//! The devices of a machine on its PCI bus, with their names and slots.
//!
//! Owns the list, the numbers by which the event loop identifies devices, and the ordered steps to
//! attach and detach one. It must not know who requests that, nor when.
//!
//! ```text
//!   attach: vectors, mappings --> on the bus --> in the event loop --> listed
//!   swap:   in the event loop --> behind the same function --> old device out of the loop
//!   detach: off the bus --> out of the event loop --> stopped --> closed --> unlisted
//!   removed by the host: closed --> detach, once the guest has ejected it
//! ```

mod attached;
mod exchange;
mod functions;
mod iommu_status;
mod removal;
mod saved;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use bellhop_api::machine::{AlarmInfo, InFlight};
use devices::hypervisor::DeviceMappings;
use devices::pci::{PciBus, PciFunction, SLOTS, Slot};
use devices::virtio::backend::Event;
use devices::virtio::block::engine::hung_disks;
use devices::virtio::iommu::{Endpoint, SharedDomains};
use devices::virtio::pci::{GuestView, VirtioPciDevice};

use self::attached::Attached;
pub(super) use self::exchange::Exchanged;
use super::devices::Device;
use super::error::RequestError;
use super::iommu::{self, RefusalWatch};
use super::pluggable::{DeviceConfig, DeviceKind, Failover, FailoverState, PlugPhase, Pluggable};
use super::ring_watch::{DeviceWatch, in_flight};
use super::status_publisher::DeviceStatus;
use crate::config::{RingWatch, VdpaConfig};
use crate::event_loop::{EventLoop, Token};
use crate::host::numa_warning;
use crate::kvm::device_mappings::KvmDeviceMappings;
use crate::kvm::msi::KvmMsiVectors;
use crate::{Error, ErrorKind};

/// How long a vCPU may take to leave a device that is already off the bus. It has one register
/// access to finish.
const LEAVE: Duration = Duration::from_secs(1);

/// A device that the guest sees.
struct Entry {
    id: String,
    slot: Slot,
    device: Attached,
    removable: Option<Removable>,
    /// Its number in requests to the IOMMU, if it is behind it.
    endpoint: Option<u32>,
    /// `None` where the watch is off.
    watch: Option<DeviceWatch>,
    /// When the host wanted it back.
    wanted_back: Option<Instant>,
    /// Whether there is an alarm about an error of it.
    failed: bool,
}

/// The additional state of a device that can be unplugged.
struct Removable {
    config: DeviceConfig,
    numa_node: Option<u16>,
    numa_warning: Option<String>,
    serial: u64,
    state: PlugPhase,
    failover: Option<Failover>,
}

impl Removable {
    /// The backup device of a NIC, for the case that its device fails.
    fn backup(&self) -> Option<(&VdpaConfig, &Path)> {
        match &self.config {
            DeviceConfig::Nic(nic) => Some((nic, nic.backup.as_deref()?)),
            DeviceConfig::Disk(_) | DeviceConfig::Vfio(_) => None,
        }
    }

    /// Its failover, if one is in progress.
    fn under_way(&self) -> Option<&Failover> {
        let failover = self.failover.as_ref();
        failover.filter(|failover| failover.state == FailoverState::UnderWay)
    }
}

/// The list of devices; see the module.
pub(super) struct DeviceManager {
    /// By the number in [`Token::Device`].
    entries: BTreeMap<u16, Entry>,
    /// Where the search for a free number begins. A number is reused as late as possible, because
    /// events of a removed device may still be pending.
    next_number: u16,
    next_serial: u64,
    pci: Arc<PciBus>,
    msi: KvmMsiVectors,
    mappings: Arc<KvmDeviceMappings>,
    /// The NUMA node that guest memory is bound to.
    memory_node: Option<u16>,
    ring_watch: RingWatch,
    /// The domains of the guest's IOMMU, if it has one.
    iommu: Option<SharedDomains>,
    refusals: RefusalWatch,
}

impl DeviceManager {
    /// Creates an empty list for devices on `pci`, of a machine whose memory is bound to
    /// `memory_node`. `ring_watch` configures the watch of their rings, and `iommu` is the guest's.
    pub(super) fn new(
        pci: Arc<PciBus>,
        msi: KvmMsiVectors,
        mappings: Arc<KvmDeviceMappings>,
        memory_node: Option<u16>,
        ring_watch: RingWatch,
        iommu: Option<SharedDomains>,
    ) -> Self {
        Self {
            ring_watch,
            iommu,
            refusals: RefusalWatch::default(),
            entries: BTreeMap::new(),
            next_number: 0,
            next_serial: 0,
            pci,
            msi,
            mappings,
            memory_node,
        }
    }

    /// Returns the virtio device whose events have this number.
    pub(super) fn device(&self, number: u16) -> Option<&VirtioPciDevice> {
        self.entries.get(&number).and_then(Entry::virtio)
    }

    /// Returns the virtio device with this name.
    pub(super) fn named(&self, id: &str) -> Option<&VirtioPciDevice> {
        self.entry(id).and_then(Entry::virtio)
    }

    /// Whether a device has this name.
    pub(super) fn has(&self, id: &str) -> bool {
        self.entry(id).is_some()
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
    /// On failure nothing has changed, and the device is closed.
    pub(super) fn attach(
        &mut self,
        device: Device,
        slot: Option<Slot>,
        events: &EventLoop,
    ) -> Result<Slot, Error> {
        let Device {
            id,
            mut backend,
            config,
            stall_kick,
            numa_node,
        } = device;
        self.ensure_unused(&id)?;
        let number = self.free_number()?;
        let translated = backend.translated().is_some();
        let slot = self.choose_slot(&id, translated, slot)?;
        let mappings: Arc<dyn DeviceMappings> = self.mappings.clone();
        let device = match VirtioPciDevice::new(backend, &self.msi, mappings) {
            Ok(device) => Arc::new(device),
            Err(source) => {
                let message = format!("cannot show device {id} to the guest");
                return Err(Error::unusable(message).because(source));
            }
        };
        let slot = self.add_function(&id, slot, device.clone())?;
        let endpoint = translated
            .then(|| self.enter_iommu(&id, slot, device.clone()))
            .transpose()?;
        if let Err(error) = poll(events, number, &device.events()) {
            self.pci.remove(slot);
            self.leave_iommu(endpoint);
            return Err(Error::failed("epoll_ctl")(error));
        }
        tracing::debug!(%id, %slot, "device attached");
        let removable = config.map(|config| self.removable(&id, config, numa_node));
        device.set_has_backup(removable.as_ref().and_then(Removable::backup).is_some());
        self.next_number = number.wrapping_add(1);
        let watch = self
            .ring_watch
            .threshold()
            .map(|threshold| DeviceWatch::new(device.queue_count(), threshold, stall_kick));
        let entry = Entry {
            id,
            slot,
            device: Attached::Virtio(device),
            removable,
            endpoint,
            watch,
            wanted_back: None,
            failed: false,
        };
        self.entries.insert(number, entry);
        Ok(slot)
    }

    /// The additional state of a new device.
    fn removable(&mut self, id: &str, config: DeviceConfig, numa_node: Option<u16>) -> Removable {
        let numa_warning = numa_warning(numa_node, self.memory_node);
        if let Some(warning) = &numa_warning {
            tracing::warn!(%id, "{warning}");
        }
        self.next_serial = self.next_serial.wrapping_add(1);
        Removable {
            config,
            numa_node,
            numa_warning,
            serial: self.next_serial,
            state: PlugPhase::Plugged,
            failover: None,
        }
    }

    fn ensure_unused(&self, id: &str) -> Result<(), Error> {
        if !self.has(id) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::NoRoom,
            format!("two devices have the id {id}; give one of them another id"),
        ))
    }

    fn add_function(
        &self,
        id: &str,
        slot: Option<Slot>,
        function: Arc<dyn PciFunction>,
    ) -> Result<Slot, Error> {
        self.pci.add(slot, function).map_err(|source| {
            let message = format!("cannot plug in device {id}");
            Error::new(ErrorKind::NoRoom, message).because(source)
        })
    }

    /// Chooses the slot of a new device, which is the `given` one if there is one. `None`: any.
    fn choose_slot(
        &self,
        id: &str,
        translated: bool,
        given: Option<Slot>,
    ) -> Result<Option<Slot>, Error> {
        if self.iommu.is_none() {
            return if translated {
                Err(Error::unusable(format!(
                    "cannot put device {id} behind an IOMMU, which the VM does not have: start it \
                     with --iommu boot_bypass=on"
                )))
            } else {
                Ok(given)
            };
        }
        if let Some(slot) = given {
            iommu::check_slot(id, slot, translated)?;
            return Ok(given);
        }
        // An ejected device keeps its endpoint until it is closed.
        let on_bus = self.pci.functions();
        let is_taken = |slot: &Slot| {
            let mut entries = self.entries.values();
            on_bus.iter().any(|(other, _)| other == slot)
                || entries.any(|entry| entry.slot == *slot)
        };
        let slots = (0..SLOTS).filter_map(Slot::new);
        let mut slots = slots.filter(|&slot| iommu::takes(slot, translated));
        let free = slots.find(|slot| !is_taken(slot));
        free.map(Some).ok_or_else(|| {
            let message = format!(
                "cannot plug in device {id}: all PCI slots {} the guest's IOMMU are taken",
                if translated { "behind" } else { "beside" }
            );
            Error::new(ErrorKind::NoRoom, message)
        })
    }

    /// Puts a device on the bus behind the IOMMU, or takes it from the bus. Returns its endpoint.
    fn enter_iommu(&self, id: &str, slot: Slot, device: Arc<dyn Endpoint>) -> Result<u32, Error> {
        let endpoint = iommu::endpoint(slot);
        if let Some(iommu) = &self.iommu
            && let Err(source) = iommu.lock().add(endpoint, device)
        {
            self.pci.remove(slot);
            let message = format!("cannot put device {id} behind the guest's IOMMU");
            return Err(Error::unusable(message).because(source));
        }
        Ok(endpoint)
    }

    /// Removes an endpoint from the IOMMU.
    fn leave_iommu(&self, endpoint: Option<u32>) {
        if let (Some(iommu), Some(endpoint)) = (&self.iommu, endpoint) {
            iommu.lock().remove(endpoint);
        }
    }

    /// Returns the last device address that the guest may map by its IOMMU, if it has one.
    pub(super) fn last_iova(&self) -> Option<u64> {
        let iommu = self.iommu.as_ref()?;
        Some(iommu.lock().input().last())
    }

    /// Whether the guest has an IOMMU.
    pub(super) fn has_iommu(&self) -> bool {
        self.iommu.is_some()
    }

    /// Sets the IOMMU as at power-on, after the reset of all functions.
    pub(super) fn power_on_iommu(&mut self) {
        if let Some(iommu) = &self.iommu {
            iommu.lock().power_on();
            self.refusals.reset(Instant::now());
        }
    }

    fn free_number(&self) -> Result<u16, Error> {
        (0..=u16::MAX)
            .map(|step| self.next_number.wrapping_add(step))
            .find(|number| !self.entries.contains_key(number))
            .ok_or_else(|| {
                let message = format!(
                    "cannot add a device to {} devices: no number is free",
                    self.entries.len()
                );
                Error::new(ErrorKind::NoRoom, message)
            })
    }

    /// Records that the guest is asked to eject a device, and returns its status.
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
                if removable.state == PlugPhase::Plugged {
                    removable.state = PlugPhase::UnplugRequested;
                }
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

    /// Detaches the devices that have a pending unplug and for which `ready` is true, whether or
    /// not they are still on the bus. Returns how many went.
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
            id,
            slot,
            device,
            endpoint,
            ..
        } = entry;
        // An ejected function left the bus when the guest ejected it, and another one may have its
        // slot by now.
        let ours = device.function();
        self.pci.remove_function(slot, &ours);
        unpoll(events, &id, &device.events());
        // From here on it touches no guest memory, even if the guest's driver never released it.
        ours.reset();
        drop(ours);
        // Not earlier: until its reset it follows each UNMAP.
        self.leave_iommu(endpoint);
        let start = Instant::now();
        while device.is_shared() && start.elapsed() < LEAVE {
            thread::sleep(Duration::from_micros(50));
        }
        if device.is_shared() {
            tracing::warn!(%id, "a vCPU still uses an unplugged device: closing it later");
        }
        drop(device);
        tracing::info!(%id, %slot, "device unplugged");
    }

    /// Returns the status of each device of the kind that `C` configures. They are in the order of
    /// attachment as long as numbers do not wrap.
    pub(super) fn pluggable<C>(&self) -> Vec<Pluggable<C>>
    where
        C: TryFrom<DeviceConfig, Error = DeviceKind>,
    {
        let removable = self.entries.values().filter_map(Entry::status);
        removable.filter_map(|device| device.of().ok()).collect()
    }

    /// Returns the status of the device with this name, if it can be unplugged.
    pub(super) fn pluggable_named(&self, id: &str) -> Option<Pluggable<DeviceConfig>> {
        self.entry(id)?.status()
    }

    /// With `on`, makes all devices, or none, mark the pages that they write in guest memory, from
    /// the return of this call. Without `on`, ends that.
    ///
    /// # Errors
    /// Names the device that cannot, and the reason. When logging ends: the first device that could
    /// not be restored.
    pub(super) fn log_writes(&self, on: bool) -> Result<(), RequestError> {
        if on {
            self.ensure_functions_movable(|_| false)?;
        }
        let mut result = self.log_functions(on);
        if on && result.is_err() {
            let _ = self.log_functions(false);
            return result;
        }
        for entry in self.entries.values() {
            let Some(device) = entry.virtio() else {
                continue;
            };
            let logged = device.log_writes(on);
            let logged = logged.map_err(|source| RequestError::DirtyLog {
                id: entry.id.clone(),
                source,
            });
            if on && logged.is_err() {
                // A failure here is in the log, and the first error gives the reason.
                let _ = self.log_writes(false);
                return logged;
            }
            result = result.and(logged);
        }
        result
    }

    /// Returns what devices may write without a mark meanwhile: guest-physical addresses and
    /// lengths in bytes.
    pub(super) fn untracked_writes(&self) -> Vec<(u64, u64)> {
        let devices = self.entries.values().filter_map(Entry::virtio);
        devices
            .flat_map(VirtioPciDevice::untracked_writes)
            .collect()
    }

    /// Returns the buffers that NICs have received and not used; of saved NICs, as they were when
    /// saved.
    pub(super) fn in_flight(&self) -> InFlight {
        let mut count = InFlight::default();
        for device in self.entries.values().filter_map(Entry::virtio) {
            in_flight::add(&mut count, device);
        }
        count
    }

    /// Returns the status of all virtio devices, in the order of attachment as long as numbers do
    /// not wrap.
    pub(super) fn devices(&self) -> Vec<DeviceStatus> {
        let status = |entry: &Entry| {
            Some(DeviceStatus {
                id: entry.id.clone(),
                address: entry.slot,
                description: entry.virtio()?.describe(),
                watch: entry.watch.iter().flat_map(DeviceWatch::status).collect(),
            })
        };
        self.entries.values().filter_map(status).collect()
    }

    /// Returns a device that the guest was asked to eject, if there is one.
    pub(super) fn unplugging(&self) -> Option<&str> {
        let mut entries = self.entries.values();
        let leaves = entries.find(|entry| entry.is_unplugging());
        leaves.map(|entry| entry.id.as_str())
    }

    /// Stops all devices and clears the state that drivers have set.
    pub(super) fn reset_all(&self) {
        // The IOMMU, which was attached first, after the devices that it contains.
        for entry in self.entries.values().rev() {
            entry.device.function().reset();
        }
    }

    /// Waits until the reset of every device has ended, for about `limit`. Returns whether nothing
    /// writes into guest memory any more, for a closed disk either.
    pub(super) fn await_resets(&self, limit: Duration) -> bool {
        let mut entries = self.entries.values();
        let is_reset = |entry: &Entry| {
            let device = entry.virtio();
            device.is_none_or(|device| device.await_reset(limit))
        };
        if !entries.all(is_reset) {
            return false;
        }
        let closed = hung_disks() == 0;
        if !closed {
            thread::sleep(limit);
        }
        closed
    }

    /// Returns, by device name, the properties on which the guest relies.
    pub(super) fn guest_view(&self) -> Vec<(String, Slot, GuestView)> {
        let entries = self.entries.values();
        let guest_view = |entry: &Entry| {
            let device = entry.virtio()?;
            Some((entry.id.clone(), entry.slot, device.guest_view()))
        };
        entries.filter_map(guest_view).collect()
    }

    /// Samples the rings of all watched devices, and the refusals of the guest's IOMMU. Returns
    /// `true` if an alarm began or ended.
    pub(super) fn sample_rings(&mut self) -> bool {
        let now = Instant::now();
        let mut changed = self.sample_refusals(now);
        for entry in self.entries.values_mut() {
            if let (Some(watch), Some(device)) = (&mut entry.watch, entry.device.virtio()) {
                changed |= watch.sample(&entry.id, device, now);
            }
        }
        changed
    }

    /// Excludes the time until now from the ring watch: the vCPUs were parked.
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

    /// Returns the alarms of all queues of all devices.
    pub(super) fn alarms(&self) -> Vec<AlarmInfo> {
        let of_entry = |entry: &Entry| {
            let alarms = entry.watch.iter().flat_map(DeviceWatch::alarms);
            let alarm = |(queue, alarm)| AlarmInfo {
                device: entry.id.clone(),
                queue,
                alarm,
                detail: None,
            };
            alarms.map(alarm).collect::<Vec<_>>()
        };
        let of_rings = self.entries.values().flat_map(of_entry);
        let others = self.errors().chain(self.refusals.alarm().cloned());
        of_rings.chain(others).collect()
    }
}

/// Makes the event loop poll all descriptors of the device with this number, or none.
fn poll(events: &EventLoop, number: u16, wanted: &[Event]) -> io::Result<()> {
    for (count, event) in wanted.iter().enumerate() {
        let token = Token::Device {
            device: number,
            token: event.token,
        };
        if let Err(error) = events.add(event.fd, token) {
            for added in wanted.iter().take(count) {
                // It was added a moment ago, so this cannot fail.
                let _ = events.remove(added.fd);
            }
            return Err(error);
        }
    }
    Ok(())
}

/// Removes descriptors from the event loop before they are closed.
fn unpoll(events: &EventLoop, id: &str, polled: &[Event]) {
    for event in polled {
        if let Err(error) = events.remove(event.fd) {
            tracing::warn!(%id, %error, "an unplugged device's event was not polled");
        }
    }
}

impl Entry {
    /// Whether the guest was asked to eject it, or is about to be asked.
    fn is_unplugging(&self) -> bool {
        let removable = self.removable.as_ref();
        let asked = removable.is_some_and(|removable| {
            matches!(
                removable.state,
                PlugPhase::UnplugRequested | PlugPhase::DeviceRemoved
            )
        });
        asked || self.wanted_back.is_some()
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

//! virtio-pci, modern only (virtio 1.3, section 4.1): a PCI function in front of a
//! [`Backend`].
//!
//! ```text
//!   vCPU thread --> PciFunction methods --+
//!                                         +--> Mutex<Transport> --> Backend
//!   event loop  --> process(token) -------+
//!
//!   guest kick --> ioeventfd --> kick eventfd ----------------------> Backend
//!          or ---> page of the device's own doorbell ---------------> device
//!   Backend ----> call eventfd = eventfd of an MSI-X vector --> irqfd --> guest
//! ```
//! Owns the guest's settings, the kick eventfds, the kick path of each queue (see `notify.rs`), and
//! the MSI-X vectors. It must not know what kind of device it fronts, nor how the hypervisor
//! routes.
//!
//! The function has one 64-bit BAR (see `layout.rs`), and MSI-X with one vector per queue and one
//! for configuration changes. Queue reset exists if the backend offers it. The function has no INTx
//! (a guest that does not enable MSI-X gets no interrupt), no legacy interface and no notification
//! data.
//!
//! The backend can be replaced while the guest's driver keeps running: see `swap.rs`.
//!
//! A guest's kick to a notify page signals the queue's eventfd even when no ioeventfd is attached
//! there. That takes no lock, so a kick never waits for another vCPU's register access. Only the
//! kicks that a backend serves inline go through the lock: see [`Backend::serves_inline`].

mod common;
mod describe;
mod layout;
mod notify;
mod saving;
mod state;
mod swap;
mod translated;
mod transport;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use vdpa::memory::DeviceMemory;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use vmm_sys_util::eventfd::EventFd;

pub use describe::{DeviceDescription, QueueDescription, RunningRing};
pub use notify::KickPath;
pub use state::{QueueState, RegistersState, VIRTIO_PCI_STATE_VERSION, VirtioPciState};
pub use swap::{GuestView, Replacement, SwapFailed, Swapped, other_device_type};
#[cfg(any(test, feature = "fuzz"))]
pub use tests::transport_anything;

use self::common::{CommonConfig, offered};
use self::layout::{BAR, MAX_DEVICE_CONFIG, MAX_QUEUES, notified_queue};
use self::notify::{NotifyDoorbells, kick};
use self::saving::Attempt;
use self::transport::Transport;
use super::backend::{Backend, Event};
use super::iommu::SharedDomains;
use crate::Error;
use crate::hypervisor::{DeviceMappings, MsiVectors};
use crate::pci::{Bar, Msix, PciFunction};

/// A virtio device as a PCI function; see the module.
#[derive(Debug)]
pub struct VirtioPciDevice {
    transport: Mutex<Transport>,
    kicks: Vec<Arc<EventFd>>,
    /// The queues whose kicks the backend serves in the thread of the vCPU.
    inline: Vec<usize>,
    /// The events of the current backend. Lock order: after the transport.
    events: Mutex<Vec<Event>>,
}

impl VirtioPciDevice {
    /// Puts `backend` behind a PCI function that no guest has touched yet.
    ///
    /// Takes one vector per queue and one more from `vectors`. `doorbells` is
    /// used when BAR 0 is decoded.
    ///
    /// # Errors
    /// The backend does not fit the layout, or the host has no eventfd or vector left.
    pub fn new(
        mut backend: Box<dyn Backend>,
        vectors: &dyn MsiVectors,
        doorbells: Arc<dyn DeviceMappings>,
    ) -> Result<Self, Error> {
        let device_type = backend.device_type();
        let device_id = layout::device_id(device_type).ok_or_else(|| {
            Error::other(format!(
                "virtio device type {device_type} has no PCI device ID (1 to 63 have)"
            ))
        })?;
        let max_sizes = backend.queue_max_sizes().to_vec();
        let queues = u16::try_from(max_sizes.len())
            .ok()
            .filter(|_| max_sizes.len() <= MAX_QUEUES)
            .ok_or_else(|| {
                Error::other(format!(
                    "{} queues: at most 1023 fit; create the device with fewer queue pairs \
                     (max_vqp)",
                    max_sizes.len()
                ))
            })?;
        for (index, size) in max_sizes.iter().copied().enumerate() {
            if size != 0 && !size.is_power_of_two() {
                return Err(Error::other(format!(
                    "queue {index} has the maximum size {size}: must be 0 or a power of two up to \
                     32768"
                )));
            }
        }
        let config_len = backend.config_len();
        if config_len > MAX_DEVICE_CONFIG {
            return Err(Error::other(format!(
                "device configuration of {config_len} bytes: at most 24576 fit"
            )));
        }
        let offer = offered(backend.features());
        if offer & (1 << VIRTIO_F_VERSION_1) == 0 {
            return Err(Error::other(
                "the device does not offer VERSION_1: legacy virtio devices are not supported",
            ));
        }

        let no_vector = "cannot allocate an interrupt vector";
        let vectors = (0..=queues)
            .map(|_| vectors.allocate())
            .collect::<io::Result<Vec<_>>>()
            .map_err(Error::context(no_vector))?;
        let calls = vectors
            .iter()
            .map(|vector| vector.eventfd().try_clone().map(Arc::new))
            .collect::<io::Result<Vec<_>>>()
            .map_err(Error::context(no_vector))?;
        let msix = Msix::new(vectors).map_err(Error::context("cannot build MSI-X"))?;
        let config_space = layout::config_space(device_id, device_type, config_len, queues, &msix)
            .map_err(Error::context("cannot build PCI configuration space"))?;
        let common = CommonConfig::new(offer, &max_sizes, msix.vectors());
        let kicks = notify::kicks(queues).map_err(Error::context(
            "cannot create an eventfd for kicks; the limit of open files (ulimit -n) may be too \
             low",
        ))?;
        let inline = (0..queues).filter(|queue| backend.serves_inline(*queue));
        let inline: Vec<usize> = inline.map(usize::from).collect();
        let doorbells = NotifyDoorbells::new(doorbells, kicks.clone(), &inline);
        let events = backend.events(&kicks);
        let transport = Transport::new(config_space, msix, calls, common, doorbells, backend);
        Ok(Self {
            transport: Mutex::new(transport),
            kicks,
            inline,
            events: Mutex::new(events),
        })
    }

    /// Returns the descriptors that the event loop must poll for reading while the device lives, or
    /// until its backend is replaced. It calls [`VirtioPciDevice::process`] for each that is
    /// readable.
    #[must_use]
    pub fn events(&self) -> Vec<Event> {
        self.events.lock().clone()
    }

    /// Prepares `backend` for [`VirtioPciDevice::swap`].
    #[must_use]
    pub fn replacement(&self, mut backend: Box<dyn Backend>) -> Replacement {
        let events = backend.events(&self.kicks);
        Replacement { backend, events }
    }

    /// Replaces the backend. A driver that works with the device continues with the new one: same
    /// registers, rings and vectors. It gets a spurious interrupt for each queue and one for a
    /// configuration change, and is asked to announce itself.
    ///
    /// `domains`: those of the guest's IOMMU, for a device behind it. They do not change during the
    /// swap. Otherwise a MAP could reach the new backend both with the copy of its space and as a
    /// change, which it would refuse.
    ///
    /// # Errors
    /// It is not possible, or it failed. The old backend stays; the kind tells whether it works.
    pub fn swap(
        &self,
        replacement: Replacement,
        domains: Option<&SharedDomains>,
    ) -> Result<Swapped, SwapFailed> {
        let Replacement { backend, events } = replacement;
        // The lock order is that of `Endpoint`.
        let _domains = domains.map(|domains| domains.lock());
        let mut transport = self.transport.lock();
        let (retired, gap) = transport.swap(backend)?;
        let events = std::mem::replace(&mut *self.events.lock(), events);
        Ok(Swapped {
            events,
            retired,
            gap,
        })
    }

    /// Returns the properties on which the guest relies, for [`VirtioPciDevice::adopt`] of a
    /// device at another host.
    #[must_use]
    pub fn guest_view(&self) -> GuestView {
        self.transport.lock().guest_view()
    }

    /// Makes this device, which no driver has used, look like one at another host, from whose state
    /// it will be restored.
    ///
    /// # Errors
    /// This device lacks something on which the guest relies.
    pub fn adopt(&self, guest_view: &GuestView) -> Result<(), Error> {
        self.transport.lock().adopt(guest_view)
    }

    /// Lets the backend handle an event, and notifies the guest of the result.
    ///
    /// Returns `true` if the device has just failed and has a backup
    /// ([`VirtioPciDevice::set_has_backup`]). Its driver is not notified then. The caller must
    /// [`VirtioPciDevice::swap`] the backend or, if it cannot, call [`VirtioPciDevice::give_up`].
    pub fn process(&self, token: u16) -> bool {
        self.transport.lock().process(token)
    }

    /// Sets whether there is a backup device. With one, the driver is not notified at once
    /// (DEVICE_NEEDS_RESET) if the device [fails](super::backend::Hardware::has_failed) while the
    /// driver works with it: see [`VirtioPciDevice::process`].
    pub fn set_has_backup(&self, on: bool) {
        self.transport.lock().set_has_backup(on);
    }

    /// Notifies the driver of a failed device that it needs a reset, because no other device
    /// replaces it. Does nothing if it was notified, or the device was reset or replaced meanwhile.
    pub fn give_up(&self) {
        self.transport.lock().give_up();
    }

    /// Whether the host is removing the device, and waits until this process closes it. The caller
    /// [swaps](VirtioPciDevice::swap) the backend or [closes](VirtioPciDevice::close) the device. A
    /// device that cannot hand over any more is treated as one that has failed.
    #[must_use]
    pub fn is_removed(&self) -> bool {
        self.transport.lock().is_removed()
    }

    /// Closes the device, which the host removes. Its driver is notified that the link is down and
    /// that the device needs a reset. After that the device cannot be started again. Dropping the
    /// result may take long. `None` for a device that is not the host's.
    #[must_use]
    pub fn close(&self) -> Option<Box<dyn Send>> {
        self.transport.lock().close()
    }

    /// Asks the guest to announce itself on its network: see
    /// [`Hardware::announce`](super::backend::Hardware::announce). Returns `false` if it is no
    /// running network device, or its driver does not support it.
    pub fn announce(&self) -> bool {
        self.transport.lock().announce()
    }

    /// Starts or stops marking, in guest memory, the pages that the device writes: see
    /// [`Hardware::log_writes`](super::backend::Hardware::log_writes). An inactive device is marked
    /// from its start by the driver; a broken one is stopped until then.
    ///
    /// # Errors
    /// As for [`Hardware::log_writes`](super::backend::Hardware::log_writes).
    pub fn log_writes(&self, on: bool) -> Result<(), Error> {
        self.transport.lock().log_writes(on)
    }

    /// Returns the areas that the device writes without a mark: see
    /// [`Hardware::untracked_writes`](super::backend::Hardware::untracked_writes).
    #[must_use]
    pub fn untracked_writes(&self) -> Vec<(u64, u64)> {
        self.transport.lock().untracked_writes()
    }

    /// Returns a description of the device's current state.
    #[must_use]
    pub fn describe(&self) -> DeviceDescription {
        self.transport.lock().describe()
    }

    /// Returns the number of queues, running or not.
    #[must_use]
    pub fn queue_count(&self) -> usize {
        self.kicks.len()
    }

    /// Passes to `visit` all queues on which the device works now, or worked when it was saved, in
    /// the order of their indices. `visit` must be quick and must not call this device: a vCPU may
    /// wait for it.
    pub fn running_rings(&self, visit: impl FnMut(&RunningRing, Option<&DeviceMemory>)) {
        self.transport.lock().running_rings(visit);
    }

    /// Kicks a queue and interrupts its driver, as if each had a notification to send. Both look at
    /// the ring again, which makes up for a lost notification. The kick goes through the queue's
    /// eventfd, even if the guest stores to the device's doorbell. Returns `false` if the device
    /// does not work on that queue now.
    pub fn spurious_notify(&self, queue: u16) -> bool {
        self.transport.lock().spurious_notify(queue)
    }

    /// Whether the device has set DEVICE_NEEDS_RESET and waits for its driver.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.transport.lock().is_broken()
    }

    /// Waits until a reset of the device has ended, at most for `limit`, because its storage may
    /// not answer. Returns whether it has. Before that, the host may write into guest memory.
    #[must_use]
    pub fn await_reset(&self, limit: Duration) -> bool {
        self.transport.lock().await_reset(limit)
    }

    /// Stops a running device and returns its state. The caller has stopped the vCPUs. The device
    /// stays stopped until it is restored, for example from this state, or reset.
    ///
    /// # Errors
    /// The backend cannot be saved, and the device resumes; or it is saved already.
    pub fn save(&self) -> Result<VirtioPciState, Error> {
        self.transport.lock().save()
    }

    /// Checks whether [`VirtioPciDevice::restore`] accepts this state, as far as possible without
    /// the backend.
    ///
    /// # Errors
    /// This device cannot have had the state. Nothing has changed.
    pub fn check(&self, state: &VirtioPciState) -> Result<(), Error> {
        self.transport.lock().check(state)
    }

    /// Restores a saved state, which is checked like the writes of a guest: a state that no guest
    /// could have reached is refused.
    ///
    /// The device must be unused or saved. Afterwards the caller updates the BAR's mapping:
    /// [`PciBus::remap`](crate::pci::PciBus::remap). A running device gets one spurious kick and
    /// interrupt per queue.
    ///
    /// # Errors
    /// As [`VirtioPciDevice::check`], or the backend fails. The device is as before, with one
    /// exception: if the backend of a *saved* device fails, the device needs a reset by its driver.
    pub fn restore(&self, state: &VirtioPciState) -> Result<(), Error> {
        self.transport.lock().restore(state, Attempt::First)
    }

    /// As [`VirtioPciDevice::restore`], after an earlier restore of this state failed, here or in
    /// another process. A device may have worked on the rings since, so their positions are read
    /// again.
    ///
    /// # Errors
    /// As [`VirtioPciDevice::restore`], or the progress since then is unknown.
    pub fn restore_again(&self, state: &VirtioPciState) -> Result<(), Error> {
        self.transport.lock().restore(state, Attempt::Again)
    }
}

impl PciFunction for VirtioPciDevice {
    fn read_config(&self, offset: u16, data: &mut [u8]) {
        self.transport.lock().read_config(offset, data);
    }

    fn write_config(&self, offset: u16, data: &[u8]) {
        self.transport.lock().write_config(offset, data);
    }

    fn bars(&self) -> Vec<Bar> {
        self.transport.lock().bars()
    }

    fn read_bar(&self, bar: u8, offset: u64, data: &mut [u8]) {
        if bar == BAR {
            self.transport.lock().read_bar(offset, data);
        } else {
            data.fill(0xff);
        }
    }

    fn write_bar(&self, bar: u8, offset: u64, data: &[u8]) {
        if bar != BAR {
            return;
        }
        match notified_queue(offset) {
            Some(queue) if self.inline.contains(&queue) => self.transport.lock().kicked(queue),
            Some(queue) => kick(&self.kicks, queue),
            None => self.transport.lock().write_bar(offset, data),
        }
    }

    fn bar_moved(&self, bar: u8, address: Option<u64>) {
        if bar == BAR {
            self.transport.lock().doorbells.bar_moved(address);
        }
    }

    fn memory_fault(&self, address: Option<u64>) -> bool {
        self.transport.lock().doorbells.memory_fault(address)
    }

    fn reset(&self) {
        self.transport.lock().reset_function();
    }
}

#[cfg(any(test, feature = "fuzz"))]
#[allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "code of tests, which fuzz targets use"
)]
mod tests;

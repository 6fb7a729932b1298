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
//! Owns what the guest programs, the kick eventfds, which queue is kicked by which
//! way (see `notify.rs`), and the MSI-X vectors. It
//! must not know what kind of device it fronts, nor how the hypervisor routes.
//!
//! What the function has: one 64-bit BAR (see `layout.rs`), MSI-X with one vector
//! per queue and one for configuration changes. What it has not: INTx (a guest
//! that does not enable MSI-X gets no interrupt), the legacy interface, notification
//! data. Queue reset is there where the backend offers it.
//!
//! The backend can be replaced by another one while the guest's driver goes on: see `swap.rs`.
//!
//! A kick that the guest sends to a page of the notify part signals the queue's
//! eventfd even when no ioeventfd is attached there; without the lock, so a kick
//! never waits for another vCPU's register access.

mod common;
mod describe;
mod layout;
mod notify;
mod saving;
mod state;
mod swap;
mod transport;

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use vmm_sys_util::eventfd::EventFd;

pub use describe::{DeviceDescription, QueueDescription, RunningRing};
pub use notify::KickPath;
pub use state::{QueueState, RegistersState, VIRTIO_PCI_STATE_VERSION, VirtioPciState};
pub use swap::{Relied, Successor, SwapFailed, Swapped, other_device_type};

use self::common::{CommonConfig, offered};
use self::layout::{BAR, MAX_DEVICE_CONFIG, MAX_QUEUES, notified_queue};
use self::notify::{NotifyDoorbells, kick};
use self::saving::Attempt;
use self::transport::Transport;
use super::backend::{Backend, Event};
use crate::Error;
use crate::hypervisor::{Doorbells, MsiVectors};
use crate::pci::{Bar, Msix, PciFunction};

/// A virtio device as a PCI function. See the module.
#[derive(Debug)]
pub struct VirtioPciDevice {
    transport: Mutex<Transport>,
    kicks: Vec<Arc<EventFd>>,
    /// Of the present backend. Locked after the transport, where both are.
    events: Mutex<Vec<Event>>,
}

impl VirtioPciDevice {
    /// Puts `backend` behind a PCI function that has not been touched by a guest yet.
    ///
    /// Takes one vector per queue and one more from `vectors`. `doorbells` is
    /// used when BAR 0 is decoded.
    ///
    /// # Errors
    /// The backend does not fit the layout, or the host gives no eventfd or vector.
    pub fn new(
        mut backend: Box<dyn Backend>,
        vectors: &dyn MsiVectors,
        doorbells: Arc<dyn Doorbells>,
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
            "cannot make an eventfd for kicks; the limit of open files (ulimit -n) may be too low",
        ))?;
        let doorbells = NotifyDoorbells::new(doorbells, kicks.clone());
        let events = backend.events(&kicks);
        let transport = Transport::new(config_space, msix, calls, common, doorbells, backend);
        Ok(Self {
            transport: Mutex::new(transport),
            kicks,
            events: Mutex::new(events),
        })
    }

    /// Descriptors that the event loop polls for reading as long as the device
    /// lives, or until its backend is another one; for each that is readable it calls [`VirtioPciDevice::process`].
    #[must_use]
    pub fn events(&self) -> Vec<Event> {
        self.events.lock().clone()
    }

    /// Makes `backend` ready for [`VirtioPciDevice::swap`].
    #[must_use]
    pub fn successor(&self, mut backend: Box<dyn Backend>) -> Successor {
        let events = backend.events(&self.kicks);
        Successor { backend, events }
    }

    /// Puts another backend in the place of the present one. A driver that works with the
    /// device goes on with the new one: same registers, rings and vectors. It gets a spurious interrupt for
    /// each queue and one for a change of the configuration, and is asked to announce itself.
    ///
    /// # Errors
    /// It is not possible, or failed. The present backend stays; the kind tells whether it works.
    pub fn swap(&self, successor: Successor) -> Result<Swapped, SwapFailed> {
        let Successor { backend, events } = successor;
        let mut transport = self.transport.lock();
        let (retired, gap) = transport.swap(backend)?;
        let events = std::mem::replace(&mut *self.events.lock(), events);
        Ok(Swapped {
            events,
            retired,
            gap,
        })
    }

    /// What the guest relies on of this device, for [`VirtioPciDevice::take_place`] of one at another host.
    #[must_use]
    pub fn relied(&self) -> Relied {
        self.transport.lock().relied_elsewhere()
    }

    /// Makes this device, which no driver has used, look like one at another host whose state it is to be
    /// restored from.
    ///
    /// # Errors
    /// This device is less than the guest relies on.
    pub fn take_place(&self, relied: &Relied) -> Result<(), Error> {
        self.transport.lock().take_place(relied)
    }

    /// Lets the backend handle an event, and tells the guest what came of it.
    ///
    /// `true`: the device has failed just now, which its driver has not been told because another one stands by
    /// ([`VirtioPciDevice::set_failover`]). The caller is to [`VirtioPciDevice::swap`] the backend or, if it cannot, to
    /// [`VirtioPciDevice::give_up`].
    pub fn process(&self, token: u16) -> bool {
        self.transport.lock().process(token)
    }

    /// Says whether another device stands by. If the present one [fails](super::backend::Hardware::has_failed) from now on while its driver
    /// works with it, the driver is not told at once (DEVICE_NEEDS_RESET): see [`VirtioPciDevice::process`].
    pub fn set_failover(&self, on: bool) {
        self.transport.lock().set_failover(on);
    }

    /// Tells the driver of a device that has failed that it needs a reset, because no other takes its place. Does
    /// nothing if it was told, or the device was reset or replaced meanwhile.
    pub fn give_up(&self) {
        self.transport.lock().give_up();
    }

    /// Asks the guest to announce itself on its network: see [`Hardware::announce`](super::backend::Hardware::announce).
    /// `false`: it is no running network device, or its driver does not know how.
    pub fn announce(&self) -> bool {
        self.transport.lock().announce()
    }

    /// From now on pages that the device writes are marked in guest memory, or no longer: see
    /// [`Hardware::log_writes`](super::backend::Hardware::log_writes). An inactive device is marked
    /// from when its driver starts it; one that is broken is stopped until then.
    ///
    /// # Errors
    /// As for that.
    pub fn log_writes(&self, on: bool) -> Result<(), Error> {
        self.transport.lock().log_writes(on)
    }

    /// What the device writes without a mark: see
    /// [`Hardware::always_dirty`](super::backend::Hardware::always_dirty).
    #[must_use]
    pub fn always_dirty(&self) -> Vec<(u64, u64)> {
        self.transport.lock().always_dirty()
    }

    /// The device as it is now.
    #[must_use]
    pub fn describe(&self) -> DeviceDescription {
        self.transport.lock().describe()
    }

    /// How many queues it has, running or not.
    #[must_use]
    pub fn queue_count(&self) -> usize {
        self.kicks.len()
    }

    /// Shows `visit` all queues that the device works on now, or worked on when it was saved, in the order of their
    /// indices.
    /// `visit` must be quick and ask this device nothing: a vCPU may wait for it.
    pub fn running_rings(&self, visit: impl FnMut(&RunningRing)) {
        self.transport.lock().running_rings(visit);
    }

    /// Kicks a queue and interrupts its driver, as if each had a notification to send: both
    /// look at the ring again, so a notification that was lost is made good. The kick takes the
    /// way of the queue's eventfd, also where the guest stores to the device's doorbell. `false`: the
    /// device does not work on that queue now.
    pub fn nudge(&self, queue: u16) -> bool {
        self.transport.lock().nudge(queue)
    }

    /// Whether the device has set DEVICE_NEEDS_RESET and waits for its driver.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.transport.lock().is_broken()
    }

    /// Stops a running device and gives its state. The caller has stopped the
    /// vCPUs. The device stays stopped until it is restored, from this state for
    /// example, or reset.
    ///
    /// # Errors
    /// The backend cannot be saved (the device goes on then), or this was saved before.
    pub fn save(&self) -> Result<VirtioPciState, Error> {
        self.transport.lock().save()
    }

    /// Whether [`VirtioPciDevice::restore`] would take this state, as far as that can be said without the backend.
    ///
    /// # Errors
    /// The state is not one that this device can have had. Nothing has changed.
    pub fn check(&self, state: &VirtioPciState) -> Result<(), Error> {
        self.transport.lock().check(state)
    }

    /// Takes a saved state, which is checked as the writes of a guest are: what
    /// no guest could have brought about is refused.
    ///
    /// The device must be one that no driver uses, or that was saved. Afterwards
    /// the caller lets the BAR's mapping follow:
    /// [`PciBus::remap`](crate::pci::PciBus::remap). A running device gets one spurious
    /// kick and interrupt per queue.
    ///
    /// # Errors
    /// As [`VirtioPciDevice::check`], or the backend fails. The device is as before, with one
    /// exception: if the backend of a *saved* device fails, the device needs a reset by its driver.
    pub fn restore(&self, state: &VirtioPciState) -> Result<(), Error> {
        self.transport.lock().restore(state, Attempt::First)
    }

    /// As [`VirtioPciDevice::restore`], of a state that was restored before, here or by another process, where that did not
    /// end well: a device may have worked on the rings since, so where they stand is looked up again.
    ///
    /// # Errors
    /// As [`VirtioPciDevice::restore`], or it is not known what was done.
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

#[cfg(test)]
mod tests;

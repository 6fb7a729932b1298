//! A vDPA backend with all parts of a machine except a guest: memory, rings, and an event loop that
//! runs while a test waits.

use std::error::Error;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use devices::virtio::backend::{Activation, Backend as _, Event, Outcome};
use devices::virtio::vdpa::{DoorbellMode, VdpaBackend, VdpaOptions};
use lab::sim::SimDevice;
use vdpa::memory::GuestMemory;
use vm_memory::{Bytes as _, GuestAddress};

use super::guest::{self, Buffer, GuestNic, HIGH, RAM_END, REGION, Ring, readable};
use super::nic::{CONTROL, PATIENCE};

/// The place of a control command, and of its ack byte.
pub(crate) const COMMAND: u64 = HIGH + REGION / 2;
pub(crate) const ACK: u64 = HIGH + REGION / 2 + 0x1_0000;
/// An ack byte before the device writes it.
const NO_ACK: u8 = 0xaa;

/// The device's options, as in `--vdpa path=…`.
pub(crate) fn options(device: &SimDevice) -> VdpaOptions {
    VdpaOptions {
        id: device.name().to_owned(),
        path: device.path().to_owned(),
        mac: None,
        mac_lock: false,
        standby: false,
        num_queues: None,
        doorbell: DoorbellMode::default(),
        iommu: false,
    }
}

/// An error and its causes in one line.
pub(crate) fn chain(error: &(dyn Error + 'static)) -> String {
    std::iter::successors(Some(error), |error| (*error).source())
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(": ")
}

pub(crate) struct Machine {
    pub(crate) backend: VdpaBackend,
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) nic: GuestNic,
    pub(crate) control: Ring,
    /// The features that the guest's driver accepts.
    pub(crate) features: u64,
    events: Vec<Event>,
}

impl Machine {
    pub(crate) fn new(device: &SimDevice) -> Self {
        Self::with(&options(device))
    }

    pub(crate) fn with(options: &VdpaOptions) -> Self {
        Self::on(options, &guest::memory())
    }

    /// A machine on memory that another machine may share.
    pub(crate) fn on(options: &VdpaOptions, memory: &Arc<GuestMemory>) -> Self {
        let mut backend = VdpaBackend::open(options, Arc::clone(memory), RAM_END).unwrap();
        let nic = GuestNic::new(memory);
        let control = Ring::new(memory, CONTROL);
        let kicks = [&nic.receive, &nic.transmit, &control].map(|ring| Arc::clone(&ring.kick));
        Self {
            features: backend.features(),
            events: backend.events(&kicks),
            memory: Arc::clone(memory),
            backend,
            nic,
            control,
        }
    }

    /// The queues as the guest's driver programs them: the control queue only if it is negotiated.
    pub(crate) fn activation(&self) -> Activation {
        let mut activation = self.nic.activation(self.features);
        if self.features & 1 << 17 != 0 {
            activation.queues.push(self.control.queue());
        }
        activation
    }

    /// Starts the device as a driver does, with empty rings.
    pub(crate) fn start(&mut self) {
        self.nic.restart();
        self.control.clear();
        self.backend.negotiate(self.features).unwrap();
        let activation = self.activation();
        self.backend.activate(activation).unwrap();
    }

    /// From its next start on, the driver adds this to all addresses that it gives the device.
    pub(crate) fn shift(&mut self, shift: u64) {
        let rings = [
            &mut self.nic.receive,
            &mut self.nic.transmit,
            &mut self.control,
        ];
        rings.into_iter().for_each(|ring| ring.shift = shift);
    }

    /// The address in the configuration that the guest sees.
    pub(crate) fn mac(&mut self) -> [u8; 6] {
        let mut mac = [0; 6];
        self.backend.read_config(0, &mut mac);
        mac
    }

    /// Runs the event loop once; waits for an event at most `limit`.
    pub(crate) fn turn(&mut self, limit: Duration) -> Outcome {
        let fds: Vec<BorrowedFd<'_>> = self
            .events
            .iter()
            // SAFETY: a descriptor without its owner cannot be borrowed in any other way. `backend`
            // keeps it open for its life, which is longer.
            .map(|event| unsafe { BorrowedFd::borrow_raw(event.fd) })
            .collect();
        let ready = readable(&fds, limit);
        let mut outcome = Outcome::default();
        for (event, _) in self.events.iter().zip(ready).filter(|(_, ready)| *ready) {
            let one = self.backend.process(event.token);
            outcome.config_changed |= one.config_changed;
            outcome.needs_reset |= one.needs_reset;
        }
        outcome
    }

    /// Runs the event loop until the control ring has a used chain: its head and length, and
    /// whether the device needs a reset.
    pub(crate) fn answer(&mut self) -> Option<(u32, u32, bool)> {
        let begin = Instant::now();
        let mut needs_reset = false;
        loop {
            if let Some((head, written)) = self.control.take() {
                return Some((head, written, needs_reset));
            }
            let left = PATIENCE.checked_sub(begin.elapsed())?;
            let outcome = self.turn(left);
            needs_reset |= outcome.needs_reset;
            if needs_reset {
                return self
                    .control
                    .take()
                    .map(|(head, written)| (head, written, true));
            }
        }
    }

    /// Sends a chain of the guest to the control queue; returns the ack byte and the length in the
    /// used ring.
    pub(crate) fn send_control(&mut self, chain: &[Buffer]) -> (u8, u32) {
        self.memory.write_obj(NO_ACK, GuestAddress(ACK)).unwrap();
        let head = self.control.add(chain);
        let (used, written, needs_reset) = self.answer().unwrap();
        assert!(!needs_reset);
        assert_eq!(used, u32::from(head));
        (self.memory.read_obj(GuestAddress(ACK)).unwrap(), written)
    }

    /// Sends a command as the Linux driver does: header, data, ack.
    pub(crate) fn command(&mut self, command: &[u8]) -> u8 {
        let place = GuestAddress(COMMAND);
        self.memory.write_slice(command, place).unwrap();
        let len = u32::try_from(command.len()).unwrap();
        let mut chain: Vec<Buffer> = vec![(COMMAND, len.min(2), false)];
        if len > 2 {
            chain.push((COMMAND + 2, len - 2, false));
        }
        chain.push((ACK, 1, true));
        let (ack, written) = self.send_control(&chain);
        assert_eq!(written, 1);
        ack
    }
}

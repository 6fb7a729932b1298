//! One queue with its private memory, its eventfds and its current relay.

use std::io;
use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

use crate::device::{VringAddresses, VringBase, VringConfig};
use crate::iotlb::{Access, Iotlb, Mapping};
use crate::iova::IovaRange;
use crate::memory::SharedBuffer;
use crate::relay::{Dirty, FullShadow, Strategy, Svq, UsedShadow, in_flight_unknown};
use crate::ring::{GuestRing, RingFormat, RingLayout};
use crate::window::PrivateWindow;
use crate::{Error, ErrorKind};

/// Largest private ring. More entries than the guest's ring has are useful if its chains are
/// indirect, since the private ring has no indirect tables.
const PRIVATE_ENTRIES_MAX: u16 = 1024;

/// A guest's queue that can be relayed.
#[derive(Debug, Clone)]
pub struct RelayedQueue {
    /// Index of the queue on the device.
    pub index: u16,
    /// The guest's ring; all rings of a device have the same format.
    pub ring: GuestRing,
    /// Signalled by the guest. The device does not see it while the queue is shadowed: wait for
    /// [`SvqSet::hints`](super::SvqSet::hints). A guest with a doorbell must use this instead.
    pub kick: Arc<EventFd>,
    /// Interrupts the guest.
    pub call: Arc<EventFd>,
}

impl RelayedQueue {
    /// For `map_err`: the ring of queue `index` has no valid place for a guest's ring.
    pub fn refused(index: u16) -> impl FnOnce(Error) -> Error {
        move |source| {
            Error::other(format!("queue {index}: cannot relay the guest's ring")).because(source)
        }
    }
}

#[derive(Debug)]
pub(super) enum Mode {
    Direct,
    UsedShadow(UsedShadow),
    FullShadow(Box<FullShadow>),
}

const NOT_MAPPED: &str = "cannot map the private rings";

impl Mode {
    pub(super) fn relay(&mut self) -> Option<&mut dyn Svq> {
        match self {
            Self::Direct => None,
            Self::UsedShadow(queue) => Some(queue),
            Self::FullShadow(queue) => Some(&mut **queue),
        }
    }

    pub(super) fn strategy(&self) -> Strategy {
        match self {
            Self::Direct => Strategy::Direct,
            Self::UsedShadow(_) => Strategy::UsedShadow,
            Self::FullShadow(_) => Strategy::FullShadow,
        }
    }
}

/// One queue with all resources for relaying.
#[derive(Debug)]
pub(super) struct SvqQueue {
    pub(super) queue: RelayedQueue,
    pub(super) private: Arc<SharedBuffer>,
    pub(super) layout: RingLayout,
    /// Kicks the device while the queue is shadowed.
    pub(super) kick: EventFd,
    /// Signalled by the device while the queue is relayed.
    pub(super) hint: EventFd,
    pub(super) mode: Mode,
    pub(super) broken: bool,
}

impl SvqQueue {
    pub(super) fn new(
        queue: RelayedQueue,
        maximum: u16,
        iotlb: &mut Iotlb,
        window: &mut PrivateWindow,
    ) -> Result<Self, Error> {
        let guest = queue.ring.size();
        let most = maximum.min(PRIVATE_ENTRIES_MAX).max(guest);
        // The largest power of two that is not above `most`. `guest` is one, since the kernel
        // accepts no other size.
        let entries = most
            .checked_ilog2()
            .map_or(guest, |log| 1 << log)
            .max(guest);
        let layout = RingLayout::new(queue.ring.format(), entries)
            .map_err(Error::context("cannot create a private ring"))?;
        let size = match queue.ring {
            GuestRing::Split(_) => layout.size() + UsedShadow::memory_size(guest),
            GuestRing::Packed(_) => layout.size(),
        };
        let iova = window.allocate(size).map_err(Error::context(
            "cannot reserve addresses for the private rings",
        ))?;
        let svq = Self::map(queue, layout, (iova, size), iotlb);
        if svq.is_err() {
            window.release(iova);
        }
        svq
    }

    fn map(
        queue: RelayedQueue,
        layout: RingLayout,
        (iova, size): (u64, u64),
        iotlb: &mut Iotlb,
    ) -> Result<Self, Error> {
        let private = SharedBuffer::new(size, iova)
            .map(Arc::new)
            .map_err(Error::context("cannot allocate the private rings"))?;
        let no_event = "cannot create an eventfd";
        let event = || crate::eventfd::new().map_err(Error::context(no_event));
        let (kick, hint) = (event()?, event()?);
        // All or nothing: dropping the batch rolls it back.
        let read_only = layout.writable_offset();
        let mapped = iotlb.batch(0).and_then(|mut batch| {
            for (offset, len, access) in [
                (0, read_only, Access::ReadOnly),
                (read_only, size - read_only, Access::ReadWrite),
            ] {
                let mapping = Mapping {
                    region: Arc::clone(&private) as _,
                    offset,
                    access,
                };
                batch.map(iova + offset, len, mapping)?;
            }
            batch.commit()
        });
        mapped.map_err(Error::context(NOT_MAPPED))?;
        Ok(Self {
            queue,
            private,
            layout,
            kick,
            hint,
            mode: Mode::Direct,
            broken: false,
        })
    }

    /// Frees the private memory. The device must no longer use it.
    pub(super) fn unmap(self, iotlb: &mut Iotlb, window: &mut PrivateWindow) -> Result<(), Error> {
        let iova = self.private.range().first();
        let unmapped = iotlb.batch(0).and_then(|mut batch| {
            batch.unmap(iova)?;
            batch.unmap(iova + self.layout.writable_offset())?;
            batch.commit()
        });
        unmapped.map_err(Error::context(NOT_MAPPED))?;
        // Only now: mapped memory must not be allocated again.
        window.release(iova);
        Ok(())
    }

    /// The mode for `strategy`, with the guest's ring at position `ring_position`; the device
    /// begins at `base`.
    pub(super) fn make(
        &self,
        strategy: Strategy,
        features: Features,
        ring_position: VringBase,
        base: VringBase,
    ) -> Result<Mode, Error> {
        let private = Arc::clone(&self.private);
        Ok(match strategy {
            Strategy::Direct => Mode::Direct,
            Strategy::UsedShadow => match (&self.queue.ring, base) {
                (GuestRing::Split(ring), VringBase::Split { index }) => {
                    Mode::UsedShadow(UsedShadow::new(
                        ring.clone(),
                        private,
                        self.layout.size(),
                        features.event_idx,
                        features.in_order,
                        index,
                    )?)
                }
                (ring, _) => return Err(ring.cannot_begin(base)),
            },
            Strategy::FullShadow => {
                let mut queue = FullShadow::new(
                    self.queue.ring.clone(),
                    ring_position,
                    private,
                    self.layout.entries(),
                    0,
                    features.event_idx,
                    base,
                )?;
                queue.fill()?;
                Mode::FullShadow(Box::new(queue))
            }
        })
    }

    /// The description for the device of the ring in `mode`.
    pub(super) fn config<'a>(&'a self, mode: &'a mut Mode, base: VringBase) -> VringConfig<'a> {
        let shadowed = matches!(mode, Mode::FullShadow(_));
        let direct = matches!(mode, Mode::Direct);
        let (addresses, size): (VringAddresses, u16) = match mode.relay() {
            Some(relay) => (relay.addresses(), relay.size()),
            None => (self.queue.ring.addresses(), self.queue.ring.size()),
        };
        VringConfig {
            size,
            addresses,
            base,
            kick: Some(if shadowed {
                &self.kick
            } else {
                &*self.queue.kick
            }),
            call: Some(if direct {
                &*self.queue.call
            } else {
                &self.hint
            }),
        }
    }

    /// A relay failed.
    pub(super) fn failed(&self, source: Error) -> Error {
        let queue = self.queue.index;
        let message = format!("cannot change how queue {queue} reaches the device");
        self.blamed(message, source)
    }

    /// An error about this queue, of the kind of its source.
    pub(super) fn blamed(&self, message: String, source: Error) -> Error {
        let queue = Some(self.queue.index);
        let kind = match source.kind() {
            ErrorKind::BrokenByGuest { .. } => ErrorKind::BrokenByGuest { queue },
            kind => kind,
        };
        Error::new(kind, message).because(source)
    }

    pub(super) fn is_packed(&self) -> bool {
        self.queue.ring.format() == RingFormat::Packed
    }

    /// The position at which a device begins in a new ring.
    pub(super) fn initial_base(&self) -> VringBase {
        VringBase::initial(self.is_packed())
    }

    /// Prepares the guest's ring for a device that takes it over; returns the position.
    pub(super) fn settle(&mut self, dirty: &dyn Dirty) -> Result<VringBase, Error> {
        let settled = match self.mode.relay() {
            None => self.queue.ring.used_position(),
            Some(relay) => relay
                .finish(dirty)
                .and_then(|_| relay.settle())
                .map(|position| position.base()),
        };
        settled.map_err(|source| self.failed(source))
    }

    /// The position for the next device after [`SvqQueue::settle`] or [`SvqQueue::take_over`]
    /// failed with `error`. That device takes again the chains that this one has taken and not
    /// used. Possible only if just those chains were unknown and the guest's ring shows order.
    pub(super) fn resume_base(&self, error: Error) -> Result<VringBase, Error> {
        let GuestRing::Split(ring) = &self.queue.ring else {
            return Err(error);
        };
        let uncounted = error.kind() == ErrorKind::InFlightUnknown;
        // The relay saw disorder, whatever the ring still shows.
        let disordered = matches!(&self.mode, Mode::UsedShadow(queue) if queue.is_disordered());
        if !uncounted || disordered || ring.check_order().is_err() {
            return Err(error);
        }
        self.queue
            .ring
            .used_position()
            .map_err(|source| self.failed(source))
    }

    /// Reports the chains that a stopped device used. A queue that is broken, or breaks now, ends
    /// anyway.
    pub(super) fn last_pass(&mut self, dirty: &dyn Dirty) {
        if self.broken {
            return;
        }
        if let Some(Err(error)) = self.mode.relay().map(|relay| relay.finish(dirty)) {
            let queue = self.queue.index;
            tracing::debug!(
                queue,
                error = &error as &dyn std::error::Error,
                "a relay ends with a broken queue"
            );
        }
    }

    /// The position at which a shadow takes over a direct ring. `stopped` is the position reported
    /// by the suspended device, which must hold no chain. A parent that reports no ring state is
    /// assumed to have completed in order.
    pub(super) fn take_over(&self, stopped: Result<VringBase, Error>) -> Result<VringBase, Error> {
        let ring_position = match (self.is_packed(), stopped) {
            (true, Ok(stopped)) => match stopped.packed_in_flight(self.queue.ring.size()) {
                0 => Ok(stopped.at_used()),
                descriptors => Err(packed_in_flight(descriptors)),
            },
            (false, Ok(VringBase::Split { index })) => {
                self.queue.ring.used_position().and_then(|used| {
                    let unknown = match used {
                        VringBase::Split { index: used } => index.wrapping_sub(used),
                        VringBase::Packed { .. } => 0,
                    };
                    if unknown > 0 {
                        return Err(in_flight_unknown(unknown));
                    }
                    Ok(used)
                })
            }
            _ => self.queue.ring.used_position(),
        };
        ring_position.map_err(|source| self.failed(source))
    }

    /// The addresses where the ring may lie: the guest's and the private memory.
    pub(super) fn allowed(&self) -> Vec<IovaRange> {
        let mut allowed = self.queue.ring.memory().reach();
        allowed.push(self.private.range());
        allowed
    }

    pub(super) fn kick_device(&self) -> io::Result<()> {
        match self.mode {
            Mode::FullShadow(_) => signal(&self.kick),
            Mode::Direct | Mode::UsedShadow(_) => signal(&self.queue.kick),
        }
    }

    /// One spurious kick and one spurious interrupt.
    pub(super) fn spurious_notify(&self) -> Result<(), Error> {
        self.kick_device()
            .and_then(|()| signal(&self.queue.call))
            .map_err(Error::context("cannot signal an eventfd"))
    }
}

/// The device holds chains of a packed ring, whose descriptors it may have overwritten with used
/// ones of other chains.
fn packed_in_flight(descriptors: u16) -> Error {
    let message = format!(
        "the device still holds {descriptors} descriptors of its packed ring and may have \
         overwritten them: try again when it has used them"
    );
    Error::new(ErrorKind::InFlightUnknown, message)
}

/// Signals an eventfd; a full counter means that it is signalled already.
pub(super) fn signal(event: &EventFd) -> io::Result<()> {
    match event.write(1) {
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
        _ => Ok(()),
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Features {
    pub(super) event_idx: bool,
    pub(super) in_order: bool,
    pub(super) format: RingFormat,
}

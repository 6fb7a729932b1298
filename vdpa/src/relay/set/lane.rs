//! One queue with its private memory, its eventfds and the relay it has now.

use std::io;
use std::sync::Arc;

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{RelaySetError, RelayedQueue, TransitionError};
use crate::device::{VringAddresses, VringBase, VringConfig};
use crate::iotlb::{Access, Iotlb, Mapping};
use crate::iova::IovaRange;
use crate::memory::SharedBuffer;
use crate::relay::{Dirty, MediatedQueue, Relay, RelayError, ShadowQueue, Strategy};
use crate::ring::SplitLayout;
use crate::ring::guest::ram;
use crate::window::PrivateWindow;

/// Largest private ring. More entries than the guest's ring has are of use
/// where its chains are indirect, which ours are not.
const PRIVATE_ENTRIES_MAX: u16 = 1024;

#[derive(Debug)]
pub(super) enum Mode {
    Direct,
    Mediated(MediatedQueue),
    Shadowed(Box<ShadowQueue>),
}

impl Mode {
    pub(super) fn relay(&mut self) -> Option<&mut dyn Relay> {
        match self {
            Self::Direct => None,
            Self::Mediated(queue) => Some(queue),
            Self::Shadowed(queue) => Some(&mut **queue),
        }
    }

    pub(super) fn strategy(&self) -> Strategy {
        match self {
            Self::Direct => Strategy::Direct,
            Self::Mediated(_) => Strategy::Mediated,
            Self::Shadowed(_) => Strategy::Shadowed,
        }
    }
}

/// One queue with all that it needs to be relayed.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) queue: RelayedQueue,
    pub(super) private: Arc<SharedBuffer>,
    pub(super) layout: SplitLayout,
    /// Kicks the device while the queue is shadowed.
    pub(super) kick: EventFd,
    /// Signalled by the device while the queue is relayed.
    pub(super) hint: EventFd,
    pub(super) mode: Mode,
    pub(super) broken: bool,
}

impl Lane {
    pub(super) fn new(
        queue: RelayedQueue,
        maximum: u16,
        iotlb: &mut Iotlb,
        window: &mut PrivateWindow,
    ) -> Result<Self, RelaySetError> {
        let guest = queue.ring.size();
        let most = maximum.min(PRIVATE_ENTRIES_MAX).max(guest);
        // The largest power of two that is not above; `guest` is one.
        let entries = most
            .checked_ilog2()
            .map_or(guest, |log| 1 << log)
            .max(guest);
        let layout = SplitLayout::new(entries).map_err(|source| RelaySetError::Ring { source })?;
        let size = layout.size() + MediatedQueue::memory_size(guest);
        let iova = window
            .allocate(size)
            .map_err(|source| RelaySetError::Window { source })?;
        let private = SharedBuffer::new(size, iova)
            .map(Arc::new)
            .map_err(|source| RelaySetError::Memory { source })?;
        let read_only = layout.used_offset();
        for (offset, len, access) in [
            (0, read_only, Access::ReadOnly),
            (read_only, size - read_only, Access::ReadWrite),
        ] {
            let mapping = Mapping {
                region: Arc::clone(&private) as _,
                offset,
                access,
            };
            iotlb
                .map(0, iova + offset, len, mapping)
                .map_err(|source| RelaySetError::Map { source })?;
        }
        let event =
            || EventFd::new(EFD_NONBLOCK).map_err(|source| RelaySetError::EventFd { source });
        Ok(Self {
            queue,
            private,
            layout,
            kick: event()?,
            hint: event()?,
            mode: Mode::Direct,
            broken: false,
        })
    }

    pub(super) fn make(
        &self,
        strategy: Strategy,
        features: Features,
        base: u16,
    ) -> Result<Mode, RelayError> {
        let ring = self.queue.ring.clone();
        let private = Arc::clone(&self.private);
        Ok(match strategy {
            Strategy::Direct => Mode::Direct,
            Strategy::Mediated => Mode::Mediated(MediatedQueue::new(
                ring,
                private,
                self.layout.size(),
                features.event_idx,
                features.in_order,
                base,
            )?),
            Strategy::Shadowed => {
                let event_idx = features.event_idx;
                let mut queue = ShadowQueue::new(ring, private, self.layout, 0, event_idx, base)?;
                queue.fill()?;
                Mode::Shadowed(Box::new(queue))
            }
        })
    }

    /// What the device is told of the ring in `mode`.
    pub(super) fn config<'a>(&'a self, mode: &'a mut Mode, index: u16) -> VringConfig<'a> {
        let shadowed = matches!(mode, Mode::Shadowed(_));
        let direct = matches!(mode, Mode::Direct);
        let (addresses, size): (VringAddresses, u16) = match mode.relay() {
            Some(relay) => (relay.addresses(), relay.size()),
            None => (self.queue.ring.addresses(), self.queue.ring.size()),
        };
        VringConfig {
            size,
            addresses,
            base: VringBase::Split { index },
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

    pub(super) fn failed(&self, source: impl Into<RelayError>) -> TransitionError {
        TransitionError::Queue {
            queue: self.queue.index,
            source: source.into(),
        }
    }

    /// Brings the guest's ring into a state in which a device can take it over;
    /// gives where.
    pub(super) fn settle(&mut self, dirty: &dyn Dirty) -> Result<u16, TransitionError> {
        let settled = match self.mode.relay() {
            None => self.queue.ring.used_index().map_err(RelayError::from),
            Some(relay) => relay
                .finish(dirty)
                .and_then(|_| relay.settle())
                .map(|position| position.used),
        };
        settled.map_err(|source| self.failed(source))
    }

    /// Where the ring may lie: guest RAM and the private memory.
    pub(super) fn allowed(&self) -> Vec<IovaRange> {
        let mut allowed = ram(self.queue.ring.memory());
        allowed.push(self.private.range());
        allowed
    }

    pub(super) fn kick_device(&self) -> io::Result<()> {
        match self.mode {
            Mode::Shadowed(_) => signal(&self.kick),
            Mode::Direct | Mode::Mediated(_) => signal(&self.queue.kick),
        }
    }

    /// One spurious kick and one spurious interrupt.
    pub(super) fn nudge(&self) -> Result<(), TransitionError> {
        self.kick_device()
            .and_then(|()| signal(&self.queue.call))
            .map_err(|source| TransitionError::Signal { source })
    }
}

/// Signals an eventfd; one whose counter is full is signalled already.
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
}

//! The driver's side of a ring in whichever format was negotiated.
//!
//! Owns the choice and nothing else: every method is that of the format's own
//! queue.

use std::sync::Arc;

use super::{Piece, QueueError, RingFeatures, RingLayout, Used, packed, split};
use crate::device::{VringAddresses, VringBase};
use crate::memory::SharedBuffer;

/// A virtqueue driven by this process.
#[derive(Debug)]
pub enum DriverQueue {
    /// A split ring.
    Split(split::DriverQueue),
    /// A packed ring.
    Packed(packed::DriverQueue),
}

macro_rules! each {
    ($self:expr, $queue:ident => $call:expr) => {
        match $self {
            DriverQueue::Split($queue) => $call,
            DriverQueue::Packed($queue) => $call,
        }
    };
}

impl DriverQueue {
    /// An empty ring of `size` entries at `offset` of `buffer`, in as many
    /// zeroed bytes of it as [`RingLayout::size`] says. `features` as negotiated.
    ///
    /// # Errors
    /// [`QueueError::Size`]; [`QueueError::Memory`] if it does not fit or is
    /// not aligned to a page.
    pub fn new(
        buffer: Arc<SharedBuffer>,
        size: u16,
        offset: u64,
        features: RingFeatures,
    ) -> Result<Self, QueueError> {
        Self::with_base(
            buffer,
            size,
            offset,
            features,
            VringBase::initial(features.packed),
        )
    }

    /// As [`DriverQueue::new`], but both sides begin at `base`: for a device that is told to go
    /// on there.
    ///
    /// # Errors
    /// As [`DriverQueue::new`]; [`QueueError::Base`].
    pub fn with_base(
        buffer: Arc<SharedBuffer>,
        size: u16,
        offset: u64,
        features: RingFeatures,
        base: VringBase,
    ) -> Result<Self, QueueError> {
        let layout = RingLayout::new(features.format(), size)?;
        Ok(match (layout, base) {
            (RingLayout::Split(layout), VringBase::Split { index }) => Self::Split(
                split::DriverQueue::with_base(buffer, layout, offset, features, index)?,
            ),
            (RingLayout::Packed(layout), VringBase::Packed { .. }) => Self::Packed(
                packed::DriverQueue::with_base(buffer, layout, offset, features, base)?,
            ),
            _ => return Err(QueueError::Base { base }),
        })
    }

    /// The ring's areas as the device sees them.
    #[must_use]
    pub fn addresses(&self) -> VringAddresses {
        each!(self, queue => queue.addresses())
    }

    /// Where a device begins in a new ring of this format.
    #[must_use]
    pub fn initial_base(&self) -> VringBase {
        VringBase::initial(matches!(self, Self::Packed(_)))
    }

    /// Entries of the ring.
    #[must_use]
    pub fn size(&self) -> u16 {
        each!(self, queue => queue.size())
    }

    /// Descriptors that are free.
    #[must_use]
    pub fn free(&self) -> u16 {
        each!(self, queue => queue.free())
    }

    /// Chains that the device has.
    #[must_use]
    pub fn outstanding(&self) -> u16 {
        each!(self, queue => queue.outstanding())
    }

    /// Gives the device a chain; what it gives back names the chain in
    /// [`Used::head`]. The device may take it at once.
    ///
    /// # Errors
    /// [`QueueError::Chain`] or [`QueueError::Full`], with nothing changed;
    /// [`QueueError::Broken`].
    pub fn add(&mut self, chain: &[Piece]) -> Result<u16, QueueError> {
        each!(self, queue => queue.add(chain))
    }

    /// As [`DriverQueue::add`], with the chain in an indirect table at `table` of the
    /// ring's buffer: 16 bytes for each piece, aligned to 16, which are the chain's
    /// until it comes back. For rings with INDIRECT_DESC negotiated.
    ///
    /// # Errors
    /// As [`DriverQueue::add`]; [`QueueError::Memory`] for a table that does not fit.
    pub fn add_indirect(&mut self, chain: &[Piece], table: u64) -> Result<u16, QueueError> {
        each!(self, queue => queue.add_indirect(chain, table))
    }

    /// Where the driver makes the next chain available, and where it looks for the
    /// next used one. Split: free-running indices; packed: offsets with their wrap
    /// counters in bit 15 (virtio 1.3, 2.8.10).
    #[must_use]
    pub fn positions(&self) -> (u16, u16) {
        each!(self, queue => queue.positions())
    }

    /// Whether the device wants a kick for what was added since the last call.
    ///
    /// # Errors
    /// [`QueueError::Broken`].
    pub fn needs_kick(&mut self) -> Result<bool, QueueError> {
        each!(self, queue => queue.needs_kick())
    }

    /// Takes back one chain that the device is done with.
    ///
    /// # Errors
    /// [`QueueError::Broken`] if the device broke a rule, now or before.
    pub fn pop_used(&mut self) -> Result<Option<Used>, QueueError> {
        each!(self, queue => queue.pop_used())
    }

    /// Asks the device to signal used chains, or not to; it may do so anyway.
    /// `true`: chains are waiting already, perhaps without a signal.
    ///
    /// # Errors
    /// [`QueueError::Broken`].
    pub fn set_interrupts(&mut self, enabled: bool) -> Result<bool, QueueError> {
        each!(self, queue => queue.set_interrupts(enabled))
    }
}

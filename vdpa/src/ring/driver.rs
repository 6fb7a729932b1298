//! The driver's side of a ring, in either format.
//!
//! All data that the device can write is untrusted. On a parent without an IOMMU that is the whole
//! ring. So private memory records the device's chains, with their descriptors and bytes, and is
//! never read back from the ring. Writing and reading a ring is in [`split`] and [`packed`].
//!
//! After a [`Violation`] the queue is broken for good:
//! ```text
//!   working --- violation seen in pop_used ---> broken (every call fails)
//! ```

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::guest::DESCRIPTOR_F_INDIRECT;
use super::in_order::InOrder;
use super::ring_memory::{Element, RingMemory};
use super::{
    Piece, RingFeatures, RingLayout, Used, Violation, cannot_begin, check_chain, packed, prepare,
    split, write_table,
};
use crate::Error;
use crate::device::{VringAddresses, VringBase};
use crate::memory::SharedBuffer;

/// A chain that the device has.
#[derive(Debug, Clone, Copy)]
struct Chain {
    descriptors: u16,
    /// Bytes that the device may write.
    writable: u32,
}

#[derive(Debug)]
enum Ring {
    Split(split::Driver),
    Packed(packed::Driver),
}

macro_rules! each {
    ($self:expr, $ring:ident => $call:expr) => {
        match $self {
            Ring::Split($ring) => $call,
            Ring::Packed($ring) => $call,
        }
    };
}

/// A virtqueue driven by this process.
#[derive(Debug)]
pub struct DriverQueue {
    memory: RingMemory,
    addresses: VringAddresses,
    size: u16,
    ring: Ring,
    /// With IN_ORDER.
    in_order: Option<InOrder>,
    /// By head.
    outstanding: Vec<Option<Chain>>,
    outstanding_count: u16,
    interrupts: bool,
    broken: Option<Violation>,
}

impl DriverQueue {
    /// An empty ring of `size` entries at `offset` of `buffer`, in [`RingLayout::size`] zeroed
    /// bytes. `features` are the negotiated ones.
    ///
    /// # Errors
    /// The size is impossible for the format; or the ring does not fit, or is not page-aligned.
    pub fn new(
        buffer: Arc<SharedBuffer>,
        size: u16,
        offset: u64,
        features: RingFeatures,
    ) -> Result<Self, Error> {
        let base = VringBase::initial(features.packed);
        Self::with_base(buffer, size, offset, features, base)
    }

    /// As [`DriverQueue::new`], but both sides begin at `base`, with nothing in flight: for a
    /// device that resumes there.
    ///
    /// # Errors
    /// As [`DriverQueue::new`]; or such a ring cannot begin at `base`.
    pub fn with_base(
        buffer: Arc<SharedBuffer>,
        size: u16,
        offset: u64,
        features: RingFeatures,
        base: VringBase,
    ) -> Result<Self, Error> {
        let layout = RingLayout::new(features.format(), size)?;
        let start = prepare(&buffer, offset, layout.size())?;
        let memory = RingMemory {
            buffer,
            offset,
            event_idx: features.event_idx,
        };
        let ring = match (layout, base) {
            (RingLayout::Split(layout), VringBase::Split { index }) => Ring::Split(
                split::Driver::new(&memory, layout, index, features.in_order)?,
            ),
            (RingLayout::Packed(layout), _) => {
                Ring::Packed(packed::Driver::new(&memory, layout, base)?)
            }
            _ => return Err(cannot_begin(base)),
        };
        Ok(Self {
            memory,
            addresses: layout.addresses(start),
            size,
            ring,
            in_order: features.in_order.then(InOrder::default),
            outstanding: vec![None; usize::from(size)],
            outstanding_count: 0,
            interrupts: true,
            broken: None,
        })
    }

    /// The I/O virtual addresses of the ring's areas.
    #[must_use]
    pub fn addresses(&self) -> VringAddresses {
        self.addresses
    }

    /// The position at which a device begins in a new ring of this format.
    #[must_use]
    pub fn initial_base(&self) -> VringBase {
        VringBase::initial(matches!(self.ring, Ring::Packed(_)))
    }

    /// Entries of the ring.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Descriptors that are free.
    #[must_use]
    pub fn free(&self) -> u16 {
        each!(&self.ring, ring => ring.free())
    }

    /// Chains that the device has.
    #[must_use]
    pub fn outstanding(&self) -> u16 {
        self.outstanding_count
    }

    /// The positions of the driver's next available chain and of the next used one. Split:
    /// free-running indices; packed: offsets with their wrap counters in bit 15 (virtio 1.3,
    /// 2.8.10).
    #[must_use]
    pub fn positions(&self) -> (u16, u16) {
        each!(&self.ring, ring => ring.positions())
    }

    /// Makes a chain available to the device, which may take it at once. [`Used::head`] names the
    /// chain when it returns.
    ///
    /// # Errors
    /// The chain is invalid, or has more pieces than there are free descriptors
    /// ([`DriverQueue::free`]); nothing changes then. Or the device broke a rule before.
    pub fn add(&mut self, chain: &[Piece]) -> Result<u16, Error> {
        self.working()?;
        let writable = check_chain(chain)?;
        self.make_available(chain, writable, 0)
    }

    /// As [`DriverQueue::add`], with the chain in an indirect table at `table` of the ring's
    /// buffer. The table takes 16 bytes for each piece, aligned to 16, until the chain returns. For
    /// rings with INDIRECT_DESC negotiated.
    ///
    /// # Errors
    /// As [`DriverQueue::add`]; or the table does not fit.
    pub fn add_indirect(&mut self, chain: &[Piece], table: u64) -> Result<u16, Error> {
        self.working()?;
        let writable = check_chain(chain)?;
        let encode = match self.ring {
            Ring::Split(_) => split::table_entry,
            Ring::Packed(_) => packed::table_entry,
        };
        let table = write_table(&self.memory.buffer, table, chain, encode)?;
        self.make_available(&[table], writable, DESCRIPTOR_F_INDIRECT)
    }

    /// Makes checked pieces available; `flags` are added to each descriptor.
    fn make_available(&mut self, chain: &[Piece], writable: u32, flags: u16) -> Result<u16, Error> {
        let (free, wanted) = (self.free(), chain.len());
        let descriptors = u16::try_from(wanted).ok().filter(|&wanted| wanted <= free);
        let descriptors = descriptors.ok_or_else(|| {
            Error::other(format!(
                "the ring has {free} free descriptors and {wanted} are needed"
            ))
        })?;
        let memory = &self.memory;
        let head = each!(&mut self.ring, ring => ring.make_available(memory, chain, flags))?;
        if let Some(place) = self.outstanding.get_mut(usize::from(head)) {
            *place = Some(Chain {
                descriptors,
                writable,
            });
        }
        self.outstanding_count += 1;
        if let Some(in_order) = &mut self.in_order {
            in_order.made_available(head);
        }
        Ok(head)
    }

    /// Whether the device wants a kick for chains added since the last call.
    ///
    /// # Errors
    /// The device broke a rule before.
    pub fn needs_kick(&mut self) -> Result<bool, Error> {
        self.working()?;
        each!(&mut self.ring, ring => ring.needs_kick(&self.memory))
    }

    /// Takes one used chain. With IN_ORDER, chains without a used element of their own count as
    /// written completely.
    ///
    /// # Errors
    /// The device broke a rule, now or before ([`Error::violation`]).
    pub fn pop_used(&mut self) -> Result<Option<Used>, Error> {
        self.working()?;
        let popped = self.take_used();
        if let Err(error) = &popped {
            self.broken = error.violation();
        }
        popped
    }

    fn take_used(&mut self) -> Result<Option<Used>, Error> {
        let of_batch = self.in_order.as_mut().and_then(InOrder::take);
        let next = match of_batch {
            Some(next) => Some(next),
            None => self.take_element()?,
        };
        let Some((head, written)) = next else {
            return Ok(None);
        };
        let place = self.outstanding.get_mut(usize::from(head));
        let chain = place.and_then(Option::take);
        let id = u32::from(head);
        let chain = chain.ok_or(Violation::NotOutstanding { id })?;
        self.outstanding_count -= 1;
        each!(&mut self.ring, ring => ring.reclaim(head, chain.descriptors));
        if self.memory.event_idx && self.interrupts {
            each!(&self.ring, ring => ring.ask_for_next(&self.memory))?;
        }
        Ok(Some(Used {
            head,
            written: written.unwrap_or(chain.writable),
        }))
    }

    /// Reads and checks the next used element; with IN_ORDER the oldest chain that it completes.
    /// The length is that of the element's own chain.
    fn take_element(&mut self) -> Result<Option<(u16, Option<u32>)>, Error> {
        let outstanding = self.outstanding_count;
        let element = each!(&self.ring, ring => ring.element(&self.memory, outstanding))?;
        let Some(Element { id, written, moved }) = element else {
            return Ok(None);
        };
        let unknown = Violation::NotOutstanding { id };
        let head = u16::try_from(id).map_err(|_| unknown)?;
        let chain = self.outstanding.get(usize::from(head)).copied().flatten();
        let offered = chain.ok_or(unknown)?.writable;
        if written > offered {
            return Err(Violation::TooLong { written, offered }.into());
        }
        let Some(in_order) = &mut self.in_order else {
            return Ok(Some((head, Some(written))));
        };
        let batch = in_order.batch_len(head).ok_or(unknown)?;
        if batch > usize::from(moved) {
            return Err(Violation::Batch { id, batch, moved }.into());
        }
        in_order.begin(head, written);
        Ok(in_order.take())
    }

    /// Enables or disables the device's signals for used chains; it may signal anyway. `true`:
    /// chains are waiting already, perhaps without a signal.
    ///
    /// # Errors
    /// The device broke a rule before.
    pub fn set_interrupts(&mut self, enabled: bool) -> Result<bool, Error> {
        self.working()?;
        self.interrupts = enabled;
        each!(&self.ring, ring => ring.set_interrupts(&self.memory, enabled))?;
        // Full fence: the new setting must be visible before the ring is read, or a chain used in
        // between is missed (virtio 1.3, 2.7.7.1).
        fence(Ordering::SeqCst);
        let of_batch = self.in_order.as_ref().is_some_and(InOrder::is_pending);
        Ok(of_batch || each!(&self.ring, ring => ring.is_used(&self.memory))?)
    }

    fn working(&self) -> Result<(), Error> {
        match self.broken {
            None => Ok(()),
            Some(violation) => Err(violation.into()),
        }
    }
}

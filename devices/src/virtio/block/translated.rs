//! A disk behind the guest's IOMMU. The kernel works on requests by host addresses, which a
//! translation gave. So each request that uses a page ends before the page is taken from the disk.
//!
//! ```text
//!   UNMAP of a page that a request uses: wait for the request, report it --> unmapped
//!                                          |
//!                                          | the storage does not answer in time
//!                                          v
//!   blocked: requests cancelled, no ring served --> the driver resets and starts the disk
//! ```
//! **The thread that serves the IOMMU waits here**, with the locks of the domains and of the disk.
//! It reaps the completions itself, so it needs no other thread. A correct driver unmaps a buffer
//! after its request has ended, and never waits. Any other driver waits once for [`UNMAP_TIME`]: a
//! blocked disk is not waited for. Until the storage has answered, each call that takes a page in
//! use fails.
//!
//! The translations of a blocked disk stay until its driver starts it. They show which pages the
//! kernel has written.

use std::sync::Arc;
use std::time::Duration;

use vdpa::iova::IovaRange;
use vdpa::memory::{AddressSpace, Change};

use super::Block;
use crate::Error;
use crate::virtio::backend::{Backend as _, Translated};
use crate::virtio::own_space::OwnSpace;
use crate::virtio::userspace_queue::Kick;

/// How long a vCPU waits for requests that use a page which its guest unmaps.
pub(super) const UNMAP_TIME: Duration = Duration::from_millis(if cfg!(test) { 500 } else { 100 });

impl Block {
    fn place(&mut self) -> Result<&mut OwnSpace, Error> {
        let place = self.place.as_mut();
        place.ok_or_else(|| Error::other("the disk is not behind the guest's IOMMU"))
    }

    /// Ends the requests that use memory in these ranges of device addresses.
    fn end_requests(&mut self, ranges: &[IovaRange]) -> Result<(), Error> {
        if !self.engine.uses(ranges) {
            return Ok(());
        }
        if self.active.is_some() {
            let awaited = |engine: &super::Engine| engine.uses(ranges);
            let finished = self.engine.drain_while(UNMAP_TIME, awaited);
            if let Err(error) = self.report_all(finished) {
                let error: &dyn std::error::Error = &error;
                tracing::warn!(error, "the driver of virtio-blk broke its queue");
                self.block();
            }
        }
        if self.engine.uses(ranges) {
            self.block();
        }
        if self.engine.uses(ranges) {
            return Err(Error::other(
                "the storage of the disk has not answered requests that use the memory: it may \
                 still write there",
            ));
        }
        Ok(())
    }
}

impl Translated for Block {
    fn reach(&self) -> IovaRange {
        self.place.as_ref().map_or(IovaRange::ALL, OwnSpace::reach)
    }

    fn space(&self) -> Option<Arc<AddressSpace>> {
        self.place.as_ref()?.space()
    }

    fn enter(&mut self, space: &Arc<AddressSpace>) -> Result<(), Error> {
        self.end_requests(&[IovaRange::ALL])?;
        self.place()?.enter(space)
    }

    fn leave(&mut self) -> Result<(), Error> {
        let ended = self.end_requests(&[IovaRange::ALL]);
        self.place()?.leave().and(ended)
    }

    fn change(&mut self, changes: &[Change]) -> Result<(), Error> {
        let unmapped = changes.iter().filter_map(|change| match *change {
            Change::Unmap { range } => Some(range),
            Change::Map { .. } => None,
        });
        self.end_requests(&unmapped.collect::<Vec<_>>())?;
        self.place()?.change(changes)
    }

    fn block(&mut self) {
        if self.active.is_some() {
            tracing::warn!("a disk stops: its guest has unmapped memory that requests use");
            self.reset();
            self.needs_reset = true;
            // The event loop notifies the driver.
            self.kick.iter().for_each(Kick::again);
        }
        self.place.iter_mut().for_each(OwnSpace::freeze);
    }
}

#[cfg(test)]
mod tests;

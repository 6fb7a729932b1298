//! The devices behind the IOMMU, as it reaches them.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use vdpa::iova::IovaRange;
use vdpa::memory::{AddressSpace, Change};

use crate::Error;
use crate::virtio::backend::Translated;

/// A device behind the IOMMU, shared with the threads that use it otherwise. The methods are those
/// of [`Translated`].
///
/// Lock order: the IOMMU's function, its domains, the endpoint's function, an [`AddressSpace`]. A
/// hot swap locks the domains, then the endpoint's function. An endpoint never calls the IOMMU.
pub trait Endpoint: Send + Sync + fmt::Debug {
    /// See [`Translated::reach`].
    ///
    /// # Errors
    /// The device is not behind an IOMMU.
    fn reach(&self) -> Result<IovaRange, Error>;

    /// See [`Translated::enter`].
    ///
    /// # Errors
    /// As there.
    fn enter(&self, space: &Arc<AddressSpace>) -> Result<(), Error>;

    /// See [`Translated::leave`].
    ///
    /// # Errors
    /// As there.
    fn leave(&self) -> Result<(), Error>;

    /// See [`Translated::change`].
    ///
    /// # Errors
    /// As there.
    fn change(&self, changes: &[Change]) -> Result<(), Error>;

    /// See [`Translated::block`].
    fn block(&self);
}

impl<T: Translated + Send + fmt::Debug> Endpoint for Mutex<T> {
    fn reach(&self) -> Result<IovaRange, Error> {
        Ok(self.lock().reach())
    }

    fn enter(&self, space: &Arc<AddressSpace>) -> Result<(), Error> {
        self.lock().enter(space)
    }

    fn leave(&self) -> Result<(), Error> {
        self.lock().leave()
    }

    fn change(&self, changes: &[Change]) -> Result<(), Error> {
        self.lock().change(changes)
    }

    fn block(&self) {
        self.lock().block();
    }
}

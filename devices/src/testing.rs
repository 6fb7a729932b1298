//! Fakes of the hypervisor for the tests of this crate: plain eventfds and maps that a test can
//! inspect.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use vmm_sys_util::eventfd::EventFd;

use crate::hypervisor::{
    DeviceMappings, DevicePages, LevelInterrupt, MsiMessage, MsiVector, MsiVectors,
};

#[derive(Debug)]
pub(crate) struct FakeVector {
    eventfd: EventFd,
    route: Mutex<Option<MsiMessage>>,
    /// Makes the next route change fail.
    pub(crate) fail: Mutex<bool>,
}

impl FakeVector {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            eventfd: vdpa::eventfd::new().unwrap(),
            route: Mutex::new(None),
            fail: Mutex::new(false),
        })
    }

    pub(crate) fn route(&self) -> Option<MsiMessage> {
        *self.route.lock()
    }

    /// Returns the message that KVM would have injected since the last call.
    pub(crate) fn delivered(&self) -> Option<MsiMessage> {
        let route = self.route()?;
        self.eventfd.read().ok().map(|_| route)
    }

    fn set(&self, route: Option<MsiMessage>) -> io::Result<()> {
        if std::mem::take(&mut *self.fail.lock()) {
            return Err(io::Error::other("no route"));
        }
        *self.route.lock() = route;
        Ok(())
    }
}

impl MsiVector for FakeVector {
    fn eventfd(&self) -> &EventFd {
        &self.eventfd
    }
    fn unmask(&self, message: MsiMessage) -> io::Result<()> {
        self.set(Some(message))
    }
    fn mask(&self) -> io::Result<()> {
        self.set(None)
    }
    fn pending(&self) -> bool {
        match self.eventfd.read() {
            Ok(count) => {
                self.eventfd.write(count).unwrap();
                true
            }
            Err(_) => false,
        }
    }
}

#[derive(Debug)]
pub(crate) struct FakeVectors {
    pub(crate) given: Mutex<Vec<Arc<FakeVector>>>,
    pub(crate) limit: usize,
}

impl FakeVectors {
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            given: Mutex::new(Vec::new()),
            limit,
        }
    }

    pub(crate) fn get(&self, vector: usize) -> Arc<FakeVector> {
        Arc::clone(&self.given.lock()[vector])
    }
}

impl MsiVectors for FakeVectors {
    fn allocate(&self) -> io::Result<Arc<dyn MsiVector>> {
        let mut given = self.given.lock();
        if given.len() == self.limit {
            return Err(io::Error::other("no vector"));
        }
        let vector = FakeVector::new();
        given.push(Arc::clone(&vector));
        Ok(vector)
    }
}

/// A page without a device, at no address.
#[derive(Debug)]
pub(crate) struct FakePage(pub(crate) u16);

// SAFETY: needed so that tests have pages. The address is never accessed: `FakeDeviceMappings` maps
// pages into no guest.
unsafe impl DevicePages for FakePage {
    fn host_address(&self) -> u64 {
        u64::from(self.0) * 4096
    }
}

/// The target of a guest write at an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Reached {
    Eventfd(u64),
    /// The page with this number.
    Page(u64, u64),
}

/// One operation, for tests of their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    Attach(u64),
    Detach(u64),
    Map(u64),
    Unmap(u64),
}

#[derive(Debug, Default)]
pub(crate) struct FakeDeviceMappings {
    attached: Mutex<BTreeMap<u64, EventFd>>,
    mapped: Mutex<BTreeMap<u64, Arc<dyn DevicePages>>>,
    /// An address at which every operation is refused.
    pub(crate) refused: Mutex<Option<u64>>,
    /// The successful operations since the last look.
    pub(crate) done: Mutex<Vec<Operation>>,
}

impl FakeDeviceMappings {
    /// Returns the addresses of the eventfds.
    pub(crate) fn addresses(&self) -> Vec<u64> {
        self.attached.lock().keys().copied().collect()
    }

    /// Returns all targets by address.
    pub(crate) fn all(&self) -> Vec<Reached> {
        let pages = self.mapped.lock();
        let pages = pages
            .iter()
            .map(|(address, page)| Reached::Page(*address, page.host_address() / 4096));
        let mut all: Vec<Reached> = pages.collect();
        all.extend(self.addresses().into_iter().map(Reached::Eventfd));
        all.sort_by_key(|reached| match reached {
            Reached::Eventfd(address) | Reached::Page(address, _) => *address,
        });
        all
    }

    /// Makes a guest write. Returns `false` if it would exit to the VMM.
    pub(crate) fn ring(&self, address: u64) -> bool {
        let attached = self.attached.lock();
        let found = attached.get(&address);
        found.is_some_and(|eventfd| eventfd.write(1).is_ok())
    }

    fn check(&self, address: u64) -> io::Result<()> {
        if *self.refused.lock() == Some(address) {
            return Err(io::Error::other("refused"));
        }
        Ok(())
    }

    fn did(&self, operation: Operation) {
        self.done.lock().push(operation);
    }
}

impl DeviceMappings for FakeDeviceMappings {
    fn attach(&self, address: u64, eventfd: &EventFd) -> io::Result<()> {
        self.check(address)?;
        let mut attached = self.attached.lock();
        if attached.contains_key(&address) {
            return Err(io::Error::other("taken"));
        }
        attached.insert(address, eventfd.try_clone()?);
        self.did(Operation::Attach(address));
        Ok(())
    }

    fn detach(&self, address: u64, _eventfd: &EventFd) -> io::Result<()> {
        let removed = self.attached.lock().remove(&address);
        let removed = removed.map(drop);
        removed.ok_or_else(|| io::Error::other("not attached"))?;
        self.did(Operation::Detach(address));
        Ok(())
    }

    fn map(&self, address: u64, page: Arc<dyn DevicePages>) -> io::Result<()> {
        self.check(address)?;
        assert_eq!(address % 4096, 0);
        let mut mapped = self.mapped.lock();
        if mapped.contains_key(&address) {
            return Err(io::Error::other("taken"));
        }
        mapped.insert(address, page);
        self.did(Operation::Map(address));
        Ok(())
    }

    fn unmap(&self, address: u64) -> io::Result<()> {
        self.check(address)?;
        let removed = self.mapped.lock().remove(&address);
        let removed = removed.map(drop);
        removed.ok_or_else(|| io::Error::other("not mapped"))?;
        self.did(Operation::Unmap(address));
        Ok(())
    }
}

/// A level-triggered input that a test can inspect.
#[derive(Debug, Clone, Default)]
pub(crate) struct FakeLevel(pub(crate) Arc<Mutex<bool>>);

impl LevelInterrupt for FakeLevel {
    fn set(&self, asserted: bool) -> io::Result<()> {
        *self.0.lock() = asserted;
        Ok(())
    }
}

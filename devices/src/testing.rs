//! Stand-ins for the hypervisor, for the tests of this crate: plain eventfds
//! and maps that a test can look into.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::hypervisor::{Doorbells, MsiMessage, MsiVector, MsiVectors};

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
            eventfd: EventFd::new(EFD_NONBLOCK).unwrap(),
            route: Mutex::new(None),
            fail: Mutex::new(false),
        })
    }

    pub(crate) fn route(&self) -> Option<MsiMessage> {
        *self.route.lock().unwrap()
    }

    /// What KVM would have injected since the last call.
    pub(crate) fn delivered(&self) -> Option<MsiMessage> {
        let route = self.route()?;
        self.eventfd.read().ok().map(|_| route)
    }

    fn set(&self, route: Option<MsiMessage>) -> io::Result<()> {
        if std::mem::take(&mut *self.fail.lock().unwrap()) {
            return Err(io::Error::other("no route"));
        }
        *self.route.lock().unwrap() = route;
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
        Arc::clone(&self.given.lock().unwrap()[vector])
    }
}

impl MsiVectors for FakeVectors {
    fn allocate(&self) -> io::Result<Arc<dyn MsiVector>> {
        let mut given = self.given.lock().unwrap();
        if given.len() == self.limit {
            return Err(io::Error::other("no vector"));
        }
        let vector = FakeVector::new();
        given.push(Arc::clone(&vector));
        Ok(vector)
    }
}

#[derive(Debug, Default)]
pub(crate) struct FakeDoorbells {
    attached: Mutex<BTreeMap<u64, EventFd>>,
    /// An address that is refused.
    pub(crate) refused: Mutex<Option<u64>>,
}

impl FakeDoorbells {
    pub(crate) fn addresses(&self) -> Vec<u64> {
        self.attached.lock().unwrap().keys().copied().collect()
    }

    /// A guest write; `false` if it would exit to us.
    pub(crate) fn ring(&self, address: u64) -> bool {
        let attached = self.attached.lock().unwrap();
        let found = attached.get(&address);
        found.is_some_and(|eventfd| eventfd.write(1).is_ok())
    }
}

impl Doorbells for FakeDoorbells {
    fn attach(&self, address: u64, eventfd: &EventFd) -> io::Result<()> {
        let mut attached = self.attached.lock().unwrap();
        if *self.refused.lock().unwrap() == Some(address) || attached.contains_key(&address) {
            return Err(io::Error::other("taken"));
        }
        attached.insert(address, eventfd.try_clone()?);
        Ok(())
    }

    fn detach(&self, address: u64, _eventfd: &EventFd) -> io::Result<()> {
        let removed = self.attached.lock().unwrap().remove(&address);
        removed
            .map(drop)
            .ok_or_else(|| io::Error::other("not attached"))
    }
}

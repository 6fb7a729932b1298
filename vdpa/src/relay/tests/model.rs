//! Models of a guest's driver and a device, which access memory only as the two sides of a ring. A
//! simulation connects them through a relay or directly.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vm_memory::{Bytes, GuestAddress};

use super::super::{Dirty, FullShadow, Signals, Strategy, Svq, UsedShadow};
use crate::Error;
use crate::device::{VringAddresses, VringBase};
use crate::iova::DeviceAddress;
use crate::memory::{GuestMemory, SharedBuffer};
use crate::ring::SplitLayout;
use crate::ring::split::{GuestRing, Suppression};

pub(super) const SIZE: u16 = 8;
const RAM: usize = 1 << 20;
const WINDOW: u64 = 1 << 40;
pub(super) const ADDRESSES: VringAddresses = VringAddresses {
    descriptor: DeviceAddress(0x1000),
    driver: DeviceAddress(0x2000),
    device: DeviceAddress(0x3000),
};
const TABLES: u64 = 0x8000;
const BUFFERS: u64 = 0x2_0000;
const BUFFER: u64 = 0x2000;

/// The memory reported as written, as bytes of guest memory.
#[derive(Debug, Default)]
pub(super) struct Log(pub(super) RefCell<BTreeSet<u64>>);

impl Dirty for Log {
    fn mark(&self, DeviceAddress(address): DeviceAddress, len: u32) {
        let bytes = address..address + u64::from(len);
        self.0.borrow_mut().extend(bytes);
    }
}

/// All memory that a device can access, by IOVA.
#[derive(Debug, Clone)]
pub(super) struct Space {
    pub(super) guest: Arc<GuestMemory>,
    pub(super) private: Arc<SharedBuffer>,
}

impl Space {
    fn new() -> Self {
        let guest = GuestMemory::from_ranges(&[(GuestAddress(0), RAM)]).unwrap();
        let size = layout().size() + UsedShadow::memory_size(SIZE);
        Self {
            guest: Arc::new(guest),
            private: Arc::new(SharedBuffer::new(size, WINDOW).unwrap()),
        }
    }

    pub(super) fn read(&self, iova: u64, data: &mut [u8]) {
        match iova.checked_sub(WINDOW) {
            Some(offset) => self.private.read(offset, data).unwrap(),
            None => self.guest.read_slice(data, GuestAddress(iova)).unwrap(),
        }
    }

    pub(super) fn write(&self, iova: u64, data: &[u8]) {
        match iova.checked_sub(WINDOW) {
            Some(offset) => self.private.write(offset, data).unwrap(),
            None => self.guest.write_slice(data, GuestAddress(iova)).unwrap(),
        }
    }

    pub(super) fn u16(&self, iova: u64) -> u16 {
        match iova.checked_sub(WINDOW) {
            Some(offset) => self.private.load_u16(offset, Ordering::SeqCst).unwrap(),
            None => self
                .guest
                .load(GuestAddress(iova), Ordering::SeqCst)
                .unwrap(),
        }
    }

    pub(super) fn set_u16(&self, iova: u64, value: u16) {
        match iova.checked_sub(WINDOW) {
            Some(offset) => self
                .private
                .store_u16(value, offset, Ordering::SeqCst)
                .unwrap(),
            None => self
                .guest
                .store(value, GuestAddress(iova), Ordering::SeqCst)
                .unwrap(),
        }
    }

    pub(super) fn descriptor(&self, at: u64, address: u64, len: u32, flags: u16, next: u16) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        self.write(at, &bytes);
    }
}

pub(super) fn layout() -> SplitLayout {
    SplitLayout::new(SIZE).unwrap()
}

/// The guest's driver: one chain per descriptor; indirect chains have two pieces.
#[derive(Debug)]
pub(super) struct Guest {
    space: Space,
    event_idx: bool,
    indirect: bool,
    free: Vec<u16>,
    /// Head → number of the chain.
    under_way: BTreeMap<u16, u32>,
    added: u32,
    pub(super) returned: Vec<u32>,
    avail: u16,
    used: u16,
    polling: bool,
    /// A flag in all descriptors of its buffers: 2 if the device writes.
    write: u16,
}

impl Guest {
    /// Lets the device read the guest's buffers from now on.
    pub(super) fn sends(&mut self) {
        self.write = 0;
    }

    /// Adds a chain of 64 bytes; `true`: the device must be kicked.
    fn add(&mut self) -> Option<bool> {
        let head = self.free.pop()?;
        let at = ADDRESSES.descriptor + 16 * u64::from(head);
        let buffer = buffer(head);
        if self.indirect && self.added.is_multiple_of(2) {
            let table = TABLES + 64 * u64::from(head);
            let write = self.write;
            self.space.descriptor(table, buffer, 4, write | 1, 1);
            self.space
                .descriptor(table + 16, buffer + 0x1000, 60, write, 0);
            self.space.descriptor(at.0, table, 32, 4, 0);
        } else {
            self.space.descriptor(at.0, buffer, 64, self.write, 0);
        }
        self.under_way.insert(head, self.added);
        self.added += 1;
        let slot = u64::from(self.avail % SIZE);
        self.space.set_u16(ADDRESSES.driver.0 + 4 + 2 * slot, head);
        let old = self.avail;
        self.avail = old.wrapping_add(1);
        self.space.set_u16(ADDRESSES.driver.0 + 2, self.avail);
        let wish = Suppression {
            flags: self.space.u16(ADDRESSES.device.0),
            event: self.space.u16(ADDRESSES.device.0 + 4 + 8 * u64::from(SIZE)),
        };
        Some(wish.wants(self.event_idx, old, self.avail))
    }

    /// Switches interrupts on or off as NAPI does; `true`: there is work already.
    fn set_interrupts(&mut self, enabled: bool) -> bool {
        self.polling = !enabled;
        if self.event_idx {
            let event = if enabled {
                self.used
            } else {
                self.used.wrapping_sub(1)
            };
            let at = ADDRESSES.driver + 4 + 2 * u64::from(SIZE);
            self.space.set_u16(at.0, event);
        } else {
            self.space.set_u16(ADDRESSES.driver.0, u16::from(!enabled));
        }
        enabled && self.space.u16(ADDRESSES.device.0 + 2) != self.used
    }

    /// Takes all used chains: each once, with the payload that the device wrote, and only memory
    /// that was reported before.
    fn take(&mut self, log: &Log, relayed: std::ops::Range<u16>) {
        while self.space.u16(ADDRESSES.device.0 + 2) != self.used {
            let at = ADDRESSES.device + 4 + 8 * u64::from(self.used % SIZE);
            let mut element = [0; 8];
            self.space.read(at.0, &mut element);
            let id = u32::from_le_bytes(element[..4].try_into().unwrap());
            let len = u32::from_le_bytes(element[4..].try_into().unwrap());
            let head = u16::try_from(id).unwrap();
            let number = self.under_way.remove(&head).expect("not under way");
            assert_eq!(len, if self.write == 0 { 0 } else { 64 });
            let mut payload = [0; 4];
            self.space.read(buffer(head), &mut payload);
            // The device's payload depends on the head; see `Device::complete`.
            assert_eq!(u32::from_le_bytes(payload), u32::from(head) ^ 0x5a5a_0000);
            self.space.write(buffer(head), &[0; 4]);
            let past = self.used.wrapping_sub(relayed.start);
            if self.write != 0 && past < relayed.end.wrapping_sub(relayed.start) {
                let log = log.0.borrow();
                assert!((0..4).all(|byte| log.contains(&(buffer(head) + byte))));
                let last = self.last_byte(head);
                assert!(
                    log.contains(&last),
                    "{last:#x} of chain {head} is not marked"
                );
            }
            self.used = self.used.wrapping_add(1);
            self.free.insert(0, head);
            self.returned.push(number);
        }
        if !self.polling {
            self.set_interrupts(true);
        }
    }

    fn last_byte(&self, head: u16) -> u64 {
        let mut flags = [0; 2];
        self.space.read(
            ADDRESSES.descriptor.0 + 16 * u64::from(head) + 12,
            &mut flags,
        );
        buffer(head) + if flags == [4, 0] { 0x1000 + 59 } else { 63 }
    }
}

fn index(base: &VringBase) -> u16 {
    match base {
        VringBase::Split { index } => *index,
        VringBase::Packed { .. } => panic!("{base}"),
    }
}

pub(super) fn buffer(head: u16) -> u64 {
    BUFFERS + BUFFER * u64::from(head)
}

/// A device that reads its ring when it is kicked and completes held chains in any order.
#[derive(Debug)]
pub(super) struct Device {
    space: Space,
    event_idx: bool,
    pub(super) ring: VringAddresses,
    avail: u16,
    pub(super) used: u16,
    /// Heads that it has taken.
    pub(super) held: Vec<u16>,
    kicked: bool,
}

impl Device {
    /// Takes chains until it holds `most`; sleeps when there are none.
    fn fetch(&mut self, most: usize) {
        if !self.kicked {
            return;
        }
        loop {
            if self.held.len() >= most {
                return;
            }
            if self.space.u16(self.ring.driver.0 + 2) == self.avail {
                let event = self.ring.device + 4 + 8 * u64::from(SIZE);
                if self.event_idx {
                    self.space.set_u16(event.0, self.avail);
                } else {
                    self.space.set_u16(self.ring.device.0, 0);
                }
                if self.space.u16(self.ring.driver.0 + 2) == self.avail {
                    self.kicked = false;
                    return;
                }
            }
            if !self.event_idx {
                self.space.set_u16(self.ring.device.0, 1);
            }
            let slot = u64::from(self.avail % SIZE);
            self.held
                .push(self.space.u16(self.ring.driver.0 + 4 + 2 * slot));
            self.avail = self.avail.wrapping_add(1);
        }
    }

    /// Writes a chain's buffers, given by either side's descriptors, and returns the chain; `true`:
    /// with an interrupt.
    pub(super) fn complete(&mut self, which: usize) -> bool {
        if self.held.is_empty() {
            return false;
        }
        let head = self.held.remove(which % self.held.len());
        let first = self.first_buffer(head);
        // The guest's number for the chain follows from its buffer. A sent frame is marked as well,
        // so that it comes back once.
        let owner = u32::try_from((first - BUFFERS) / BUFFER).unwrap();
        self.space
            .write(first, &(owner ^ 0x5a5a_0000).to_le_bytes());
        let old = self.used;
        self.put(u32::from(head), if self.receives(head) { 64 } else { 0 });
        self.publish(old.wrapping_add(1));
        let wish = Suppression {
            flags: self.space.u16(self.ring.driver.0),
            event: self.space.u16(self.ring.driver.0 + 4 + 2 * u64::from(SIZE)),
        };
        wish.wants(self.event_idx, old, self.used)
    }

    fn first_buffer(&self, head: u16) -> u64 {
        let bytes = self.first_descriptor(head);
        u64::from_le_bytes(bytes[..8].try_into().unwrap())
    }

    fn receives(&self, head: u16) -> bool {
        self.first_descriptor(head)[12] & 2 != 0
    }

    /// The first piece of a chain.
    fn first_descriptor(&self, head: u16) -> [u8; 16] {
        let mut bytes = [0; 16];
        self.space
            .read(self.ring.descriptor.0 + 16 * u64::from(head), &mut bytes);
        if bytes[12] & 4 != 0 {
            let table = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            self.space.read(table, &mut bytes);
        }
        bytes
    }

    /// Writes an element at the current position.
    pub(super) fn put(&self, id: u32, len: u32) {
        let mut element = [0; 8];
        element[..4].copy_from_slice(&id.to_le_bytes());
        element[4..].copy_from_slice(&len.to_le_bytes());
        let at = self.ring.device + 4 + 8 * u64::from(self.used % SIZE);
        self.space.write(at.0, &element);
    }

    pub(super) fn publish(&mut self, index: u16) {
        self.used = index;
        self.space.set_u16(self.ring.device.0 + 2, index);
    }

    /// Takes over a ring as vhost-vdpa parents do while suspended: a base other than the reported
    /// one makes them forget held chains.
    fn switch(&mut self, ring: VringAddresses, base: u16) {
        if base != self.avail {
            self.held.clear();
            self.avail = base;
            self.used = base;
        }
        self.ring = ring;
    }
}

/// Guest, device, and the relay between them.
#[derive(Debug)]
pub(super) struct RingSim {
    pub(super) space: Space,
    pub(super) guest: Guest,
    pub(super) device: Device,
    pub(super) relay: Option<Box<dyn Svq>>,
    pub(super) log: Log,
    event_idx: bool,
    interrupted: bool,
    /// The range of used indices whose elements a relay saw.
    relayed: std::ops::Range<u16>,
}

impl RingSim {
    /// Begins with a direct queue and both indices at `start`.
    pub(super) fn new(event_idx: bool, indirect: bool, start: u16) -> Self {
        let space = Space::new();
        for at in [ADDRESSES.driver + 2, ADDRESSES.device + 2] {
            space.set_u16(at.0, start);
        }
        if event_idx {
            space.set_u16(ADDRESSES.driver.0 + 4 + 2 * u64::from(SIZE), start);
            space.set_u16(ADDRESSES.device.0 + 4 + 8 * u64::from(SIZE), start);
        }
        Self {
            guest: Guest {
                space: space.clone(),
                event_idx,
                indirect,
                free: (0..SIZE).collect(),
                under_way: BTreeMap::new(),
                added: 0,
                returned: Vec::new(),
                avail: start,
                used: start,
                polling: false,
                write: 2,
            },
            device: Device {
                space: space.clone(),
                event_idx,
                ring: ADDRESSES,
                avail: start,
                used: start,
                held: Vec::new(),
                kicked: true,
            },
            relay: None,
            log: Log::default(),
            event_idx,
            interrupted: false,
            relayed: start..start,
            space,
        }
    }

    pub(super) fn ring(&self) -> GuestRing {
        GuestRing::new(Arc::clone(&self.space.guest), SIZE, ADDRESSES, true).unwrap()
    }

    pub(super) fn strategy(&self) -> Strategy {
        self.relay
            .as_ref()
            .map_or(Strategy::Direct, |relay| relay.strategy())
    }

    /// The steps of `SvqSet::change`, with the model as the device.
    pub(super) fn change(&mut self, target: Strategy) -> Result<(), Error> {
        let now = self.strategy();
        if now == target {
            return Ok(());
        }
        // One spurious signal each way, also after a failed change: the relay has drained by then.
        self.device.kicked = true;
        self.interrupted = true;
        let ring = self.ring();
        if now == Strategy::Direct {
            // Earlier relayed writes count as unchecked.
            self.log.0.borrow_mut().clear();
        }
        if let Some(relay) = &mut self.relay {
            relay.finish(&self.log)?;
        }
        let base = if now == Strategy::FullShadow || target == Strategy::FullShadow {
            match &mut self.relay {
                None => ring.used_index()?,
                Some(relay) => index(&relay.settle()?.base()),
            }
        } else {
            self.device.avail
        };
        let private = Arc::clone(&self.space.private);
        self.relay = match target {
            Strategy::Direct => None,
            Strategy::UsedShadow => {
                let offset = layout().size();
                let queue = UsedShadow::new(ring, private, offset, self.event_idx, false, base)?;
                Some(Box::new(queue))
            }
            Strategy::FullShadow => {
                let ring_position = VringBase::Split {
                    index: ring.used_index()?,
                };
                let base = VringBase::Split { index: base };
                let events = self.event_idx;
                let mut queue =
                    FullShadow::new(ring.into(), ring_position, private, SIZE, 0, events, base)?;
                queue.fill()?;
                Some(Box::new(queue))
            }
        };
        let shown = self.ring().used_index()?;
        if now == Strategy::Direct {
            self.relayed.start = shown;
        }
        self.relayed.end = shown;
        let addresses = self
            .relay
            .as_ref()
            .map_or(ADDRESSES, |relay| relay.addresses());
        self.device.switch(addresses, base);
        Ok(())
    }

    pub(super) fn add(&mut self) {
        // A shadowed device does not get the guest's kicks; the shadow polls.
        if self.guest.add() == Some(true) && self.strategy() != Strategy::FullShadow {
            self.device.kicked = true;
        }
    }

    /// As [`RingSim::add`]; whether the guest kicks for it.
    pub(super) fn add_kicks(&mut self) -> bool {
        self.guest.add() == Some(true)
    }

    pub(super) fn pass(&mut self) -> bool {
        let Some(relay) = &mut self.relay else {
            return false;
        };
        let pass = relay.pass(&self.log).unwrap();
        self.device.kicked |= pass.kick;
        self.interrupted |= pass.interrupt;
        pass.used > 0 || pass.forwarded > 0 || pass.more
    }

    /// Runs passes until there is no work; returns the signals enabled then.
    pub(super) fn come_to_rest(&mut self) -> Signals {
        while self.pass() {}
        let relay = self.relay.as_mut().expect("nothing is relayed");
        let pass = relay.pass(&self.log).unwrap();
        assert_eq!((pass.used, pass.forwarded, pass.more), (0, 0, false));
        pass.signals
    }

    pub(super) fn fetch(&mut self, most: usize) {
        self.device.fetch(most);
    }

    pub(super) fn complete(&mut self, which: usize) {
        let interrupt = self.device.complete(which);
        self.interrupted |= interrupt && self.relay.is_none();
    }

    /// The guest's interrupt handler, or its poll.
    pub(super) fn take(&mut self) {
        if !self.interrupted && !self.guest.polling {
            return;
        }
        self.interrupted = false;
        if self.relay.is_some() {
            self.relayed.end = self.space.u16(ADDRESSES.device.0 + 2);
        }
        self.guest.take(&self.log, self.relayed.clone());
        self.log.0.borrow_mut().clear();
    }

    pub(super) fn napi(&mut self, interrupts: bool) {
        self.interrupted |= self.guest.set_interrupts(interrupts);
    }

    /// Everything comes to rest by kicks, interrupts and passes alone; afterwards no chain may be
    /// left.
    pub(super) fn settle(&mut self) {
        self.napi(true);
        for _ in 0..200 {
            self.fetch(usize::from(SIZE));
            while !self.device.held.is_empty() {
                self.complete(0);
            }
            while self.pass() {}
            self.take();
        }
        assert!(
            self.guest.under_way.is_empty(),
            "{:?} stalled: chains {:?}, guest avail {} used {}, device avail {} used {} kicked {}",
            self.strategy(),
            self.guest.under_way,
            self.guest.avail,
            self.guest.used,
            self.device.avail,
            self.device.used,
            self.device.kicked,
        );
        let mut returned = self.guest.returned.clone();
        returned.sort_unstable();
        assert!(returned.into_iter().eq(0..self.guest.added));
    }
}

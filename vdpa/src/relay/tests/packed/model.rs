//! A device that accesses memory only as the other side of a packed ring. A simulation connects it
//! with a guest's driver through a shadow or directly.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::super::super::{FullShadow, Pass, Strategy, Svq};
use super::super::model::{Log, Space};
use crate::device::{VringAddresses, VringBase};
use crate::iova::DeviceAddress;
use crate::memory::SharedBuffer;
use crate::ring::packed::GuestRing;
use crate::ring::{self, Direction, DriverQueue, PackedLayout, Piece, RingFeatures, Used};
use crate::{Error, ErrorKind};

pub(super) const SIZE: u16 = 8;
const RAM: u64 = 1 << 20;
pub(super) const WINDOW: u64 = 1 << 40;
pub(super) const TABLES: u64 = 0x8000;
const BUFFERS: u64 = 0x2_0000;
const BUFFER: u64 = 0x2000;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;

/// The shapes of the guest's chains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shapes {
    /// One descriptor each; every second one is indirect, of two pieces.
    Single,
    /// One, two or three descriptors, or an indirect one.
    Mixed,
}

/// A chain of the guest.
#[derive(Debug)]
struct UnderWay {
    number: u32,
    slot: u16,
    pieces: Vec<Piece>,
}

#[derive(Debug)]
pub(super) struct Guest {
    pub(super) ring: DriverQueue,
    shapes: Shapes,
    free: VecDeque<u16>,
    /// By buffer id.
    under_way: BTreeMap<u16, UnderWay>,
    pub(super) added: u32,
    pub(super) returned: Vec<u32>,
    polling: bool,
}

impl Guest {
    /// Adds a chain of 64 writable bytes; `true`: the device must be kicked.
    fn add(&mut self) -> bool {
        let Some(&slot) = self.free.front() else {
            return false;
        };
        let at = DeviceAddress(BUFFERS + BUFFER * u64::from(slot));
        let piece = |offset, len| Piece {
            iova: at + offset,
            len,
            direction: Direction::DeviceWrites,
        };
        let pieces = match (self.shapes, self.added % 4) {
            (Shapes::Single, 0 | 2) | (Shapes::Mixed, 0) => vec![piece(0, 64)],
            (Shapes::Mixed, 2) => vec![piece(0, 4), piece(0x800, 28), piece(0x1000, 32)],
            _ => vec![piece(0, 4), piece(0x1000, 60)],
        };
        let indirect = self.shapes == Shapes::Single && pieces.len() > 1
            || self.shapes == Shapes::Mixed && self.added % 4 == 3;
        let added = if indirect {
            let table = TABLES + 64 * u64::from(slot);
            self.ring.add_indirect(&pieces, table)
        } else {
            self.ring.add(&pieces)
        };
        // A chain too long for the free entries waits.
        let Ok(id) = added else {
            return false;
        };
        self.free.pop_front();
        let number = self.added;
        self.added += 1;
        let chain = UnderWay {
            number,
            slot,
            pieces,
        };
        assert!(self.under_way.insert(id, chain).is_none());
        self.ring.needs_kick().unwrap()
    }
}

/// A chain that the device has.
#[derive(Debug, Clone)]
pub(super) struct Held {
    pub(super) id: u16,
    descriptors: u16,
    pieces: Vec<(u64, u32)>,
}

/// A device that reads its ring when it is kicked and completes held chains in any order.
#[derive(Debug)]
pub(super) struct Device {
    space: Space,
    event_idx: bool,
    ring: VringAddresses,
    size: u16,
    avail: (u16, bool),
    used: (u16, bool),
    pub(super) held: Vec<Held>,
    kicked: bool,
}

impl Device {
    fn step(&self, (index, wrap): (u16, bool)) -> (u16, bool) {
        if index + 1 == self.size {
            (0, !wrap)
        } else {
            (index + 1, wrap)
        }
    }

    fn entry(&self, index: u16) -> u64 {
        self.ring.descriptor.0 + 16 * u64::from(index)
    }

    fn is_available(&self) -> bool {
        let (index, wrap) = self.avail;
        let flags = self.space.u16(self.entry(index) + 14);
        (flags & AVAIL != 0) == wrap && (flags & USED != 0) != wrap
    }

    fn descriptor(&self, at: u64) -> (u64, u32, u16, u16) {
        let mut bytes = [0; 16];
        self.space.read(at, &mut bytes);
        (
            u64::from_le_bytes(bytes[..8].try_into().unwrap()),
            u32::from_le_bytes(bytes[8..12].try_into().unwrap()),
            u16::from_le_bytes(bytes[12..14].try_into().unwrap()),
            u16::from_le_bytes(bytes[14..].try_into().unwrap()),
        )
    }

    /// Takes chains until it holds `most`; sleeps when there are none.
    fn fetch(&mut self, most: usize) {
        while self.kicked && self.held.len() < most {
            if !self.is_available() {
                let (index, wrap) = self.avail;
                if self.event_idx {
                    let off_wrap = index | u16::from(wrap) << 15;
                    self.space.set_u16(self.ring.device.0, off_wrap);
                    self.space.set_u16(self.ring.device.0 + 2, 2);
                } else {
                    self.space.set_u16(self.ring.device.0 + 2, 0);
                }
                if !self.is_available() {
                    self.kicked = false;
                    return;
                }
            }
            self.space.set_u16(self.ring.device.0 + 2, 1);
            let (mut descriptors, mut pieces) = (0, Vec::new());
            loop {
                let (address, len, id, flags) = self.descriptor(self.entry(self.avail.0));
                self.avail = self.step(self.avail);
                descriptors += 1;
                if flags & INDIRECT != 0 {
                    for index in 0..u64::from(len / 16) {
                        let (address, len, _, flags) = self.descriptor(address + 16 * index);
                        assert_eq!(flags, WRITE);
                        pieces.push((address, len));
                    }
                } else {
                    assert_ne!(flags & WRITE, 0);
                    pieces.push((address, len));
                }
                if flags & NEXT == 0 {
                    self.held.push(Held {
                        id,
                        descriptors,
                        pieces,
                    });
                    break;
                }
            }
        }
    }

    /// Writes a chain's buffers and returns it; `true`: with an interrupt.
    fn complete(&mut self, which: usize) -> bool {
        if self.held.is_empty() {
            return false;
        }
        let chain = self.held.remove(which % self.held.len());
        let (first, _) = chain.pieces[0];
        let owner = u32::try_from((first - BUFFERS) / BUFFER).unwrap();
        self.space
            .write(first, &(owner ^ 0x5a5a_0000).to_le_bytes());
        let room: u32 = chain.pieces.iter().map(|(_, len)| len).sum();
        self.put(chain.id, room);
        let mut passed = false;
        let event = self.space.u16(self.ring.driver.0);
        for _ in 0..chain.descriptors {
            let (index, wrap) = self.used;
            passed |= event == index | u16::from(wrap) << 15;
            self.used = self.step(self.used);
        }
        match self.space.u16(self.ring.driver.0 + 2) {
            0 => true,
            2 => {
                assert!(self.event_idx);
                passed
            }
            _ => false,
        }
    }

    /// Writes a used descriptor at the current position, without moving on.
    pub(super) fn put(&self, id: u16, len: u32) {
        let (index, wrap) = self.used;
        let flags = WRITE | if wrap { AVAIL | USED } else { 0 };
        let at = self.entry(index);
        self.space.write(at + 8, &len.to_le_bytes());
        self.space.set_u16(at + 12, id);
        self.space.set_u16(at + 14, flags);
    }

    /// Moves past a used descriptor of one entry.
    pub(super) fn advance(&mut self) {
        self.used = self.step(self.used);
    }

    pub(super) fn base(&self) -> VringBase {
        VringBase::Packed {
            available: self.avail.0,
            available_wrap: self.avail.1,
            used: self.used.0,
            used_wrap: self.used.1,
        }
    }

    /// A base other than its own makes a suspended device forget held chains.
    fn switch(&mut self, (ring, size): (VringAddresses, u16), base: VringBase) {
        if base != self.base() {
            self.held.clear();
        }
        let VringBase::Packed {
            available,
            available_wrap,
            used,
            used_wrap,
        } = base
        else {
            panic!("{base}");
        };
        (self.avail, self.used) = ((available, available_wrap), (used, used_wrap));
        (self.ring, self.size) = (ring, size);
    }
}

/// Guest, device, and the relay between them.
#[derive(Debug)]
pub(super) struct RingSim {
    pub(super) space: Space,
    pub(super) guest: Guest,
    pub(super) device: Device,
    pub(super) shadow: Option<FullShadow>,
    pub(super) log: Log,
    event_idx: bool,
    /// Entries of the private ring.
    entries: u16,
    interrupted: bool,
    /// For each chain that the guest can see as used: whether a relay showed it.
    shown: VecDeque<bool>,
    /// Chains that a device held at a transition.
    pub(super) cut: usize,
}

impl RingSim {
    /// Begins with a direct ring at its start.
    pub(super) fn new(event_idx: bool, shapes: Shapes, entries: u16) -> Self {
        let buffer = Arc::new(SharedBuffer::new(RAM, 0).unwrap());
        let size = PackedLayout::new(entries).unwrap().size();
        let space = Space {
            guest: Arc::new(buffer.as_guest_memory().unwrap()),
            private: Arc::new(SharedBuffer::new(size, WINDOW).unwrap()),
        };
        let features = RingFeatures {
            packed: true,
            event_idx,
            in_order: false,
            indirect: true,
        };
        let ring = DriverQueue::new(buffer, SIZE, 0, features).unwrap();
        Self {
            device: Device {
                space: space.clone(),
                event_idx,
                ring: ring.addresses(),
                size: SIZE,
                avail: (0, true),
                used: (0, true),
                held: Vec::new(),
                kicked: true,
            },
            guest: Guest {
                ring,
                shapes,
                free: (0..SIZE).collect(),
                under_way: BTreeMap::new(),
                added: 0,
                returned: Vec::new(),
                polling: false,
            },
            shadow: None,
            log: Log::default(),
            event_idx,
            entries,
            interrupted: false,
            shown: VecDeque::new(),
            cut: 0,
            space,
        }
    }

    pub(super) fn ring(&self) -> ring::GuestRing {
        let memory = Arc::clone(&self.space.guest);
        let ring = GuestRing::new(memory, SIZE, self.guest.ring.addresses(), true);
        ring.unwrap().into()
    }

    pub(super) fn strategy(&self) -> Strategy {
        match self.shadow {
            None => Strategy::Direct,
            Some(_) => Strategy::FullShadow,
        }
    }

    /// The steps of `SvqSet::change` on a device that suspends.
    pub(super) fn change(&mut self, target: Strategy) -> Result<(), Error> {
        if self.strategy() == target {
            return Ok(());
        }
        self.spurious_notify();
        let held = self.device.base().packed_in_flight(self.device.size);
        let base = match &self.shadow {
            None if held > 0 => {
                let message = format!("{held} descriptors are in flight");
                return Err(Error::new(ErrorKind::InFlightUnknown, message));
            }
            None => self.device.base(),
            Some(_) => self.settled()?,
        };
        self.cut += self.device.held.len();
        self.resume(target, base, base)
    }

    /// The steps of a start after a reset: the device forgets everything.
    pub(super) fn restart(&mut self, target: Strategy) -> Result<(), Error> {
        self.spurious_notify();
        self.cut += self.device.held.len();
        self.device.held.clear();
        let used = match &self.shadow {
            None => self.ring().used_position()?,
            Some(_) => self.settled()?,
        };
        let base = match target {
            Strategy::FullShadow => VringBase::initial(true),
            _ => used,
        };
        self.resume(target, used, base)
    }

    /// One spurious signal each way.
    fn spurious_notify(&mut self) {
        self.device.kicked = true;
        self.interrupted = true;
    }

    fn settled(&mut self) -> Result<VringBase, Error> {
        let Some(shadow) = &mut self.shadow else {
            panic!("not shadowed");
        };
        let pass = shadow.finish(&self.log)?;
        self.shown
            .extend(std::iter::repeat_n(true, usize::from(pass.used)));
        let position = shadow.settle()?;
        assert_eq!(position.in_flight().len(), self.device_has());
        Ok(position.base())
    }

    /// The guest's chains that reached the shadow and are not back.
    fn device_has(&self) -> usize {
        let shown = self.shown.len();
        let taken = self.shadow.as_ref().map_or(0, FullShadow::in_flight);
        assert!(taken + shown <= self.guest.under_way.len());
        taken
    }

    fn resume(
        &mut self,
        target: Strategy,
        ring_position: VringBase,
        base: VringBase,
    ) -> Result<(), Error> {
        if target == Strategy::Direct {
            self.shadow = None;
            let ring = (self.guest.ring.addresses(), SIZE);
            self.device.switch(ring, base);
            return Ok(());
        }
        let private = Arc::clone(&self.space.private);
        let (ring, entries, events) = (self.ring(), self.entries, self.event_idx);
        let mut shadow = FullShadow::new(ring, ring_position, private, entries, 0, events, base)?;
        shadow.fill()?;
        self.device
            .switch((shadow.addresses(), shadow.size()), base);
        self.shadow = Some(shadow);
        Ok(())
    }

    pub(super) fn add(&mut self) {
        // A shadowed device does not get the guest's kicks; the shadow polls.
        if self.guest.add() && self.shadow.is_none() {
            self.device.kicked = true;
        }
    }

    pub(super) fn try_pass(&mut self) -> Result<Pass, Error> {
        let Some(shadow) = &mut self.shadow else {
            return Ok(Pass::default());
        };
        let pass = shadow.pass(&self.log)?;
        self.shown
            .extend(std::iter::repeat_n(true, usize::from(pass.used)));
        self.device.kicked |= pass.kick;
        self.interrupted |= pass.interrupt;
        Ok(pass)
    }

    pub(super) fn pass(&mut self) -> bool {
        let pass = self.try_pass().unwrap();
        pass.used > 0 || pass.forwarded > 0 || pass.more
    }

    pub(super) fn fetch(&mut self, most: usize) {
        self.device.fetch(most);
    }

    pub(super) fn complete(&mut self, which: usize) {
        if self.device.held.is_empty() {
            return;
        }
        let interrupt = self.device.complete(which);
        if self.shadow.is_none() {
            self.interrupted |= interrupt;
            self.shown.push_back(false);
        }
    }

    /// The guest's interrupt handler, or its poll: each chain once, with the payload that the
    /// device wrote, and only memory that was reported before.
    pub(super) fn take(&mut self) {
        if !self.interrupted && !self.guest.polling {
            return;
        }
        self.interrupted = false;
        while let Some(Used { head, written }) = self.guest.ring.pop_used().unwrap() {
            let chain = self.guest.under_way.remove(&head).expect("not under way");
            assert_eq!(written, 64);
            let at = chain.pieces[0].iova;
            let mut payload = [0; 4];
            self.space.read(at.0, &mut payload);
            let expected = u32::from(chain.slot) ^ 0x5a5a_0000;
            assert_eq!(u32::from_le_bytes(payload), expected);
            self.space.write(at.0, &[0; 4]);
            if self.shown.pop_front().expect("an entry that was shown") {
                let log = self.log.0.borrow();
                for piece in &chain.pieces {
                    let bytes = piece.iova.0..piece.iova.0 + u64::from(piece.len);
                    assert!(bytes.into_iter().all(|byte| log.contains(&byte)));
                }
            }
            self.guest.free.push_front(chain.slot);
            self.guest.returned.push(chain.number);
        }
        assert!(self.shown.is_empty(), "the guest does not see what is used");
        self.log.0.borrow_mut().clear();
        if !self.guest.polling {
            self.interrupted |= self.guest.ring.set_interrupts(true).unwrap();
        }
    }

    pub(super) fn napi(&mut self, interrupts: bool) {
        self.guest.polling = !interrupts;
        self.interrupted |= self.guest.ring.set_interrupts(interrupts).unwrap() && interrupts;
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
            "{:?} stalled: chains {:?}, device {}, kicked {}",
            self.strategy(),
            self.guest.under_way,
            self.device.base(),
            self.device.kicked,
        );
        let mut returned = self.guest.returned.clone();
        returned.sort_unstable();
        assert!(returned.into_iter().eq(0..self.guest.added));
    }
}

//! The bus with a function that only records: both access paths, invalid widths, BARs that move,
//! collide and swap.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata};

use super::*;
use crate::pci::{Bar, BarType, ConfigPorts, ConfigSpace, Ecam, Identity};
use crate::saved::through_a_file;

const WINDOW: u64 = 0x10_0000_0000;
const BAR_SIZE: u64 = 0x1_0000;

#[derive(Debug)]
struct Recorder {
    space: Mutex<ConfigSpace>,
    moves: Mutex<Vec<Option<u64>>>,
    writes: Mutex<Vec<(u64, usize)>>,
    /// Its slot, and where it records a reset.
    resets: OnceLock<(Slot, Arc<Mutex<Vec<Slot>>>)>,
}

impl Recorder {
    fn new() -> Arc<Self> {
        let mut space = ConfigSpace::new(Identity {
            vendor: 0x1234,
            device: 0x5678,
            revision: 0,
            class: [0xff, 0, 0],
            subsystem_vendor: 0,
            subsystem: 0,
        });
        space.add_bar(0, BAR_SIZE, BarType::WIDE).unwrap();
        Arc::new(Self {
            space: Mutex::new(space),
            moves: Mutex::default(),
            writes: Mutex::default(),
            resets: OnceLock::new(),
        })
    }

    fn moves(&self) -> Vec<Option<u64>> {
        std::mem::take(&mut self.moves.lock())
    }
}

impl PciFunction for Recorder {
    fn read_config(&self, offset: u16, data: &mut [u8]) {
        self.space.lock().read(offset, data);
    }
    fn write_config(&self, offset: u16, data: &[u8]) {
        self.space.lock().write(offset, data);
    }
    fn bars(&self) -> Vec<Bar> {
        self.space.lock().bars()
    }
    fn read_bar(&self, _bar: u8, _offset: u64, data: &mut [u8]) {
        data.fill(0x5a);
    }
    fn write_bar(&self, _bar: u8, offset: u64, data: &[u8]) {
        self.writes.lock().push((offset, data.len()));
    }
    fn bar_moved(&self, _bar: u8, address: Option<u64>) {
        self.moves.lock().push(address);
    }
    fn reset(&self) {
        if let Some((slot, resets)) = self.resets.get() {
            resets.lock().push(*slot);
        }
        self.space.lock().reset();
    }
}

fn bus() -> (Arc<Bus>, Arc<PciBus>) {
    let memory = Arc::new(Bus::new());
    let window = MmioWindow::new(WINDOW, 0x100_0000).unwrap();
    let pci = Arc::new(PciBus::new(&memory, window, None));
    (memory, pci)
}

fn move_to(pci: &PciBus, slot: Slot, address: u64) {
    let [a, b, c, d, e, f, g, h] = address.to_le_bytes();
    pci.write_config(slot, 0x10, &[a, b, c, d]);
    pci.write_config(slot, 0x14, &[e, f, g, h]);
}

fn answers(memory: &Bus, address: u64) -> bool {
    let mut data = [0];
    memory.read(address, &mut data);
    data == [0x5a]
}

/// All places of two BARs in and around a window of four. A BAR answers if it lies in the window
/// and no earlier one has the address.
#[test]
fn all_places_of_two_bars() {
    let memory = Arc::new(Bus::new());
    let window = MmioWindow::new(WINDOW, 4 * BAR_SIZE).unwrap();
    let pci = PciBus::new(&memory, window, None);
    let slots = [(); 2].map(|()| pci.add(None, Recorder::new()).unwrap());
    for slot in slots {
        pci.write_config(slot, 0x04, &[2, 0]);
    }
    let outside = [
        0,
        WINDOW - BAR_SIZE,
        WINDOW + 4 * BAR_SIZE,
        u64::MAX - (BAR_SIZE - 1),
    ];
    let inside = [0, 1, 2, 3].map(|place| WINDOW + place * BAR_SIZE);
    let places = [outside, inside].concat();
    for &first in &places {
        for &second in &places {
            // Nothing is in the way of the first one.
            move_to(&pci, slots[1], 0);
            move_to(&pci, slots[0], first);
            move_to(&pci, slots[1], second);
            for &place in &places {
                let expected = inside.contains(&place) && [first, second].contains(&place);
                for at in [place, place + (BAR_SIZE - 1)] {
                    assert_eq!(
                        answers(&memory, at),
                        expected,
                        "{first:#x} {second:#x} {at:#x}"
                    );
                }
            }
        }
    }
}

#[test]
fn the_host_bridge_continues_on_another_host() {
    let bus = || {
        let window = MmioWindow::new(WINDOW, 1 << 30).unwrap();
        PciBus::new(&Arc::new(Bus::new()), window, None)
    };
    let source = bus();
    source.write_config(Slot::HOST_BRIDGE, 0x04, &[0x06, 0x04]);
    source.write_config(Slot::HOST_BRIDGE, 0x3c, &[9]);
    let mut state = through_a_file(&source.save());
    let destination = bus();
    destination.restore(&state).unwrap();
    let mut command = [0; 2];
    destination.read_config(Slot::HOST_BRIDGE, 0x04, &mut command);
    assert_eq!(command, [0x06, 0x04]);
    state.host_bridge.bytes[0] ^= 1;
    let refused = destination.restore(&state).unwrap_err();
    assert!(refused.to_string().contains("read-only byte 0x0"));
    state.host_bridge.bytes.clear();
    let refused = destination.restore(&state).unwrap_err();
    assert!(refused.to_string().contains("has 0 bytes"));
}

#[test]
fn both_doors_show_the_same_registers() {
    let (_, pci) = bus();
    let slot = pci.add(None, Recorder::new()).unwrap();
    assert_eq!(
        (slot.number(), slot.to_string().as_str()),
        (1, "0000:00:01.0")
    );
    let ecam = Ecam::new(Arc::clone(&pci));
    let ports = ConfigPorts::new(Arc::clone(&pci));
    let read = |offset, width| {
        let mut data = vec![0; width];
        ecam.read(offset, &mut data);
        data
    };
    assert_eq!(read(1 << 15, 4), [0x34, 0x12, 0x78, 0x56]);
    assert_eq!(read((1 << 15) + 2, 2), [0x78, 0x56]);
    assert_eq!(read((1 << 15) + 3, 1), [0x56]);
    assert_eq!(read(10, 2), [0x00, 0x06]);
    // Other function, other slot, extended space, beyond the end, beyond the bus.
    assert_eq!(read((1 << 15) + (1 << 12), 4), [0xff; 4]);
    assert_eq!(read(2 << 15, 4), [0xff; 4]);
    assert_eq!(read((1 << 15) + 0x100, 4), [0; 4]);
    assert_eq!(read((1 << 15) + 0xffe, 4), [0xff; 4]);
    for beyond in [1 << 20, 1 << 32, u64::MAX] {
        assert_eq!(read(beyond, 4), [0xff; 4]);
        ecam.write(beyond, &[0; 4]);
    }

    let port_read = |offset, width| {
        let mut data = vec![0; width];
        ports.read(offset, &mut data);
        data
    };
    assert_eq!(port_read(4, 4), [0xff; 4]);
    ports.write(0, &0x8000_0800u32.to_le_bytes());
    assert_eq!(port_read(0, 4), 0x8000_0800u32.to_le_bytes());
    assert_eq!(port_read(4, 4), [0x34, 0x12, 0x78, 0x56]);
    assert_eq!(port_read(6, 2), [0x78, 0x56]);
    assert_eq!(port_read(7, 1), [0x56]);
    // Beyond the end of the data port; narrow accesses of the address port.
    assert_eq!(port_read(7, 2), [0xff; 2]);
    assert_eq!(port_read(u64::MAX, 4), [0xff; 4]);
    ports.write(3, &[1]);
    ports.write(0, &[0, 0]);
    assert_eq!(port_read(0, 4), 0x8000_0800u32.to_le_bytes());
    for other in [0x8001_0800u32, 0x8000_0900, 0x0000_0800] {
        ports.write(0, &other.to_le_bytes());
        assert_eq!(port_read(4, 4), [0xff; 4]);
    }
    ports.write(0, &u32::MAX.to_le_bytes());
    assert_eq!(port_read(0, 4), 0x80ff_fffcu32.to_le_bytes());
}

#[test]
fn a_bar_answers_where_it_is_programmed() {
    let (memory, pci) = bus();
    let function = Recorder::new();
    let slot = pci.add(None, function.clone()).unwrap();
    assert_eq!(function.bars()[0].address, WINDOW);
    assert!(!answers(&memory, WINDOW));

    pci.write_config(slot, 4, &[6, 0]);
    assert_eq!(function.moves(), [Some(WINDOW)]);
    assert!(answers(&memory, WINDOW));
    // An identical write moves nothing.
    pci.write_config(slot, 4, &[2, 0]);
    assert!(function.moves().is_empty());

    let there = WINDOW + 4 * BAR_SIZE;
    move_to(&pci, slot, there);
    assert_eq!(function.moves(), [None, Some(there)]);
    assert!(answers(&memory, there) && !answers(&memory, WINDOW));

    // Sizing with decoding on passes through addresses outside the window.
    pci.write_config(slot, 0x14, &[0xff; 4]);
    assert_eq!(function.moves(), [None]);
    move_to(&pci, slot, 0);
    move_to(&pci, slot, 0xfee0_0000);
    assert!(function.moves().is_empty() && !answers(&memory, 0xfee0_0000));
    move_to(&pci, slot, WINDOW);
    assert!(answers(&memory, WINDOW));

    pci.write_config(slot, 4, &[0, 0]);
    assert!(!answers(&memory, WINDOW));
}

#[test]
fn two_bars_collide_and_swap() {
    let (memory, pci) = bus();
    let (left, right) = (Recorder::new(), Recorder::new());
    let a = pci.add(None, left.clone()).unwrap();
    let b = pci.add(None, right.clone()).unwrap();
    let there = WINDOW + BAR_SIZE;
    for slot in [a, b] {
        pci.write_config(slot, 4, &[2]);
    }
    left.moves();
    right.moves();

    move_to(&pci, a, there);
    assert_eq!(left.moves(), [None]);
    assert!(right.moves().is_empty(), "the first comer keeps answering");
    memory.write(there, &[0; 4]);
    assert_eq!(*right.writes.lock(), [(0, 4)]);
    assert!(!answers(&memory, WINDOW));

    move_to(&pci, b, WINDOW);
    assert_eq!(left.moves(), [Some(there)]);
    assert_eq!(right.moves(), [None, Some(WINDOW)]);
    memory.write(there + 8, &[0; 2]);
    assert_eq!(*left.writes.lock(), [(8, 2)]);

    // A waiting BAR gets its address when the other one is removed.
    move_to(&pci, b, there);
    assert_eq!(right.moves(), [None]);
    pci.remove(a).unwrap();
    assert_eq!(left.moves(), [None]);
    assert_eq!(right.moves(), [Some(there)]);
}

/// Counts the warnings of a thread.
#[derive(Default)]
struct Warnings(Arc<AtomicUsize>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn a_guest_does_not_fill_the_log() {
    let warnings = Warnings::default();
    let count = Arc::clone(&warnings.0);
    tracing::subscriber::with_default(warnings, || {
        let (_memory, pci) = bus();
        let functions: [Slot; 5] = std::array::from_fn(|_| pci.add(None, Recorder::new()).unwrap());
        for slot in functions {
            pci.write_config(slot, 4, &[2]);
            move_to(&pci, slot, WINDOW);
        }
        for _ in 0..1000 {
            pci.write_config(functions[4], 4, &[0]);
            pci.write_config(functions[4], 4, &[2]);
        }
        // One for each of the four, and another one at another address.
        assert_eq!(count.load(Ordering::Relaxed), 4);
        let there = WINDOW + 8 * BAR_SIZE;
        move_to(&pci, functions[0], there);
        move_to(&pci, functions[2], there);
        assert_eq!(count.load(Ordering::Relaxed), 5);
    });
}

#[test]
fn slots_fill_empty_and_fill_again() {
    let (memory, pci) = bus();
    let slot = Slot::new(5).unwrap();
    pci.add(Some(slot), Recorder::new()).unwrap();
    for taken in [slot, Slot::HOST_BRIDGE] {
        let error = pci.add(Some(taken), Recorder::new()).unwrap_err();
        assert!(error.to_string().ends_with("is taken"), "{error}");
    }
    for _ in 0..30 {
        pci.add(None, Recorder::new()).unwrap();
    }
    assert_eq!(pci.functions().len(), 32);
    let full = pci.add(None, Recorder::new()).unwrap_err();
    assert!(full.to_string().starts_with("no free PCI slot"), "{full}");
    assert!(pci.remove(Slot::HOST_BRIDGE).is_none());

    pci.write_config(slot, 4, &[2]);
    assert!(answers(&memory, WINDOW));
    let gone = pci.remove(slot).unwrap();
    assert!(!answers(&memory, WINDOW));
    assert!(pci.remove(slot).is_none());
    assert_eq!(Arc::strong_count(&gone), 1);
    let mut data = [0; 4];
    pci.read_config(slot, 0, &mut data);
    assert_eq!(data, [0xff; 4]);
    assert_eq!(pci.add(None, Recorder::new()).unwrap(), slot);
}

#[test]
fn a_full_window_leaves_nothing_behind() {
    let memory = Arc::new(Bus::new());
    let window = MmioWindow::new(WINDOW, BAR_SIZE).unwrap();
    let pci = PciBus::new(&memory, window, None);
    let slot = pci.add(None, Recorder::new()).unwrap();
    let full = pci.add(None, Recorder::new()).unwrap_err();
    assert_eq!(full.to_string(), "cannot place a BAR");
    assert_eq!(pci.functions().len(), 2);
    pci.remove(slot);
    pci.add(None, Recorder::new()).unwrap();
}

#[test]
fn functions_are_reset_from_the_last_slot_to_the_first() {
    let (_memory, pci) = bus();
    let resets = Arc::new(Mutex::new(Vec::new()));
    for slot in [31, 3, 16].map(Slot::new) {
        let function = Recorder::new();
        let slot = pci.add(slot, function.clone()).unwrap();
        function.resets.set((slot, resets.clone())).unwrap();
    }
    pci.reset();
    assert_eq!(
        *resets.lock(),
        [31, 16, 3].map(|slot| Slot::new(slot).unwrap())
    );
}

#[test]
fn reset_restores_first_addresses() {
    let (memory, pci) = bus();
    let function = Recorder::new();
    let slot = pci.add(None, function.clone()).unwrap();
    pci.write_config(slot, 4, &[2]);
    move_to(&pci, slot, WINDOW + 2 * BAR_SIZE);
    pci.reset();
    assert!(!answers(&memory, WINDOW + 2 * BAR_SIZE));
    let bar = function.bars()[0];
    assert_eq!((bar.address, bar.decoded), (WINDOW, false));
    assert_eq!(function.moves().last(), Some(&None));

    // Restored without the bus.
    function.write_config(4, &[2]);
    pci.remap();
    assert!(answers(&memory, WINDOW));
    drop(pci);
    assert!(!answers(&memory, WINDOW));
    assert_eq!(Arc::strong_count(&function), 1);
}

#[test]
fn a_machine_that_goes_leaves_nothing() {
    let (memory, pci) = bus();
    let function = Recorder::new();
    let slot = pci.add(None, function.clone()).unwrap();
    pci.write_config(slot, 4, &[2]);
    let ecam = Arc::new(Ecam::new(Arc::clone(&pci)));
    memory.insert(0xe000_0000, 1 << 20, ecam).unwrap();
    drop(pci);
    assert!(answers(&memory, WINDOW));
    drop(memory);
    assert_eq!(function.moves(), [Some(WINDOW), None]);
    assert_eq!(Arc::strong_count(&function), 1);
}

#[test]
fn only_the_function_that_is_meant_is_removed() {
    let (_memory, bus) = bus();
    let (one, other) = (Recorder::new(), Recorder::new());
    let slot = bus.add(None, one.clone()).unwrap();
    let (one, other): (Arc<dyn PciFunction>, Arc<dyn PciFunction>) = (one, other);
    assert!(!bus.remove_function(slot, &other));
    assert!(bus.remove_function(slot, &one));
    assert!(!bus.remove_function(slot, &one));
    assert_eq!(bus.add(None, other.clone()).unwrap(), slot);
    assert!(!bus.remove_function(slot, &one));
    assert_eq!(bus.functions().len(), 2);
}

//! The registers as a guest may use them, and a model with which every order of writes and requests
//! is compared.

use proptest::prelude::*;

use super::*;
use crate::bus::Bus;
use crate::pci::{Bar, BarType, ConfigSpace, Identity, MmioWindow, PciFunction};
use crate::saved::through_a_file;
use crate::testing::FakeLevel;

/// A function with one BAR and no behaviour.
#[derive(Debug)]
struct Plain(Mutex<ConfigSpace>);

impl Plain {
    fn new() -> Arc<Self> {
        let mut space = ConfigSpace::new(Identity {
            vendor: 0x1234,
            device: 0x5678,
            revision: 0,
            class: [0xff, 0, 0],
            subsystem_vendor: 0,
            subsystem: 0,
        });
        space.add_bar(0, 0x1_0000, BarType::WIDE).unwrap();
        Arc::new(Self(Mutex::new(space)))
    }
}

impl PciFunction for Plain {
    fn read_config(&self, offset: u16, data: &mut [u8]) {
        self.0.lock().read(offset, data);
    }
    fn write_config(&self, offset: u16, data: &[u8]) {
        self.0.lock().write(offset, data);
    }
    fn bars(&self) -> Vec<Bar> {
        self.0.lock().bars()
    }
    fn read_bar(&self, _: u8, _: u64, data: &mut [u8]) {
        data.fill(0x5a);
    }
    fn write_bar(&self, _: u8, _: u64, _: &[u8]) {}
    fn bar_moved(&self, _: u8, _: Option<u64>) {}
    fn reset(&self) {
        self.0.lock().reset();
    }
}

struct Rig {
    memory: Arc<Bus>,
    bus: Arc<PciBus>,
    level: FakeLevel,
    hotplug: PciHotplug,
}

const WINDOW: u64 = 0x10_0000_0000;

impl Rig {
    fn new() -> Self {
        let memory = Arc::new(Bus::new());
        let window = MmioWindow::new(WINDOW, 1 << 30).unwrap();
        let bus = Arc::new(PciBus::new(&memory, window, None));
        let level = FakeLevel::default();
        let hotplug = PciHotplug::new(bus.clone(), Box::new(level.clone())).unwrap();
        Self {
            memory,
            bus,
            level,
            hotplug,
        }
    }

    fn register(&self, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.hotplug.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn set(&self, offset: u64, value: u32) {
        self.hotplug.write(offset, &value.to_le_bytes());
    }

    fn asserted(&self) -> bool {
        *self.level.0.lock()
    }

    /// Returns the used slots as bits, without the host bridge.
    fn occupied(&self) -> u32 {
        self.bus
            .functions()
            .iter()
            .map(|(slot, _)| bit(*slot))
            .sum::<u32>()
            & !1
    }
}

#[test]
fn reports_and_requests_continue_on_another_host() {
    let build = || {
        let rig = Rig::new();
        let slots: Vec<Slot> = (0..3)
            .map(|_| rig.bus.add(None, Plain::new()).unwrap())
            .collect();
        (rig, slots)
    };
    let (source, slots) = build();
    source.hotplug.announce(slots[0]);
    source.hotplug.request_removal(slots[1]);
    source.hotplug.request_removal(slots[2]);
    source.set(HOTPLUG_REMOVAL, bit(slots[2]));
    let state = through_a_file(&source.hotplug.save());

    let (destination, slots) = build();
    destination.hotplug.restore(&state).unwrap();
    assert!(destination.asserted());
    assert_eq!(destination.register(HOTPLUG_INSERTED), bit(slots[0]));
    assert_eq!(destination.register(HOTPLUG_REMOVAL), bit(slots[1]));
    // The first slot was not requested; the other two were.
    destination.set(HOTPLUG_EJECT, bit(slots[0]) | bit(slots[1]) | bit(slots[2]));
    let state = destination.hotplug.save();
    assert_eq!(state.ejected, bit(slots[1]) | bit(slots[2]));
    // Restore on a machine that never had them.
    let third = Rig::new();
    third.bus.add(None, Plain::new()).unwrap();
    third.hotplug.restore(&state).unwrap();
    assert_eq!(third.hotplug.take_ejected(), [slots[1], slots[2]]);
}

#[test]
fn impossible_registers_change_nothing() {
    let rig = Rig::new();
    let slot = bit(rig.bus.add(None, Plain::new()).unwrap());
    let good = rig.hotplug.save();
    for bad in [
        PciHotplugState {
            inserted: 1,
            ..good
        },
        PciHotplugState {
            ejected: u32::MAX,
            ..good
        },
        PciHotplugState {
            removal: slot,
            ..good
        },
        PciHotplugState {
            ejectable: 1 << 31,
            ..good
        },
        PciHotplugState {
            ejectable: slot,
            ejected: slot,
            ..good
        },
    ] {
        rig.hotplug.restore(&bad).unwrap_err();
        assert_eq!(rig.hotplug.save(), good);
        assert!(!rig.asserted());
    }
}

#[test]
fn is_inserted_and_ejected() {
    let rig = Rig::new();
    let slot = rig.bus.add(None, Plain::new()).unwrap();
    let ours = bit(slot);
    assert!(!rig.asserted());
    rig.hotplug.announce(slot);
    assert!(rig.asserted());
    assert_eq!(rig.register(HOTPLUG_INSERTED), ours);
    // A write of other slots' bits leaves it set.
    rig.set(HOTPLUG_INSERTED, !ours);
    assert!(rig.asserted());
    rig.set(HOTPLUG_INSERTED, ours);
    assert!(!rig.asserted());
    // The BAR is decoded for the driver.
    rig.bus.write_config(slot, 4, &2u16.to_le_bytes());
    let mut data = [0; 4];
    rig.memory.read(WINDOW, &mut data);
    assert_eq!(data, [0x5a; 4]);

    assert!(!rig.hotplug.is_asked(slot));
    rig.hotplug.request_removal(slot);
    assert!(rig.asserted());
    assert_eq!(rig.register(HOTPLUG_REMOVAL), ours);
    rig.set(HOTPLUG_REMOVAL, ours);
    assert!(!rig.asserted());
    assert!(rig.hotplug.eventfd().read().is_err());
    assert!(rig.hotplug.is_asked(slot));
    rig.set(HOTPLUG_EJECT, ours);
    assert!(!rig.hotplug.is_asked(slot));
    // At once, before the machine takes notice.
    assert_eq!(rig.occupied(), 0);
    rig.memory.read(WINDOW, &mut data);
    assert_eq!(data, [0xff; 4]);
    assert_eq!(rig.hotplug.take_ejected(), [slot]);
    assert_eq!(rig.hotplug.take_ejected(), []);
    // Address and slot are free for the next function.
    assert_eq!(rig.bus.add(None, Plain::new()).unwrap(), slot);
    rig.bus.write_config(slot, 4, &2u16.to_le_bytes());
    rig.memory.read(WINDOW, &mut data);
    assert_eq!(data, [0x5a; 4]);
}

#[test]
fn nothing_goes_that_was_not_asked_for() {
    let rig = Rig::new();
    for _ in 1..SLOTS {
        rig.bus.add(None, Plain::new()).unwrap();
    }
    let all = rig.occupied();
    assert_eq!(all, !1);
    rig.set(HOTPLUG_EJECT, u32::MAX);
    rig.hotplug.announce(Slot::new(3).unwrap());
    rig.set(HOTPLUG_EJECT, u32::MAX);
    assert_eq!(rig.occupied(), all);
    assert_eq!(rig.hotplug.take_ejected(), []);
    // Only the requested slot is ejected, even before the guest has noticed.
    let asked = Slot::new(31).unwrap();
    rig.hotplug.request_removal(asked);
    rig.set(HOTPLUG_EJECT, u32::MAX);
    assert_eq!(rig.occupied(), all & !bit(asked));
    // Only once: the old request does not eject a new function in the slot.
    assert_eq!(rig.bus.add(None, Plain::new()).unwrap(), asked);
    rig.set(HOTPLUG_EJECT, u32::MAX);
    assert_eq!(rig.occupied(), all);
    assert_eq!(rig.hotplug.take_ejected(), [asked]);
    // The host bridge cannot be ejected, even by a request.
    rig.hotplug.request_removal(Slot::HOST_BRIDGE);
    rig.set(HOTPLUG_EJECT, 1);
    assert_eq!(rig.bus.functions().len(), usize::from(SLOTS));
}

#[test]
fn a_reset_forgets_questions_but_not_answers() {
    let rig = Rig::new();
    let gone = rig.bus.add(None, Plain::new()).unwrap();
    let stays = rig.bus.add(None, Plain::new()).unwrap();
    rig.hotplug.announce(stays);
    rig.hotplug.request_removal(gone);
    rig.set(HOTPLUG_EJECT, bit(gone));
    rig.hotplug.request_removal(stays);
    rig.hotplug.reset();
    assert!(!rig.asserted());
    assert_eq!(
        (
            rig.register(HOTPLUG_INSERTED),
            rig.register(HOTPLUG_REMOVAL)
        ),
        (0, 0)
    );
    rig.set(HOTPLUG_EJECT, u32::MAX);
    assert_eq!(rig.occupied(), bit(stays));
    assert_eq!(rig.hotplug.take_ejected(), [gone]);
}

#[test]
fn a_late_ejection_spares_the_next_function_of_the_slot() {
    let rig = Rig::new();
    let [slow, other] = [(); 2].map(|()| rig.bus.add(None, Plain::new()).unwrap());
    rig.hotplug.request_removal(slow);
    rig.hotplug.request_removal(other);
    // The guest was too slow.
    rig.bus.remove(slow);
    rig.hotplug.forget(slow);
    assert_eq!(rig.register(HOTPLUG_REMOVAL), bit(other));
    assert_eq!(rig.bus.add(None, Plain::new()).unwrap(), slow);
    rig.set(HOTPLUG_EJECT, bit(slow));
    assert_eq!(rig.occupied(), bit(slow) | bit(other));
    rig.set(HOTPLUG_EJECT, bit(other));
    assert_eq!(rig.hotplug.take_ejected(), [other]);
}

#[test]
fn odd_accesses_are_harmless() {
    let rig = Rig::new();
    let slot = rig.bus.add(None, Plain::new()).unwrap();
    rig.hotplug.announce(slot);
    rig.hotplug.request_removal(slot);
    for offset in (0..16).chain([u64::MAX - 8, u64::MAX]) {
        for len in [0, 1, 2, 3, 5, 8, 16] {
            rig.hotplug.write(offset, &vec![0xff; len]);
            let mut data = vec![0; len];
            rig.hotplug.read(offset, &mut data);
            assert_eq!(data, vec![0xff; len]);
        }
        if offset % 4 != 0 || offset >= HOTPLUG_LEN {
            rig.set(offset, u32::MAX);
            assert_eq!(rig.register(offset), u32::MAX);
        }
    }
    assert_eq!(rig.occupied(), bit(slot));
    assert_eq!(rig.register(HOTPLUG_INSERTED), bit(slot));
    assert_eq!(rig.register(HOTPLUG_REMOVAL), bit(slot));
    assert_eq!(rig.register(HOTPLUG_EJECT), 0);
}

#[derive(Debug, Clone)]
enum Step {
    Plug,
    Ask(u8),
    Write(u64, u32),
    Take,
    Reset,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        Just(Step::Plug),
        (1u8..6).prop_map(Step::Ask),
        (prop::sample::select(vec![0u64, 4, 8, 2, 12]), any::<u32>())
            .prop_map(|(offset, value)| Step::Write(offset, value)),
        (0u32..64).prop_map(|value| Step::Write(HOTPLUG_EJECT, value)),
        Just(Step::Take),
        Just(Step::Reset),
    ];
    prop::collection::vec(step, 0..80)
}

proptest! {
    #[test]
    fn every_order_follows_the_model(steps in steps()) {
        let rig = Rig::new();
        let (mut on_bus, mut inserted, mut removal, mut asked, mut gone) =
            (0u32, 0u32, 0u32, 0u32, 0u32);
        for step in steps {
            match step {
                Step::Plug if on_bus.count_ones() < 5 => {
                    let slot = rig.bus.add(None, Plain::new()).unwrap();
                    rig.hotplug.announce(slot);
                    on_bus |= bit(slot);
                    inserted |= bit(slot);
                }
                Step::Plug => {}
                Step::Ask(number) => {
                    // The machine requests only slots that are occupied or were just ejected.
                    let slot = Slot::new(number).unwrap();
                    if gone & bit(slot) != 0 {
                        rig.hotplug.request_removal(slot);
                    } else if on_bus & bit(slot) != 0 {
                        rig.hotplug.request_removal(slot);
                        removal |= bit(slot);
                        asked |= bit(slot);
                    }
                }
                Step::Write(offset, value) => {
                    rig.set(offset, value);
                    match offset {
                        HOTPLUG_INSERTED => inserted &= !value,
                        HOTPLUG_REMOVAL => removal &= !value,
                        HOTPLUG_EJECT => {
                            let out = value & asked;
                            gone |= out;
                            for set in [&mut on_bus, &mut inserted, &mut removal, &mut asked] {
                                *set &= !out;
                            }
                        }
                        _ => {}
                    }
                }
                Step::Take => {
                    let taken: u32 = rig.hotplug.take_ejected().into_iter().map(bit).sum();
                    prop_assert_eq!(taken, std::mem::take(&mut gone));
                }
                Step::Reset => {
                    rig.hotplug.reset();
                    (inserted, removal, asked) = (0, 0, 0);
                }
            }
            prop_assert_eq!(rig.occupied(), on_bus);
            prop_assert_eq!(rig.register(HOTPLUG_INSERTED), inserted);
            prop_assert_eq!(rig.register(HOTPLUG_REMOVAL), removal);
            prop_assert_eq!(rig.asserted(), inserted | removal != 0);
        }
    }
}

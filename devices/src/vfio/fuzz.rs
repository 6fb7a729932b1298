//! A function against a hostile device and a hostile guest: for the fuzz target `vfio`, and for the
//! tests below, which need no fuzzer.
//!
//! The first byte selects whether the device can add vectors. Steps then change the device's bytes
//! and BARs and select a failure, until the first other step opens it. For any steps each call ends
//! without a panic. The model of the host panics at each write that is not in the allowlist. It
//! also panics if a page stays mapped while the memory is disabled.

use serde::{Deserialize, Serialize};

use super::host::Region;
use super::model::{Fault, Rig, config_u32, region, shown, virtio_config};
use super::*;

/// The failures of the host that a step chooses from.
const FAULTS: [Option<Fault>; 9] = [
    None,
    Some(Fault::Read),
    Some(Fault::Write),
    Some(Fault::Map(0)),
    Some(Fault::Map(1)),
    Some(Fault::SetError),
    Some(Fault::SetVectors),
    Some(Fault::DisableVectors),
    Some(Fault::Reset),
];
/// The failure with this number.
fn fault(number: u8) -> Option<Fault> {
    FAULTS[usize::from(number) % FAULTS.len()]
}

/// The largest access of a guest, in bytes, and the end of its configuration space.
const ACCESS: usize = 8;
const CONFIG_END: u16 = 4096;

/// A property of the device, or one action of the guest or the host.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum Step {
    /// A byte of the device's configuration space, by its offset.
    Byte(u8, u8),
    /// The size of a BAR, 2 to this power; none from 16 on.
    Region(u8, u8),
    /// Writes and reads configuration space.
    Config(u16, Vec<u8>),
    /// Writes and reads a BAR.
    Bar(u8, u64, Vec<u8>),
    /// Moves a BAR to a page.
    Moved(u8, Option<u32>),
    /// A fault of the guest at an address.
    Memory(Option<u64>),
    Reset,
    /// A failure of the host from now on.
    Fault(u8),
}

/// The function once it is open.
struct Opened {
    rig: Rig,
    device: Arc<VfioPciDevice>,
}

impl Opened {
    /// `None`: the function is refused.
    fn new(
        config: &[u8; CONFIG_SPACE_SIZE],
        regions: [Region; BARS],
        variant: u8,
        fault: Option<Fault>,
    ) -> Option<Self> {
        let mut rig = Rig::new(config, regions);
        rig.model.set_fault(fault);
        rig.description.resizable = variant & 1 == 1;
        let device = rig.open().ok()?;
        let ids = shown(&device);
        assert!(ids.iter().all(|(id, _)| [0x09, 0x10, 0x11].contains(id)));
        Some(Self { rig, device })
    }

    fn run(&self, step: Step) {
        let Self { rig, device } = self;
        match step {
            // The device is described already.
            Step::Byte(..) | Step::Region(..) => {}
            Step::Config(offset, mut data) => {
                data.truncate(ACCESS);
                let len = u16::try_from(data.len()).unwrap();
                let offset = offset % (CONFIG_END - len);
                device.write_config(offset, &data);
                device.read_config(offset, &mut data);
            }
            Step::Bar(bar, offset, mut data) => {
                data.truncate(ACCESS);
                let before = rig.model.state.lock().writes.len();
                device.write_bar(bar, offset, &data);
                let len = u64::try_from(data.len()).unwrap();
                let places = device.msix_places;
                let in_msix = [places.table, places.pending]
                    .iter()
                    .any(|part| part.touches(bar, offset, len));
                let forwarded = rig.model.state.lock().writes.len() - before;
                assert!(!in_msix || forwarded == 0);
                device.read_bar(bar, offset, &mut data);
            }
            // As the bus calls it: only while the guest enables the memory.
            Step::Moved(bar, page) => {
                let bar = bar % 6;
                let address = page.map(|page| u64::from(page) << 12);
                device.bar_moved(bar, None);
                if address.is_some() && config_u32(device, COMMAND) & 2 != 0 {
                    device.bar_moved(bar, address);
                }
            }
            Step::Memory(address) => {
                device.memory_fault(address);
            }
            Step::Reset => device.reset(),
            Step::Fault(number) => rig.model.set_fault(fault(number)),
        }
        let state = rig.model.state.lock();
        assert!(state.connected <= usize::from(device.msix_places.vectors));
        let shown = config_u32(device, COMMAND) & u32::from(COMMAND_MASK);
        // A page that is mapped after a failed write answers by a fault of the guest.
        let enabled = if state.stale {
            shown
        } else {
            state.command.into()
        };
        // No DMA before a reset has succeeded.
        let shown = if state.unreset { shown & !4 } else { shown };
        let enabled = if state.unreset { enabled & !4 } else { enabled };
        assert!(enabled & 2 != 0 || rig.mappings.all().is_empty());
        assert_eq!(enabled, shown);
    }

    /// Closes the function.
    fn close(self) {
        let Self { rig, device } = self;
        drop(device);
        assert!(rig.mappings.all().is_empty());
        assert_eq!(rig.model.connected(), 0);
        let state = rig.model.state.lock();
        assert!(state.command == 0 || state.stale);
    }
}

/// Passes any function to any guest; see the module.
pub fn vfio_anything(input: &[u8]) {
    let Some((&variant, rest)) = input.split_first() else {
        return;
    };
    let mut config = virtio_config();
    let mut regions = Rig::virtio().description.regions;
    let mut opened = None;
    let mut at_open = None;
    for step in crate::steps::steps(rest) {
        match (&opened, step) {
            (None, Step::Byte(offset, value)) => config[usize::from(offset)] = value,
            (None, Step::Region(bar, order)) => {
                regions[usize::from(bar) % BARS] = match order % 32 {
                    order @ 0..16 => region(1 << order),
                    _ => Region::default(),
                };
            }
            (None, Step::Fault(number)) => at_open = fault(number),
            (None, step) => {
                let Some(function) = Opened::new(&config, regions.clone(), variant, at_open) else {
                    return;
                };
                function.run(step);
                opened = Some(function);
            }
            (Some(function), step) => function.run(step),
        }
    }
    if let Some(function) = opened {
        function.close();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::steps::{encoded, generated};

    fn description() -> impl Strategy<Value = Step> + Clone {
        prop_oneof![
            3 => any::<(u8, u8)>().prop_map(|(offset, value)| Step::Byte(offset, value)),
            1 => (0..6u8, 0..32u8).prop_map(|(bar, order)| Step::Region(bar, order)),
            1 => any::<u8>().prop_map(Step::Fault),
        ]
    }

    fn action() -> impl Strategy<Value = Step> + Clone {
        let data = || prop::collection::vec(any::<u8>(), 0..=ACCESS);
        let offset = prop_oneof![0u64..0x40, 0x7f0u64..0x1010, any::<u64>()];
        prop_oneof![
            4 => (0..0x100u16, data()).prop_map(|(offset, data)| Step::Config(offset, data)),
            1 => (any::<u16>(), data()).prop_map(|(offset, data)| Step::Config(offset, data)),
            // The command register, and the control of MSI-X where the model has it.
            2 => (prop::sample::select(vec![4u16, 0x42]), 0..8u8, prop::bool::ANY)
                .prop_map(|(offset, low, high)| {
                    Step::Config(offset, vec![low, if high { 0x80 } else { 0 }])
                }),
            4 => (0..8u8, offset, data())
                .prop_map(|(bar, offset, data)| Step::Bar(bar, offset, data)),
            2 => (0..6u8, prop::option::of(0..1u32 << 18))
                .prop_map(|(bar, page)| Step::Moved(bar, page)),
            1 => any::<Option<u64>>().prop_map(Step::Memory),
            1 => Just(Step::Reset),
            1 => any::<u8>().prop_map(Step::Fault),
        ]
    }

    #[test]
    fn the_corpus_of_functions_keeps_the_allowlist() {
        let seeds = || generated(32, action());
        crate::corpus::replay("vfio", seeds, vfio_anything);
    }

    proptest! {
        #[test]
        fn any_device_and_any_guest(
            variant in any::<u8>(),
            described in prop::collection::vec(description(), 0..8),
            actions in prop::collection::vec(action(), 0..60),
        ) {
            let steps: Vec<Step> = described.into_iter().chain(actions).collect();
            vfio_anything(&encoded(variant, &steps));
        }

        /// Bytes of no known function.
        #[test]
        fn any_bytes_and_any_guest(
            bytes in prop::collection::vec(any::<u8>(), 256),
            actions in prop::collection::vec(action(), 0..20),
        ) {
            let bytes = (0..=u8::MAX).zip(bytes);
            let described = bytes.map(|(offset, value)| Step::Byte(offset, value));
            let steps: Vec<Step> = described.chain(actions).collect();
            vfio_anything(&encoded(0, &steps));
        }

        #[test]
        fn any_input(input in prop::collection::vec(any::<u8>(), 0..200)) {
            vfio_anything(&input);
        }
    }
}

//! The device against a model of the host: valid functions, any configuration space, any writes of
//! the guest, and failures of the host.

use std::io;
use std::os::fd::RawFd;

use proptest::prelude::*;

use super::host::Region;
use super::*;
use crate::bus::Bus;
use crate::hypervisor::DevicePages;
use crate::pci::{MmioWindow, PciBus, Slot};
use crate::testing::{FakeDoorbells, FakePage, FakeVectors};

const WIDE_WINDOW: u64 = 0x10_0000_0000;
const NARROW_WINDOW: u64 = 0xc000_0000;

/// A step that fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Read,
    SetVectors,
    DisableVectors,
    SetError,
    Reset,
    /// A reset while the host unbinds the device.
    Busy,
    /// The mapping with this number.
    Map(usize),
}

#[derive(Debug, Default)]
struct ModelState {
    config: Vec<u8>,
    command: u16,
    /// All writes: region, offset, data.
    writes: Vec<(u8, u64, Vec<u8>)>,
    connected: usize,
    request: Option<RawFd>,
    error: Option<RawFd>,
    resets: usize,
    maps: usize,
    fault: Option<Fault>,
}

/// A device of the host. It panics where the real one would be misused.
#[derive(Debug)]
struct Model {
    state: Mutex<ModelState>,
    regions: [Region; BARS],
    doorbells: Arc<FakeDoorbells>,
}

impl Model {
    fn fails(&self, fault: Fault) -> io::Result<()> {
        if self.state.lock().fault == Some(fault) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        Ok(())
    }

    fn set_fault(&self, fault: Option<Fault>) {
        self.state.lock().fault = fault;
    }

    fn resets(&self) -> usize {
        self.state.lock().resets
    }

    fn connected(&self) -> usize {
        self.state.lock().connected
    }

    fn command(&self) -> u16 {
        self.state.lock().command
    }
}

impl Host for Arc<Model> {
    fn read(&self, region: u8, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.fails(Fault::Read)?;
        let state = self.state.lock();
        if region == CONFIG {
            let start = usize::try_from(offset).unwrap();
            data.copy_from_slice(&state.config[start..start + data.len()]);
        } else {
            let end = offset + u64::try_from(data.len()).unwrap();
            assert!(end <= self.regions[usize::from(region)].size);
            data.fill(0x5a);
        }
        Ok(())
    }

    fn write(&self, region: u8, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut state = self.state.lock();
        state.writes.push((region, offset, data.to_vec()));
        if region == CONFIG {
            let command = u16::from_le_bytes(data.try_into().unwrap());
            assert_eq!((offset, command & !6), (4, 0), "not in the allowlist");
            let mapped = self.doorbells.all();
            assert!(command & 2 != 0 || mapped.is_empty(), "{mapped:?}");
            state.command = command;
        } else {
            let end = offset + u64::try_from(data.len()).unwrap();
            assert!(end <= self.regions[usize::from(region)].size);
        }
        Ok(())
    }

    fn map(&self, bar: u8, offset: u64, size: u64) -> io::Result<Arc<dyn DevicePages>> {
        let number = self.state.lock().maps;
        self.state.lock().maps += 1;
        self.fails(Fault::Map(number))?;
        assert!(offset + size <= self.regions[usize::from(bar)].size);
        Ok(Arc::new(FakePage(u16::from(bar) << 8)))
    }

    fn set_vectors(&self, first: u32, eventfds: &[RawFd]) -> io::Result<()> {
        self.fails(Fault::SetVectors)?;
        let mut state = self.state.lock();
        let first = usize::try_from(first).unwrap();
        // New ones follow the old ones, or there were none.
        assert_eq!(first, state.connected);
        state.connected = first + eventfds.len();
        Ok(())
    }

    fn disable_vectors(&self) -> io::Result<()> {
        self.state.lock().connected = 0;
        self.fails(Fault::DisableVectors)
    }

    fn set_request(&self, eventfd: RawFd) -> io::Result<()> {
        self.state.lock().request = Some(eventfd);
        Ok(())
    }

    fn set_error(&self, eventfd: RawFd) -> io::Result<()> {
        self.fails(Fault::SetError)?;
        self.state.lock().error = Some(eventfd);
        Ok(())
    }

    fn reset(&self) -> io::Result<()> {
        assert!(self.doorbells.all().is_empty());
        assert_eq!(self.state.lock().command, 0);
        self.state.lock().resets += 1;
        if self.fails(Fault::Busy).is_err() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.fails(Fault::Reset)
    }
}

struct Rig {
    model: Arc<Model>,
    vectors: Arc<FakeVectors>,
    doorbells: Arc<FakeDoorbells>,
    description: Description,
}

fn region(size: u64) -> Region {
    Region {
        size,
        areas: vec![(0, size)],
    }
}

impl Rig {
    fn new(config: &[u8; 256], regions: [Region; BARS]) -> Self {
        let doorbells = Arc::new(FakeDoorbells::default());
        let model = Arc::new(Model {
            state: Mutex::new(ModelState {
                config: config.to_vec(),
                ..ModelState::default()
            }),
            regions: regions.clone(),
            doorbells: Arc::clone(&doorbells),
        });
        Self {
            model,
            vectors: Arc::new(FakeVectors::new(2048)),
            doorbells,
            description: Description {
                driver: "vfio-pci".to_owned(),
                regions,
                vectors: 2048,
                resizable: true,
            },
        }
    }

    /// A virtual function with a 32-bit BAR for MSI-X in BAR 1 and a 64-bit BAR in BAR 4.
    fn virtio() -> Self {
        let mut regions: [Region; BARS] = Default::default();
        regions[1] = region(0x1000);
        regions[4] = region(0x4000);
        // An I/O BAR.
        regions[0] = region(0x20);
        Self::new(&virtio_config(), regions)
    }

    fn open(&self) -> Result<Arc<VfioPciDevice>, Error> {
        let host = Box::new(Arc::clone(&self.model));
        let function = HostFunction::new("vf", host, self.description.clone())?;
        VfioPciDevice::new(function, &*self.vectors, self.doorbells.clone()).map(Arc::new)
    }

    fn mapped(&self) -> Vec<u64> {
        let all = self.doorbells.all().into_iter();
        all.map(|reached| match reached {
            crate::testing::Reached::Page(address, _) => address,
            crate::testing::Reached::Eventfd(_) => panic!("a VFIO device has no kicks"),
        })
        .collect()
    }
}

fn virtio_config() -> [u8; 256] {
    let mut bytes = [0; 256];
    let mut put = |offset: usize, value: &[u8]| {
        bytes[offset..offset + value.len()].copy_from_slice(value);
    };
    put(0x00, &[0xf4, 0x1a, 0x41, 0x10, 0x00, 0x00, 0x10, 0x00]);
    put(0x08, &[1, 0, 0, 2]);
    put(0x10, &[1]);
    put(0x20, &[0x0c]);
    put(0x2c, &[0xf4, 0x1a, 0x00, 0x11]);
    put(0x34, &[0x40]);
    put(0x3c, &[11, 1]);
    // Power management, MSI, MSI-X of 3 vectors in BAR 1, PCI Express, common and window of virtio.
    put(0x40, &[0x01, 0x48, 0xff, 0xff, 8, 0]);
    put(0x48, &[0x05, 0x60, 0x80, 0]);
    put(0x60, &[0x11, 0x70, 2, 0, 1, 0, 0, 0, 1, 8, 0, 0]);
    put(
        0x70,
        &[0x10, 0xb0, 0x02, 0, 0xff, 0xff, 0xff, 0xef, 0xff, 0x7f],
    );
    put(
        0xb0,
        &[0x09, 0xc0, 16, 1, 4, 0, 0, 0, 0, 0, 0, 0, 0x38, 0, 0, 0],
    );
    put(0xc0, &[0x09, 0x40, 20, 5, 4, 9, 9, 9]);
    bytes
}

fn config_u32(device: &VfioPciDevice, offset: u16) -> u32 {
    let mut data = [0; 4];
    device.read_config(offset, &mut data);
    u32::from_le_bytes(data)
}

/// The IDs and offsets of the capabilities that the guest sees.
fn shown(device: &VfioPciDevice) -> Vec<(u8, u16)> {
    let mut chain = Vec::new();
    let mut next = config_u32(device, 0x34) & 0xff;
    while next != 0 {
        assert!(chain.len() < 48, "a cycle");
        let offset = u16::try_from(next).unwrap();
        let [id, link, ..] = config_u32(device, offset).to_le_bytes();
        chain.push((id, offset));
        next = link.into();
    }
    chain
}

#[test]
fn the_guest_sees_the_allowed_parts_only() {
    let rig = Rig::virtio();
    let device = rig.open().unwrap();
    assert_eq!(rig.model.resets(), 1);
    assert_eq!(config_u32(&device, 0), 0x1041_1af4);
    assert_eq!(config_u32(&device, 8), 0x0200_0001);
    assert_eq!(config_u32(&device, 0x2c), 0x1100_1af4);
    // No I/O BAR, no ROM, no pin.
    device.write_config(0x10, &[0xff; 4]);
    device.write_config(0x30, &[0xff; 4]);
    assert_eq!(
        (config_u32(&device, 0x10), config_u32(&device, 0x30)),
        (0, 0)
    );
    assert_eq!(config_u32(&device, 0x3c), 0);
    device.write_config(0x14, &[0xff; 4]);
    device.write_config(0x20, &[0xff; 8]);
    assert_eq!(config_u32(&device, 0x14), 0xffff_f000);
    assert_eq!(config_u32(&device, 0x20), 0xffff_c00c);
    assert_eq!(config_u32(&device, 0x24), 0xffff_ffff);

    let chain = shown(&device);
    let ids: Vec<u8> = chain.iter().map(|(id, _)| *id).collect();
    assert_eq!(ids, [0x11, 0x10, 0x09, 0x09]);
    let express = chain[1].1;
    // Version 2, an integrated endpoint; FLR; sizes without anything else.
    assert_eq!(config_u32(&device, express) >> 16, 0x92);
    assert_eq!(config_u32(&device, express + 4), 0x1000_8027);
    device.write_config(express + 8, &[0xff, 0x7f]);
    assert_eq!(config_u32(&device, express + 8), 0x70e0);
    // The window of virtio has its type, and leads nowhere.
    let window = chain[3].1;
    assert_eq!(config_u32(&device, window) >> 16, 0x0514);
    assert_eq!(config_u32(&device, window + 4), 0);
    device.write_config(window, &[0xff; 20]);
    assert_eq!(config_u32(&device, window + 4), 0);
    // All that reached the device so far.
    let writes = rig.model.state.lock().writes.clone();
    assert_eq!(writes, [(CONFIG, 4, vec![0, 0])]);
}

#[test]
fn pages_are_mapped_while_the_memory_is_enabled() {
    let rig = Rig::virtio();
    let device = rig.open().unwrap();
    let memory = Arc::new(Bus::new());
    let wide = MmioWindow::new(WIDE_WINDOW, 1 << 30).unwrap();
    let narrow = MmioWindow::new(NARROW_WINDOW, 1 << 29).unwrap();
    let pci = PciBus::new(&memory, wide, Some(narrow));
    let slot = pci.add(Slot::new(5), device.clone()).unwrap();
    assert_eq!(config_u32(&device, 0x14), 0xc000_0000);
    assert!(rig.mapped().is_empty());
    // The model checks the order at each write of the command register.
    pci.write_config(slot, 4, &[6, 4]);
    assert_eq!((rig.model.command(), rig.mapped()), (6, vec![WIDE_WINDOW]));
    // The BAR of MSI-X has no page of its own, so it is not mapped; the rest of it answers.
    let read = |address: u64| {
        let mut data = [0; 4];
        memory.read(address, &mut data);
        u32::from_le_bytes(data)
    };
    assert_eq!(read(NARROW_WINDOW + 0x900), 0x5a5a_5a5a);
    assert_eq!(read(NARROW_WINDOW + 0xc), 1);
    // Across the end of the table.
    assert_eq!(read(NARROW_WINDOW + 0x2e), u32::MAX);
    pci.write_config(slot, 0x20, &0x0100_0fffu32.to_le_bytes());
    assert_eq!(rig.mapped(), [WIDE_WINDOW + 0x0100_0000]);
    pci.write_config(slot, 4, &[0, 4]);
    assert_eq!((rig.model.command(), rig.mapped()), (0, vec![]));

    // A fault of the guest unmaps the page; the next change maps it again.
    pci.write_config(slot, 4, &[2, 0]);
    let place = rig.mapped()[0];
    assert!(!device.memory_fault(Some(place + 0x4000)));
    assert!(device.memory_fault(Some(place + 0xfff)));
    assert!(!device.memory_fault(None));
    assert!(rig.mapped().is_empty());
    assert_eq!(read(place), 0x5a5a_5a5a);
    rig.model.set_fault(Some(Fault::Read));
    assert_eq!(read(place), u32::MAX);
    rig.model.set_fault(None);

    // A reset by the guest, whose driver then restores the registers.
    let express = shown(&device)[1].1;
    pci.write_config(slot, 4, &[6, 0]);
    pci.write_config(slot, express + 8, &[0, 0x80]);
    assert_eq!((rig.model.resets(), rig.model.command()), (2, 0));
    assert_eq!(config_u32(&device, 4) & 0xffff, 0);
    assert_eq!(config_u32(&device, express + 8) & 0x8000, 0);
    pci.write_config(slot, 0x20, &WIDE_WINDOW.to_le_bytes());
    pci.write_config(slot, 4, &[6, 0]);
    assert_eq!(rig.mapped(), [WIDE_WINDOW]);
    pci.reset();
    assert_eq!((rig.model.resets(), rig.mapped()), (3, vec![]));
    pci.write_config(slot, 4, &[2, 0]);
    pci.remove(slot);
    assert!(rig.mapped().is_empty());
    drop(device);
    assert_eq!(rig.model.resets(), 4);
}

fn unmask(device: &VfioPciDevice, vector: u64) {
    let entry = vector * 16;
    device.write_bar(1, entry, &0xfee0_0000u64.to_le_bytes());
    device.write_bar(1, entry + 8, &0x4021u64.to_le_bytes());
}

#[test]
fn vectors_are_connected_as_the_guest_unmasks_them() {
    for resizable in [true, false] {
        let mut rig = Rig::virtio();
        rig.description.resizable = resizable;
        let device = rig.open().unwrap();
        let control = shown(&device)[0].1 + 2;
        unmask(&device, 0);
        assert_eq!(rig.model.connected(), 0);
        device.write_config(control, &[0, 0x80]);
        assert_eq!(rig.model.connected(), 1);
        rig.vectors.get(0).delivered();
        unmask(&device, 2);
        assert_eq!(rig.model.connected(), 3);
        // A trigger may have been lost only if the first vector was disconnected.
        assert_eq!(rig.vectors.get(0).delivered().is_some(), !resizable);
        // A masked vector stays connected.
        device.write_bar(1, 2 * 16 + 12, &1u32.to_le_bytes());
        assert_eq!(rig.model.connected(), 3);
        device.write_config(control, &[0, 0]);
        assert_eq!(rig.model.connected(), 0);

        // A failure is repeated with the next change.
        rig.model.set_fault(Some(Fault::SetVectors));
        device.write_config(control, &[0, 0x80]);
        assert_eq!(rig.model.connected(), 0);
        rig.model.set_fault(Some(Fault::DisableVectors));
        unmask(&device, 1);
        assert_eq!(rig.model.connected(), 2);
        device.reset();
        assert_eq!(rig.model.connected(), 0);
    }
}

/// Signals an eventfd of the device, as the kernel does.
fn signal(device: &VfioPciDevice, fd: RawFd) {
    let Signals { request, error } = &device.signals;
    let mut all = [request, error].into_iter();
    let eventfd = all.find(|eventfd| eventfd.as_raw_fd() == fd);
    eventfd.unwrap().write(1).unwrap();
    assert!(device.events().iter().any(|event| event.fd == fd));
}

#[test]
fn a_request_of_the_host_is_seen_once() {
    let rig = Rig::virtio();
    let device = rig.open().unwrap();
    assert!(!device.is_wanted_back());
    signal(&device, rig.model.state.lock().request.unwrap());
    assert!(!device.take_error());
    assert!(device.is_wanted_back());
    assert!(!device.is_wanted_back());
    assert_eq!(device.describe().requests, 1);
    // The host holds the device, which does no harm any more.
    device.write_config(4, &[6, 0]);
    rig.model.set_fault(Some(Fault::Busy));
    device.reset();
    assert_eq!(device.describe().failures, 0);
    assert_eq!(rig.model.command(), 0);
}

#[test]
fn an_error_of_the_device_is_shown_until_its_reset() {
    let rig = Rig::virtio();
    let device = rig.open().unwrap();
    signal(&device, rig.model.state.lock().error.unwrap());
    assert!(!device.is_wanted_back() && !device.has_failed());
    assert!(device.take_error());
    assert!(!device.take_error() && device.has_failed());
    // Also of a device that the guest has not touched; not if the reset fails.
    rig.model.set_fault(Some(Fault::Reset));
    device.reset();
    assert!(device.has_failed());
    rig.model.set_fault(None);
    device.reset();
    let shown = device.describe();
    assert!(!shown.failed);
    assert_eq!((shown.errors, shown.resets, shown.failures), (1, 2, 1));
    device.reset();
    assert_eq!(device.describe().resets, 2);

    // A function without such reports works.
    let rig = Rig::virtio();
    rig.model.set_fault(Some(Fault::SetError));
    let device = rig.open().unwrap();
    assert!(!device.take_error());
}

#[test]
fn the_description_counts_what_exits() {
    let rig = Rig::virtio();
    let device = rig.open().unwrap();
    device.write_config(4, &[2, 0]);
    device.bar_moved(4, Some(0x10_0000));
    device.write_config(shown(&device)[0].1 + 2, &[0, 0x80]);
    unmask(&device, 1);
    let mut data = [0; 4];
    device.read_bar(1, 0x900, &mut data);
    device.write_bar(1, 0x900, &data);
    // Not of the device: the table, and beyond the end.
    device.read_bar(1, 0, &mut data);
    device.read_bar(1, 0x1000, &mut data);
    let area = MappedArea {
        bar: 4,
        offset: 0,
        size: 0x1000,
        address: Some(0x10_0000),
    };
    let mut shown = device.describe();
    let areas = std::mem::take(&mut shown.areas);
    assert_eq!(areas, [area]);
    let expected = FunctionDescription {
        driver: "vfio-pci".to_owned(),
        vectors: 3,
        connected: 2,
        areas: Vec::new(),
        failed: false,
        trapped: [1, 1],
        failures: 0,
        faults: 0,
        resets: 0,
        requests: 0,
        errors: 0,
    };
    assert_eq!(shown, expected);
    assert!(device.memory_fault(Some(0x10_0000)));
    assert_eq!(device.describe().faults, 1);
}

#[test]
fn functions_that_cannot_be_used_are_refused() {
    let refusal = |rig: &Rig| rig.open().unwrap_err().to_string();
    let mut rig = Rig::virtio();
    rig.model.set_fault(Some(Fault::Reset));
    assert!(refusal(&rig).contains("cannot reset"));
    rig.model.set_fault(None);
    rig.description.vectors = 2;
    assert!(refusal(&rig).contains("3 MSI-X vectors, and the host gives 2"));
    let with = |offset: usize, value: u8| {
        let mut config = virtio_config();
        config[offset] = value;
        Rig::new(&config, Rig::virtio().description.regions)
    };
    assert!(refusal(&with(0x0e, 1)).contains("bridge"));
    assert!(refusal(&with(0x0b, 6)).contains("bridge"));
    assert!(refusal(&with(0x60, 0xaa)).contains("no MSI-X"));
    // In an I/O BAR, in a BAR that does not exist, beyond the end.
    for (offset, value) in [(0x64, 0), (0x64, 7), (0x64, 2), (0x69, 0x10), (0x63, 7)] {
        let text = refusal(&with(offset, value));
        assert!(text.contains("outside its memory"), "{text}");
    }
    let few = Rig {
        vectors: Arc::new(FakeVectors::new(2)),
        ..Rig::virtio()
    };
    assert!(refusal(&few).contains("interrupt vector"));
}

#[test]
fn a_part_that_cannot_be_mapped_answers_slowly() {
    let mut regions: [Region; BARS] = Default::default();
    regions[1] = region(0x1000);
    regions[4] = Region {
        size: 0x4000,
        areas: vec![(0, 0x1000), (0x2000, 0x1000), (0x3000, 0x1000)],
    };
    for k in 0..3 {
        let rig = Rig::new(&virtio_config(), regions.clone());
        rig.model.set_fault(Some(Fault::Map(k)));
        let device = rig.open().unwrap();
        rig.model.set_fault(None);
        device.write_config(4, &[2, 0]);
        device.bar_moved(4, Some(0x10_0000));
        let expected: Vec<u64> = [0x10_0000, 0x10_2000, 0x10_3000]
            .into_iter()
            .enumerate()
            .filter_map(|(number, place)| (number != k).then_some(place))
            .collect();
        assert_eq!(rig.mapped(), expected);
        // One that the hypervisor refuses.
        device.bar_moved(4, None);
        *rig.doorbells.refused.lock() = Some(expected[0]);
        device.bar_moved(4, Some(0x10_0000));
        assert_eq!(rig.mapped(), expected[1..]);
    }
}

fn any_regions() -> impl Strategy<Value = [Region; BARS]> {
    let one = (0u32..16, prop::bool::weighted(0.3)).prop_map(|(order, absent)| {
        if absent {
            Region::default()
        } else {
            region(1 << order)
        }
    });
    prop::array::uniform6(one)
}

/// The configuration space of a virtio function with some bytes replaced, or any bytes.
fn any_config() -> impl Strategy<Value = [u8; 256]> {
    let bytes = prop::collection::vec(any::<u8>(), 256);
    let bytes = bytes.prop_map(|bytes| <[u8; 256]>::try_from(bytes).unwrap());
    let changes = prop::collection::vec((0usize..256, any::<u8>()), 0..8);
    (any::<bool>(), bytes, changes).prop_map(|(random, bytes, changes)| {
        let mut config = if random { bytes } else { virtio_config() };
        for (offset, value) in changes {
            config[offset] = value;
        }
        config
    })
}

#[derive(Debug, Clone)]
enum Step {
    Config(u16, Vec<u8>),
    Bar(u8, u64, Vec<u8>),
    Moved(u8, Option<u64>),
    Memory(Option<u64>),
    Reset,
    Fault(Option<Fault>),
}

fn any_step() -> impl Strategy<Value = Step> {
    let data = || prop::sample::select(vec![1usize, 2, 4, 8, 3]);
    let data = move || data().prop_flat_map(|len| prop::collection::vec(any::<u8>(), len));
    let fault = prop::option::of(prop::sample::select(vec![
        Fault::Read,
        Fault::SetVectors,
        Fault::DisableVectors,
        Fault::Reset,
    ]));
    prop_oneof![
        4 => (0u16..0x100, data()).prop_map(|(offset, data)| Step::Config(offset, data)),
        1 => (any::<u16>(), data()).prop_map(|(offset, data)| Step::Config(offset % 4089, data)),
        4 => (0u8..8, prop_oneof![0u64..0x40, 0x7f0u64..0x1010, any::<u64>()], data())
            .prop_map(|(bar, offset, data)| Step::Bar(bar, offset, data)),
        2 => (0u8..6, prop::option::of(0u64..1 << 30))
            .prop_map(|(bar, page)| Step::Moved(bar, page.map(|page| page << 12))),
        1 => prop::option::of(any::<u64>()).prop_map(Step::Memory),
        1 => Just(Step::Reset),
        1 => fault.prop_map(Step::Fault),
    ]
}

proptest! {
    /// The model panics on each write that is not in the allowlist.
    #[test]
    fn any_device_and_any_guest(
        config in any_config(),
        regions in any_regions(),
        defaults in any::<bool>(),
        resizable in any::<bool>(),
        steps in prop::collection::vec(any_step(), 0..60),
    ) {
        let regions = if defaults { Rig::virtio().description.regions } else { regions };
        let mut rig = Rig::new(&config, regions);
        rig.description.resizable = resizable;
        let Ok(device) = rig.open() else { return Ok(()) };
        let chain = shown(&device);
        prop_assert!(chain.iter().all(|(id, _)| [0x09, 0x10, 0x11].contains(id)));
        let places = device.msix_places;
        for step in steps {
            match step {
                Step::Config(offset, data) => {
                    device.write_config(offset, &data);
                    let mut back = [0; 8];
                    device.read_config(offset, &mut back[..data.len()]);
                }
                Step::Bar(bar, offset, data) => {
                    let before = rig.model.state.lock().writes.len();
                    device.write_bar(bar, offset, &data);
                    let len = u64::try_from(data.len()).unwrap();
                    let in_msix = [places.table, places.pending]
                        .iter()
                        .any(|part| part.touches(bar, offset, len));
                    let forwarded = rig.model.state.lock().writes.len() - before;
                    prop_assert!(!in_msix || forwarded == 0);
                    let mut back = [0; 8];
                    device.read_bar(bar, offset, &mut back[..data.len()]);
                }
                // As the bus calls it: only while the guest enables the memory.
                Step::Moved(bar, address) => {
                    let enabled = config_u32(&device, 4) & 2 != 0;
                    device.bar_moved(bar, None);
                    if enabled && address.is_some() {
                        device.bar_moved(bar, address);
                    }
                }
                Step::Memory(address) => {
                    device.memory_fault(address);
                }
                Step::Reset => device.reset(),
                Step::Fault(fault) => rig.model.set_fault(fault),
            }
            let state = rig.model.state.lock();
            prop_assert!(state.connected <= usize::from(places.vectors));
            prop_assert!(state.command & 2 != 0 || rig.doorbells.all().is_empty());
            let shown = u16::try_from(config_u32(&device, 4) & 6).unwrap();
            prop_assert_eq!(state.command, shown);
        }
        drop(device);
        prop_assert!(rig.doorbells.all().is_empty());
        prop_assert_eq!((rig.model.command(), rig.model.connected()), (0, 0));
    }
}

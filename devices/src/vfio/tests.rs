//! The device in front of a model of the host: valid functions, requests and failures of the host.

use std::os::fd::RawFd;

use super::host::Region;
use super::model::{Fault, Rig, config_u32, region, shown, virtio_config};
use super::*;
use crate::bus::Bus;
use crate::pci::{MmioWindow, PciBus, Slot};
use crate::testing::FakeVectors;

const WIDE_WINDOW: u64 = 0x10_0000_0000;
const NARROW_WINDOW: u64 = 0xc000_0000;

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
    // Its BARs do not answer then, though the bus still decodes them.
    let writes = rig.model.state.lock().writes.len();
    for address in [NARROW_WINDOW + 0x900, NARROW_WINDOW + 0xc, WIDE_WINDOW] {
        memory.write(address, &[0; 4]);
        assert_eq!(read(address), u32::MAX);
    }
    assert_eq!(rig.model.state.lock().writes.len(), writes);
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
        device.write_config(4, &[2, 0]);
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

        // The vectors that work stay if the host has no more of them.
        device.write_config(4, &[2, 0]);
        rig.model.set_fault(Some(Fault::Vectors(1)));
        unmask(&device, 0);
        device.write_config(control, &[0, 0x80]);
        assert_eq!(device.describe().connected, 1);
        rig.vectors.get(0).delivered();
        unmask(&device, 1);
        assert_eq!((rig.model.connected(), device.describe().connected), (1, 1));
        assert!(rig.vectors.get(0).delivered().is_some(), "a lost trigger");
        // The same number is not tried again, so no trigger is invented.
        unmask(&device, 1);
        assert!(rig.vectors.get(0).delivered().is_none());
        rig.model.set_fault(None);
        unmask(&device, 2);
        assert_eq!(rig.model.connected(), 3);
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
    assert!(!device.take_error());
    let shown = device.describe();
    assert!(!shown.failed);
    assert_eq!((shown.errors, shown.resets, shown.failures), (2, 2, 1));
    device.reset();
    assert_eq!(device.describe().resets, 2);

    // A function without such reports works.
    let rig = Rig::virtio();
    rig.model.set_fault(Some(Fault::SetError));
    let device = rig.open().unwrap();
    assert!(!device.take_error());
}

#[test]
fn a_function_that_is_not_reset_gets_no_dma_and_is_reported() {
    let rig = Rig::virtio();
    let device = rig.open().unwrap();
    // Another task of the host has it for a moment.
    device.write_config(4, &[6, 0]);
    rig.model.set_fault(Some(Fault::Busier(2)));
    device.reset();
    assert_eq!((rig.model.resets(), device.describe().failures), (2, 0));
    assert!(!device.take_error() && !device.has_failed());
    for fault in [Fault::Busy, Fault::Reset] {
        device.write_config(4, &[6, 0]);
        assert_eq!(rig.model.command(), 6);
        rig.model.set_fault(Some(fault));
        device.reset();
        assert!(device.take_error() && device.has_failed(), "{fault:?}");
        rig.model.set_fault(None);
        // The guest boots again.
        device.write_config(4, &[6, 0]);
        assert_eq!((rig.model.command(), config_u32(&device, 4) & 6), (2, 6));
        // Another program would give it DMA.
        let error = device.ensure_savable().unwrap_err().to_string();
        assert!(error.contains("reset"), "{error}");
        device.save(1 << 20).unwrap_err();
        device.reset();
        assert!(!device.take_error() && !device.has_failed());
    }
    device.write_config(4, &[6, 0]);
    assert_eq!(rig.model.command(), 6);
}

#[test]
fn a_write_that_fails_is_counted_and_tried_again() {
    let rig = Rig::virtio();
    let device = rig.open().unwrap();
    rig.model.set_fault(Some(Fault::Write));
    device.write_config(4, &[6, 0]);
    device.write_bar(1, 0x900, &[1; 4]);
    assert_eq!((rig.model.command(), device.describe().failures), (0, 2));
    // The device is reset all the same.
    device.reset();
    assert_eq!((rig.model.resets(), device.describe().failures), (2, 3));
    rig.model.set_fault(None);
    device.write_config(4, &[6, 0]);
    assert_eq!((rig.model.command(), device.describe().failures), (6, 3));
    // Also at its end.
    rig.model.set_fault(Some(Fault::Write));
    drop(device);
    assert_eq!((rig.model.resets(), rig.model.command()), (3, 6));
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
        *rig.mappings.refused.lock() = Some(expected[0]);
        device.bar_moved(4, Some(0x10_0000));
        assert_eq!(rig.mapped(), expected[1..]);
    }
}

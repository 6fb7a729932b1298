//! The registers that a guest finds, and the writes that have no effect.

use std::sync::Arc;

use super::rig::{MAX_SIZES, Model, OFFER, PACKED, REFUSE, Rig, Shape, VERSION_1, WINDOW, reg};
use crate::Error;
use crate::testing::{FakeDeviceMappings, FakeVectors};
use crate::virtio::backend::{Activation, Backend, Event, Outcome, QueueChange, SavedState};
use crate::virtio::pci::VirtioPciDevice;
use vdpa::iova::DeviceAddress;

#[test]
fn a_guest_finds_everything() {
    let rig = Rig::cold();
    assert_eq!(rig.config_read(0, 4), 0x1041_1af4);
    assert_eq!(rig.config_read(8, 4), 0x0200_0001);
    assert_eq!(rig.config_read(0x3d, 1), 0, "no INTx");
    assert_eq!(rig.bar(), WINDOW);
    let mut types = Vec::new();
    for offset in rig.capabilities() {
        if rig.config_read(offset, 1) == 0x11 {
            assert_eq!(rig.config_read(offset + 2, 2), 4);
            assert_eq!(rig.config_read(offset + 4, 4), 0x8000);
            assert_eq!(rig.config_read(offset + 8, 4), 0xc000);
            continue;
        }
        assert_eq!(rig.config_read(offset + 4, 1), 0);
        let place = (
            rig.config_read(offset + 8, 4),
            rig.config_read(offset + 12, 4),
        );
        types.push((
            rig.config_read(offset + 3, 1),
            rig.config_read(offset + 2, 1),
            place,
        ));
        if types.last().unwrap().0 == 2 {
            assert_eq!(rig.config_read(offset + 16, 4), 4096);
        }
    }
    types.sort_unstable();
    let expected = [
        (1, 16, (0, 60)),
        (2, 20, (0x1_0000, 4 * 4096)),
        (3, 16, (0x1000, 1)),
        (4, 16, (0x2000, 10)),
        (5, 20, (0, 0)),
    ];
    assert_eq!(types, expected);
    // Sizing: 64 KiB and four pages make 128 KiB.
    rig.config_write(0x10, 4, 0xffff_ffff);
    assert_eq!(rig.config_read(0x10, 4), 0xfffe_0004);
}

#[test]
fn features_are_offered_and_taken_in_their_window() {
    let rig = Rig::new();
    let mut offer = 0;
    for select in 0..4 {
        rig.write(reg::DEVICE_FEATURE_SELECT, 4, select);
        let word = rig.read(reg::DEVICE_FEATURE, 4);
        if select < 2 {
            offer |= word << (32 * select);
        } else {
            assert_eq!(word, 0);
        }
    }
    assert_eq!(offer, OFFER, "NOTIFICATION_DATA is not offered");
    rig.set_features(VERSION_1);
    rig.write(reg::DRIVER_FEATURE_SELECT, 4, 1);
    assert_eq!(rig.read(reg::DRIVER_FEATURE, 4), 0, "not before DRIVER");

    for (features, agreed) in [
        (0, false),
        (PACKED, false),
        (VERSION_1 | 1 << 20, false),
        (VERSION_1 | 1 << 38, false),
        (VERSION_1 | REFUSE, false),
        (VERSION_1, true),
    ] {
        rig.agree(features);
        assert_eq!(rig.status() == 11, agreed, "{features:#x}");
    }
    rig.set_features(VERSION_1 | PACKED);
    rig.write(reg::DRIVER_FEATURE_SELECT, 4, 1);
    assert_eq!(rig.read(reg::DRIVER_FEATURE, 4), 1, "not after FEATURES_OK");
    // A refused negotiation can be corrected without a reset.
    rig.agree(VERSION_1 | REFUSE);
    assert_eq!(rig.status(), 3);
    rig.set_features(VERSION_1);
    rig.set_status(11);
    assert_eq!(rig.status(), 11);
}

#[test]
fn queue_registers_have_their_window() {
    let rig = Rig::new();
    let untouched = |rig: &Rig| {
        rig.write(reg::QUEUE_SELECT, 2, 0);
        rig.write(reg::QUEUE_SIZE, 2, 16);
        rig.write(reg::QUEUE_DESC, 4, 0x1000);
        rig.write(reg::QUEUE_ENABLE, 2, 1);
        let found = rig.read(reg::QUEUE_SIZE, 2) == 256
            && rig.read(reg::QUEUE_DESC, 4) == 0
            && rig.read(reg::QUEUE_ENABLE, 2) == 0;
        assert!(found, "status {:#x}", rig.status());
    };
    for status in [0, 1, 3] {
        rig.set_status(status);
        untouched(&rig);
    }
    rig.agree(VERSION_1);
    rig.set_status(11 | 128);
    untouched(&rig);
    rig.agree(VERSION_1);
    rig.set_status(15);
    untouched(&rig);
}

#[test]
fn queue_sizes_are_checked() {
    let rig = Rig::new();
    rig.agree(VERSION_1);
    let size_after = |index, size| {
        rig.write(reg::QUEUE_SELECT, 2, index);
        rig.write(reg::QUEUE_SIZE, 2, size);
        rig.read(reg::QUEUE_SIZE, 2)
    };
    for size in [0, 3, 255, 257, 512, 32768, 65535] {
        assert_eq!(size_after(0, size), 256, "{size}");
    }
    assert_eq!(size_after(0, 1), 1);
    assert_eq!(size_after(0, 256), 256);
    assert_eq!(size_after(3, 32768), 32768);
    assert_eq!(size_after(3, 65535), 32768);
    // A queue with maximum 0 does not exist.
    assert_eq!(size_after(2, 1), 0);
    rig.write(reg::QUEUE_ENABLE, 2, 1);
    assert_eq!(rig.read(reg::QUEUE_ENABLE, 2), 0);
    // A packed ring may have any size up to the maximum.
    rig.agree(VERSION_1 | PACKED);
    assert_eq!(size_after(0, 255), 255);
    assert_eq!(size_after(0, 257), 255);
}

/// CVE-2026-5747 of another VMM: the device's settings and the registers must not diverge.
#[test]
fn queue_size_after_activation_has_no_effect() {
    let rig = Rig::new();
    rig.agree(VERSION_1);
    rig.set_up_queue(0, 128, 1);
    for _ in 0..2 {
        rig.write(reg::QUEUE_SIZE, 2, 256);
        rig.write(reg::QUEUE_DESC, 4, 0x9000);
        rig.write(reg::QUEUE_ENABLE, 2, 0);
        assert_eq!(rig.read(reg::QUEUE_SIZE, 2), 128);
        assert_eq!(rig.read(reg::QUEUE_DESC, 4), 0x1000);
        assert_eq!(rig.read(reg::QUEUE_ENABLE, 2), 1);
        rig.set_status(15);
    }
    let seen = rig.seen.lock();
    let activation = seen.activation.as_ref().unwrap();
    assert_eq!(activation.queues.len(), 1);
    let addresses = activation.queues[0].addresses;
    assert_eq!(addresses.size, 128);
    assert_eq!(addresses.descriptor, DeviceAddress(0x2000_0000_1000));
    assert_eq!(addresses.driver, DeviceAddress(0x4000_0000_3000));
    assert_eq!(addresses.device, DeviceAddress(0x6000_0000_5000));
}

#[test]
fn a_selector_out_of_range_reads_zero_and_ignores_writes() {
    let rig = Rig::new();
    rig.agree(VERSION_1);
    for select in [4u64, 5, 0xffff] {
        rig.write(reg::QUEUE_SELECT, 2, select);
        assert_eq!(rig.read(reg::QUEUE_SELECT, 2), select);
        for offset in (0x18..0x40).step_by(2) {
            rig.write(offset, 2, 1);
            assert_eq!(rig.read(offset, 2), 0, "{offset:#x}");
        }
        for offset in (0x20..0x40).step_by(4) {
            rig.write(offset, 4, 1);
            assert_eq!(rig.read(offset, 4), 0, "{offset:#x}");
        }
    }
    for index in 0..4 {
        rig.write(reg::QUEUE_SELECT, 2, index);
        assert_eq!(rig.read(reg::QUEUE_NOTIFY_OFF, 2), index);
        assert_eq!(rig.read(reg::QUEUE_RESET, 2), 0);
        let max = MAX_SIZES[usize::try_from(index).unwrap()];
        assert_eq!(rig.read(reg::QUEUE_SIZE, 2), u64::from(max));
        assert_eq!(rig.read(reg::QUEUE_VECTOR, 2), 0xffff);
    }
    assert_eq!(rig.read(reg::NUM_QUEUES, 2), 4);
}

#[test]
fn vectors_that_do_not_exist_read_back_as_none() {
    let rig = Rig::new();
    for register in [reg::CONFIG_VECTOR, reg::QUEUE_VECTOR] {
        rig.write(register, 2, 4);
        assert_eq!(rig.read(register, 2), 4);
        for vector in [5, 0x7ff, 0xfffe, 0xffff] {
            rig.write(register, 2, 1);
            rig.write(register, 2, vector);
            assert_eq!(rig.read(register, 2), 0xffff);
        }
    }
}

#[test]
fn device_configuration_is_bounded() {
    let rig = Rig::new();
    assert_eq!(rig.read(0x2000, 8), u64::from_le_bytes(*b"01234567"));
    assert_eq!(rig.read(0x2008, 2), u64::from(u16::from_le_bytes(*b"89")));
    for (offset, width) in [
        (0x2007, 4),
        (0x2008, 4),
        (0x200a, 1),
        (0x7fff, 1),
        (0x1fff, 2),
    ] {
        assert_eq!(rig.read(offset, width), 0, "{offset:#x}");
        rig.write(offset, width, u64::MAX);
    }
    assert_eq!(rig.seen.lock().config, *b"0123456789");
    rig.write(0x2009, 1, u64::from(b'!'));
    assert_eq!(rig.seen.lock().config, *b"012345678!");
    // Widths that no processor uses, at all boundaries.
    for width in [0usize, 3, 5, 7, 9, 16, 4096] {
        let mut data = vec![0xaa; width];
        for offset in [
            0, 0x14, 0x3b, 0x1000, 0x2000, 0x2009, 0x8000, 0xc000, 0x1_0000,
        ] {
            rig.memory.read(rig.bar() + offset, &mut data);
            rig.memory.write(rig.bar() + offset, &data);
        }
    }
}

#[test]
fn the_pci_window_reaches_the_bar() {
    let rig = Rig::cold(); // works with decoding off
    let window = rig
        .capabilities()
        .into_iter()
        .find(|offset| rig.config_read(offset + 3, 1) == 5);
    let window = window.unwrap();
    let aim = |bar, offset, length| {
        rig.config_write(window + 4, 1, bar);
        rig.config_write(window + 8, 4, offset);
        rig.config_write(window + 12, 4, length);
    };
    aim(0, reg::NUM_QUEUES, 2);
    assert_eq!(rig.config_read(window + 16, 4), 4);
    aim(0, reg::STATUS, 1);
    rig.config_write(window + 16, 1, 1);
    assert_eq!(rig.config_read(window + 16, 1), 1);
    aim(0, 0x1_1000, 2);
    rig.config_write(window + 16, 2, 1);
    assert_eq!(rig.device.kicks[1].read().unwrap(), 1);
    // Invalid accesses: other BAR, length, alignment, or beyond the end.
    for (bar, offset, length) in [
        (1, 0x14, 1),
        (0, 0x14, 0),
        (0, 0x14, 3),
        (0, 0x14, 8),
        (0, 0x15, 2),
        (0, 0x2_0000, 4),
        (0, 0xffff_fffc, 4),
        (0, 0xffff_ffff, 1),
    ] {
        aim(bar, offset, length);
        rig.config_write(window + 16, 4, 0);
        rig.config_read(window + 16, 4);
    }
    aim(0, reg::STATUS, 1);
    assert_eq!(
        rig.config_read(window + 16, 1),
        1,
        "no write of 0 got through"
    );
}

#[derive(Debug)]
struct Odd {
    device_type: u32,
    sizes: Vec<u16>,
    features: u64,
    config_len: u32,
}

impl Backend for Odd {
    fn device_type(&self) -> u32 {
        self.device_type
    }
    fn queue_max_sizes(&self) -> &[u16] {
        &self.sizes
    }
    fn features(&self) -> u64 {
        self.features
    }
    fn config_len(&self) -> u32 {
        self.config_len
    }
    fn read_config(&mut self, _: u32, _: &mut [u8]) {}
    fn write_config(&mut self, _: u32, _: &[u8]) {}
    fn events(&mut self, _: &[Arc<vmm_sys_util::eventfd::EventFd>]) -> Vec<Event> {
        Vec::new()
    }
    fn negotiate(&mut self, _: u64) -> Result<(), Error> {
        Ok(())
    }
    fn activate(&mut self, _: Activation) -> Result<(), Error> {
        Ok(())
    }
    fn change(&mut self, _: QueueChange) -> Result<(), Error> {
        Ok(())
    }
    fn reset(&mut self) {}
    fn process(&mut self, _: u16) -> Outcome {
        Outcome::default()
    }
    fn save(&mut self) -> Result<SavedState, Error> {
        Err(Error::other("odd"))
    }
    fn check_state(&self, _: &SavedState) -> Result<(), Error> {
        Err(Error::other("odd"))
    }
    fn restore(&mut self, _: &SavedState, _: Activation) -> Result<(), Error> {
        Err(Error::other("odd"))
    }
}

#[test]
fn odd_devices_are_refused_with_a_reason() {
    let make = |device_type, sizes: &[u16], features, config_len, limit| {
        let odd = Odd {
            device_type,
            sizes: sizes.to_vec(),
            features,
            config_len,
        };
        let doorbells = Arc::new(FakeDeviceMappings::default());
        VirtioPciDevice::new(Box::new(odd), &FakeVectors::new(limit), doorbells)
    };
    for device_type in [0, 64, 0xffff_ffff] {
        let refused = make(device_type, &[1], VERSION_1, 0, 10).unwrap_err();
        assert!(refused.to_string().contains("has no PCI device ID"));
    }
    let refused = make(4, &[1; 1024], VERSION_1, 0, 2000).unwrap_err();
    assert!(refused.to_string().contains("max_vqp"));
    let refused = make(4, &[16, 17], VERSION_1, 0, 10).unwrap_err();
    let text = refused.to_string();
    assert!(
        text.starts_with("queue 1 has the maximum size 17"),
        "{text}"
    );
    let refused = make(4, &[16], VERSION_1, 0x6001, 10).unwrap_err();
    assert!(refused.to_string().contains("configuration of 24577 bytes"));
    let refused = make(4, &[16], 1, 0, 10).unwrap_err();
    assert!(refused.to_string().contains("does not offer VERSION_1"));
    let refused = make(4, &[16; 3], VERSION_1, 0, 3).unwrap_err();
    assert!(refused.to_string().contains("interrupt vector"));
    make(63, &[], VERSION_1, 0, 1).unwrap();
    make(1, &[32768; 300], VERSION_1, 0x6000, 301).unwrap();
    let (model, _) = Model::new(Shape::default());
    let doorbells = Arc::new(FakeDeviceMappings::default());
    VirtioPciDevice::new(Box::new(model), &FakeVectors::new(5), doorbells).unwrap();
}

//! Interrupts and doorbells against a real `/dev/kvm`. Fails with a message without KVM.

mod support;

use std::sync::Arc;
use std::time::Duration;

use devices::hypervisor::{DeviceMappings, MsiMessage, MsiVectors};
use support::asm::{self, CLI, HALT_FOR_EVER, IRET, STI, join};
use support::{MMIO, PORT, Rig};
use vdpa::memory::GuestMemory;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};
use vmm::kvm::device_mappings::KvmDeviceMappings;
use vmm::kvm::line::InterruptLine;
use vmm::kvm::memory_slots::SlotRange;
use vmm::kvm::msi::{KvmMsiVectors, MsiCounts};

/// Long enough for an interrupt that must not arrive.
const SILENCE: Duration = Duration::from_millis(50);

fn message(vector: u32) -> MsiMessage {
    MsiMessage {
        address: 0xfee0_0000,
        data: vector,
    }
}

/// A guest that halts, and prints `letter` for each interrupt `vector` it receives.
fn listener(vectors: &[(u16, u8)]) -> Rig {
    let rig = Rig::new(
        1,
        &join(&[
            CLI,
            &asm::x2apic(),
            &asm::out(PORT, b'!'),
            STI,
            HALT_FOR_EVER,
        ]),
    );
    for (place, &(vector, letter)) in (0x2000u16..).step_by(0x100).zip(vectors) {
        let handler = join(&[
            &asm::out(PORT, letter),
            &asm::wrmsr(0x80b, 0, 0), // end of interrupt
            IRET,
        ]);
        rig.load(place.into(), &handler);
        rig.load(u64::from(vector) * 4, &u32::from(place).to_le_bytes());
    }
    rig.vcpus.resume();
    assert_eq!(rig.port.take_bytes(1), b"!");
    rig
}

#[test]
fn msi_vectors_mask_unmask_and_reroute() {
    let rig = listener(&[(0x40, b'a'), (0x41, b'b')]);
    let vectors = KvmMsiVectors::new(rig.vm.fd().clone());
    let vector = vectors.allocate().unwrap();

    // Masked from the start: a trigger stays pending.
    vector.eventfd().write(1).unwrap();
    std::thread::sleep(SILENCE);
    assert!(vector.pending() && rig.port.is_empty());
    vector.unmask(message(0x40)).unwrap();
    assert_eq!(rig.port.take_bytes(1), b"a");
    assert!(!vector.pending());

    // Delivered once: the next mask and unmask do not repeat it.
    vector.mask().unwrap();
    assert!(!vector.pending());
    vector.unmask(message(0x40)).unwrap();
    std::thread::sleep(SILENCE);
    assert!(rig.port.is_empty());

    vector.eventfd().write(1).unwrap();
    assert_eq!(rig.port.take_bytes(1), b"a");
    // Re-routed without a mask.
    vector.unmask(message(0x41)).unwrap();
    vector.eventfd().write(1).unwrap();
    assert_eq!(rig.port.take_bytes(1), b"b");

    vector.mask().unwrap();
    vector.mask().unwrap();
    for _ in 0..3 {
        vector.eventfd().write(1).unwrap();
    }
    assert!(vector.pending());
    vector.unmask(message(0x40)).unwrap();
    assert_eq!(rig.port.take_bytes(1), b"a");
    std::thread::sleep(SILENCE);
    assert!(
        rig.port.is_empty(),
        "three pending triggers are one interrupt"
    );
}

#[test]
fn no_route_or_irqfd_leaks() {
    let rig = Rig::new(1, HALT_FOR_EVER);
    let vectors = KvmMsiVectors::new(rig.vm.fd().clone());
    for _ in 0..5 {
        let many: Vec<_> = (0..64).map(|_| vectors.allocate().unwrap()).collect();
        for (data, vector) in (0x30..).zip(&many) {
            vector.unmask(message(data)).unwrap();
            vector.unmask(message(data)).unwrap();
        }
        many[0].mask().unwrap();
        assert_eq!(
            vectors.counts(),
            MsiCounts {
                vectors: 64,
                routes: 64,
                irqfds: 63
            }
        );
        // A message that no APIC understands does not affect the others.
        let odd = MsiMessage {
            address: u64::MAX,
            data: u32::MAX,
        };
        let _ = many[1].unmask(odd);
        many[2].unmask(message(0x99)).unwrap();
        drop(many);
        assert_eq!(vectors.counts(), MsiCounts::default());
    }
}

#[test]
fn vectors_run_out_with_an_error() {
    let rig = Rig::new(1, HALT_FOR_EVER);
    let vectors = KvmMsiVectors::new(rig.vm.fd().clone());
    // Fewer than an ordinary descriptor limit allows, or an error either way.
    let all: Vec<_> = std::iter::from_fn(|| vectors.allocate().ok())
        .take(5000)
        .collect();
    assert!(all.len() < 5000);
    drop(all);
    vectors.allocate().unwrap();
}

#[test]
fn isa_lines_survive_a_new_routing_table() {
    // The PICs at vectors 8 and 0x70, only IRQ 4 unmasked; the local APIC
    // passes them through as it does after power-on.
    let mut pic = Vec::new();
    for (port, value) in [
        (0x20, 0x11),
        (0x21, 0x08),
        (0x21, 0x04),
        (0x21, 0x01),
        (0x21, 0xef),
    ] {
        pic.extend(asm::out(port, value));
    }
    let rig = Rig::new(
        1,
        &join(&[CLI, &pic, &asm::out(PORT, b'!'), STI, HALT_FOR_EVER]),
    );
    let handler = join(&[&asm::out(PORT, b'4'), &asm::out(0x20, 0x20), IRET]);
    rig.load(0x2000, &handler);
    rig.load(0x0c * 4, &0x2000u32.to_le_bytes());
    let trigger = vdpa::eventfd::new().unwrap();
    let line = InterruptLine::new(rig.vm.fd().clone(), &trigger, 4).unwrap();
    rig.vcpus.resume();
    assert_eq!(rig.port.take_bytes(1), b"!");

    trigger.write(1).unwrap();
    assert_eq!(rig.port.take_bytes(1), b"4");
    let vectors = KvmMsiVectors::new(rig.vm.fd().clone());
    let vector = vectors.allocate().unwrap();
    vector.unmask(message(0x40)).unwrap();
    trigger.write(1).unwrap();
    assert_eq!(rig.port.take_bytes(1), b"4");
    drop(vector);
    trigger.write(1).unwrap();
    assert_eq!(rig.port.take_bytes(1), b"4");

    drop(line);
    trigger.write(1).unwrap();
    std::thread::sleep(SILENCE);
    assert!(rig.port.is_empty());
    // Disconnected for good: the same pin can be connected again.
    let _again = InterruptLine::new(rig.vm.fd().clone(), &trigger, 4).unwrap();
    assert_eq!(rig.port.take_bytes(1), b"4");
}

#[test]
fn doorbells_take_any_width_and_are_detached() {
    let [low, high] = MMIO.to_le_bytes();
    let rig = Rig::new(
        1,
        &join(&[
            &[0xa2, low, high],       // mov [MMIO], al
            &[0xa3, low, high],       // mov [MMIO], ax
            &[0x66, 0xa3, low, high], // mov [MMIO], eax
            &asm::store(MMIO + 4, 1), // beside it: an exit
            &asm::out(PORT, b'.'),
            HALT_FOR_EVER,
        ]),
    );
    let doorbells = KvmDeviceMappings::new(rig.vm.fd().clone(), rig.slots.clone());
    let bell = vdpa::eventfd::new().unwrap();
    let other = vdpa::eventfd::new().unwrap();
    doorbells.attach(MMIO.into(), &bell).unwrap();
    assert_eq!(doorbells.count(), 1);
    let taken = doorbells.attach(MMIO.into(), &other).unwrap_err();
    assert_eq!(taken.kind(), std::io::ErrorKind::AlreadyExists);
    assert!(doorbells.detach(MMIO.into(), &other).is_err());
    assert!(doorbells.detach(0x1_0000, &bell).is_err());

    rig.vcpus.resume();
    rig.port.take(1);
    assert_eq!(bell.read().unwrap(), 3);
    assert_eq!(rig.mmio.take(1), [(4, vec![1, 0])]);

    rig.vcpus.pause();
    doorbells.detach(MMIO.into(), &bell).unwrap();
    assert_eq!(doorbells.count(), 0);
    rig.restart();
    rig.vcpus.resume();
    rig.port.take(1);
    assert!(bell.read().is_err());
    assert_eq!(rig.mmio.take(4).len(), 4);
    doorbells.attach(MMIO.into(), &other).unwrap();
    doorbells.detach(MMIO.into(), &other).unwrap();
}

#[test]
fn memory_slots_are_added_and_removed() {
    // mov al, [0x9000]; out PORT, al; hlt
    let code = [0xa0, 0x00, 0x90, 0xe6, PORT, 0xf4];
    let rig = Rig::new(1, &code);
    assert_eq!(rig.slots.count(), 1);
    let page = Arc::new(GuestMemory::from_ranges(&[(GuestAddress(0x9000), 0x1000)]).unwrap());
    page.write_obj(0x77u8, GuestAddress(0x9000)).unwrap();
    let host = page.get_host_address(GuestAddress(0x9000)).unwrap();
    let range = SlotRange {
        guest_address: 0x9000,
        len: 0x1000,
        host_address: host.addr() as u64,
        readonly: true,
    };
    for _ in 0..3 {
        // SAFETY: the range is the memory that `page` keeps mapped.
        let number = unsafe { rig.slots.add(range, page.clone()) }.unwrap();
        assert_eq!((number, rig.slots.count()), (1, 2));
        assert!(rig.slots.add_ram(&page).is_err(), "overlap");
        rig.vcpus.resume();
        assert_eq!(rig.port.take_bytes(1), [0x77]);
        rig.vcpus.pause();
        rig.slots.remove(1).unwrap();
        assert!(rig.slots.remove(1).is_err());
        rig.restart();
        rig.vcpus.resume();
        assert_eq!(rig.port.take_bytes(1), [0x5a], "the recorder answers again");
        rig.vcpus.pause();
        rig.restart();
    }
    assert_eq!(Arc::strong_count(&page), 1, "removal releases the memory");
    let nowhere = SlotRange {
        guest_address: 0x10_0000,
        len: 0,
        host_address: 0,
        readonly: true,
    };
    // SAFETY: an empty range is refused before it is used.
    assert!(unsafe { rig.slots.add(nowhere, Arc::new(())) }.is_err());
}

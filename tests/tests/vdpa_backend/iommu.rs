//! A device behind the guest's IOMMU: what it reaches, as its traffic and its mappings show.

use std::sync::Arc;
use std::time::{Duration, Instant};

use devices::virtio::backend::{Backend as _, Translated};
use devices::virtio::vdpa::VdpaOptions;
use lab::sim::{Mapping, SimDevice};
use vdpa::iotlb::Access;
use vdpa::iova::IovaRange;
use vdpa::memory::{AddressSpace, Change, Mode, Piece};
use vm_memory::{Bytes as _, GuestAddress};

use super::support::frames::{Loopback as _, exchange, packet};
use super::support::guest::{HIGH, REGION};
use super::support::machine::{Machine, options};
use super::support::nic::PATIENCE;
use super::support::{MAC, net};

const ACCESS_PLATFORM: u64 = 1 << 33;
/// Where the guest maps its memory.
const SHIFT: u64 = 0x10_0000_0000;
/// Bytes of one mapping.
const PIECE: u64 = 0x1_0000;

fn behind(device: &SimDevice) -> Machine {
    Machine::with(&VdpaOptions {
        iommu: true,
        ..options(device)
    })
}

fn translated(machine: &mut Machine) -> &mut dyn Translated {
    machine.backend.translated().unwrap()
}

fn space(mode: Mode) -> Arc<AddressSpace> {
    let space = AddressSpace::new(IovaRange::new(0, (1 << 46) - 1).unwrap());
    space.change(|space| space.set_mode(mode));
    Arc::new(space)
}

/// Mappings of all guest memory, in pieces, at other addresses than the guest-physical ones.
fn shifted() -> Vec<Change> {
    let map = |gpa: u64| Change::Map {
        range: IovaRange::from_size(gpa + SHIFT, PIECE).unwrap(),
        piece: Piece {
            gpa,
            access: Access::ReadWrite,
        },
    };
    let pieces = |base: u64| (base..base + REGION).step_by(0x1_0000);
    pieces(0).chain(pieces(HIGH)).map(map).collect()
}

fn change(machine: &mut Machine, domain: &AddressSpace, changes: &[Change]) {
    domain.change(|domain| {
        for change in changes {
            match *change {
                Change::Map { range, piece } => domain.map(range, piece).unwrap(),
                Change::Unmap { range } => drop(domain.unmap(range).unwrap()),
            }
        }
    });
    translated(machine).change(changes).unwrap();
}

/// Starts the device in a domain with the driver's own addresses of all rings and buffers.
fn start_shifted(machine: &mut Machine) -> Arc<AddressSpace> {
    let domain = space(Mode::Mapped);
    translated(machine).enter(&domain).unwrap();
    change(machine, &domain, &shifted());
    machine.shift(SHIFT);
    machine.start();
    exchange(&mut machine.nic, 50, &[MAC]);
    domain
}

#[test]
fn a_device_reaches_what_its_space_has() {
    for mapping in Mapping::ALL {
        let device = net(mapping);
        let mut machine = behind(&device);
        assert_eq!(machine.backend.mapped_bytes(), 0);
        assert_ne!(machine.features & ACCESS_PLATFORM, 0);
        let plain = machine.features & !ACCESS_PLATFORM;
        machine.backend.negotiate(plain).unwrap_err();

        // Bypass: as without an IOMMU.
        translated(&mut machine)
            .enter(&space(Mode::Identity))
            .unwrap();
        machine.start();
        exchange(&mut machine.nic, 50, &[MAC]);
        machine.backend.reset();

        let domain = start_shifted(&mut machine);
        // A command of the control queue: MAC_ADDR_SET.
        let mut command = vec![1, 1];
        command.extend(MAC);
        assert_eq!(machine.command(&command), 0);

        // A reset by the driver keeps the mappings.
        machine.backend.reset();
        machine.start();
        exchange(&mut machine.nic, 50, &[MAC]);
        machine.backend.reset();
        let range = IovaRange::new(0, (1 << 46) - 1).unwrap();
        change(&mut machine, &domain, &[Change::Unmap { range }]);
        let window = machine.backend.mapped_bytes();
        translated(&mut machine)
            .enter(&space(Mode::Identity))
            .unwrap();
        assert_eq!(machine.backend.mapped_bytes(), window + 2 * REGION);
        translated(&mut machine).leave().unwrap();
        assert_eq!(machine.backend.mapped_bytes(), window);
        machine.shift(0);
        translated(&mut machine)
            .enter(&space(Mode::Identity))
            .unwrap();
        machine.start();
        exchange(&mut machine.nic, 20, &[MAC]);
    }
}

#[test]
fn a_blocked_device_reaches_nothing_until_its_driver_starts_it() {
    for mapping in [Mapping::DEFAULT, Mapping::PINNED] {
        let device = net(mapping);
        let mut machine = behind(&device);
        translated(&mut machine)
            .enter(&space(Mode::Identity))
            .unwrap();
        machine.start();
        exchange(&mut machine.nic, 20, &[MAC]);
        let mapped = machine.backend.mapped_bytes();
        translated(&mut machine).block();
        assert_eq!(machine.backend.mapped_bytes() + 2 * REGION, mapped);
        let outcome = machine.turn(Duration::from_secs(1));
        assert!(outcome.needs_reset);
        machine.backend.reset();
        machine.start();
        assert_eq!(machine.backend.mapped_bytes(), mapped);
        exchange(&mut machine.nic, 20, &[MAC]);
    }
}

/// The frames that the device received and could not write.
fn unwritten(device: &SimDevice) -> u64 {
    device.vstats(0).unwrap()["rx errors"].as_u64().unwrap()
}

/// Sends a frame, and waits until the device has failed to write one.
#[track_caller]
fn fails_to_write(machine: &mut Machine, device: &SimDevice, mapping: Mapping) {
    let before = unwritten(device);
    machine.nic.send(&packet(0, 1514, MAC));
    let begin = Instant::now();
    while unwritten(device) == before {
        assert!(begin.elapsed() < PATIENCE, "{mapping:?}: it writes");
    }
}

#[test]
fn a_device_writes_nothing_after_an_unmap() {
    for mapping in Mapping::ALL {
        let device = net(mapping);
        let mut machine = behind(&device);
        let domain = start_shifted(&mut machine);

        // The device has all receive buffers, which are one mapping, and frames for some of them.
        for number in 0..4 {
            machine.nic.send(&packet(number, 1514, MAC));
        }
        let range = IovaRange::from_size(HIGH + SHIFT, PIECE).unwrap();
        change(&mut machine, &domain, &[Change::Unmap { range }]);
        // The simulator's only thread has finished earlier frames when a later one fails.
        fails_to_write(&mut machine, &device, mapping);
        let buffers = GuestAddress(HIGH);
        let pattern = vec![0x5a; usize::try_from(PIECE).unwrap()];
        machine.memory.write_slice(&pattern, buffers).unwrap();
        for _ in 0..3 {
            fails_to_write(&mut machine, &device, mapping);
        }
        let mut found = vec![0; pattern.len()];
        machine.memory.read_slice(&mut found, buffers).unwrap();
        assert!(found == pattern, "{mapping:?}");

        machine.backend.reset();
        let piece = Piece {
            gpa: HIGH,
            access: Access::ReadWrite,
        };
        change(&mut machine, &domain, &[Change::Map { range, piece }]);
        machine.start();
        exchange(&mut machine.nic, 50, &[MAC]);
    }
}

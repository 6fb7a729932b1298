//! Tests of the position of a ring, against a driver and a device that are counted without laps.

use std::collections::BTreeMap;
use std::ops::Range;

use super::super::ring_position::{ring_position, unfinished};
use super::*;

/// A position counted from the ring's beginning.
fn position(place: u32, size: u16) -> Position {
    let size = u32::from(size);
    Position {
        index: u16::try_from(place % size).unwrap(),
        wrap: (place / size).is_multiple_of(2),
    }
}

/// Flags of a ring in which `used` chains came back and `fill` are in flight.
fn flags(size: u16, used: u32, fill: u32) -> Vec<u16> {
    let mut flags = vec![0; usize::from(size)];
    for place in 0..used + fill {
        let at = position(place, size);
        flags[usize::from(at.index)] = if place < used {
            at.used_flags()
        } else {
            at.available_flags()
        };
    }
    flags
}

#[test]
fn every_fill_in_every_lap_is_reported() {
    for size in (1..=17).chain([64]) {
        for used in 0..=4 * u32::from(size) {
            for fill in 0..=u32::from(size) {
                let expected = (position(used + fill, size), position(used, size));
                let told = ring_position(&flags(size, used, fill)).unwrap();
                assert_eq!(told, expected, "size {size}, used {used}, fill {fill}");
            }
        }
    }
}

/// A device that ends after each of its writes of flags has used none of the entries.
#[test]
fn entries_of_a_device_that_ended_are_available_again() {
    for size in 1..=9u16 {
        let lap = u32::from(size);
        for used in 0..=2 * lap {
            for fill in 0..=lap {
                let mut honest = flags(size, used, fill);
                for flags in &mut honest {
                    *flags |= DESCRIPTOR_F_WRITE;
                }
                for together in 0..=fill {
                    // All but the first entry, from the last one on.
                    for first in 1..=together {
                        let mut read = honest.clone();
                        for place in used + first..used + together {
                            let at = position(place, size);
                            read[usize::from(at.index)] = at.used_flags() | DESCRIPTOR_F_WRITE;
                        }
                        read.insert(0, *read.last().unwrap());
                        let changed = unfinished(&read);
                        let expected = usize::try_from(together - first).unwrap();
                        assert_eq!(changed.len(), expected, "{size} {used} {fill} {read:x?}");
                        for (index, flags) in changed {
                            assert_eq!(flags, honest[usize::from(index)]);
                        }
                    }
                }
            }
        }
    }
}

/// Eight entries; six are available. The device ended while it used the first four
/// together, before it wrote the entry `first` of them. The buffers with the numbers `tables` are
/// indirect tables.
fn killed(round: u32, first: u32, tables: Range<u64>) -> (Pair, GuestRing, VringBase) {
    let mut pair = Pair::new(8, features(false, false));
    for _ in 0..round {
        pair.driver(|driver| driver.add(&[writes(0x3000, 4)]))
            .unwrap();
        let chain = pair.device(DeviceQueue::pop).unwrap().unwrap();
        pair.device(|device| device.push_used(chain.id, 4)).unwrap();
        pair.driver(DriverQueue::pop_used).unwrap().unwrap();
    }
    for number in 0..6 {
        let (chain, table) = ([buffer(number)], 0x400 + 16 * number);
        let is_table = tables.contains(&number);
        let add = |driver: &mut DriverQueue| {
            if is_table {
                driver.add_indirect(&chain, table)
            } else {
                driver.add(&chain)
            }
        };
        pair.driver(add).unwrap();
    }
    let ring = GuestRing::new(Arc::clone(&pair.ram), 8, pair.driver.addresses(), true).unwrap();
    let base = ring.ring_position().unwrap();
    let ids = ring.ids(base).unwrap();
    // As `push_used_together`.
    for number in (first..4).rev() {
        let at = position(round + number, 8);
        let id = ids[usize::try_from(number).unwrap()];
        let flags = at.used_flags() | DESCRIPTOR_F_WRITE;
        ring.write_result(at.index, 4, id, flags).unwrap();
    }
    ring.ring_position().unwrap_err();
    (pair, ring, base)
}

fn buffer(number: u64) -> Piece {
    writes(0x4000 + 0x100 * number, 4)
}

/// The next device gets the buffers again, of which the driver has seen none.
#[test]
fn a_ring_of_a_killed_device_shows_its_position() {
    for (round, first) in (0..8).flat_map(|round| [(round, 1), (round, 2), (round, 3)]) {
        let (mut pair, ring, base) = killed(round, first, 0..0);
        ring.restore_unfinished().unwrap();
        assert_eq!(ring.ring_position().unwrap(), base);
        let base = base.at_used();
        pair.device = DeviceQueue::new(ring, base, features(false, false)).unwrap();
        pair.copy(false);
        for number in 0..6 {
            assert!(pair.driver(DriverQueue::pop_used).unwrap().is_none());
            let chain = pair.device(DeviceQueue::pop).unwrap().unwrap();
            assert_eq!(chain.pieces, [buffer(number)]);
            pair.device(|device| device.push_used(chain.id, 4)).unwrap();
            assert!(pair.driver(DriverQueue::pop_used).unwrap().is_some());
        }
    }
}

/// A used entry does not show that its buffer was a table, which a device would overwrite.
#[test]
fn indirect_tables_of_a_killed_device_are_not_available_again() {
    for (round, first) in (0..8).flat_map(|round| [(round, 1), (round, 2), (round, 3)]) {
        for tables in [0..6, 0..1, 1..6, 5..6] {
            let (_, ring, _) = killed(round, first, tables);
            ring.restore_unfinished().unwrap();
            ring.ring_position().unwrap_err();
        }
    }
}

/// Each chain of two leaves an entry behind that looks available. The entries after it are used,
/// and the driver has seen them.
#[test]
fn entries_after_the_rest_of_a_chain_of_two_stay_used() {
    // The lengths of ten chains.
    for (size, lengths) in (2..=5).flat_map(|size| (0..1024).map(move |lengths| (size, lengths))) {
        let mut pair = Pair::new(size, features(false, false));
        let addresses = pair.driver.addresses();
        let ring = GuestRing::new(Arc::clone(&pair.ram), size, addresses, true).unwrap();
        let read = |ram: &GuestMemory| {
            let mut bytes = vec![0; 16 * usize::from(size)];
            let entries = GuestAddress(addresses.descriptor.0);
            ram.read_slice(&mut bytes, entries).unwrap();
            bytes
        };
        for chain in 0..10 {
            let pieces = [reads(0x1000, 1); 2];
            let pieces = &pieces[lengths >> chain & 1..];
            pair.driver(|driver| driver.add(pieces)).unwrap();
            let id = pair.device(DeviceQueue::pop).unwrap().unwrap().id;
            pair.device(|device| device.push_used(id, 0)).unwrap();
            pair.driver(DriverQueue::pop_used).unwrap().unwrap();
            let before = read(&pair.ram);
            ring.restore_unfinished().unwrap();
            assert_eq!(read(&pair.ram), before);
        }
    }
}

/// All possible flags: the position is found for those of an honest ring, and for no others.
#[test]
fn nothing_else_is_taken_for_a_place() {
    for size in 1..=7u16 {
        let mut honest = BTreeMap::new();
        for used in 0..2 * u32::from(size) {
            for fill in 0..=u32::from(size) {
                let places = (position(used + fill, size), position(used, size));
                let before = honest.insert(flags(size, used, fill), places);
                assert!(before.is_none(), "two places look the same");
            }
        }
        // In the second lap the wrap counters are those of the zeroth.
        for number in 0..1u32 << (2 * size) {
            let flags: Vec<u16> = (0..size)
                .map(|slot| match number >> (2 * slot) & 3 {
                    0 => 0,
                    1 => DESCRIPTOR_F_AVAIL,
                    2 => DESCRIPTOR_F_USED,
                    _ => DESCRIPTOR_F_AVAIL | DESCRIPTOR_F_USED,
                })
                .collect();
            match (ring_position(&flags), honest.get(&flags)) {
                (Ok(told), Some(places)) => assert_eq!(told, *places),
                (Err(error), None) => {
                    assert!(error.to_string().contains("match no position"), "{error}");
                }
                (told, honest) => panic!("{flags:x?}: {told:?}, not {honest:?}"),
            }
        }
    }
}

/// A driver adds while the ring is read from front to back. A found position has the right used
/// position and one of the available positions of that time.
#[test]
fn a_driver_that_continues_does_not_deceive() {
    for size in 1..=6u16 {
        for used in 0..2 * u32::from(size) {
            for fill in 0..=u32::from(size) {
                // The driver's progress when each entry is read.
                let most = u32::from(size) - fill;
                let moments = usize::try_from(most + 1).unwrap();
                for number in 0..moments.pow(u32::from(size)) {
                    let mut rest = number;
                    let mut added = 0;
                    let mut read = Vec::new();
                    for slot in 0..usize::from(size) {
                        added = added.max(u32::try_from(rest % moments).unwrap());
                        rest /= moments;
                        read.push(flags(size, used, fill + added)[slot]);
                    }
                    let Ok((available, found)) = ring_position(&read) else {
                        continue;
                    };
                    assert_eq!(found, position(used, size));
                    let mut between = (0..=added).map(|more| position(used + fill + more, size));
                    assert!(between.any(|one| one == available), "{read:x?}");
                }
            }
        }
    }
}

#[test]
fn chains_of_several_descriptors_are_refused() {
    for index in 0..8 {
        let mut flags = flags(8, 11, 5);
        flags[index] |= DESCRIPTOR_F_NEXT;
        let error = ring_position(&flags).unwrap_err().to_string();
        let says = format!("entry {index} belongs to a chain");
        assert!(error.starts_with(&says), "{error}");
    }
}

/// The one case in which several descriptors leave a valid pattern behind.
#[test]
fn the_rest_of_a_chain_of_two_is_not_offered_as_writable() {
    for round in 0..8 {
        for (pieces, refused) in [
            (vec![reads(0x1000, 1), reads(0x2000, 1)], false),
            (vec![reads(0x1000, 1), writes(0x2000, 1)], true),
            (vec![writes(0x1000, 1), writes(0x2000, 1)], true),
        ] {
            let mut pair = Pair::new(8, features(false, false));
            let mut give_back = |pieces: &[Piece]| {
                pair.driver(|driver| driver.add(pieces)).unwrap();
                let chain = pair.device(DeviceQueue::pop).unwrap().unwrap();
                let writes = |piece: &Piece| piece.direction == Direction::DeviceWrites;
                let written = u32::from(chain.pieces.iter().any(writes));
                pair.device(|device| device.push_used(chain.id, written))
                    .unwrap();
                assert!(pair.driver(DriverQueue::pop_used).unwrap().is_some());
            };
            for _ in 0..round {
                give_back(&[writes(0x3000, 1)]);
            }
            give_back(&pieces);
            let ring =
                GuestRing::new(Arc::clone(&pair.ram), 8, pair.driver.addresses(), true).unwrap();
            match ring.ring_position() {
                Err(error) => {
                    assert!(refused);
                    let says = format!("entry {} may be a remnant", (round + 1) % 8);
                    assert!(error.to_string().starts_with(&says), "{round}: {error}");
                }
                Ok(_) => assert!(!refused),
            }
        }
    }
}

/// An honest ring is never refused for that.
#[test]
fn a_ring_of_single_descriptors_is_reported_with_its_ids() {
    for used in 0..20u16 {
        for fill in 1..=8u16 {
            let mut pair = Pair::new(8, features(true, false));
            for _ in 0..used {
                pair.driver(|driver| driver.add(&[writes(0, 1)])).unwrap();
                let chain = pair.device(DeviceQueue::pop).unwrap().unwrap();
                pair.device(|device| device.push_used(chain.id, 1)).unwrap();
                pair.driver(DriverQueue::pop_used).unwrap().unwrap();
            }
            let ids: Vec<u16> = (0..fill)
                .map(|_| pair.driver(|driver| driver.add(&[writes(0, 1)])).unwrap())
                .collect();
            let ring =
                GuestRing::new(Arc::clone(&pair.ram), 8, pair.driver.addresses(), true).unwrap();
            let base = ring.ring_position().unwrap();
            let (used, fill) = (u32::from(used), u32::from(fill));
            assert_eq!(base, base_of(position(used + fill, 8), position(used, 8)));
            assert_eq!(ring.ids(base).unwrap(), ids);
        }
    }
}

//! Tests of chains in flight that are written again for another device.

use super::*;

proptest! {
    /// For any completion order and any chain lengths, a device that begins at the used position
    /// finds each remaining chain once. It finds them in the order of creation, and the driver gets
    /// all of them back.
    #[test]
    fn another_device_finds_the_chains_in_flight(
        size in 1u16..20,
        rounds in prop::collection::vec(
            (prop::collection::vec(1usize..4, 0..8), prop::collection::vec(any::<usize>(), 0..8)),
            1..12,
        ),
    ) {
        let features = features(true, false);
        let mut pair = Pair::new(size, features);
        let mut held: Vec<Chain> = Vec::new();
        let mut number = 0u32;
        for (added, returned) in rounds {
            for len in added {
                number += 1;
                let chain: Vec<Piece> = (0..len)
                    .map(|piece| writes(u64::from(number) * 16 + piece as u64, number))
                    .collect();
                let _ = pair.driver(|driver| driver.add(&chain));
            }
            while let Some(chain) = pair.device(DeviceQueue::pop).unwrap() {
                held.push(chain);
            }
            for choice in returned {
                if held.is_empty() {
                    break;
                }
                let chain = held.remove(choice % held.len());
                pair.device(|device| device.push_used(chain.id, 1)).unwrap();
            }
            let left: Vec<u16> = held.iter().map(|chain| chain.id).collect();
            prop_assert_eq!(pair.device(|device| device.arrange()).unwrap(), left);
            let ring = GuestRing::new(Arc::clone(&pair.ram), size, pair.driver.addresses(), true);
            let (_, used) = Position::of(pair.device.base()).unwrap();
            let mut other = DeviceQueue::new(ring.unwrap(), base_of(used, used), features).unwrap();
            for chain in &held {
                let popped = other.pop().unwrap();
                prop_assert_eq!(popped.as_ref(), Some(chain));
            }
            prop_assert_eq!(other.pop().unwrap(), None);
            prop_assert_eq!(other.base(), pair.device.base());
            pair.device = other;
            while pair.driver(DriverQueue::pop_used).unwrap().is_some() {}
            prop_assert_eq!(usize::from(pair.driver.outstanding()), held.len());
        }
    }
}

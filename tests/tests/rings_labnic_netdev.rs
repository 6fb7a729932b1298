//! `vdpa::netdev` on pairs of lab NICs: every kind of split ring, through a switch.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[path = "rings_netdev/traffic.rs"]
mod traffic;

use lab::labnic::{self, Labnic};
use lab::sim::SimDevice;
use traffic::{Flow, Mode, both_ways, start};
use vdpa::ErrorKind;
use vdpa::netdev::{Chains, Kick, Options};

const A: [u8; 6] = [2, 0, 0x5e, 0, 0x53, 1];
const B: [u8; 6] = [2, 0, 0x5e, 0, 0x53, 2];
const EVENT_IDX: u64 = 1 << 29;
const IN_ORDER: u64 = 1 << 35;

fn two(labnic: &Labnic, pairs: &str) -> [SimDevice; 2] {
    [("a", A), ("b", B)].map(|(name, mac)| {
        let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
        let attributes = ["mac", &mac, "max_vqp", pairs];
        labnic.add(name, &attributes).unwrap()
    })
}

fn kernel_is_well() {
    assert_eq!(labnic::trouble().unwrap(), Vec::<String>::new());
}

#[test]
fn every_ring_feature_and_every_way_to_kick_and_wait() {
    let labnic = Labnic::load(&[]).unwrap();
    let [one, other] = two(&labnic, "1");
    for withhold in [0, EVENT_IDX, IN_ORDER, EVENT_IDX | IN_ORDER] {
        for chains in [Chains::Single, Chains::Pair, Chains::Indirect] {
            for kick in [Kick::Doorbell, Kick::Eventfd] {
                let options = Options {
                    withhold,
                    chains,
                    kick,
                    ..Options::default()
                };
                let [mut a, mut b] = [&one, &other].map(|nic| start(nic.path(), &options));
                assert_eq!(a.device.features() & withhold, 0);
                assert_eq!(a.driver.pairs[0].transmit.queue().kick_by(), kick);
                assert_eq!(a.driver.pairs[0].transmit.queue().chains(), chains);
                for mode in [Mode::Poll, Mode::Interrupts] {
                    let mut flow = Flow::new(A, B);
                    flow.count = 700;
                    flow.mode = mode;
                    both_ways(&flow, &mut a, &mut b);
                }
                assert!(b.driver.pairs[0].receive.queue().counters().calls > 0);
            }
        }
    }
    kernel_is_well();
}

#[test]
fn four_pairs_each_carry_their_own_frames() {
    let labnic = Labnic::load(&[]).unwrap();
    let [one, other] = two(&labnic, "4");
    let options = Options {
        pairs: 4,
        ..Options::default()
    };
    let [mut a, mut b] = [&one, &other].map(|nic| start(nic.path(), &options));
    // The switch learns both addresses.
    let mut flow = Flow::new(A, B);
    flow.count = 10;
    both_ways(&flow, &mut a, &mut b);
    flow.count = 1500;
    // Each pair on its own thread.
    std::thread::scope(|threads| {
        for (from, to) in a.driver.pairs.iter_mut().zip(&mut b.driver.pairs) {
            let flow = &flow;
            threads.spawn(move || flow.run(&mut from.transmit, &mut to.receive));
        }
    });
    kernel_is_well();
}

#[test]
fn completion_in_any_order_loses_nothing() {
    for completion in ["out_of_order", "delayed"] {
        let labnic = Labnic::load(&[("completion", completion), ("completion_ms", "2")]).unwrap();
        let [one, other] = two(&labnic, "1");
        for withhold in [0, EVENT_IDX] {
            let options = Options {
                withhold,
                ..Options::default()
            };
            let [mut a, mut b] = [&one, &other].map(|nic| start(nic.path(), &options));
            for mode in [Mode::Poll, Mode::Interrupts] {
                let mut flow = Flow::new(A, B);
                flow.mode = mode;
                both_ways(&flow, &mut a, &mut b);
            }
        }
    }
    kernel_is_well();
}

/// Process addresses have 47 bits: with 39 the private window is used.
#[test]
fn a_narrow_address_space_is_enough() {
    for bits in ["39", "32", "64"] {
        let labnic = Labnic::load(&[("iova_bits", bits)]).unwrap();
        let [one, other] = two(&labnic, "1");
        let options = Options::default();
        let [mut a, mut b] = [&one, &other].map(|nic| start(nic.path(), &options));
        let wide = bits == "64";
        let shift = if wide { 47 } else { bits.parse().unwrap() };
        assert!(a.driver.range().last() < 1 << shift, "{}", a.driver.range());
        assert_eq!(
            a.driver.range().first() >> 39 != 0,
            wide,
            "{}",
            a.driver.range()
        );
        both_ways(&Flow::new(A, B), &mut a, &mut b);
    }
    kernel_is_well();
}

#[test]
fn large_frames_fit() {
    let labnic = Labnic::load(&[]).unwrap();
    let [one, other] = [("a", A), ("b", B)].map(|(name, mac)| {
        let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
        labnic.add(name, &["mac", &mac, "mtu", "9000"]).unwrap()
    });
    let options = Options::default();
    let [mut a, mut b] = [&one, &other].map(|nic| start(nic.path(), &options));
    let mut flow = Flow::new(A, B);
    flow.lengths = &[60, 9014];
    both_ways(&flow, &mut a, &mut b);
    kernel_is_well();
}

#[test]
fn a_hostile_device_ends_the_queue_and_nothing_else() {
    for fault in ["used_id", "used_length"] {
        let labnic = Labnic::load(&[("faults", fault)]).unwrap();
        let [one, _other] = two(&labnic, "1");
        let mut a = start(one.path(), &Options::default());
        let transmit = &mut a.driver.pairs[0].transmit;
        let mut frame = [0; 60];
        frame[..6].copy_from_slice(&B);
        assert!(transmit.send(&frame).unwrap());
        transmit.flush().unwrap();
        let begin = std::time::Instant::now();
        let error = loop {
            if let Err(error) = transmit.reap() {
                break error;
            }
            assert!(begin.elapsed().as_secs() < 20, "{fault} was not seen");
            std::thread::yield_now();
        };
        assert_eq!(error.kind(), ErrorKind::BrokenByDevice, "{error:?}");
        let error = transmit.send(&frame).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BrokenByDevice, "{error:?}");
        // The other queue is not affected, and the device can be reset.
        assert_eq!(a.driver.pairs[0].receive.poll(1, |_| ()).unwrap(), 0);
        a.device.reset().unwrap();
    }
    kernel_is_well();
}

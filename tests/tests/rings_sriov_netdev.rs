//! `vdpa::netdev` on virtual functions: doorbells, an IOMMU, split and packed rings.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[path = "rings_netdev/traffic.rs"]
mod traffic;

use std::time::{Duration, Instant};

use lab::rig::FIRST_PACKED_FUNCTION;
use lab::sriov::{SriovNic, VfDevice};
use traffic::{Flow, Mode, both_ways, frame, start};
use vdpa::control_queue::{Answer, Command};
use vdpa::netdev::{Chains, Kick, Netdev, Options, TxQueue};

/// Features that QEMU offers and that change how a ring is used.
const EVENT_IDX: u64 = 1 << 29;
/// How often traffic is repeated until the receiver had to wait for an interrupt.
const REPEATS: usize = 10;

fn mac(device: &VfDevice<'_>) -> [u8; 6] {
    let text = device.function().mac();
    let mut bytes = text.split(':').map(|byte| u8::from_str_radix(byte, 16));
    [(); 6].map(|()| bytes.next().unwrap().unwrap())
}

fn two_functions_talk(functions: [usize; 2], packed: bool) {
    let nic = SriovNic::enable(4).unwrap();
    let [one, other] = functions.map(|index| VfDevice::add(nic.vf(index).unwrap()).unwrap());
    for (withhold, chains, kick) in [
        (0, Chains::Single, Kick::Doorbell),
        (0, Chains::Indirect, Kick::Eventfd),
        (EVENT_IDX, Chains::Pair, Kick::Doorbell),
    ] {
        let options = Options {
            withhold,
            chains,
            kick,
            ..Options::default()
        };
        let [mut a, mut b] = [&one, &other].map(|device| start(device.path(), &options));
        assert_eq!(a.device.is_packed(), packed);
        assert_eq!(a.driver.pairs[0].transmit.queue().kick_by(), kick);
        let mut flow = Flow::new(mac(&one), mac(&other));
        flow.mode = Mode::Poll;
        both_ways(&flow, &mut a, &mut b);
        flow.mode = Mode::Interrupts;
        // On a busy host frames may come so densely that the receiver never waits.
        let calls = (0..REPEATS).find_map(|_| {
            both_ways(&flow, &mut a, &mut b);
            let calls = b.driver.pairs[0].receive.queue().counters().calls;
            (calls > 0).then_some(calls)
        });
        assert!(calls.is_some(), "no interrupt in {REPEATS} runs");
    }
    // All pairs. The switch chooses the receive queue of a frame, so here the transmit queues
    // count: each sends, and gets its buffers back.
    let options = Options {
        pairs: 4,
        ..Options::default()
    };
    let [mut a, b] = [&one, &other].map(|device| start(device.path(), &options));
    assert_eq!((a.driver.pairs.len(), b.driver.pairs.len()), (4, 4));
    let mut frame = [0; 200];
    frame[..6].copy_from_slice(&mac(&other));
    frame[6..12].copy_from_slice(&mac(&one));
    for pair in &mut a.driver.pairs {
        for _ in 0..10 {
            assert_eq!(pair.transmit.send_burst([&frame[..]; 20]).unwrap(), 20);
            let begin = Instant::now();
            while pair.transmit.queue().outstanding() > 0 {
                pair.transmit.reap().unwrap();
                assert!(begin.elapsed() < Duration::from_secs(20), "a queue is dead");
                std::thread::yield_now();
            }
        }
    }
}

#[test]
fn split_rings() {
    two_functions_talk([0, 1], false);
}

#[test]
fn packed_rings() {
    two_functions_talk([FIRST_PACKED_FUNCTION, FIRST_PACKED_FUNCTION + 1], true);
}

fn set_mac(netdev: &mut Netdev, address: [u8; 6]) {
    let control = netdev.driver.control.as_mut().unwrap();
    let answer = control
        .execute(&Command::MacAddrSet(address), Duration::from_secs(10))
        .unwrap();
    assert!(matches!(answer, Answer::Ok), "{answer:?}");
}

/// Sends frames without a waiting receiver, until the device has taken them.
fn send(transmit: &mut TxQueue, frames: &[Vec<u8>]) {
    let frames = frames.iter().map(Vec::as_slice);
    let count = frames.len();
    assert_eq!(transmit.send_burst(frames).unwrap(), count);
    let begin = Instant::now();
    while transmit.queue().outstanding() > 0 {
        transmit.reap().unwrap();
        assert!(begin.elapsed() < Duration::from_secs(20), "a queue is dead");
        std::thread::yield_now();
    }
}

/// Announces an address as a driver does, with a frame outside the flows.
fn announce(netdev: &mut Netdev, address: [u8; 6]) {
    let mut frame = [0xff; 60];
    frame[6..12].copy_from_slice(&address);
    send(&mut netdev.driver.pairs[0].transmit, &[frame.to_vec()]);
}

/// A migrating guest requires this of its network: frames go to the port that last sent from the
/// address.
#[test]
fn the_switch_follows_an_address_that_moves() {
    const MOVED: [u8; 6] = [0x02, 0, 0x5e, 0, 0x99, 1];
    let nic = SriovNic::enable(3).unwrap();
    let devices = [0, 1, 2].map(|index| VfDevice::add(nic.vf(index).unwrap()).unwrap());
    let options = Options::default();
    let [mut sender, mut old, mut new] = devices
        .each_ref()
        .map(|device| start(device.path(), &options));
    let flow = Flow::new(mac(&devices[0]), MOVED);

    set_mac(&mut old, MOVED);
    announce(&mut old, MOVED);
    both_ways(&flow, &mut sender, &mut old);

    set_mac(&mut old, mac(&devices[1]));
    set_mac(&mut new, MOVED);
    // The switch does not know yet: these frames go to the old place. If one reached the new place,
    // its number would arrive twice, because the numbers are reused.
    let transmit = &mut sender.driver.pairs[0].transmit;
    let tag = transmit.queue().index();
    let early: Vec<Vec<u8>> = (0..20)
        .map(|number| {
            let mut bytes = Vec::new();
            frame(&mut bytes, MOVED, flow.from, tag, number, 60);
            bytes
        })
        .collect();
    send(transmit, &early);
    announce(&mut new, MOVED);
    both_ways(&flow, &mut sender, &mut new);
}

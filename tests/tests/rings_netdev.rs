//! `vdpa::netdev` on the kernel's simulator, which sends frames back.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[path = "rings_netdev/traffic.rs"]
#[expect(dead_code, reason = "shared with targets that need all of it")]
mod traffic;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use lab::sim::{Mapping, OtherMapping, SimDevice, require_lab};
use lab::threads::StopOnDrop;
use traffic::{Flow, Mode, start};
use vdpa::device::Device;
use vdpa::netdev::{Chains, Kick, Netdev, Options};
use vdpa::relay::{Pause, Strategy, SvqSet};
use vm_memory::{Bytes, GuestAddress};

/// Without a zero byte: the simulator compares addresses as C strings.
const MAC: [u8; 6] = [0x02, 0x5e, 0x10, 0x53, 0x11, 0x01];

fn net() -> SimDevice {
    require_lab().unwrap();
    let text = MAC.map(|byte| format!("{byte:02x}")).join(":");
    SimDevice::net("netdev", &text, 1500).unwrap()
}

fn loopback(netdev: &mut Netdev, flow: &Flow) {
    let pair = &mut netdev.driver.pairs[0];
    flow.run(&mut pair.transmit, &mut pair.receive);
}

#[test]
fn frames_come_back_however_they_lie_and_are_waited_for() {
    for mapping in Mapping::ALL {
        let _mapping = OtherMapping::load(mapping).unwrap();
        let net = net();
        for chains in [Chains::Single, Chains::Pair] {
            let options = Options {
                chains,
                ..Options::default()
            };
            let mut netdev = start(net.path(), &options);
            assert_eq!(netdev.driver.config().mac, Some(MAC));
            assert_eq!(netdev.driver.config().link, Some(true));
            // The simulator has no doorbell and does not claim one.
            assert_eq!(
                netdev.driver.pairs[0].transmit.queue().kick_by(),
                Kick::Eventfd
            );
            for mode in [Mode::Poll, Mode::Interrupts] {
                let mut flow = Flow::new(MAC, MAC);
                flow.mode = mode;
                loopback(&mut netdev, &flow);
            }
            let counters = netdev.driver.pairs[0].receive.queue().counters();
            assert!(
                counters.calls > 0 && counters.packets >= 4000,
                "{counters:?}"
            );
        }
    }
}

#[test]
fn rings_of_all_sizes_wrap() {
    let net = net();
    for ring_size in [2, 7, 64, 1024] {
        let options = Options {
            ring_size,
            ..Options::default()
        };
        let mut netdev = start(net.path(), &options);
        let size = netdev.driver.pairs[0].receive.queue().size();
        assert_eq!(size, (1 << ring_size.ilog2()).min(256));
        let mut flow = Flow::new(MAC, MAC);
        flow.window = u32::from(size.min(32));
        loopback(&mut netdev, &flow);
    }
}

#[test]
fn a_suspended_device_continues_where_it_was() {
    let net = net();
    let mut netdev = start(net.path(), &Options::default());
    let mut flow = Flow::new(MAC, MAC);
    flow.count = 300;
    for _ in 0..10 {
        loopback(&mut netdev, &flow);
        netdev.suspend().unwrap();
        let queue = netdev.driver.pairs[0].transmit.queue();
        let (available, used) = queue.positions();
        assert_eq!(available, used);
        let base = netdev.device.vring_base(1).unwrap();
        let expected = vdpa::device::VringBase::Split { index: available };
        assert_eq!(base, expected);
        netdev.resume().unwrap();
    }
}

#[test]
fn rings_are_also_a_guest_s_memory() {
    let net = net();
    let mut netdev = start(net.path(), &Options::default());
    let mut flow = Flow::new(MAC, MAC);
    flow.count = 100;
    loopback(&mut netdev, &flow);
    let memory = netdev.driver.guest_memory().unwrap();
    let queue = netdev.driver.pairs[0].transmit.queue();
    let index = |area: u64| -> u16 {
        let address = GuestAddress(area + 2);
        memory.load(address, Ordering::Acquire).unwrap()
    };
    let seen = (
        index(queue.addresses().driver.0),
        index(queue.addresses().device.0),
    );
    assert_eq!(seen, queue.positions());
    // IOVA = VA where the range allows it, as it does here.
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let first = format!("{:x}-", netdev.driver.range().first());
    assert!(maps.lines().any(|line| line.starts_with(&first)), "{first}");
}

/// A relay takes over the rings of a running driver and returns them; the driver continues.
#[test]
fn rings_are_relayed_under_a_driver_that_notices_nothing() {
    let net = net();
    let mut netdev = start(net.path(), &Options::default());
    let memory = netdev.driver.guest_memory().unwrap();
    let mut set = netdev.relay_set(&memory).unwrap();
    let memory = vdpa::memory::DeviceMemory::from(memory);
    let Netdev { device, mut driver } = netdev;
    let mut pair = driver.pairs.remove(0);
    let stop = AtomicBool::new(false);
    let all = [Strategy::UsedShadow, Strategy::FullShadow, Strategy::Direct];
    let frames = thread::scope(|scope| {
        let traffic = scope.spawn(|| {
            let mut flow = Flow::new(MAC, MAC);
            flow.count = 300;
            flow.mode = Mode::Interrupts;
            while !stop.load(Ordering::Relaxed) {
                flow.run(&mut pair.transmit, &mut pair.receive);
            }
            pair.receive.queue().counters().packets
        });
        // Also when a check below fails: the scope waits for its threads.
        let stopped = StopOnDrop(&stop);
        let relay = |set: &mut SvqSet, time: Duration| {
            let (begin, mut used) = (Instant::now(), 0);
            while begin.elapsed() < time && !traffic.is_finished() {
                let progress = set.poll(&memory).unwrap();
                used += progress.used;
                match progress.pause {
                    Pause::None => thread::yield_now(),
                    Pause::AtMost(pause) => thread::sleep(pause),
                    Pause::Forever => thread::sleep(Duration::from_millis(1)),
                }
            }
            used
        };
        let (mut device, mut relayed) = (device, 0);
        for step in 0..60 {
            relayed += relay(&mut set, Duration::from_millis(10));
            let (receive, transmit) = (all[step % 3], all[step / 3 % 3]);
            let targets = [(0, receive), (1, transmit)];
            set.change(&mut device, &targets, &memory).unwrap();
        }
        assert!(relayed > 0);
        drop(stopped);
        while !traffic.is_finished() {
            relay(&mut set, Duration::from_millis(10));
        }
        device.reset().unwrap();
        traffic.join().unwrap()
    });
    assert!(frames >= 300, "{frames}");
}

#[test]
fn impossible_wishes_are_refused() {
    let net = net();
    for pairs in [0, 2, 0x8000] {
        let (device, iotlb) = Device::open(net.path()).unwrap().own().unwrap();
        let options = Options {
            pairs,
            ..Options::default()
        };
        let error = Netdev::start(device, iotlb, &options).unwrap_err();
        assert!(error.to_string().contains("can have up to 1 "), "{error}");
    }
    let block = SimDevice::block("netdev-blk").unwrap();
    let (device, iotlb) = Device::open(block.path()).unwrap().own().unwrap();
    let error = Netdev::start(device, iotlb, &Options::default()).unwrap_err();
    assert!(error.to_string().contains("has virtio type 2"), "{error}");
}

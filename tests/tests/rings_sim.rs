//! Relays on the kernel's simulator, by the library alone: a running device
//! changes between direct, mediated and shadowed under traffic.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[path = "rings_sim/driver.rs"]
mod driver;

use std::error::Error;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use lab::sim::{self, Mapping, SimDevice};
use vdpa::device::{Device, Negotiated, Owned, Running, VringBase, VringConfig};
use vdpa::features::{Policy, pass_through};
use vdpa::iotlb::Iotlb;
use vdpa::iova::IovaRange;
use vdpa::relay::{
    Pause, QueueFailed, Reason, RelaySet, Restart, RestartFailed, Strategy, TransitionError, choose,
};
use vdpa::uapi::BackendFeatures;
use vdpa::window::PrivateWindow;
use vm_memory::bitmap::Bitmap;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use self::driver::{Driver, RAM, RECEIVE, SIZE, TRANSMIT};

const MAC: [u8; 6] = [0x02, 0x5e, 0x10, 0x53, 0x11, 0x01];

fn simulator() -> SimDevice {
    sim::require_lab().unwrap();
    sim::reload(Mapping {
        use_va: true,
        batch_mapping: true,
    })
    .unwrap();
    let mac = MAC.map(|byte| format!("{byte:02x}")).join(":");
    SimDevice::net("vdpa", &mac, 1500).unwrap()
}

/// What the data queues need; without the control queue.
fn features(device: &Device<Owned>) -> u64 {
    let info = device.info();
    let passed = pass_through(info.features, info.device_id, Policy::default());
    passed.features & !(1 << 17 | 1 << 23)
}

/// A device with both queues direct, at `start`.
fn begin(
    net: &SimDevice,
    wanted: BackendFeatures,
    driver: &Driver,
    start: u16,
) -> (Device<Running>, Iotlb, RelaySet, u64) {
    let (device, mut iotlb) = Device::open(net.path()).unwrap().own_with(wanted).unwrap();
    iotlb.map_guest_memory(0, &driver.memory).unwrap();
    let features = features(&device);
    let mut window = PrivateWindow::new(device.info().iova_range, RAM).unwrap();
    let queues = vec![driver.receive.queue(), driver.transmit.queue()];
    let set = RelaySet::new(device.info(), features, queues, &mut iotlb, &mut window).unwrap();
    let mut device = device.negotiate(features).unwrap();
    let ram = [IovaRange::from_size(0, RAM).unwrap()];
    for queue in [driver.receive.queue(), driver.transmit.queue()] {
        let config = VringConfig {
            size: SIZE,
            addresses: queue.ring.addresses(),
            base: VringBase::Split { index: start },
            kick: Some(&queue.kick),
            call: Some(&queue.call),
        };
        device.set_vring(queue.index, &config, &ram).unwrap();
        device.enable_vring(queue.index).unwrap();
    }
    (device.start().unwrap(), iotlb, set, features)
}

/// Polls for a time, pausing as told; gives the used chains relayed.
fn pump(set: &mut RelaySet, driver_memory: &vdpa::memory::GuestMemory, time: Duration) -> u32 {
    let (end, mut used) = (Instant::now() + time, 0);
    while Instant::now() < end {
        let progress = set.poll(driver_memory).unwrap();
        used += progress.used;
        match progress.pause {
            Pause::None => thread::yield_now(),
            Pause::AtMost(pause) => thread::sleep(pause),
            Pause::Forever => thread::sleep(Duration::from_millis(1)),
        }
    }
    used
}

/// Every order of the three strategies, both queues together and alone.
#[test]
fn changes_under_traffic_lose_nothing() {
    let net = simulator();
    let mut driver = Driver::new(MAC, 65000);
    let (device, iotlb, mut set, features) = begin(&net, BackendFeatures::all(), &driver, 65000);
    assert_eq!(
        choose(device.info(), device.backend_features(), features),
        (Strategy::Mediated, Reason::SuspendsAndResumes)
    );
    let memory = driver.memory.clone();
    let (stop, moved) = (AtomicBool::new(false), AtomicU32::new(0));
    let all = [Strategy::Direct, Strategy::Mediated, Strategy::Shadowed];
    let (mut changes, mut longest) = (0, Duration::ZERO);
    let mut relayed = [0u32; 3];
    let slept = thread::scope(|scope| {
        let traffic = scope.spawn(|| {
            driver.exchange(u32::MAX, &stop, &moved);
            driver.slept
        });
        let mut device = device;
        let mut state = 0x9e37_79b9_u32;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            usize::try_from(state % 3).unwrap()
        };
        while changes < 300 && !traffic.is_finished() {
            let targets = [(RECEIVE, all[next()]), (TRANSMIT, all[next()])];
            let before = Instant::now();
            device = set.change(device, &targets, &*memory).unwrap();
            longest = longest.max(before.elapsed());
            changes += 1;
            assert_eq!(set.strategy(RECEIVE), Some(targets[0].1));
            let came = moved.load(Ordering::Relaxed);
            let used = pump(&mut set, &memory, Duration::from_millis(5));
            let receive = all.iter().position(|how| *how == targets[0].1).unwrap();
            relayed[receive] += if targets[0].1 == Strategy::Direct {
                moved.load(Ordering::Relaxed) - came
            } else {
                used
            };
        }
        stop.store(true, Ordering::Relaxed);
        while !traffic.is_finished() {
            pump(&mut set, &memory, Duration::from_millis(5));
        }
        traffic.join().unwrap()
    });
    let moved = moved.into_inner();
    println!(
        "{changes} changes, {moved} frames, {relayed:?} per strategy, {slept} sleeps, longest \
         change {longest:?}"
    );
    assert_eq!(changes, 300);
    assert!(relayed.iter().all(|used| *used > 100), "{relayed:?}");
    assert!(slept > 0);
    // Over the index wrap.
    assert!(moved > 1000, "{moved}");
    drop((set, iotlb));
}

/// Pages compared before and after with what was reported.
#[test]
fn every_page_that_the_device_wrote_is_dirty() {
    let net = simulator();
    for how in [Strategy::Mediated, Strategy::Shadowed] {
        let mut driver = Driver::new(MAC, 0);
        let (device, iotlb, mut set, _) = begin(&net, BackendFeatures::all(), &driver, 0);
        let memory = driver.memory.clone();
        let device = set.change(device, &[(RECEIVE, how)], &*memory).unwrap();
        let before = driver.receive_pages();
        memory.iter().for_each(|region| (**region).bitmap().reset());
        let (stop, moved) = (AtomicBool::new(false), AtomicU32::new(0));
        thread::scope(|scope| {
            // Fewer than there are buffers, so that some pages stay clean.
            let traffic = scope.spawn(|| driver.exchange(u32::from(SIZE) / 2, &stop, &moved));
            while !traffic.is_finished() {
                pump(&mut set, &memory, Duration::from_millis(5));
            }
            traffic.join().unwrap();
        });
        let mut written = 0;
        let mut clean = 0;
        for ((address, old), (_, new)) in before.iter().zip(driver.receive_pages()) {
            let region = memory.find_region(GuestAddress(*address)).unwrap();
            let offset = usize::try_from(address - region.start_addr().0).unwrap();
            let dirty = region.bitmap().dirty_at(offset);
            written += u32::from(*old != new);
            clean += u32::from(!dirty);
            assert!(
                dirty || *old == new,
                "{how}: page {address:#x} changed unseen"
            );
        }
        assert_eq!((written, clean), (32, 32), "{how}");
        drop((device, set, iotlb));
    }
}

/// A caller without a control queue.
struct Again<'a> {
    iotlb: &'a mut Iotlb,
    features: u64,
}

impl Restart for Again<'_> {
    fn negotiate(&mut self, device: Device<Owned>) -> Result<Device<Negotiated>, RestartFailed> {
        self.iotlb.remap_after_reset().unwrap();
        Ok(device.negotiate(self.features)?)
    }

    fn replay(&mut self, _: &mut Device<Running>) -> Result<(), Box<dyn Error + Send + Sync>> {
        Ok(())
    }
}

/// A device that can't suspend is reset and shadowed under traffic, and goes back
/// to direct passage at the index wrap, at base 0.
#[test]
fn a_device_that_cannot_suspend_is_shadowed_and_goes_direct_at_the_wrap() {
    let net = simulator();
    let wanted = BackendFeatures::all() - BackendFeatures::SUSPEND - BackendFeatures::RESUME;
    // 1000 frames before the wrap.
    let mut driver = Driver::new(MAC, 64536);
    let (device, mut iotlb, mut set, features) = begin(&net, wanted, &driver, 64536);
    assert_eq!(
        choose(device.info(), device.backend_features(), features),
        (Strategy::Shadowed, Reason::NoSuspend)
    );
    let memory = driver.memory.clone();
    let (stop, moved) = (AtomicBool::new(false), AtomicU32::new(0));
    thread::scope(|scope| {
        let traffic = scope.spawn(|| driver.exchange(u32::MAX, &stop, &moved));
        let both = |how| [(RECEIVE, how), (TRANSMIT, how)];
        let failed = set
            .change(device, &both(Strategy::Mediated), &*memory)
            .unwrap_err();
        assert!(matches!(failed.error, TransitionError::Device { .. }));
        let vdpa::relay::Halted::Running(device) = failed.device else {
            panic!("the device does not run on");
        };
        // The simulator works one step at a time, so between two of them it
        // holds nothing; nothing is sent twice.
        let mut again = Again {
            iotlb: &mut iotlb,
            features,
        };
        let device = device.reset().unwrap();
        let device = set
            .restart(device, &both(Strategy::Shadowed), &*memory, &mut again)
            .unwrap();
        set.hold_at_wrap();
        let begin = Instant::now();
        while !set.is_held() && !traffic.is_finished() {
            pump(&mut set, &memory, Duration::from_millis(2));
            assert!(
                begin.elapsed() < Duration::from_secs(60),
                "never at the wrap"
            );
        }
        assert!(set.is_held());
        let held = moved.load(Ordering::Relaxed);
        let device = device.reset().unwrap();
        let device = set
            .restart(device, &both(Strategy::Direct), &*memory, &mut again)
            .unwrap();
        assert_eq!(set.strategy(TRANSMIT), Some(Strategy::Direct));
        let progress: Result<_, QueueFailed> = set.poll(&*memory);
        assert_eq!(progress.unwrap().pause, Pause::Forever);
        let begin = Instant::now();
        while moved.load(Ordering::Relaxed) < held + 500 && !traffic.is_finished() {
            thread::sleep(Duration::from_millis(5));
            assert!(
                begin.elapsed() < Duration::from_secs(30),
                "no traffic after the wrap"
            );
        }
        stop.store(true, Ordering::Relaxed);
        traffic.join().unwrap();
        drop(device);
    });
    assert!(moved.into_inner() > 1000 - u32::from(SIZE));
}

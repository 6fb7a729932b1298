//! Relays on the kernel's simulator, which sends frames back: a running device changes between
//! direct, used-shadow and full-shadow under traffic.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[path = "rings/mod.rs"]
mod rings;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use lab::sim::{self, Mapping, SimDevice};
use vdpa::memory::GuestMemory;
use vdpa::relay::{Reason, Strategy};
use vdpa::uapi::BackendFeatures;
use vm_memory::bitmap::Bitmap;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use self::rings::frame::Mac;
use self::rings::guest::{Flow, Guest, Options, SIZE, receive_buffer};
use self::rings::vmm::{Machine, Setup, pump};

/// Without a zero byte: the simulator compares addresses as C strings.
const MAC: Mac = [0x02, 0x5e, 0x10, 0x53, 0x11, 0x01];
const RECEIVE: u16 = 0;
const TRANSMIT: u16 = 1;

fn simulator() -> SimDevice {
    sim::require_lab().unwrap();
    sim::reload(Mapping::DEFAULT).unwrap();
    let mac = MAC.map(|byte| format!("{byte:02x}")).join(":");
    SimDevice::net("vdpa", &mac, 1500).unwrap()
}

/// A guest that talks to itself, its device with both queues direct, and the flow.
fn begin(
    net: &SimDevice,
    start: u16,
    frames: u32,
    without: BackendFeatures,
) -> (Guest, Machine, Arc<Flow>) {
    let options = Options {
        event_idx: false,
        indirect: false,
        // The simulator drops a frame without room in the receive ring. A relay that is preempted
        // before it forwards can hold back the buffers of two windows, while a third is on its way.
        window: u32::from(SIZE) / 4,
        frames,
    };
    let setup = Setup {
        event_idx: false,
        indirect: false,
        control: false,
        doorbells: false,
        pairs: 1,
        start,
        without,
    };
    let flow: Arc<Flow> = Arc::default();
    let flows = [Arc::clone(&flow)];
    let guest = Guest::new(MAC, MAC, start, options, &flows, &flows);
    let machine = Machine::start("sim", net.path(), &guest, setup);
    (guest, machine, flow)
}

/// Polls the relays for a time.
fn pump_for(machine: &mut Machine, time: Duration) {
    let begin = Instant::now();
    pump(&mut [machine], || begin.elapsed() >= time);
}

/// Every order of the three strategies, both queues together and alone.
#[test]
fn changes_under_traffic_lose_nothing() {
    let net = simulator();
    let (mut guest, mut machine, flow) = begin(&net, 65000, u32::MAX, BackendFeatures::empty());
    let expected = (Strategy::UsedShadow, Reason::SuspendsAndResumes);
    assert_eq!(machine.chosen(), expected);
    let memory = machine.memory();
    let stop = AtomicBool::new(false);
    let all = [Strategy::Direct, Strategy::UsedShadow, Strategy::FullShadow];
    let mut by_strategy = [0u32; 3];
    let account = thread::scope(|scope| {
        let traffic = scope.spawn(|| guest.exchange(&stop));
        let mut state = 0x9e37_79b9_u32;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            usize::try_from(state % 3).unwrap()
        };
        for _ in 0..300 {
            let receive = next();
            let targets = [(RECEIVE, all[receive]), (TRANSMIT, all[next()])];
            machine.change(&targets, &memory).unwrap();
            for (queue, strategy) in targets {
                assert_eq!(machine.strategy(queue), strategy);
            }
            let before = flow.received();
            pump_for(&mut machine, Duration::from_millis(5));
            by_strategy[receive] += flow.received() - before;
            assert!(!traffic.is_finished(), "{}", machine.describe());
        }
        stop.store(true, Ordering::Relaxed);
        pump(&mut [&mut machine], || traffic.is_finished());
        traffic.join().unwrap()
    });
    println!("{account:?}, {by_strategy:?} by strategy");
    assert!(by_strategy.iter().all(|frames| *frames > 100));
    assert!(account.slept > 0);
    // Past the index wrap.
    assert!(account.received > 1000);
}

/// The receive buffers' pages: address and content.
fn receive_pages(memory: &GuestMemory) -> Vec<(u64, Vec<u8>)> {
    let page = |descriptor| {
        let address = receive_buffer(0, descriptor);
        let mut content = vec![0; 4096];
        let place = GuestAddress(address);
        memory.read_slice(&mut content, place).unwrap();
        (address, content)
    };
    (0..SIZE).map(page).collect()
}

/// Compares pages before and after with the report.
#[test]
fn every_page_that_the_device_wrote_is_dirty() {
    let net = simulator();
    for how in [Strategy::UsedShadow, Strategy::FullShadow] {
        // Fewer than there are buffers, so that some pages stay clean.
        let frames = u32::from(SIZE) / 2;
        let (mut guest, mut machine, flow) = begin(&net, 0, frames, BackendFeatures::empty());
        let memory = machine.memory();
        machine.change(&[(RECEIVE, how)], &memory).unwrap();
        let before = receive_pages(memory.ram());
        memory
            .ram()
            .iter()
            .for_each(|region| (**region).bitmap().reset());
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let traffic = scope.spawn(|| guest.exchange(&stop));
            pump(&mut [&mut machine], || {
                let over = flow.received() == frames;
                stop.store(over, Ordering::Relaxed);
                traffic.is_finished()
            });
            traffic.join().unwrap();
        });
        let (mut written, mut clean) = (0, 0);
        for ((address, old), (_, new)) in before.iter().zip(receive_pages(memory.ram())) {
            let region = memory.ram().find_region(GuestAddress(*address)).unwrap();
            let offset = usize::try_from(address - region.start_addr().0).unwrap();
            let dirty = region.bitmap().dirty_at(offset);
            written += u32::from(*old != new);
            clean += u32::from(!dirty);
            assert!(
                dirty || *old == new,
                "{how}: page {address:#x} changed without a mark"
            );
        }
        assert_eq!((written, clean), (frames, frames), "{how}");
    }
}

/// A device that cannot suspend is reset and shadowed under traffic, before the index wrap. The
/// simulator works in steps and holds nothing between two of them: no frame is lost or sent twice.
#[test]
fn a_device_that_cannot_suspend_is_shadowed_by_a_reset() {
    let net = simulator();
    let without = BackendFeatures::SUSPEND | BackendFeatures::RESUME;
    // 1000 frames before the wrap.
    let (mut guest, mut machine, flow) = begin(&net, 64536, u32::MAX, without);
    assert_eq!(machine.chosen(), (Strategy::FullShadow, Reason::NoSuspend));
    let memory = machine.memory();
    let stop = AtomicBool::new(false);
    let account = thread::scope(|scope| {
        let traffic = scope.spawn(|| guest.exchange(&stop));
        let targets = machine.all(Strategy::UsedShadow);
        let refused = machine.change(&targets, &memory).unwrap_err();
        assert!(refused.to_string().contains("refused to change its rings"));
        let targets = machine.all(Strategy::FullShadow);
        machine.restart(&targets, &memory);
        assert_eq!(machine.strategy(TRANSMIT), Strategy::FullShadow);
        // The shadow also passes the guest's last frames.
        pump(&mut [&mut machine], || {
            stop.store(flow.received() > 1500, Ordering::Relaxed);
            traffic.is_finished()
        });
        traffic.join().unwrap()
    });
    assert!(account.received > 1500);
}

//! Compares the writes that relays report with the truth: all of guest memory before and after, and
//! each frame when the guest sees it.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

#[path = "rings/mod.rs"]
mod rings;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use lab::labnic::{self, Labnic};
use vdpa::ErrorKind;
use vdpa::iova::DeviceAddress;
use vdpa::memory::GuestMemory;
use vdpa::relay::{Dirty, Strategy, mark_ram};
use vdpa::uapi::BackendFeatures;
use vm_memory::bitmap::Bitmap;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use self::rings::frame::Mac;
use self::rings::guest::{BUFFER, Flow, Guest, Options, RAM, RECEIVE_BUFFERS};
use self::rings::vmm::{Machine, PATIENCE, Setup, pump};

const A: Mac = [2, 0, 0x5e, 0, 0x53, 1];
const B: Mac = [2, 0, 0x5e, 0, 0x53, 2];
const PAIRS: u16 = 2;
const FRAMES: u32 = 1500;
/// The end of the receive buffers.
const RECEIVE_END: u64 = RECEIVE_BUFFERS + BUFFER * 64 * 2;

/// Records every range and passes it on to the memory's own bitmap.
#[derive(Debug)]
struct Log {
    memory: Arc<GuestMemory>,
    /// By address: bytes, and the number of reports since the guest looked at it.
    marks: Mutex<BTreeMap<u64, (u32, u32)>>,
}

impl Dirty for Log {
    fn mark(&self, DeviceAddress(address): DeviceAddress, len: u32) {
        mark_ram(&self.memory, address, u64::from(len));
        let mut marks = self.marks.lock().unwrap();
        let (longest, times) = marks.entry(address).or_default();
        *longest = len.max(*longest);
        *times += 1;
    }
}

impl Log {
    /// The guest has a frame in the buffer at `address`: the write must have been reported before,
    /// once for this frame.
    fn meet(&self, queue: u16, address: u64) {
        let mut marks = self.marks.lock().unwrap();
        match marks.get_mut(&address) {
            Some((2048, times @ 1)) => *times = 0,
            other => panic!("queue {queue}: frame at {address:#x}, reported {other:?}"),
        }
    }

    fn claims(&self, address: u64) -> bool {
        let marks = self.marks.lock().unwrap();
        let before = marks.range(..=address).next_back();
        before.is_some_and(|(start, (len, _))| address - start < u64::from(*len))
    }
}

fn content(memory: &GuestMemory) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(RAM).unwrap()];
    memory.read_slice(&mut bytes, GuestAddress(0)).unwrap();
    bytes
}

/// Compares; returns changed and claimed bytes of the receive buffers.
fn compare(log: &Log, before: &[u8], direct_rings: &[u64]) -> (u32, u32) {
    let after = content(&log.memory);
    let (mut changed, mut claimed) = (0, 0);
    for address in RECEIVE_BUFFERS..RECEIVE_END {
        let place = usize::try_from(address).unwrap();
        let differs = before[place] != after[place];
        let claims = log.claims(address);
        assert!(
            claims || !differs,
            "byte {address:#x} changed without a mark"
        );
        changed += u32::from(differs);
        claimed += u32::from(claims);
    }
    // All of memory by pages: this process's own writes are also in the bitmap.
    let size = usize::try_from(BUFFER).unwrap();
    for (page, (old, new)) in before.chunks(size).zip(after.chunks(size)).enumerate() {
        let address = BUFFER * u64::try_from(page).unwrap();
        let region = log.memory.find_region(GuestAddress(address)).unwrap();
        let dirty = region.bitmap().dirty_at(page * size);
        // The used rings of direct transmit queues count as always dirty.
        let exempt = direct_rings.contains(&address);
        assert!(
            dirty || old == new || exempt,
            "page {address:#x} changed without a mark"
        );
    }
    (changed, claimed)
}

/// How the receive queues are relayed while frames arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    Always(Strategy),
    /// Used shadow and full shadow in turn.
    ByTurns,
}

fn run(event_idx: bool, completion: &str, how: How) {
    let parameters = [
        ("completion", completion),
        ("completion_ms", "4"),
        ("rx_prefetch", "6"),
        ("credit_wait_ms", "60000"),
    ];
    let labnic = Labnic::load(&parameters).unwrap();
    let text = |mac: Mac| mac.map(|byte| format!("{byte:02x}")).join(":");
    let devices = [("a", A), ("b", B)].map(|(name, mac)| {
        let pairs = PAIRS.to_string();
        labnic
            .add(name, &["mac", &text(mac), "max_vqp", &pairs])
            .unwrap()
    });
    let flows: [Vec<Arc<Flow>>; 2] = [(); 2].map(|()| (0..PAIRS).map(|_| Arc::default()).collect());
    let options = Options {
        event_idx,
        indirect: true,
        window: u32::MAX,
        frames: u32::MAX,
    };
    let setup = Setup {
        event_idx,
        indirect: true,
        control: true,
        doorbells: true,
        pairs: PAIRS,
        start: 65_000,
        without: BackendFeatures::empty(),
    };
    let mut a = Guest::new(A, B, setup.start, options, &flows[0], &flows[1]);
    let mut b = Guest::new(B, A, setup.start, options, &flows[1], &flows[0]);
    let mut machine = Machine::start("a", devices[0].path(), &a, setup);
    let mut other = Machine::start("b", devices[1].path(), &b, setup);
    let log = Arc::new(Log {
        memory: Arc::clone(&a.memory),
        marks: Mutex::default(),
    });
    let receive = |how| [(0, how), (2, how)];
    // Before traffic, so that no direct queue writes. A device that has already taken buffers is
    // with a used shadow first.
    machine
        .change(&receive(Strategy::UsedShadow), &*log)
        .unwrap();
    let witness = Arc::clone(&log);
    a.witness = Some(Arc::new(move |queue, address| witness.meet(queue, address)));
    let before = content(&a.memory);
    a.memory
        .iter()
        .for_each(|region| (**region).bitmap().reset());
    let stop = AtomicBool::new(false);
    let (mut changes, mut waits) = (0, 0);
    thread::scope(|scope| {
        let threads = [
            scope.spawn(|| a.exchange(&stop)),
            scope.spawn(|| b.exchange(&stop)),
        ];
        let ended = || threads.iter().any(|thread| thread.is_finished());
        let begin = Instant::now();
        let mut next = Strategy::FullShadow;
        while flows.iter().flatten().any(|flow| flow.received() < FRAMES) && !ended() {
            assert!(begin.elapsed() < PATIENCE, "{how:?} {completion}: too slow");
            let wanted = match how {
                How::Always(strategy) => strategy,
                How::ByTurns => next,
            };
            match machine.change(&receive(wanted), &*log) {
                Ok(()) if machine.strategy(0) == wanted => {
                    changes += 1;
                    next = if wanted == Strategy::FullShadow {
                        Strategy::UsedShadow
                    } else {
                        Strategy::FullShadow
                    };
                }
                Ok(()) => panic!("not {wanted}"),
                Err(error) if error.kind() == ErrorKind::InFlightUnknown => waits += 1,
                Err(error) => panic!("{error:?}"),
            }
            let turn = Instant::now();
            while turn.elapsed() < Duration::from_millis(5) {
                let pause = machine.poll(&*log);
                if pause != vdpa::relay::Pause::None {
                    thread::sleep(Duration::from_micros(200));
                }
            }
        }
        stop.store(true, Ordering::Relaxed);
        let begin = Instant::now();
        while !threads.iter().all(|thread| thread.is_finished()) {
            assert!(begin.elapsed() < PATIENCE, "the guests do not end");
            machine.poll(&*log);
            thread::sleep(Duration::from_micros(200));
        }
        for thread in threads {
            thread.join().unwrap();
        }
    });
    pump(&mut [&mut other], || true);
    // The used ring of queue n begins at 0x8000 in its 64 KiB.
    let direct_rings = [1, 3].map(|queue: u64| 0x1_0000 * queue + 0x8000);
    let (changed, claimed) = compare(&log, &before, &direct_rings);
    println!(
        "event_idx {event_idx}, {completion}, {how:?}: {changes} changes, {waits} refused, \
         {changed} bytes changed of {claimed} claimed"
    );
    assert!(changed > 10_000, "{changed}");
    // Half of each page is never given to the device.
    assert!(u64::from(claimed) <= (RECEIVE_END - RECEIVE_BUFFERS) / 2);
    assert_eq!(labnic::trouble().unwrap(), Vec::<String>::new());
}

#[test]
fn every_byte_that_the_device_wrote_is_reported_before_the_guest_sees_it() {
    for (event_idx, completion) in [
        (true, "immediate"),
        (false, "out_of_order"),
        (true, "out_of_order"),
    ] {
        for how in [
            How::Always(Strategy::UsedShadow),
            How::Always(Strategy::FullShadow),
            How::ByTurns,
        ] {
            run(event_idx, completion, how);
        }
    }
}

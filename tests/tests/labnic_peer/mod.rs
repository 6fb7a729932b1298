//! A peer on the lab NIC's switch: its own device with a driver in this process, which sends
//! every frame back to its sender.
//!
//! It can also continuously send unsolicited frames.

#[expect(
    dead_code,
    reason = "most of this driver is for the lab NIC's own tests"
)]
#[path = "../hardware_labnic/client.rs"]
mod client;

use self::client::Client;
use lab::guest::Guest;
use lab::labnic::Labnic;
use lab::sim::SimDevice;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The peer's address.
pub(crate) const MAC: &str = "02:4c:61:62:53:77";
const MAC_BYTES: [u8; 6] = [0x02, 0x4c, 0x61, 0x62, 0x53, 0x77];

/// How long it sleeps when there is nothing to do.
const PAUSE: Duration = Duration::from_millis(1);

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    floods: AtomicBool,
    echoed: AtomicU64,
    /// When each frame arrived, and its number in its run.
    arrivals: Mutex<Vec<(Instant, u64)>>,
    seen: Mutex<Seen>,
}

/// Which frames of a run arrived.
#[derive(Debug, Default)]
struct Seen {
    /// The seed that the run's frames share.
    seed: u64,
    numbers: BTreeSet<u64>,
    /// Those that arrived twice.
    twice: Vec<u64>,
}

impl Seen {
    fn take(&mut self, seed: u64, number: u64) {
        if self.seed != seed {
            *self = Self {
                seed,
                ..Self::default()
            };
        }
        if !self.numbers.insert(number) {
            self.twice.push(number);
        }
    }
}

/// The peer. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Peer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Peer {
    /// Adds the peer's device and starts its driver.
    pub(crate) fn start(labnic: &Labnic) -> Self {
        let device = labnic.add("peer", &["mac", MAC]).unwrap();
        let shared = Arc::new(Shared::default());
        let (started, ready) = mpsc::channel();
        let thread = {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || {
                let client = Client::start(&device);
                started.send(()).unwrap();
                run(client, &shared);
                drop::<SimDevice>(device);
            })
        };
        ready.recv().unwrap();
        Self {
            shared,
            thread: Some(thread),
        }
    }

    /// Starts or stops unsolicited frames.
    #[allow(dead_code, reason = "not every test needs them")]
    pub(crate) fn flood(&self, on: bool) {
        self.shared.floods.store(on, Ordering::Relaxed);
    }

    /// How many frames it has sent back so far.
    pub(crate) fn echoed(&self) -> u64 {
        self.shared.echoed.load(Ordering::Relaxed)
    }

    /// Numbers of the frames of the guest's newest run that arrived twice.
    #[allow(dead_code, reason = "not every test looks at single frames")]
    pub(crate) fn twice(&self) -> Vec<u64> {
        self.shared.seen.lock().unwrap().twice.clone()
    }

    /// When each frame of a guest's runs arrived since the last call, with its number.
    #[allow(dead_code, reason = "not every test looks at times")]
    pub(crate) fn arrivals(&self) -> Vec<(Instant, u64)> {
        std::mem::take(&mut self.shared.arrivals.lock().unwrap())
    }

    /// Makes the guest send frames from its first NIC to the peer, and checks that each comes
    /// back once.
    #[track_caller]
    pub(crate) fn exchange(&self, guest: &mut Guest, count: u64, size: u64) {
        self.exchange_on("eth0", guest, count, size);
    }

    /// Like [`Peer::exchange`], from any NIC of the guest.
    #[track_caller]
    pub(crate) fn exchange_on(&self, nic: &str, guest: &mut Guest, count: u64, size: u64) {
        let before = self.echoed();
        let line = format!("frames {count} {size} 16 {nic} to {MAC}");
        let said = guest.command(&line).unwrap();
        lab::traffic::all_returned(&said, count).unwrap();
        assert!(self.echoed() >= before + count);
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            eprintln!("lab: the peer has panicked");
        }
    }
}

fn run(mut client: Client, shared: &Shared) {
    let mut guest = None;
    while !shared.stop.load(Ordering::Relaxed) {
        let mut idle = true;
        while let Some(mut frame) = client.queues[0].receive() {
            let (to, rest) = frame.split_at_mut(6);
            if to != MAC_BYTES {
                continue;
            }
            guest = <[u8; 6]>::try_from(&rest[..6]).ok();
            // After both addresses, the Ethernet type and the run's seed.
            let word = |at: Range<usize>| Some(u64::from_le_bytes(rest.get(at)?.try_into().ok()?));
            if let (Some(seed), Some(number)) = (word(8..16), word(16..24)) {
                let arrival = (Instant::now(), number);
                shared.arrivals.lock().unwrap().push(arrival);
                shared.seen.lock().unwrap().take(seed, number);
            }
            to.swap_with_slice(&mut rest[..6]);
            client.send(0, &frame);
            shared.echoed.fetch_add(1, Ordering::Relaxed);
            idle = false;
        }
        if let Some(guest) = guest.filter(|_| shared.floods.load(Ordering::Relaxed)) {
            // Ethertype "local experimental 2": the guest's own traffic uses the first.
            let head = [&guest[..], &MAC_BYTES, &[0x88, 0xb6]].concat();
            client.send(0, &[head, vec![0x5a; 200]].concat());
        }
        if idle {
            std::thread::sleep(PAUSE);
        }
    }
}

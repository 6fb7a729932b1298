//! Two ends in one process: machines of 16 MiB without a CPU, connected by socket pairs.
//!
//! [`Guest`] simulates both machines. `link` breaks, silences and falsifies the connections, and
//! `hostile` scripts one end. `standstill` tests how long a stopped guest waits, `tls` runs over
//! TCP with certificates.

mod hostile;
mod link;
mod standstill;
mod tls;

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::{Value, json};
use vdpa::memory::GuestMemory;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryBackend as _};

use super::channel::{Connection, Timeouts};
use super::convergence::Limits;
use super::destination::{DestinationMachine, Go, ReceiveOptions, receive};
use super::dirty::{DirtyPages, PAGE_SIZE};
use super::protocol::{Hello, MigrationSecret, RamRange, Refusal};
use super::source::{SendOptions, SourceMachine, send};
use super::*;
use crate::layout::Layout;
use crate::memory::GuestRam;

const SIZE: u64 = 16 << 20;
const PAGES: u64 = SIZE / PAGE_SIZE;

/// A machine without a CPU: a thread that writes to memory replaces it.
struct Guest {
    ram: GuestRam,
    /// Whether the guest runs; the writer writes only then.
    running: Arc<AtomicBool>,
    /// Held by the writer while it writes.
    writing: Arc<Mutex<()>>,
    state: Vec<u8>,
    throttle: Arc<AtomicU64>,
    refusals: Vec<Refusal>,
    /// Pages that count as written once more while the guest is stopped.
    after_stop: Vec<u64>,
    fail: Option<&'static str>,
    logging: bool,
    /// The log begins with every page set, as KVM's does.
    all_logged: bool,
    throttled: Vec<u8>,
    /// How long a read of all its memory takes.
    digest_takes: Duration,
    /// Early states that are left to send, or have arrived.
    early: VecDeque<Vec<u8>>,
}

impl Guest {
    fn new() -> Self {
        Self {
            ram: GuestRam::new(&Layout::new(SIZE, 40).unwrap(), None).unwrap(),
            running: Arc::default(),
            writing: Arc::default(),
            state: b"the state of a machine".to_vec(),
            throttle: Arc::default(),
            refusals: Vec::new(),
            after_stop: Vec::new(),
            fail: None,
            logging: false,
            all_logged: false,
            throttled: Vec::new(),
            digest_takes: Duration::ZERO,
            early: VecDeque::new(),
        }
    }

    /// A guest that runs, with a few pages of memory.
    fn running() -> Self {
        let guest = Self::new();
        guest.running.store(true, Ordering::SeqCst);
        for page in [0, 1, 300, 1000] {
            guest
                .memory()
                .write_obj(page, GuestAddress(page << 12))
                .unwrap();
        }
        guest
    }

    fn memory(&self) -> &GuestMemory {
        self.ram.memory()
    }

    fn image(&self) -> RamImage {
        RamImage::new(&self.ram)
    }

    fn content(&self) -> Vec<u8> {
        let mut content = vec![0; usize::try_from(SIZE).unwrap()];
        self.image().read(0, &mut content).unwrap();
        content
    }

    fn runs(&self) -> bool {
        self.running.load(Ordering::SeqCst)
    }

    fn step(&self, name: &str) -> Result<(), MachineError> {
        match self.fail {
            Some(step) if step == name => Err(format!("{name} fails").into()),
            _ => Ok(()),
        }
    }

    /// Starts a thread that writes while the guest runs, until `end` is set; `pages` different
    /// ones, with `pause` between two writes. Half of the writes make a page zero again.
    fn write_pages(&self, pages: u64, pause: Duration, end: &Arc<AtomicBool>) -> JoinHandle<()> {
        let (memory, running, writing, throttle, end) = (
            self.memory().clone(),
            self.running.clone(),
            self.writing.clone(),
            self.throttle.clone(),
            end.clone(),
        );
        thread::spawn(move || {
            let mut random = 1_u64;
            while !end.load(Ordering::Relaxed) {
                {
                    let _writing = writing.lock();
                    if running.load(Ordering::SeqCst) {
                        random = random
                            .wrapping_mul(6_364_136_223_846_793_005)
                            .wrapping_add(1);
                        let page = (random >> 33) % pages * (PAGES / pages);
                        let value = if random >> 60 & 1 == 0 { 0 } else { random };
                        for offset in [0, 2048, 4088] {
                            memory
                                .write_obj(value, GuestAddress((page << 12) + offset))
                                .unwrap();
                        }
                    }
                }
                let share = 100 - throttle.load(Ordering::Relaxed);
                thread::sleep(pause * 100 / u32::try_from(share).unwrap());
            }
        })
    }
}

impl SourceMachine for Guest {
    fn compat(&mut self) -> Result<Value, MachineError> {
        self.step("compat")?;
        Ok(json!({"cpu": "none"}))
    }

    fn start_logging(&mut self) -> Result<(), MachineError> {
        self.step("start_logging")?;
        self.logging = true;
        self.all_logged = true;
        Ok(())
    }

    fn take_dirty(&mut self, pages: &mut DirtyPages) -> Result<(), MachineError> {
        self.step("take_dirty")?;
        assert!(self.logging);
        if std::mem::take(&mut self.all_logged) {
            pages.mark(0..SIZE);
        }
        for region in self.memory().iter() {
            pages.merge(0, &vm_memory::MmapRegion::bitmap(region).get_and_reset());
        }
        if !self.runs() {
            for page in self.after_stop.drain(..) {
                pages.mark(page << 12..(page << 12) + 1);
            }
        }
        Ok(())
    }

    fn throttle(&mut self, percent: u8) {
        self.throttled.push(percent);
        self.throttle.store(percent.into(), Ordering::Relaxed);
    }

    fn early(&mut self) -> Result<Option<Vec<u8>>, MachineError> {
        self.step("early")?;
        Ok(self.early.pop_front())
    }

    fn stop(&mut self) -> Result<(), MachineError> {
        let _writing = self.writing.lock();
        self.running.store(false, Ordering::SeqCst);
        self.step("stop")
    }

    fn verifies_memory(&self) -> bool {
        !self.digest_takes.is_zero()
    }

    fn digest_memory(&mut self) -> Result<(), MachineError> {
        assert!(!self.runs());
        thread::sleep(self.digest_takes);
        self.step("digest_memory")
    }

    fn save(&mut self, to: &mut dyn Write) -> Result<(), MachineError> {
        assert!(!self.runs());
        to.write_all(&self.state)?;
        self.step("save")
    }

    fn commit(&mut self) -> Result<(), MachineError> {
        self.step("commit")
    }

    fn resume(&mut self) -> Result<(), MachineError> {
        self.step("resume")?;
        self.running.store(true, Ordering::SeqCst);
        Ok(())
    }

    fn stop_logging(&mut self) {
        self.logging = false;
    }
}

impl DestinationMachine for Guest {
    fn prepare(&mut self, hello: &Hello) -> Result<RamImage, Vec<Refusal>> {
        assert_eq!(hello.compat, json!({"cpu": "none"}));
        if self.refusals.is_empty() {
            Ok(self.image())
        } else {
            Err(self.refusals.clone())
        }
    }

    fn try_out(&mut self, hello: &Hello) -> Result<Vec<RamRange>, Vec<Refusal>> {
        self.prepare(hello).map(|ram| ram.ranges())
    }

    fn take_early(&mut self, state: &[u8]) -> Result<(), MachineError> {
        self.step("take_early")?;
        self.early.push_back(state.to_vec());
        Ok(())
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), MachineError> {
        self.step("restore")?;
        self.state = state.to_vec();
        Ok(())
    }

    fn run(&mut self, _: Go) -> Result<(), MachineError> {
        self.step("run")?;
        self.running.store(true, Ordering::SeqCst);
        Ok(())
    }
}

fn send_options(connections: u16) -> SendOptions {
    SendOptions {
        connections,
        limits: Limits {
            downtime: Duration::from_millis(20),
            timeout: Duration::from_secs(60),
            switch: Duration::ZERO,
        },
        timeouts: timeouts(),
        standstill: Duration::from_secs(20),
        state_max: 8 << 20,
        secret: MigrationSecret::default(),
    }
}

fn timeouts() -> Timeouts {
    Timeouts {
        frame: Duration::from_secs(20),
        accept: Duration::from_secs(20),
        ready: Duration::from_secs(20),
        done: Duration::from_secs(20),
    }
}

fn receive_options() -> ReceiveOptions {
    ReceiveOptions {
        timeouts: timeouts(),
        ..ReceiveOptions::default()
    }
}

fn accept_from(waiting: &Receiver<UnixStream>) -> io::Result<UnixStream> {
    waiting
        .recv_timeout(Duration::from_millis(5))
        .map_err(|_| ErrorKind::WouldBlock.into())
}

/// Runs both ends of a migration, with the source's connections wrapped by `wrap`. Returns the
/// outcomes of source and destination.
fn migrate<C: Connection>(
    source: &mut Guest,
    destination: &mut Guest,
    send_options: &SendOptions,
    receive_options: &ReceiveOptions,
    monitor: &Monitor,
    wrap: impl Fn(UnixStream) -> C,
) -> (Outcome, Outcome) {
    let (mine, theirs) = UnixStream::pair().unwrap();
    let (connected, waiting): (Sender<UnixStream>, _) = channel();
    thread::scope(|scope| {
        let arrives = scope.spawn(|| {
            let waiting = waiting;
            receive(
                destination,
                theirs,
                &mut || accept_from(&waiting),
                receive_options,
                &Monitor::default(),
            )
        });
        let mut connect = || {
            let (mine, theirs) = UnixStream::pair()?;
            connected
                .send(theirs)
                .map_err(|_| io::Error::from(ErrorKind::ConnectionRefused))?;
            Ok(wrap(mine))
        };
        let ram = source.image();
        let left = send(
            source,
            &ram,
            wrap(mine),
            &mut connect,
            send_options,
            monitor,
        );
        (left, arrives.join().unwrap())
    })
}

fn move_simply(
    source: &mut Guest,
    destination: &mut Guest,
    connections: u16,
) -> (Outcome, Outcome) {
    migrate(
        source,
        destination,
        &send_options(connections),
        &receive_options(),
        &Monitor::default(),
        |stream| stream,
    )
}

/// What must hold for any two ends, after any fault.
fn check_one_owner(source: &Guest, destination: &Guest, left: &Outcome, arrived: &Outcome) {
    assert!(!(source.runs() && destination.runs()), "both run");
    match left {
        Outcome::Source { not_resumed, .. } => {
            assert!(not_resumed.is_none() && source.runs() && !destination.runs());
            assert!(!source.logging, "nothing is left on");
            assert!(!matches!(arrived, Outcome::Destination));
        }
        Outcome::Destination => {
            assert!(!source.runs() && destination.runs());
            assert!(matches!(arrived, Outcome::Destination));
        }
        Outcome::Indeterminate { .. } => {
            assert!(!source.runs());
            assert!(!matches!(arrived, Outcome::Source { .. }), "{arrived:?}");
        }
    }
    match arrived {
        Outcome::Source { .. } => assert!(matches!(left, Outcome::Source { .. }), "{left:?}"),
        Outcome::Destination => assert!(destination.runs()),
        Outcome::Indeterminate { .. } => assert!(!destination.runs()),
    }
    if destination.runs() {
        assert!(source.content() == destination.content(), "memory differs");
        assert_eq!(source.state, destination.state);
    }
}

#[test]
fn memory_that_changes_meanwhile_arrives_as_it_was_at_the_stop() {
    for (connections, pages) in [(1, 64), (3, 4096), (16, 1024)] {
        let (mut source, mut destination) = (Guest::running(), Guest::new());
        // Larger than one frame.
        source.state = (0..3_000_000_u32).map(|n| n.to_le_bytes()[1]).collect();
        source.after_stop = vec![4095];
        let end = Arc::default();
        let writer = source.write_pages(pages, Duration::from_micros(20), &end);
        let monitor = Monitor::default();
        let (left, arrived) = migrate(
            &mut source,
            &mut destination,
            &send_options(connections),
            &receive_options(),
            &monitor,
            |stream| stream,
        );
        assert!(matches!(left, Outcome::Destination), "{left:?}");
        check_one_owner(&source, &destination, &left, &arrived);
        end.store(true, Ordering::Relaxed);
        writer.join().unwrap();
        let seen = monitor.progress.snapshot();
        assert_eq!((seen.phase, seen.ram_bytes), (Phase::Done, SIZE));
        assert!(seen.round >= 2 && seen.pages + seen.zero_pages >= PAGES);
        assert!(seen.bytes_sent > seen.pages * PAGE_SIZE && seen.bytes_left == 0);
        assert!(seen.downtime.is_some() && seen.forecast.is_some());
    }
}

#[test]
fn early_states_arrive_in_order_before_the_stop() {
    for connections in [1, 3] {
        let (mut source, mut destination) = (Guest::running(), Guest::new());
        // More than the queue of the destination holds.
        let states: VecDeque<Vec<u8>> = (1..=9).map(|n| vec![n; 100_000]).collect();
        source.early = states.clone();
        let (left, arrived) = move_simply(&mut source, &mut destination, connections);
        assert!(matches!(left, Outcome::Destination), "{left:?}");
        check_one_owner(&source, &destination, &left, &arrived);
        assert!(destination.early == states);
    }
    for (source_fails, destination_fails) in [(Some("early"), None), (None, Some("take_early"))] {
        let (mut source, mut destination) = (Guest::running(), Guest::new());
        source.early = (1..=9).map(|n| vec![n; 100_000]).collect();
        (source.fail, destination.fail) = (source_fails, destination_fails);
        let (left, arrived) = move_simply(&mut source, &mut destination, 2);
        check_one_owner(&source, &destination, &left, &arrived);
        assert!(matches!(left, Outcome::Source { .. }), "{left:?}");
        // The other end may see only that the connection is closed.
        let (step, outcome) = match (source_fails, destination_fails) {
            (Some(step), _) => (step, &left),
            (_, step) => (step.unwrap(), &arrived),
        };
        assert!(format!("{outcome:?}").contains(step), "{outcome:?}");
    }
}

#[test]
fn untouched_pages_cost_neither_side_memory() {
    let (mut source, mut destination) = (Guest::running(), Guest::new());
    let blocks = |guest: &Guest| {
        use std::os::unix::fs::MetadataExt as _;
        guest.ram.file().metadata().unwrap().blocks()
    };
    let before = blocks(&source);
    let monitor = Monitor::default();
    let (left, _) = migrate(
        &mut source,
        &mut destination,
        &send_options(2),
        &receive_options(),
        &monitor,
        |stream| stream,
    );
    assert!(matches!(left, Outcome::Destination));
    // Page 0 holds the number 0, for which the source's file has a page of 8 blocks.
    assert_eq!(
        (blocks(&source), blocks(&destination)),
        (before, before - 8)
    );
    assert_eq!(monitor.progress.snapshot().pages, 3);
}

#[test]
fn a_guest_that_writes_too_fast_is_held_back_and_may_stay() {
    let (mut source, mut destination) = (Guest::running(), Guest::new());
    let end = Arc::default();
    let writer = source.write_pages(64, Duration::ZERO, &end);
    let mut options = send_options(1);
    // Zero downtime: nothing fits.
    options.limits.downtime = Duration::ZERO;
    options.limits.switch = Duration::from_millis(1);
    options.limits.timeout = Duration::from_millis(400);
    let monitor = Monitor::default();
    let (left, arrived) = migrate(
        &mut source,
        &mut destination,
        &options,
        &receive_options(),
        &monitor,
        |stream| stream,
    );
    check_one_owner(&source, &destination, &left, &arrived);
    end.store(true, Ordering::Relaxed);
    writer.join().unwrap();
    match left {
        Outcome::Source {
            why: MigrationError::TooSlow { .. },
            ..
        } => {
            // Any throttling is undone.
            assert!(source.throttled.is_empty() || source.throttled.last() == Some(&0));
            assert!(matches!(
                arrived,
                Outcome::Source {
                    why: MigrationError::PeerFailed { .. },
                    ..
                }
            ));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn reasons_of_the_destination_come_to_the_source() {
    let (mut source, mut destination) = (Guest::running(), Guest::new());
    let reason = Refusal {
        what: "mtu of nic0".to_owned(),
        source: "9000".to_owned(),
        destination: "1500".to_owned(),
        remedy: "vdpa dev add ... mtu 9000".to_owned(),
    };
    destination.refusals = vec![reason.clone(), Refusal::default()];
    let (left, arrived) = move_simply(&mut source, &mut destination, 4);
    check_one_owner(&source, &destination, &left, &arrived);
    match left {
        Outcome::Source {
            why: MigrationError::Refused { reasons },
            ..
        } => assert_eq!(reasons, [reason, Refusal::default()]),
        other => panic!("{other:?}"),
    }
}

/// The result of a query for its source and its destination, and a later migration to the same
/// destination.
#[test]
fn a_source_that_only_asks_changes_nothing() {
    let ask = |source: &Guest, destination: &mut Guest| {
        let (mine, theirs) = UnixStream::pair().unwrap();
        thread::scope(|scope| {
            let asked = scope.spawn(|| {
                let accept = &mut || Err(ErrorKind::WouldBlock.into());
                let options = receive_options();
                receive(destination, theirs, accept, &options, &Monitor::default())
            });
            let secret = MigrationSecret::default();
            let compat = json!({"cpu": "none"});
            let answer = try_out(compat, &source.image(), mine, secret, &timeouts());
            (answer, asked.join().unwrap())
        })
    };
    let (mut source, mut destination) = (Guest::running(), Guest::new());
    let before = source.content();
    let (answer, arrived) = ask(&source, &mut destination);
    answer.unwrap();
    assert!(
        matches!(
            arrived,
            Outcome::Source {
                why: MigrationError::OnlyTried,
                ..
            }
        ),
        "{arrived:?}"
    );
    assert!(source.runs() && !source.logging && !destination.runs());
    assert!(source.content() == before && destination.content().iter().all(|&byte| byte == 0));

    let reason = Refusal {
        what: "features of nic0".to_owned(),
        ..Refusal::default()
    };
    destination.refusals = vec![reason.clone()];
    let (answer, _) = ask(&source, &mut destination);
    match answer {
        Err(MigrationError::Refused { reasons }) => assert_eq!(reasons, [reason]),
        other => panic!("{other:?}"),
    }
    destination.refusals.clear();

    let mut other = Guest::new();
    other.ram = GuestRam::new(&Layout::new(2 * SIZE, 40).unwrap(), None).unwrap();
    let (answer, _) = ask(&source, &mut other);
    assert!(format!("{answer:?}").contains("guest memory"), "{answer:?}");

    let (left, arrived) = move_simply(&mut source, &mut destination, 2);
    assert!(matches!(left, Outcome::Destination), "{left:?}");
    check_one_owner(&source, &destination, &left, &arrived);
}

#[test]
fn another_memory_size_is_refused() {
    let (mut source, mut destination) = (Guest::running(), Guest::new());
    destination.ram = GuestRam::new(&Layout::new(2 * SIZE, 40).unwrap(), None).unwrap();
    let (left, arrived) = move_simply(&mut source, &mut destination, 1);
    check_one_owner(&source, &destination, &left, &arrived);
    assert!(format!("{left:?}").contains("guest memory"), "{left:?}");
}

#[test]
fn a_step_that_fails_before_go_leaves_the_guest_at_the_source() {
    for step in [
        "compat",
        "start_logging",
        "take_dirty",
        "stop",
        "digest_memory",
        "save",
        "commit",
    ] {
        let (mut source, mut destination) = (Guest::running(), Guest::new());
        source.fail = Some(step);
        source.digest_takes = Duration::from_millis(1);
        let (left, arrived) = move_simply(&mut source, &mut destination, 2);
        check_one_owner(&source, &destination, &left, &arrived);
        assert!(matches!(left, Outcome::Source { .. }), "{step}: {left:?}");
        assert!(format!("{left:?}").contains(step), "{step}: {left:?}");
    }
    let (mut source, mut destination) = (Guest::running(), Guest::new());
    destination.fail = Some("restore");
    let (left, arrived) = move_simply(&mut source, &mut destination, 2);
    check_one_owner(&source, &destination, &left, &arrived);
    // The source reports the destination's reason.
    assert!(format!("{left:?}").contains("restore fails"), "{left:?}");

    let (mut source, mut destination) = (Guest::running(), Guest::new());
    source.fail = Some("resume");
    source.state = vec![0; 9 << 20];
    let (left, arrived) = move_simply(&mut source, &mut destination, 1);
    assert!(!source.runs() && !destination.runs());
    assert!(matches!(arrived, Outcome::Source { .. }));
    match left {
        Outcome::Source {
            not_resumed: Some(error),
            ..
        } => assert_eq!(error.to_string(), "resume fails"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_guest_that_cannot_run_after_go_runs_nowhere() {
    let (mut source, mut destination) = (Guest::running(), Guest::new());
    destination.fail = Some("run");
    let (left, arrived) = move_simply(&mut source, &mut destination, 1);
    check_one_owner(&source, &destination, &left, &arrived);
    assert!(matches!(arrived, Outcome::Indeterminate { .. }));
    match left {
        Outcome::Indeterminate {
            why: MigrationError::PeerFailed { text, .. },
        } => assert!(text.contains("run fails"), "{text}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn it_can_be_cancelled_at_any_moment() {
    let mut ends = [0; 2];
    for delay in (0..40).map(|n| Duration::from_micros(n * 500)) {
        let (mut source, mut destination) = (Guest::running(), Guest::new());
        let end = Arc::default();
        let writer = source.write_pages(512, Duration::from_micros(10), &end);
        let monitor = Monitor::default();
        let cancel = monitor.cancel.clone();
        let canceller = thread::spawn(move || {
            thread::sleep(delay);
            cancel.cancel();
        });
        let started = Instant::now();
        let (left, arrived) = migrate(
            &mut source,
            &mut destination,
            &send_options(3),
            &receive_options(),
            &monitor,
            |stream| stream,
        );
        assert!(started.elapsed() < Duration::from_secs(10));
        check_one_owner(&source, &destination, &left, &arrived);
        end.store(true, Ordering::Relaxed);
        writer.join().unwrap();
        canceller.join().unwrap();
        match left {
            Outcome::Source {
                why: MigrationError::Cancelled,
                ..
            } => ends[0] += 1,
            Outcome::Destination => ends[1] += 1,
            other => panic!("{other:?}"),
        }
    }
    assert!(ends[0] > 0, "{ends:?}");
}

/// Both ends over TCP, the destination with these options.
fn migrate_by_tcp(
    source: &mut Guest,
    destination: &mut Guest,
    receive_options: &ReceiveOptions,
) -> (Outcome, Outcome) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::scope(|scope| {
        let arrives = scope.spawn(move || {
            let (first, _) = listener.accept().unwrap();
            listener.set_nonblocking(true).unwrap();
            let mut accept = || {
                thread::sleep(Duration::from_millis(1));
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(false)?;
                Ok(stream)
            };
            let monitor = Monitor::default();
            receive(destination, first, &mut accept, receive_options, &monitor)
        });
        let first = TcpStream::connect(address).unwrap();
        let ram = source.image();
        let left = send(
            source,
            &ram,
            first,
            &mut || TcpStream::connect(address),
            &send_options(4),
            &Monitor::default(),
        );
        (left, arrives.join().unwrap())
    })
}

#[test]
fn tcp_carries_the_guest_and_the_reasons() {
    let (mut source, mut destination) = (Guest::running(), Guest::new());
    let (left, arrived) = migrate_by_tcp(&mut source, &mut destination, &receive_options());
    assert!(matches!(left, Outcome::Destination), "{left:?}");
    check_one_owner(&source, &destination, &left, &arrived);

    for _ in 0..10 {
        let (mut source, mut destination) = (Guest::running(), Guest::new());
        // Much data is in flight when the destination hangs up.
        for page in 0..PAGES {
            let address = GuestAddress(page << 12);
            source.memory().write_obj(page + 1, address).unwrap();
        }
        let options = ReceiveOptions {
            rounds_max: 0,
            ..receive_options()
        };
        let (left, arrived) = migrate_by_tcp(&mut source, &mut destination, &options);
        check_one_owner(&source, &destination, &left, &arrived);
        match left {
            Outcome::Source {
                why: MigrationError::PeerFailed { text, .. },
                ..
            } => assert!(text.contains("bytes of memory"), "{text}"),
            other => panic!("{other:?}"),
        }
    }
}

//! A link that breaks, goes silent or changes a byte, at every byte of the exchange in each
//! direction. In every case at most one side runs, and each side's outcome is true.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;

use super::{
    Connection, Guest, Monitor, Outcome, check_one_owner, migrate, receive_options, send_options,
};

/// The fault of the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// It breaks, and both ends notice: a cable, a killed process.
    Cut,
    /// Nothing passes any more, and neither end is notified.
    Silence,
    /// One byte changes.
    Flip,
}

/// The direction of the byte where the fault happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    ToDestination,
    ToSource,
}

#[derive(Debug)]
struct Fault {
    kind: Kind,
    way: Way,
    at: usize,
    passed: [AtomicUsize; 2],
    happened: AtomicBool,
}

impl Fault {
    fn new(kind: Kind, way: Way, at: usize) -> Arc<Self> {
        Arc::new(Self {
            kind,
            way,
            at,
            passed: Default::default(),
            happened: AtomicBool::new(false),
        })
    }

    /// Number of bytes, of `count`, that may still pass in this direction.
    fn room(&self, way: Way, count: usize) -> usize {
        if self.happened.load(Ordering::SeqCst) && self.kind != Kind::Flip {
            return 0;
        }
        if way != self.way || self.kind == Kind::Flip {
            return count;
        }
        let passed = self.passed[way as usize].load(Ordering::SeqCst);
        count.min(self.at.saturating_sub(passed))
    }

    /// Counts passing bytes, and changes the selected one.
    fn pass(&self, way: Way, bytes: &mut [u8]) {
        let before = self.passed[way as usize].fetch_add(bytes.len(), Ordering::SeqCst);
        if way == self.way
            && self.kind == Kind::Flip
            && let Some(byte) = self.at.checked_sub(before).and_then(|at| bytes.get_mut(at))
        {
            *byte ^= 0x41;
            self.happened.store(true, Ordering::SeqCst);
        }
    }
}

/// The source's end of the link.
struct Faulty {
    stream: UnixStream,
    fault: Arc<Fault>,
}

impl Faulty {
    /// The result of a call that nothing passes.
    fn fail(&self, cut: io::Result<usize>) -> io::Result<usize> {
        self.fault.happened.store(true, Ordering::SeqCst);
        if self.fault.kind == Kind::Silence {
            thread::sleep(Duration::from_millis(5));
            return Err(ErrorKind::WouldBlock.into());
        }
        let _ = self.stream.shutdown(Shutdown::Both);
        cut
    }
}

impl Read for Faulty {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let room = self.fault.room(Way::ToSource, buffer.len());
        if room == 0 {
            return self.fail(Ok(0));
        }
        let count = self.stream.read(&mut buffer[..room])?;
        self.fault.pass(Way::ToSource, &mut buffer[..count]);
        Ok(count)
    }
}

impl Write for Faulty {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = self.fault.room(Way::ToDestination, bytes.len());
        if room == 0 {
            if self.fault.kind == Kind::Silence {
                // The kernel accepts it and never delivers it.
                self.fault.happened.store(true, Ordering::SeqCst);
                return Ok(bytes.len());
            }
            return self.fail(Err(ErrorKind::BrokenPipe.into()));
        }
        let mut passing = bytes[..room].to_vec();
        self.fault.pass(Way::ToDestination, &mut passing);
        // They count as passed, so they must pass, however slow the other end is.
        let mut rest = &passing[..];
        while !rest.is_empty() {
            match self.stream.write(rest) {
                Ok(count) => rest = &rest[count..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(room)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Connection for Faulty {
    fn set_timeout(&mut self, timeout: Duration) -> io::Result<()> {
        self.stream.set_timeout(timeout)
    }
}

/// One migration over such a link. Returns the outcomes of both ends, and the bytes that passed in
/// each direction.
fn run(fault: &Arc<Fault>, connections: u16, patience: Duration) -> (String, [usize; 2]) {
    let (mut source, mut destination) = (Guest::running(), Guest::new());
    source.after_stop = vec![300, 4000];
    let mut send = send_options(connections);
    let mut receive = receive_options();
    for timeouts in [&mut send.timeouts, &mut receive.timeouts] {
        timeouts.frame = patience;
        timeouts.accept = patience;
        timeouts.ready = patience;
        timeouts.done = patience;
    }
    let (left, arrived) = migrate(
        &mut source,
        &mut destination,
        &send,
        &receive,
        &Monitor::default(),
        |stream| Faulty {
            stream,
            fault: fault.clone(),
        },
    );
    check_one_owner(&source, &destination, &left, &arrived);
    let name = |outcome: &Outcome| match outcome {
        Outcome::Source { .. } => "source",
        Outcome::Destination => "destination",
        Outcome::Indeterminate { .. } => "indeterminate",
    };
    (
        format!("{} {}", name(&left), name(&arrived)),
        [0, 1].map(|way| fault.passed[way].load(Ordering::SeqCst)),
    )
}

/// Bytes that pass in each direction without a fault.
fn undisturbed(connections: u16) -> [usize; 2] {
    let fault = Fault::new(Kind::Flip, Way::ToSource, usize::MAX);
    let (ends, passed) = run(&fault, connections, Duration::from_secs(20));
    assert_eq!(ends, "destination destination");
    passed
}

/// All positions near both ends, and some in between, in the pages.
fn positions(total: usize, edge: usize, step: usize) -> Vec<usize> {
    (0..total)
        .filter(|&at| at < edge || at + edge >= total || at.is_multiple_of(step))
        .collect()
}

/// Runs all of them on several threads, and counts the outcomes of the two ends.
fn sweep(
    faults: Vec<(Arc<Fault>, u16)>,
    threads: usize,
    patience: Duration,
) -> BTreeMap<String, usize> {
    let (queue, ends) = (Mutex::new(faults), Mutex::new(BTreeMap::new()));
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let Some((fault, connections)) = queue.lock().pop() else {
                        break;
                    };
                    let (end, _) = run(&fault, connections, patience);
                    *ends.lock().entry(end).or_insert(0) += 1;
                }
            });
        }
    });
    ends.into_inner()
}

fn faults(kind: Kind, connections: u16, edge: usize, step: usize) -> Vec<(Arc<Fault>, u16)> {
    let totals = undisturbed(connections);
    let mut faults = Vec::new();
    for (way, total) in [Way::ToDestination, Way::ToSource].into_iter().zip(totals) {
        for at in positions(total, edge, step) {
            faults.push((Fault::new(kind, way, at), connections));
        }
    }
    faults
}

const LONG: Duration = Duration::from_secs(20);

#[test]
fn a_cut_at_any_byte_leaves_one_owner_or_none() {
    let ends = sweep(faults(Kind::Cut, 1, 260, 61), 4, LONG);
    // Every row of the table in the module's documentation occurred, and no other.
    let rows: Vec<&str> = ends.keys().map(String::as_str).collect();
    let all = [
        "indeterminate destination",
        "indeterminate indeterminate",
        "source indeterminate",
        "source source",
    ];
    assert_eq!(rows, all, "{ends:?}");
}

#[test]
fn a_cut_of_several_connections_leaves_one_owner_or_none() {
    let ends = sweep(faults(Kind::Cut, 3, 40, 211), 4, LONG);
    assert!(ends.len() >= 3, "{ends:?}");
}

#[test]
fn a_changed_byte_never_reaches_a_guest_that_runs() {
    let ends = sweep(faults(Kind::Flip, 1, 260, 61), 4, Duration::from_secs(1));
    assert!(!ends.contains_key("destination destination"), "{ends:?}");
    assert!(ends["source source"] > 300, "{ends:?}");
    let ends = sweep(faults(Kind::Flip, 3, 20, 401), 4, Duration::from_secs(1));
    assert!(!ends.contains_key("destination destination"), "{ends:?}");
}

#[test]
fn silence_at_any_moment_is_noticed_by_both() {
    let ends = sweep(
        faults(Kind::Silence, 1, 70, 1009),
        24,
        Duration::from_millis(1500),
    );
    let rows: Vec<&str> = ends.keys().map(String::as_str).collect();
    for row in [
        "source source",
        "source indeterminate",
        "indeterminate destination",
    ] {
        assert!(rows.contains(&row), "{ends:?}");
    }
    let ends = sweep(
        faults(Kind::Silence, 3, 8, 2003),
        24,
        Duration::from_millis(1500),
    );
    assert!(ends.contains_key("source source"), "{ends:?}");
}

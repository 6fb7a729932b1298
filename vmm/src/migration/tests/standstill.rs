//! How long a stopped guest waits for the peer: one limit for everything, not one per frame. The
//! guest resumes before the peer receives the reason.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::hostile::Peer;
use super::{Connection, Guest, MigrationError, Monitor, Outcome, Phase, SendOptions, send};
use crate::migration::channel::{Channel, Halt, Standstill};
use crate::migration::protocol::{FRAME_HEADER_LEN, Message, Session};

/// The guest's waiting time in these tests, and a time in which every machine finishes.
const STANDSTILL: Duration = Duration::from_millis(400);
const SLOW: Duration = Duration::from_secs(8);

/// The source's end of a link that records whether the guest ran when the reason was sent.
struct Noting {
    stream: UnixStream,
    running: Arc<AtomicBool>,
    notified: Arc<Mutex<Vec<bool>>>,
}

impl Read for Noting {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.read(buffer)
    }
}

impl Write for Noting {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // CANCEL and FAILED.
        if matches!(bytes, [13 | 14, 0, 0, 0, ..]) {
            let runs = self.running.load(Ordering::SeqCst);
            self.notified.lock().push(runs);
        }
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Connection for Noting {
    fn set_timeout(&mut self, timeout: Duration) -> io::Result<()> {
        self.stream.set_timeout(timeout)
    }
}

/// The outcome, its duration, and whether the guest ran each time that the reason was sent.
struct Ended {
    outcome: Outcome,
    took: Duration,
    notified: Vec<bool>,
}

/// Sends a guest with `state` bytes of state to a destination that runs `play` and then hangs up.
fn send_to(options: &SendOptions, state: usize, play: impl FnOnce(&mut Peer)) -> Ended {
    let (mine, theirs) = UnixStream::pair().unwrap();
    let mut guest = Guest::running();
    guest.state = vec![7; state];
    let notified = Arc::default();
    let noting = Noting {
        stream: theirs,
        running: guest.running.clone(),
        notified: Arc::clone(&notified),
    };
    let started = Instant::now();
    let (outcome, took) = thread::scope(|scope| {
        let leaves = scope.spawn(|| {
            let ram = guest.image();
            let connect = &mut || Err(io::ErrorKind::NotConnected.into());
            let outcome = send(
                &mut guest,
                &ram,
                noting,
                connect,
                options,
                &Monitor::default(),
            );
            (outcome, started.elapsed())
        });
        let mut peer = Peer::new(mine);
        play(&mut peer);
        let ended = leaves.join().unwrap();
        let _ = peer.stream.shutdown(Shutdown::Both);
        ended
    });
    assert!(guest.runs() && !guest.logging, "{outcome:?}");
    let notified = notified.lock().clone();
    Ended {
        outcome,
        took,
        notified,
    }
}

fn options() -> SendOptions {
    SendOptions {
        standstill: STANDSTILL,
        ..super::send_options(1)
    }
}

fn accept(peer: &mut Peer) {
    assert_eq!(peer.next_message(), Some("HELLO"));
    peer.say(&Message::Accept {
        session: Session([9; 16]),
        connections: 1,
    });
}

fn error(outcome: &Outcome) -> &MigrationError {
    match outcome {
        Outcome::Source {
            why,
            not_resumed: None,
        } => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_silent_destination_does_not_hold_a_stopped_guest() {
    let ended = send_to(&options(), 10, |peer| {
        accept(peer);
        while peer.next_message() != Some("STATE_END") {}
        assert_eq!(
            peer.next_message(),
            Some("FAILED"),
            "the reason arrives in the end"
        );
    });
    let Ended {
        outcome,
        took,
        notified,
    } = ended;
    assert!(took >= STANDSTILL && took < SLOW, "{took:?}");
    match error(&outcome) {
        MigrationError::StoodStill {
            phase,
            connection,
            limit,
        } => assert_eq!((*phase, *connection, *limit), (Phase::Ready, 0, STANDSTILL)),
        other => panic!("{other:?}"),
    }
    assert_eq!(notified, [true], "the guest resumes first");
    let text = error(&outcome).to_string();
    assert!(
        text.contains("the guest was stopped") && text.contains("0.4 s"),
        "{text}"
    );
}

#[test]
fn a_destination_that_takes_nothing_any_more_does_not_hold_a_stopped_guest() {
    // More than fits into a socket; the peer reads none of it.
    let ended = send_to(&options(), 4 << 20, accept);
    assert!(ended.took < SLOW, "{:?}", ended.took);
    assert!(
        matches!(
            error(&ended.outcome),
            MigrationError::StoodStill {
                phase: Phase::Stop,
                ..
            }
        ),
        "{:?}",
        ended.outcome
    );
}

#[test]
fn a_destination_that_takes_a_little_now_and_then_does_not_hold_a_stopped_guest() {
    let ended = send_to(&options(), 4 << 20, |peer| {
        accept(peer);
        let started = Instant::now();
        let mut buffer = vec![0; 40 << 10];
        while started.elapsed() < 2 * STANDSTILL {
            let _ = peer.stream.read(&mut buffer);
            thread::sleep(Duration::from_millis(20));
        }
    });
    assert!(ended.took < SLOW, "{:?}", ended.took);
    assert!(
        matches!(error(&ended.outcome), MigrationError::StoodStill { .. }),
        "{:?}",
        ended.outcome
    );
}

#[test]
fn a_busy_destination_does_not_hold_a_stopped_guest() {
    let ended = send_to(&options(), 10, |peer| {
        accept(peer);
        while peer.next_message() != Some("STATE_END") {}
        let started = Instant::now();
        // More often than a read waits, so that no read ever waits.
        while started.elapsed() < 3 * STANDSTILL {
            peer.say(&Message::Alive);
            thread::sleep(Duration::from_millis(5));
        }
    });
    assert!(ended.took < 2 * STANDSTILL, "{:?}", ended.took);
    assert!(
        matches!(error(&ended.outcome), MigrationError::StoodStill { .. }),
        "{:?}",
        ended.outcome
    );
}

#[test]
fn alive_does_not_stretch_a_wait_that_has_an_end() {
    let mut options = super::send_options(1);
    options.timeouts.accept = STANDSTILL;
    let ended = send_to(&options, 10, |peer| {
        assert_eq!(peer.next_message(), Some("HELLO"));
        let started = Instant::now();
        while started.elapsed() < 3 * STANDSTILL {
            peer.say(&Message::Alive);
            thread::sleep(Duration::from_millis(5));
        }
    });
    assert!(ended.took < 2 * STANDSTILL, "{:?}", ended.took);
    assert!(
        matches!(
            error(&ended.outcome),
            MigrationError::Silent {
                phase: Phase::Offer,
                ..
            }
        ),
        "{:?}",
        ended.outcome
    );
}

#[test]
fn after_go_the_source_waits_as_long_as_before() {
    // Much longer than a stopped guest that could still resume would wait.
    let (mine, theirs) = UnixStream::pair().unwrap();
    let mut guest = Guest::running();
    let options = options();
    let outcome = thread::scope(|scope| {
        let leaves = scope.spawn(|| {
            let ram = guest.image();
            let connect = &mut || Err(io::ErrorKind::NotConnected.into());
            let monitor = Monitor::default();
            send(&mut guest, &ram, theirs, connect, &options, &monitor)
        });
        let mut peer = Peer::new(mine);
        accept(&mut peer);
        while peer.next_message() != Some("STATE_END") {}
        peer.say(&Message::Ready);
        assert_eq!(peer.next_message(), Some("GO"));
        thread::sleep(2 * STANDSTILL);
        peer.say(&Message::Done);
        leaves.join().unwrap()
    });
    assert!(matches!(outcome, Outcome::Destination), "{outcome:?}");
    assert!(!guest.runs());
}

/// The source reads all of its memory for longer than a stopped guest waits for the peer.
#[test]
fn the_time_in_which_the_source_reads_its_memory_is_not_the_destinations() {
    let (mine, theirs) = UnixStream::pair().unwrap();
    let mut guest = Guest::running();
    guest.digest_takes = 2 * STANDSTILL;
    let options = options();
    let outcome = thread::scope(|scope| {
        let leaves = scope.spawn(|| {
            let ram = guest.image();
            let connect = &mut || Err(io::ErrorKind::NotConnected.into());
            let monitor = Monitor::default();
            send(&mut guest, &ram, theirs, connect, &options, &monitor)
        });
        let mut peer = Peer::new(mine);
        accept(&mut peer);
        while peer.next_message() != Some("STATE_END") {}
        // The destination may take as long for the same.
        thread::sleep(2 * STANDSTILL);
        peer.say(&Message::Ready);
        assert_eq!(peer.next_message(), Some("GO"));
        peer.say(&Message::Done);
        leaves.join().unwrap()
    });
    assert!(matches!(outcome, Outcome::Destination), "{outcome:?}");
}

/// The source reads all of its memory for longer than the destination waits for one frame.
#[test]
fn the_destination_waits_while_the_source_reads_its_memory() {
    let frame = Duration::from_millis(600);
    let (mut source, mut destination) = (Guest::running(), Guest::new());
    source.digest_takes = 3 * frame;
    let mut options = super::send_options(2);
    options.timeouts.frame = frame;
    let mut receive_options = super::receive_options();
    receive_options.timeouts.frame = frame;
    let monitor = Monitor::default();
    let (left, arrived) = super::migrate(
        &mut source,
        &mut destination,
        &options,
        &receive_options,
        &monitor,
        |stream| stream,
    );
    assert!(matches!(left, Outcome::Destination), "{left:?}");
    super::check_one_owner(&source, &destination, &left, &arrived);
}

/// Each of many frames passes at once; all of them together take too long.
#[test]
fn no_frame_is_begun_once_the_guest_has_stood_still_for_long_enough() {
    let (mine, mut theirs) = UnixStream::pair().unwrap();
    let mut channel = Channel::new(mine, 0, SLOW, &Halt::default()).unwrap();
    channel.send(Phase::Stop, &Message::Ready).unwrap();
    channel.end_at(Some(Standstill::of(Duration::ZERO)));
    let error = channel.send(Phase::Stop, &Message::Ready).unwrap_err();
    assert!(
        matches!(error, MigrationError::StoodStill { .. }),
        "{error:?}"
    );
    drop(channel);
    let mut heard = Vec::new();
    theirs.read_to_end(&mut heard).unwrap();
    assert_eq!(heard.len(), FRAME_HEADER_LEN);
}

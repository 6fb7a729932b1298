//! One end scripted to misbehave: valid frames at the wrong time, forged content, replays, floods.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Duration;

use serde_json::json;

use super::{
    Guest, MigrationError, Monitor, Outcome, PAGE_SIZE, SIZE, accept_from, greet, receive,
    receive_from, receive_options, send, send_options,
};
use crate::migration::dirty::PageRun;
use crate::migration::protocol::{
    FRAME_HEADER_LEN, Header, Hello, Kind, Message, MigrationSecret, Session, decode_message,
    encode_message, seal,
};

/// The description of a machine that the destination accepts from a source with its secret.
fn hello(secret: MigrationSecret) -> Hello {
    Hello {
        secret,
        connections: 1,
        ram: Guest::new().image().ranges(),
        compat: json!({"cpu": "none"}),
    }
}

/// An end that sends any frames.
pub(super) struct Peer {
    pub(super) stream: UnixStream,
    sent: u32,
    received: u32,
    session: Session,
}

impl Peer {
    pub(super) fn new(stream: UnixStream) -> Self {
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        Self {
            stream,
            sent: 0,
            received: 0,
            session: Session([0; 16]),
        }
    }

    fn frame(&mut self, message: &Message<'_>) -> Vec<u8> {
        let mut frame = Vec::new();
        encode_message(message, 0, self.sent, &mut frame).unwrap();
        self.sent += 1;
        frame
    }

    /// The other end may have hung up.
    pub(super) fn say(&mut self, message: &Message<'_>) {
        let frame = self.frame(message);
        let _ = self.stream.write_all(&frame);
    }

    /// The name of the next message; `None` once the other end has hung up.
    pub(super) fn next_message(&mut self) -> Option<&'static str> {
        let mut header = [0; FRAME_HEADER_LEN];
        self.stream.read_exact(&mut header).ok()?;
        let header = Header::decode(header, 0, self.received).unwrap();
        self.received += 1;
        let mut payload = vec![0; header.payload_len()];
        self.stream.read_exact(&mut payload).ok()?;
        header.check(&payload).unwrap();
        let message = decode_message(&header, &payload).unwrap();
        if let Message::Accept { session, .. } = message {
            self.session = session;
        }
        Some(message.name())
    }

    fn hello(&mut self) {
        self.say(&Message::Hello(hello(MigrationSecret::default())));
        assert_eq!(self.next_message(), Some("ACCEPT"));
    }

    /// Acts as a source that has sent everything.
    fn until_ready(&mut self) {
        self.hello();
        self.say(&Message::RoundEnd {
            round: 1,
            last: true,
        });
        self.say(&Message::State(b"state"));
        self.say(&Message::StateEnd { len: 5 });
        assert_eq!(self.next_message(), Some("READY"));
    }
}

/// The outcome of a destination whose source runs `play`.
fn with_source(play: impl FnOnce(&mut Peer)) -> (Outcome, Guest) {
    let (mine, theirs) = UnixStream::pair().unwrap();
    let mut options = receive_options();
    options.state_max = 1 << 20;
    options.rounds_max = 2;
    options.timeouts.frame = Duration::from_secs(5);
    let mut guest = Guest::new();
    let outcome = thread::scope(|scope| {
        let arrives = scope.spawn(|| {
            let (_connect, waiting) = channel();
            receive(
                &mut guest,
                theirs,
                &mut || accept_from(&waiting),
                &options,
                &Monitor::default(),
            )
        });
        let mut peer = Peer::new(mine);
        play(&mut peer);
        let _ = peer.stream.shutdown(Shutdown::Write);
        let outcome = arrives.join().unwrap();
        drop(peer);
        outcome
    });
    assert_eq!(guest.runs(), matches!(outcome, Outcome::Destination));
    (outcome, guest)
}

fn why(outcome: &Outcome) -> &MigrationError {
    match outcome {
        Outcome::Source { why, .. } | Outcome::Indeterminate { why } => why,
        Outcome::Destination => panic!("the guest runs"),
    }
}

/// One message of each kind, each of them valid at some point.
fn one_of_each() -> Vec<Message<'static>> {
    static PAGE: [u8; 4096] = [3; 4096];
    vec![
        Message::Accept {
            session: Session([0; 16]),
            connections: 1,
        },
        Message::Join {
            session: Session([0; 16]),
            connection: 1,
        },
        Message::Pages {
            offset: 0,
            data: &PAGE,
        },
        Message::Zeros(vec![PageRun { first: 0, count: 1 }]),
        Message::RoundEnd {
            round: 1,
            last: false,
        },
        Message::State(b"state"),
        Message::Early(b"state"),
        Message::StateEnd { len: 5 },
        Message::Ready,
        Message::Go(Session([0; 16])),
        Message::Done,
        Message::Try(hello(MigrationSecret::default())),
    ]
}

#[test]
fn a_source_by_hand_arrives() {
    let (outcome, guest) = with_source(|peer| {
        peer.until_ready();
        peer.say(&Message::Go(peer.session));
        assert_eq!(peer.next_message(), Some("DONE"));
    });
    assert!(matches!(outcome, Outcome::Destination), "{outcome:?}");
    assert_eq!(guest.state, b"state");
}

const SECRET: MigrationSecret = MigrationSecret([0x5e; 32]);

/// The secret but for one bit.
fn almost(byte: usize) -> MigrationSecret {
    let mut secret = SECRET;
    secret.0[byte] ^= 1;
    secret
}

/// A destination with a secret. `visit` opens connections to it; then its source comes, which must
/// be served.
fn served_behind(visit: impl FnOnce(&Sender<UnixStream>)) {
    let (connected, waiting) = channel();
    let (mut source, mut guest) = (Guest::running(), Guest::new());
    let mut options = receive_options();
    options.secret = Some(SECRET);
    let (left, arrived) = thread::scope(|scope| {
        let arrives = scope.spawn(|| {
            let (waiting, monitor) = (waiting, Monitor::default());
            let mut accept = || accept_from(&waiting);
            let pending = greet(&mut accept, &options, &monitor).unwrap();
            receive_from(&mut guest, pending, &mut accept, &options, &monitor)
        });
        visit(&connected);
        let mut connect = || Ok(visitor(&connected));
        let ram = source.image();
        let mut options = send_options(3);
        options.secret = SECRET;
        let first = visitor(&connected);
        let monitor = Monitor::default();
        let left = send(&mut source, &ram, first, &mut connect, &options, &monitor);
        (left, arrives.join().unwrap())
    });
    assert!(matches!(left, Outcome::Destination), "{left:?} {arrived:?}");
    assert!(guest.runs() && !source.runs());
}

/// A new connection to a destination.
fn visitor(connected: &Sender<UnixStream>) -> UnixStream {
    let (mine, theirs) = UnixStream::pair().unwrap();
    connected.send(theirs).unwrap();
    mine
}

#[test]
fn peers_without_the_secret_are_dismissed_and_the_source_is_served() {
    served_behind(|connected| {
        // More than the destination asks at once.
        let secrets = (0..32)
            .map(almost)
            .chain([MigrationSecret::default(), MigrationSecret([0xff; 32])]);
        let peers = secrets.enumerate().map(|(number, secret)| {
            let mut peer = Peer::new(visitor(connected));
            let hello = hello(secret);
            peer.say(&match number % 2 {
                0 => Message::Hello(hello),
                _ => Message::Try(hello),
            });
            peer
        });
        for mut peer in peers.collect::<Vec<_>>() {
            assert_eq!(peer.next_message(), Some("FAILED"));
            assert_eq!(peer.next_message(), None);
        }
    });
}

#[test]
fn a_hello_that_is_cut_or_too_long_is_dismissed() {
    served_behind(|connected| {
        let mut frame = Vec::new();
        encode_message(&Message::Hello(hello(SECRET)), 0, 0, &mut frame).unwrap();
        let payload = &frame[FRAME_HEADER_LEN..];
        // Within magic, version, secret and page size, and before the ranges.
        let cut = [0, 7, 11, 12, 43, 47, 51].map(|len| {
            let payload = &payload[..len];
            let header = seal(Kind::Hello, 0, 0, &[payload]).unwrap();
            [&header[..], payload].concat()
        });
        let mut long = frame.clone();
        long[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        for bytes in cut.into_iter().chain([long]) {
            let mut peer = Peer::new(visitor(connected));
            peer.stream.write_all(&bytes).unwrap();
            assert_eq!(peer.next_message(), Some("FAILED"));
            assert_eq!(peer.next_message(), None);
        }
    });
}

#[test]
fn messages_at_the_wrong_time_end_it() {
    for message in one_of_each() {
        let name = message.name();
        let (outcome, _) = with_source(|peer| peer.say(&message));
        assert!(matches!(outcome, Outcome::Source { .. }), "{name} first");
        let (outcome, _) = with_source(|peer| {
            peer.hello();
            peer.say(&message);
            if matches!(message, Message::RoundEnd { .. }) {
                // Repeat it: the second one is one too many.
                peer.say(&message);
            }
        });
        assert!(
            matches!(outcome, Outcome::Source { .. }),
            "{name} in rounds"
        );
        let (outcome, _) = with_source(|peer| {
            peer.hello();
            peer.say(&Message::RoundEnd {
                round: 1,
                last: true,
            });
            peer.say(&message);
        });
        assert!(matches!(outcome, Outcome::Source { .. }), "{name} in state");
        let (outcome, _) = with_source(|peer| {
            peer.until_ready();
            peer.say(&message);
        });
        let error = why(&outcome);
        assert!(
            matches!(
                (&outcome, error),
                (
                    Outcome::Indeterminate { .. },
                    MigrationError::OutOfOrder { .. }
                )
            ),
            "{name} for GO: {outcome:?}"
        );
    }
}

#[test]
fn a_source_that_changes_its_mind_before_go_is_in_charge() {
    for message in [Message::Cancel, Message::Failed("later".to_owned())] {
        let (outcome, _) = with_source(|peer| {
            peer.until_ready();
            peer.say(&message);
        });
        assert!(matches!(outcome, Outcome::Source { .. }), "{outcome:?}");
    }
}

#[test]
fn go_of_another_migration_is_no_go() {
    let (outcome, _) = with_source(|peer| {
        peer.until_ready();
        let mut session = peer.session;
        session.0[0] ^= 1;
        peer.say(&Message::Go(session));
    });
    assert!(
        matches!(outcome, Outcome::Indeterminate { .. }),
        "{outcome:?}"
    );
}

#[test]
fn memory_outside_ram_or_without_end_is_refused() {
    let page = [1; 4096];
    for offset in [SIZE, SIZE - 4096 + (1 << 40), 1 << 62] {
        let (outcome, _) = with_source(|peer| {
            peer.hello();
            peer.say(&Message::Pages {
                offset,
                data: &page,
            });
            assert_eq!(peer.next_message(), Some("FAILED"));
        });
        assert!(matches!(why(&outcome), MigrationError::Page { .. }));
        let (outcome, _) = with_source(|peer| {
            peer.hello();
            peer.say(&Message::Zeros(vec![PageRun {
                first: offset / PAGE_SIZE,
                count: 1,
            }]));
        });
        assert!(matches!(why(&outcome), MigrationError::Page { .. }));
    }
    // A run that crosses from one stripe into the next.
    let (outcome, _) = with_source(|peer| {
        peer.hello();
        peer.say(&Message::Zeros(vec![PageRun {
            first: 255,
            count: 2,
        }]));
    });
    assert!(matches!(why(&outcome), MigrationError::Page { .. }));
    // More zeros than twice the memory.
    let (outcome, _) = with_source(|peer| {
        peer.hello();
        for _ in 0..3 {
            let all = (0..16).map(|stripe| PageRun {
                first: stripe * 256,
                count: 256,
            });
            peer.say(&Message::Zeros(all.collect()));
        }
    });
    assert!(matches!(why(&outcome), MigrationError::TooMuch { .. }));
    // Endless rounds.
    let (outcome, _) = with_source(|peer| {
        peer.hello();
        for round in 1..20_000 {
            peer.say(&Message::RoundEnd { round, last: false });
        }
    });
    assert!(matches!(why(&outcome), MigrationError::TooMuch { .. }));
}

#[test]
fn state_without_end_or_with_another_length_is_refused() {
    let chunk = vec![1; 1 << 19];
    let (outcome, _) = with_source(|peer| {
        peer.hello();
        peer.say(&Message::RoundEnd {
            round: 1,
            last: true,
        });
        for _ in 0..3 {
            peer.say(&Message::State(&chunk));
        }
    });
    assert!(matches!(why(&outcome), MigrationError::TooMuch { .. }));
    let (outcome, _) = with_source(|peer| {
        peer.hello();
        peer.say(&Message::RoundEnd {
            round: 1,
            last: true,
        });
        peer.say(&Message::State(b"state"));
        peer.say(&Message::StateEnd { len: 4 });
    });
    assert!(matches!(why(&outcome), MigrationError::OutOfOrder { .. }));
}

#[test]
fn frames_that_are_replayed_or_swapped_are_refused() {
    for (order, swapped) in [([0, 0], "replayed"), ([1, 0], "swapped")] {
        let (outcome, _) = with_source(|peer| {
            peer.hello();
            let page = [1; 4096];
            let frames = [0, 4096].map(|offset| {
                peer.frame(&Message::Pages {
                    offset,
                    data: &page,
                })
            });
            for index in order {
                let _ = peer.stream.write_all(&frames[index]);
            }
        });
        let error = format!("{:?}", why(&outcome));
        assert!(error.contains("Sequence"), "{swapped}: {error}");
    }
}

#[test]
fn strangers_do_not_take_the_place_of_a_connection() {
    let (mut source, mut destination) = (Guest::running(), Guest::new());
    let (mine, theirs) = UnixStream::pair().unwrap();
    let (connected, waiting) = channel();
    let (left, arrived) = thread::scope(|scope| {
        let destination = &mut destination;
        let arrives = scope.spawn(move || {
            receive(
                destination,
                theirs,
                &mut || accept_from(&waiting),
                &receive_options(),
                &Monitor::default(),
            )
        });
        let mut connect = || {
            for words in [&b""[..], b"GET / HTTP/1.1\r\n\r\n", &[0xff; 64]] {
                let (mut stranger, theirs) = UnixStream::pair()?;
                stranger.write_all(words)?;
                connected.send(theirs).unwrap();
            }
            let (mine, theirs) = UnixStream::pair()?;
            connected.send(theirs).unwrap();
            Ok(mine)
        };
        let ram = source.image();
        let left = send(
            &mut source,
            &ram,
            mine,
            &mut connect,
            &send_options(3),
            &Monitor::default(),
        );
        (left, arrives.join().unwrap())
    });
    assert!(matches!(left, Outcome::Destination), "{left:?}");
    super::check_one_owner(&source, &destination, &left, &arrived);
}

/// The outcome of a source whose destination runs `play`.
fn with_destination(play: impl FnOnce(&mut Peer)) -> (Outcome, Guest) {
    let (mine, theirs) = UnixStream::pair().unwrap();
    let mut guest = Guest::running();
    let mut options = send_options(1);
    options.timeouts.frame = Duration::from_secs(5);
    let outcome = thread::scope(|scope| {
        let leaves = scope.spawn(|| {
            let ram = guest.image();
            send(
                &mut guest,
                &ram,
                theirs,
                &mut || Err(std::io::ErrorKind::NotConnected.into()),
                &options,
                &Monitor::default(),
            )
        });
        let mut peer = Peer::new(mine);
        play(&mut peer);
        let _ = peer.stream.shutdown(Shutdown::Both);
        leaves.join().unwrap()
    });
    assert_eq!(guest.runs(), matches!(outcome, Outcome::Source { .. }));
    (outcome, guest)
}

fn accept(peer: &mut Peer) {
    assert_eq!(peer.next_message(), Some("HELLO"));
    peer.say(&Message::Accept {
        session: Session([9; 16]),
        connections: 1,
    });
    while peer.next_message() != Some("STATE_END") {}
}

#[test]
fn a_destination_with_another_answer_does_not_get_the_guest() {
    for message in one_of_each() {
        let name = message.name();
        if name != "ACCEPT" {
            let (outcome, _) = with_destination(|peer| peer.say(&message));
            assert!(
                matches!(outcome, Outcome::Source { .. }),
                "{name} for HELLO"
            );
        }
        if name != "READY" {
            let (outcome, _) = with_destination(|peer| {
                accept(peer);
                peer.say(&message);
            });
            assert!(
                matches!(outcome, Outcome::Source { .. }),
                "{name} for READY"
            );
        }
        let (outcome, _) = with_destination(|peer| {
            accept(peer);
            peer.say(&Message::Ready);
            assert_eq!(peer.next_message(), Some("GO"));
            peer.say(&message);
        });
        match outcome {
            Outcome::Destination => assert_eq!(name, "DONE"),
            Outcome::Indeterminate { .. } => assert_ne!(name, "DONE"),
            other => panic!("{name}: {other:?}"),
        }
    }
}

#[test]
fn a_ready_that_comes_too_early_is_no_ready_for_a_refused_guest() {
    let (outcome, _) = with_destination(|peer| {
        assert_eq!(peer.next_message(), Some("HELLO"));
        peer.say(&Message::Ready);
        peer.say(&Message::Ready);
    });
    assert!(matches!(outcome, Outcome::Source { .. }));
}

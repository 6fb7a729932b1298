//! The whole protocol in TLS over the loopback device. The peers are two hosts with certificates of
//! one authority, unknown peers, and a man in the middle.

use std::error::Error as _;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::migration::connector::{self, Connector};
use crate::migration::endpoint::{Endpoint, Listener, Route, Stream, connect};
use crate::migration::protocol::MigrationSecret;
use crate::migration::tls::Tls;
use crate::migration::tls::tests::{both_hosts, listen, paired_hosts};

const PATIENCE: Duration = Duration::from_secs(10);

/// The first connection, from any peer.
fn first(listener: &Listener) -> Stream {
    let end = Instant::now() + PATIENCE;
    loop {
        match listener.accept() {
            Ok(stream) => return stream,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                assert!(Instant::now() < end, "no connection arrived");
            }
        }
    }
}

/// Both ends of a migration to `listener`, whose address the source knows as `endpoint`. `before`
/// runs before each further connection, with its number.
fn migrate_by_tls(
    (source, send_options): (&mut Guest, &SendOptions),
    (destination, receive_options): (&mut Guest, &ReceiveOptions),
    tls: &Tls,
    listener: &Listener,
    endpoint: &Endpoint,
    before: &mut dyn FnMut(u32),
) -> (Outcome, Outcome) {
    thread::scope(|scope| {
        let arrives = scope.spawn(|| {
            let monitor = Monitor::default();
            let mut accept = || listener.accept();
            let first = first(listener);
            receive(destination, first, &mut accept, receive_options, &monitor)
        });
        let connect = || connect(endpoint, PATIENCE, Some(tls)).map_err(io::Error::other);
        let first = connect().unwrap();
        let mut number = 0;
        let mut connect = || {
            number += 1;
            before(number);
            connect()
        };
        let ram = source.image();
        let monitor = Monitor::default();
        let left = send(source, &ram, first, &mut connect, send_options, &monitor);
        (left, arrives.join().unwrap())
    })
}

fn full_guest() -> Guest {
    let guest = Guest::running();
    for page in 0..PAGES {
        let address = GuestAddress(page << 12);
        guest.memory().write_obj(page + 1, address).unwrap();
    }
    guest
}

fn chain(outcome: &Outcome) -> String {
    let Outcome::Source { why, .. } = outcome else {
        panic!("{outcome:?}");
    };
    let mut text = why.to_string();
    let mut cause = why.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

#[test]
fn tls_carries_the_guest_while_it_writes() {
    let (near, far) = both_hosts();
    for connections in [1, 4, 16] {
        let (listener, endpoint) = listen(Some(far.clone()));
        let (mut source, mut destination) = (full_guest(), Guest::new());
        source.state = (0..3_000_000_u32).map(|n| n.to_le_bytes()[1]).collect();
        let end = Arc::default();
        let writer = source.write_pages(1024, Duration::from_micros(20), &end);
        let (left, arrived) = migrate_by_tls(
            (&mut source, &send_options(connections)),
            (&mut destination, &receive_options()),
            &near,
            &listener,
            &endpoint,
            &mut |_| {},
        );
        assert!(matches!(left, Outcome::Destination), "{left:?} {arrived:?}");
        check_one_owner(&source, &destination, &left, &arrived);
        end.store(true, Ordering::Relaxed);
        writer.join().unwrap();
    }
}

#[test]
fn a_source_without_a_network_gets_its_connections_from_its_daemon() {
    let (near, far) = paired_hosts();
    let (listener, endpoint) = listen(Some(far));
    let connector = connector::serve("one", endpoint.clone()).unwrap();
    let route = Route {
        endpoint,
        tls: Some(near),
        connector: Some(Connector::new(connector).unwrap()),
    };
    let (mut source, mut destination) = (full_guest(), Guest::new());
    let (left, arrived) = thread::scope(|scope| {
        let arrives = scope.spawn(|| {
            let (options, monitor) = (receive_options(), Monitor::default());
            let (first, mut accept) = (first(&listener), || listener.accept());
            receive(&mut destination, first, &mut accept, &options, &monitor)
        });
        let connect = || route.connect(PATIENCE).map_err(io::Error::other);
        let (ram, first) = (source.image(), connect().unwrap());
        let (options, monitor) = (send_options(4), Monitor::default());
        let left = send(
            &mut source,
            &ram,
            first,
            &mut || connect(),
            &options,
            &monitor,
        );
        (left, arrives.join().unwrap())
    });
    assert!(matches!(left, Outcome::Destination), "{left:?} {arrived:?}");
    check_one_owner(&source, &destination, &left, &arrived);
}

#[test]
fn tls_carries_the_reasons_of_a_destination_that_hangs_up() {
    let (near, far) = both_hosts();
    for _ in 0..10 {
        let (listener, endpoint) = listen(Some(far.clone()));
        // Much data is in flight when the destination hangs up.
        let (mut source, mut destination) = (full_guest(), Guest::new());
        let options = ReceiveOptions {
            rounds_max: 0,
            ..receive_options()
        };
        let (left, arrived) = migrate_by_tls(
            (&mut source, &send_options(4)),
            (&mut destination, &options),
            &near,
            &listener,
            &endpoint,
            &mut |_| {},
        );
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

#[test]
fn hosts_that_do_not_know_each_other_move_no_guest() {
    let (near, far) = both_hosts();
    let (other_near, _) = both_hosts();
    // The destination does not trust the authority of `other_near`, which does not trust the
    // destination's either.
    let (listener, endpoint) = listen(Some(far));
    for _ in 0..5 {
        let (mut source, mut destination) = (Guest::running(), Guest::new());
        let (left, arrived) = migrate_by_tls(
            (&mut source, &send_options(2)),
            (&mut destination, &receive_options()),
            &other_near,
            &listener,
            &endpoint,
            &mut |_| {},
        );
        check_one_owner(&source, &destination, &left, &arrived);
        let text = chain(&left);
        assert!(text.contains("this host does not accept"), "{text}");
        let text = chain(&arrived);
        assert!(text.contains("does not continue with TLS"), "{text}");
    }
    // The same destination still accepts a source that it knows.
    let (mut source, mut destination) = (Guest::running(), Guest::new());
    let (left, _) = migrate_by_tls(
        (&mut source, &send_options(2)),
        (&mut destination, &receive_options()),
        &near,
        &listener,
        &endpoint,
        &mut |_| {},
    );
    assert!(matches!(left, Outcome::Destination), "{left:?}");
}

#[test]
fn strangers_at_the_door_do_not_end_it() {
    let (near, far) = both_hosts();
    let (stranger, _) = both_hosts();
    let (listener, endpoint) = listen(Some(far));
    let (mut source, mut destination) = (full_guest(), Guest::new());
    let mut strangers = Vec::new();
    let mut knock = |number| {
        let mut plain = connect(&endpoint, PATIENCE, None).unwrap();
        match number {
            // Sends nothing.
            1 => {}
            2 => plain.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap(),
            // Hangs up.
            3 => return,
            _ => {
                let mut other = connect(&endpoint, PATIENCE, Some(&stranger)).unwrap();
                other.set_timeout(Duration::from_millis(1)).unwrap();
                // Up to the first bytes of the handshake. If the reply arrives at once, up to the
                // certificate, which it does not know.
                let error = other.write(b"HELLO").unwrap_err();
                assert!(
                    [ErrorKind::WouldBlock, ErrorKind::InvalidData].contains(&error.kind()),
                    "{error}"
                );
                strangers.push(other);
                plain.write_all(&[0; 5000]).unwrap();
            }
        }
        strangers.push(plain);
    };
    let (left, arrived) = migrate_by_tls(
        (&mut source, &send_options(5)),
        (&mut destination, &receive_options()),
        &near,
        &listener,
        &endpoint,
        &mut knock,
    );
    assert!(matches!(left, Outcome::Destination), "{left:?} {arrived:?}");
    check_one_owner(&source, &destination, &left, &arrived);
}

#[test]
fn many_silent_strangers_use_up_nothing_of_the_source() {
    let (near, far) = both_hosts();
    let (listener, endpoint) = listen(Some(far));
    let (mut source, mut destination) = (full_guest(), Guest::new());
    let mut strangers = Vec::new();
    let mut knock = |number| {
        // More than an earlier limit: first peers that send nothing, then peers that hang up.
        for _ in 0..18 {
            let stranger = connect(&endpoint, PATIENCE, None).unwrap();
            if number == 1 {
                strangers.push(stranger);
            }
        }
    };
    let started = Instant::now();
    let (left, arrived) = migrate_by_tls(
        (&mut source, &send_options(3)),
        (&mut destination, &receive_options()),
        &near,
        &listener,
        &endpoint,
        &mut knock,
    );
    assert!(matches!(left, Outcome::Destination), "{left:?} {arrived:?}");
    check_one_owner(&source, &destination, &left, &arrived);
    // One after the other they would take 2 s each.
    assert!(started.elapsed() < Duration::from_secs(18));
}

#[test]
fn a_source_is_served_behind_silent_connections() {
    let (near, far) = both_hosts();
    let (stranger, _) = both_hosts();
    let (listener, endpoint) = listen(Some(far));
    let (mut source, mut destination) = (full_guest(), Guest::new());
    let silent: Vec<Stream> = (0..20)
        .map(|_| connect(&endpoint, PATIENCE, None).unwrap())
        .collect();
    let mut unknown = connect(&endpoint, PATIENCE, Some(&stranger)).unwrap();
    unknown.set_timeout(Duration::from_millis(1)).unwrap();
    let error = unknown.write(b"HELLO").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    let started = Instant::now();
    let (left, arrived) = thread::scope(|scope| {
        let arrives = scope.spawn(|| {
            let (options, monitor) = (receive_options(), Monitor::default());
            let mut accept = || listener.accept();
            let pending = greet(&mut accept, &options, &monitor).unwrap();
            receive_from(&mut destination, pending, &mut accept, &options, &monitor)
        });
        let connect = || connect(&endpoint, PATIENCE, Some(&near)).map_err(io::Error::other);
        let (ram, first) = (source.image(), connect().unwrap());
        let monitor = Monitor::default();
        let options = send_options(2);
        let left = send(
            &mut source,
            &ram,
            first,
            &mut || connect(),
            &options,
            &monitor,
        );
        (left, arrives.join().unwrap())
    });
    assert!(matches!(left, Outcome::Destination), "{left:?} {arrived:?}");
    check_one_owner(&source, &destination, &left, &arrived);
    // One after the other they would take 5 s each.
    assert!(started.elapsed() < Duration::from_secs(50));
    drop(silent);
}

/// Another node of the authority, or a VM that took it over, comes before the source.
#[test]
fn a_node_that_is_not_the_source_gets_no_guest_in() {
    let secret = MigrationSecret([3; 32]);
    let (node, _) = both_hosts();
    let (near, far) = both_hosts();
    let (paired_near, paired_far) = paired_hosts();
    for (stranger, near, far, said) in [
        // With a certificate that the destination accepts.
        (near.clone(), near, far, "has not sent the secret"),
        (node, paired_near, paired_far, "does not accept"),
    ] {
        let (listener, endpoint) = listen(Some(far));
        let mut destination = Guest::new();
        thread::scope(|scope| {
            let arrives = scope.spawn(|| {
                let (mut options, monitor) = (receive_options(), Monitor::default());
                options.secret = Some(secret);
                let mut accept = || listener.accept();
                let pending = greet(&mut accept, &options, &monitor).unwrap();
                receive_from(&mut destination, pending, &mut accept, &options, &monitor)
            });
            let send_as = |tls: &Tls, secret| {
                let mut guest = Guest::running();
                let connect = || connect(&endpoint, PATIENCE, Some(tls)).map_err(io::Error::other);
                let (ram, first) = (guest.image(), connect().unwrap());
                let (mut options, monitor) = (send_options(2), Monitor::default());
                options.secret = secret;
                send(
                    &mut guest,
                    &ram,
                    first,
                    &mut || connect(),
                    &options,
                    &monitor,
                )
            };
            let refused = send_as(&stranger, MigrationSecret::default());
            let text = chain(&refused);
            assert!(text.contains(said), "{text}");
            let left = send_as(&near, secret);
            let arrived = arrives.join().unwrap();
            assert!(matches!(left, Outcome::Destination), "{left:?} {arrived:?}");
        });
        assert!(destination.runs());
    }
}

#[test]
fn no_peer_is_greeted_after_a_cancellation() {
    let (_, far) = both_hosts();
    let (listener, endpoint) = listen(Some(far));
    let _silent = connect(&endpoint, PATIENCE, None).unwrap();
    let monitor = Monitor::default();
    monitor.cancel.cancel();
    let greeted = greet(&mut || listener.accept(), &receive_options(), &monitor);
    assert!(matches!(greeted, Err(MigrationError::Cancelled)));
}

#[test]
fn silence_instead_of_a_handshake_ends_in_time_on_either_side() {
    let (near, far) = both_hosts();
    let patience = Timeouts {
        frame: Duration::from_millis(300),
        accept: Duration::from_millis(300),
        ..timeouts()
    };
    let started = Instant::now();
    // A host that accepts connections and sends nothing.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = Endpoint::Tcp {
        host: "127.0.0.1".to_owned(),
        port: silent.local_addr().unwrap().port(),
    };
    let mut source = Guest::running();
    let options = SendOptions {
        timeouts: patience,
        ..send_options(1)
    };
    let (ram, monitor) = (source.image(), Monitor::default());
    let dial = || connect(&endpoint, PATIENCE, Some(&near)).map_err(io::Error::other);
    let first = dial().unwrap();
    let left = send(&mut source, &ram, first, &mut || dial(), &options, &monitor);
    assert!(chain(&left).contains("silent"), "{left:?}");
    assert!(source.runs());

    // A source that does the same.
    let (listener, endpoint) = listen(Some(far));
    let _silent = connect(&endpoint, PATIENCE, None).unwrap();
    let mut destination = Guest::new();
    let options = ReceiveOptions {
        timeouts: patience,
        ..receive_options()
    };
    let arrived = receive(
        &mut destination,
        listener.accept().unwrap(),
        &mut || listener.accept(),
        &options,
        &monitor,
    );
    assert!(chain(&arrived).contains("silent"), "{arrived:?}");
    assert!(started.elapsed() < PATIENCE);
}

/// Forwards bytes, and changes the one after `at` others.
fn pass_on(mut from: TcpStream, mut to: TcpStream, at: Option<usize>) {
    let (mut passed, mut buffer) = (0, [0; 4096]);
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        if let Some(index) = at.and_then(|at| at.checked_sub(passed))
            && index < count
        {
            buffer[index] ^= 1;
        }
        passed += count;
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(std::net::Shutdown::Write);
}

#[test]
fn a_byte_that_changes_on_the_way_is_noticed() {
    let (near, far) = both_hosts();
    // In the handshake, in the first messages, in the middle of memory.
    for (at, to_source) in [
        (100, false),
        (100, true),
        (1000, false),
        (600, true),
        (3000, false),
        (5_000_000, false),
    ] {
        let (listener, endpoint) = listen(Some(far.clone()));
        let Endpoint::Tcp { port, .. } = endpoint else {
            panic!("{endpoint}");
        };
        let between = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = Endpoint::Tcp {
            host: "127.0.0.1".to_owned(),
            port: between.local_addr().unwrap().port(),
        };
        thread::spawn(move || {
            let (from, _) = between.accept().unwrap();
            let to = TcpStream::connect(("127.0.0.1", port)).unwrap();
            let back = (to.try_clone().unwrap(), from.try_clone().unwrap());
            thread::spawn(move || pass_on(back.0, back.1, to_source.then_some(at)));
            pass_on(from, to, (!to_source).then_some(at));
        });
        let (mut source, mut destination) = (full_guest(), Guest::new());
        let (left, arrived) = migrate_by_tls(
            (&mut source, &send_options(1)),
            (&mut destination, &receive_options()),
            &near,
            &listener,
            &endpoint,
            &mut |_| {},
        );
        check_one_owner(&source, &destination, &left, &arrived);
        assert!(
            matches!(left, Outcome::Source { .. }),
            "{at} {to_source}: {left:?}"
        );
        let text = format!("{} {}", chain(&left), chain(&arrived));
        assert!(text.contains("TLS"), "{at} {to_source}: {text}");
    }
}

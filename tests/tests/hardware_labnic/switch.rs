//! Frames between devices: how the switch learns and waits, and what a frame may need.

use std::time::{Duration, Instant};

use lab::labnic::Labnic;
use vdpa::control_queue::Command;

use super::client::{Client, EVENT_IDX, HEADER, MRG_RXBUF, Setup, frame, wait_for};
use super::{A, B, BROADCAST, C, MULTICAST, add, count, exchange, kernel_is_well, text, two};

#[test]
fn frames_cross_the_switch() {
    for set_map in ["1", "0"] {
        for without in [0, EVENT_IDX, MRG_RXBUF, EVENT_IDX | MRG_RXBUF] {
            let labnic = Labnic::load(&[("set_map", set_map)]).unwrap();
            let (one, other) = two(&labnic);
            let setup = Setup::without(without);
            let mut a = Client::with(&one, &setup);
            let mut b = Client::with(&other, &setup);
            exchange(&mut a, &mut b, 200);
            assert_eq!(count(&one, 1, "tx packets"), 200);
            assert_eq!(count(&other, 0, "rx packets"), 200);
            let bytes: usize = (0..200).map(|len| HEADER + 18 + len).sum();
            assert_eq!(count(&other, 0, "rx bytes"), u64::try_from(bytes).unwrap());
            // A frame to the sender itself, or to an address that the switch knows on the same
            // port.
            a.send(0, &frame(A, A, 1, 64));
            a.receives_nothing();
            b.receives_nothing();
        }
    }
    kernel_is_well();
}

#[test]
fn the_switch_learns_floods_and_forgets() {
    let labnic = Labnic::load(&[]).unwrap();
    let (one, other) = two(&labnic);
    let third = add(&labnic, "c", C);
    let (mut a, mut b, mut c) = (
        Client::start(&one),
        Client::start(&other),
        Client::start(&third),
    );
    // B is not known yet, so all receive everything.
    for to in [B, BROADCAST, MULTICAST] {
        a.send(0, &frame(to, A, 1, 100));
        assert_eq!(b.receive(0), frame(to, A, 1, 100));
        assert_eq!(c.receive(0), frame(to, A, 1, 100));
    }
    b.send(0, &frame(A, B, 2, 100));
    assert_eq!(a.receive(0), frame(A, B, 2, 100));
    a.send(0, &frame(B, A, 3, 100));
    assert_eq!(b.receive(0), frame(B, A, 3, 100));
    c.receives_nothing();
    // B's address moves to C's port.
    c.send(0, &frame(BROADCAST, B, 4, 60));
    assert_eq!(a.receive(0), frame(BROADCAST, B, 4, 60));
    assert_eq!(b.receive(0), frame(BROADCAST, B, 4, 60));
    a.send(0, &frame(B, A, 5, 60));
    assert_eq!(c.receive(0), frame(B, A, 5, 60));
    b.receives_nothing();
    kernel_is_well();
}

#[test]
fn a_burst_loses_nothing() {
    let labnic = Labnic::load(&[]).unwrap();
    let (one, other) = two(&labnic);
    let mut a = Client::start(&one);
    let mut b = Client::start(&other);
    let mut received = 0;
    for number in 0..3000 {
        a.send(0, &frame(B, A, number, 600));
        // The receiver is slow: the sender runs ahead by its whole ring.
        if number % 50 == 49 {
            while let Some(got) = b.queues[0].receive() {
                assert_eq!(got, frame(B, A, received, 600));
                received += 1;
            }
        }
    }
    while received < 3000 {
        assert_eq!(b.receive(0), frame(B, A, received, 600));
        received += 1;
    }
    assert_eq!(count(&other, 0, "rx overruns"), 0);
    kernel_is_well();
}

#[test]
fn a_receiver_without_buffers_delays_others_only_briefly() {
    let labnic = Labnic::load(&[("credit_wait_ms", "300")]).unwrap();
    let (one, other) = two(&labnic);
    let third = add(&labnic, "c", C);
    let setup = Setup {
        buffers: 0,
        ..Setup::default()
    };
    let mut a = Client::start(&one);
    let mut b = Client::with(&other, &setup);
    // A frame waits for the buffer that comes in time.
    a.send(0, &frame(B, A, 1, 100));
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(a.queues[1].completed(), None);
    assert_eq!(count(&one, 1, "tx waits"), 1);
    b.queues[0].post();
    b.queues[0].kick();
    assert_eq!(
        wait_for("frame", || b.queues[0].take()),
        frame(B, A, 1, 100)
    );
    wait_for("completion", || a.queues[1].completed());
    // No buffer comes: the other ports receive the flooded frame after the wait.
    let mut c = Client::start(&third);
    let begin = Instant::now();
    a.send(0, &frame(BROADCAST, A, 2, 100));
    assert_eq!(c.receive(0), frame(BROADCAST, A, 2, 100));
    assert!(begin.elapsed() >= Duration::from_millis(250));
    assert_eq!(count(&other, 0, "rx overruns"), 1);
    // A port that was given up no longer delays others: 20 frames would take 6 s.
    let begin = Instant::now();
    for number in 0..20 {
        a.send(0, &frame(BROADCAST, A, number, 100));
        assert_eq!(c.receive(0), frame(BROADCAST, A, number, 100));
    }
    assert!(begin.elapsed() < Duration::from_secs(5));
    assert_eq!(count(&other, 0, "rx overruns"), 21);
    // With a buffer the port takes part again.
    b.queues[0].post();
    b.queues[0].kick();
    a.send(0, &frame(BROADCAST, A, 3, 100));
    assert_eq!(
        wait_for("frame", || b.queues[0].take()),
        frame(BROADCAST, A, 3, 100)
    );
    kernel_is_well();
}

#[test]
fn eight_pairs_carry_their_own_frames() {
    let labnic = Labnic::load(&[]).unwrap();
    let attributes = |mac| ["mac".to_owned(), text(mac), "max_vqp".into(), "8".into()];
    let make = |name, mac| {
        let attributes = attributes(mac);
        let attributes: Vec<&str> = attributes.iter().map(String::as_str).collect();
        labnic.add(name, &attributes).unwrap()
    };
    let (one, other) = (make("a", A), make("b", B));
    let mut a = Client::start(&one);
    let mut b = Client::start(&other);
    assert_eq!(a.queues.len(), 16);
    // One pair until the driver asks for more.
    a.send(3, &frame(B, A, 0, 100));
    assert_eq!(b.receive(0), frame(B, A, 0, 100));
    for wrong in [0, 9, 0xffff] {
        b.refuse(&Command::VqPairsSet(wrong));
    }
    b.obey(&Command::VqPairsSet(8));
    for number in 0..64 {
        let pair = usize::try_from(number % 8).unwrap();
        a.send(pair, &frame(B, A, number, 700));
        assert_eq!(b.receive(pair), frame(B, A, number, 700));
    }
    b.obey(&Command::VqPairsSet(2));
    a.send(7, &frame(B, A, 1, 100));
    assert_eq!(b.receive(1), frame(B, A, 1, 100));
    kernel_is_well();
}

#[test]
fn large_frames_take_several_buffers_if_they_may() {
    let labnic = Labnic::load(&[]).unwrap();
    let attributes = |mac| ["mac".to_owned(), text(mac), "mtu".into(), "9000".into()];
    let make = |name, mac| {
        let attributes = attributes(mac);
        let attributes: Vec<&str> = attributes.iter().map(String::as_str).collect();
        labnic.add(name, &attributes).unwrap()
    };
    let (one, other) = (make("a", A), make("b", B));
    let mut a = Client::start(&one);
    let mut b = Client::start(&other);
    for number in 0..40 {
        let sent = frame(B, A, number, 8000);
        a.queues[1].offer_large(&sent);
        a.queues[1].kick();
        let first = wait_for("frame", || b.queues[0].take_raw());
        // 12 + 18 + 8000 bytes in buffers of 2048; all are used at once.
        assert_eq!(first[10..12], [4, 0]);
        let mut received = first[HEADER..].to_vec();
        for _ in 0..3 {
            received.extend(b.queues[0].take_raw().unwrap());
        }
        assert_eq!(received, sent);
        (0..4).for_each(|_| b.queues[0].post());
        b.queues[0].kick();
        wait_for("completion", || a.queues[1].ring.pop_used().unwrap());
    }
    drop(b);
    let mut b = Client::with(&other, &Setup::without(MRG_RXBUF));
    a.queues[1].offer_large(&frame(B, A, 1, 8000));
    a.queues[1].kick();
    wait_for("completion", || a.queues[1].ring.pop_used().unwrap());
    assert_eq!(count(&other, 0, "rx drops"), 1);
    exchange(&mut a, &mut b, 70);
    kernel_is_well();
}

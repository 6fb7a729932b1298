//! Hostile drivers, deliberate faults, and a hundred restarts.

use std::time::Instant;

use lab::labnic::Labnic;
use vdpa::ErrorKind;
use vdpa::device::VringBase;
use vdpa::iova::DeviceAddress;
use vdpa::ring::{Direction, Piece};

use super::client::{Client, MRG_RXBUF, PATIENCE, RING_SIZE, Setup, frame, wait_for};
use super::{A, B, add, count, exchange, kernel_is_well, two};

#[test]
fn hostile_chains_harm_no_other_guest() {
    let labnic = Labnic::load(&[]).unwrap();
    let (one, other) = two(&labnic);
    let mut a = Client::start(&one);
    let mut b = Client::start(&other);
    let piece = |iova, len, direction| Piece {
        iova,
        len,
        direction,
    };
    let reads = Direction::DeviceReads;
    let writes = Direction::DeviceWrites;
    let chains = [
        vec![piece(DeviceAddress(0), 100, reads)],
        vec![piece(DeviceAddress(u64::MAX - 50), 40, reads)],
        vec![piece(DeviceAddress(2 << 20), u32::MAX, reads)],
        vec![piece(DeviceAddress(2 << 20), 11, reads)],
        vec![piece(DeviceAddress(2 << 20), 100_000, reads)],
        vec![
            piece(DeviceAddress(2 << 20), 100, reads),
            piece(DeviceAddress(2 << 20), 100, writes),
        ],
        vec![piece(DeviceAddress(2 << 20), 100, writes)],
    ];
    for chain in &chains {
        let head = a.queues[1].ring.add(chain).unwrap();
        a.queues[1].kick();
        let used = wait_for("completion", || a.queues[1].ring.pop_used().unwrap());
        assert_eq!(used.head, head);
    }
    assert_eq!(
        count(&one, 1, "tx errors"),
        u64::try_from(chains.len()).unwrap()
    );
    // Descriptors that only a broken driver writes: addr, len, flags, next.
    let table = 2_u64 << 20;
    for (address, len, flags, next) in [
        (u64::MAX - 50, 100_u32, 0_u16, 0_u16), // beyond the last address
        (table, 100, 1, 0),                     // a loop
        (table, 100, 1, 0xffff),                // next outside of the ring
        (table, 0, 4, 0),                       // an empty indirect table
        (table, 17, 4, 0),                      // half a descriptor
        (table, u32::MAX - 15, 4, 0),
        (table, 16, 4 | 1, 1),
        (u64::MAX - 15, 64, 4, 0),
    ] {
        let good = piece(DeviceAddress(table), 100, reads);
        let head = a.queues[1].ring.add(&[good]).unwrap();
        let mut descriptor = [0; 16];
        descriptor[..8].copy_from_slice(&address.to_le_bytes());
        descriptor[8..12].copy_from_slice(&len.to_le_bytes());
        descriptor[12..14].copy_from_slice(&flags.to_le_bytes());
        descriptor[14..].copy_from_slice(&next.to_le_bytes());
        let offset = 16 * u64::from(head);
        a.queues[1].ring_memory.write(offset, &descriptor).unwrap();
        a.queues[1].kick();
        let used = wait_for("completion", || a.queues[1].ring.pop_used().unwrap());
        assert_eq!(used.head, head);
    }
    // Invalid receive buffers: the frame is lost, the next one is not.
    let setup = Setup {
        buffers: 0,
        ..Setup::without(MRG_RXBUF)
    };
    drop(b);
    b = Client::with(&other, &setup);
    for chain in [
        vec![piece(DeviceAddress(0), 2000, writes)],
        vec![piece(DeviceAddress(2 << 20), 2000, reads)],
        vec![piece(DeviceAddress(u64::MAX - 4000), 2000, writes)],
    ] {
        b.queues[0].ring.add(&chain).unwrap();
        b.queues[0].kick();
        b.queues[0].post();
        b.queues[0].kick();
        a.send(0, &frame(B, A, 1, 100));
        let used = wait_for("bad buffer", || b.queues[0].ring.pop_used().unwrap());
        assert_eq!(used.written, 0);
        a.send(0, &frame(B, A, 2, 100));
        let got = wait_for("frame", || b.queues[0].take());
        assert!(got == frame(B, A, 1, 100) || got == frame(B, A, 2, 100));
        while b.queues[0].ring.outstanding() > 0 {
            b.queues[0].take();
        }
    }
    // An index that is too far ahead only makes the device read old entries.
    drop(a);
    drop(b);
    let (mut a, mut b) = (Client::start(&one), Client::start(&other));
    exchange(&mut a, &mut b, 10);
    kernel_is_well();
}

#[test]
fn faults_have_their_documented_effect() {
    let labnic = Labnic::load(&[("faults", "wrong_base,large_config")]).unwrap();
    let (one, other) = two(&labnic);
    let mut a = Client::start(&one);
    assert_eq!(a.device().config_size(), 24 + 64);
    a.suspended(|device, _| {
        assert_eq!(device.vring_base(0).unwrap(), VringBase::Split { index: 1 });
    });
    drop(a);
    drop((one, other));

    labnic.set("faults", "").unwrap();
    let good = add(&labnic, "b", B);
    let mut b = Client::start(&good);
    for fault in [
        "silent_map",
        "suspend_runs_on",
        "used_id",
        "used_length",
        "lost_call",
    ] {
        labnic.set("faults", fault).unwrap();
        let bad = add(&labnic, "a", A);
        let mut a = Client::start(&bad);
        // Discards interrupts from before the fault.
        let _ = a.queues[1].call.read();
        a.queues[1].offer(&frame(B, A, 1, 100));
        a.queues[1].kick();
        match fault {
            "silent_map" => b.receives_nothing(),
            "suspend_runs_on" => {
                assert_eq!(b.receive(0), frame(B, A, 1, 100));
                a.suspended(|_, queues| {
                    queues[1].offer(&frame(B, A, 2, 100));
                    queues[1].force_kick();
                    assert_eq!(b.receive(0), frame(B, A, 2, 100));
                });
            }
            "lost_call" => {
                assert_eq!(b.receive(0), frame(B, A, 1, 100));
                wait_for("completion", || a.queues[1].completed());
                assert!(a.queues[1].call.read().is_err());
            }
            _ => {
                assert_eq!(b.receive(0), frame(B, A, 1, 100));
                let begin = Instant::now();
                let broken = loop {
                    match a.queues[1].ring.pop_used() {
                        Ok(None) if begin.elapsed() < PATIENCE => {}
                        other => break other,
                    }
                };
                let error = broken.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::BrokenByDevice, "{error:?}");
            }
        }
    }
    kernel_is_well();
}

#[test]
fn a_hundred_lives_leave_nothing_behind() {
    let labnic = Labnic::load(&[("rx_prefetch", "8")]).unwrap();
    for round in 0..100_u32 {
        let (one, other) = two(&labnic);
        let mut a = Client::start(&one);
        let mut b = Client::start(&other);
        // Ended in the middle of traffic, by deletion, reset or suspend.
        for number in 0..u32::from(RING_SIZE) {
            a.send(0, &frame(B, A, number, 200));
        }
        match round % 3 {
            0 => drop(b),
            1 => drop(b.suspend()),
            _ => {
                assert_eq!(b.receive(0), frame(B, A, 0, 200));
                drop(b.restart_without_mapping());
            }
        }
        drop(a);
    }
    drop(labnic);
    assert!(!std::path::Path::new("/sys/module/labnic").exists());
    kernel_is_well();
}

//! Rings: doorbells, ring state across a suspend, completion in time and in order.

use std::time::{Duration, Instant};

use lab::labnic::{self, Labnic};
use rustix::mm::{MapFlags, ProtFlags};
use vdpa::device::{VringAddresses, VringBase};

use super::client::{Client, HEADER, frame, wait_for};
use super::{A, B, C, add, count, exchange, kernel_is_well, two};

/// Stores a 16-bit value at the beginning of a queue's doorbell page.
fn ring_doorbell(client: &Client, queue: u16, value: u16) -> rustix::io::Result<()> {
    let page = 4096;
    // SAFETY: there is no safe interface to mmap. A new shared mapping of one
    // page of the device's doorbell, at an address that the kernel chooses.
    let address = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            page,
            ProtFlags::WRITE,
            MapFlags::SHARED,
            &client.file,
            u64::from(queue) * 4096,
        )
    }?;
    // SAFETY: a store to a device cannot be made otherwise. The page was just mapped writable, is
    // aligned, and nothing in this process refers to it.
    unsafe { address.cast::<u16>().write_volatile(value.to_le()) };
    // SAFETY: unmapping has no safe interface. It is the mapping made above, and no pointer into it
    // is used any more.
    unsafe { rustix::mm::munmap(address, page) }
}

#[test]
fn a_store_to_the_doorbell_moves_a_frame() {
    let labnic = Labnic::load(&[]).unwrap();
    let (one, other) = two(&labnic);
    let mut a = Client::start(&one);
    let mut b = Client::start(&other);
    let kicks = count(&one, 1, "kicks");
    for number in 0..50 {
        a.queues[1].offer(&frame(B, A, number, 100));
        assert!(a.queues[1].ring.needs_kick().unwrap());
        ring_doorbell(&a, 1, 1).unwrap();
        assert_eq!(b.receive(0), frame(B, A, number, 100));
        wait_for("completion", || a.queues[1].completed());
    }
    assert_eq!(count(&one, 1, "doorbells"), 50);
    assert_eq!(count(&one, 1, "kicks"), kicks);
    // Another queue's number on this page, or this number on another page.
    a.queues[1].offer(&frame(B, A, 50, 100));
    ring_doorbell(&a, 1, 0).unwrap();
    wait_for("count of bad doorbells", || {
        (labnic::counter(&one, "bad_doorbells").unwrap() == 1).then_some(())
    });
    ring_doorbell(&a, 0, 0).unwrap();
    b.receives_nothing();
    ring_doorbell(&a, 1, 1).unwrap();
    assert_eq!(b.receive(0), frame(B, A, 50, 100));
    // The control queue has no page, and there is no page after the last queue.
    assert!(ring_doorbell(&a, 2, 2).is_err());
    assert!(ring_doorbell(&a, 3, 3).is_err());
    labnic.set("doorbell", "0").unwrap();
    let third = add(&labnic, "c", C);
    let c = Client::start(&third);
    let error = ring_doorbell(&c, 1, 1).unwrap_err();
    assert_eq!(error.raw_os_error(), 524, "{error}");
    kernel_is_well();
}

#[test]
fn suspend_keeps_ring_state() {
    // state, prefetched buffers, base after 10 frames
    for (state, prefetch, base) in [
        ("avail", 0, Some(10)),
        ("avail", 4, Some(14)),
        ("used", 0, Some(10)),
        ("used", 4, Some(10)),
        ("none", 4, None),
    ] {
        let prefetch = format!("{prefetch}");
        let parameters = [("ring_state", state), ("rx_prefetch", prefetch.as_str())];
        let labnic = Labnic::load(&parameters).unwrap();
        let (one, other) = two(&labnic);
        let mut a = Client::start(&one);
        let mut b = Client::start(&other);
        exchange(&mut a, &mut b, 10);
        // A kick makes the device prefetch buffers.
        b.queues[0].force_kick();
        std::thread::sleep(Duration::from_millis(50));
        b.suspended(|device, queues| {
            let found = device.vring_base(0).ok();
            let expected = base.map(|index| VringBase::Split { index });
            assert_eq!(found, expected, "{state} {prefetch}");
            // The device is suspended: a frame that is sent now arrives after the resume.
            a.send(0, &frame(B, A, 10, 100));
            std::thread::sleep(Duration::from_millis(50));
            assert_eq!(queues[0].used_index(), 10);
        });
        assert_eq!(b.receive(0), frame(B, A, 10, 100));
        exchange(&mut a, &mut b, 70);
        if state == "none" {
            let (mut device, queues) = b.suspend();
            let config = queues[0].config(VringBase::Split { index: 5 });
            let range = queues[0].ring_memory.range();
            assert!(device.switch_vring(0, &config, &[range]).is_err());
        }
    }
    kernel_is_well();
}

#[test]
fn a_used_ring_is_switched_in_place() {
    for apply in ["enable", "resume"] {
        for (state, prefetch) in [("avail", "3"), ("used", "3"), ("avail", "0")] {
            let parameters = [
                ("apply", apply),
                ("ring_state", state),
                ("rx_prefetch", prefetch),
            ];
            let labnic = Labnic::load(&parameters).unwrap();
            let (one, other) = two(&labnic);
            let mut a = Client::start(&one);
            let mut b = Client::start(&other);
            exchange(&mut a, &mut b, 7);
            // The unused half of the ring's used page serves as the private ring.
            let old = b.queues[0].ring.addresses();
            let moved = VringAddresses {
                device: old.device + 2048,
                ..old
            };
            b.suspended(|device, queues| {
                let base = device.vring_base(0).unwrap();
                let range = queues[0].ring_memory.range();
                let config = queues[0].config_at(moved, base);
                device.switch_vring(0, &config, &[range]).unwrap();
            });
            b.queues[0].force_kick();
            for number in 7..10 {
                a.send(0, &frame(B, A, number, 100));
            }
            let private = |b: &Client| {
                let offset = moved.device.0 - b.queues[0].ring_memory.range().first() + 2;
                let ordering = std::sync::atomic::Ordering::Acquire;
                b.queues[0].ring_memory.load_u16(offset, ordering).unwrap()
            };
            wait_for("used elements in the private ring", || {
                (private(&b) == 10).then_some(())
            });
            assert_eq!(b.queues[0].used_index(), 7, "{apply} {state} {prefetch}");
            // Three elements, at the places of entries 7 to 9.
            for entry in 7..10_u64 {
                let offset = moved.device.0 - b.queues[0].ring_memory.range().first();
                let mut element = [0; 8];
                b.queues[0]
                    .ring_memory
                    .read(offset + 4 + 8 * entry, &mut element)
                    .unwrap();
                let length = u32::from_le_bytes([element[4], element[5], element[6], element[7]]);
                assert_eq!(usize::try_from(length).unwrap(), HEADER + 118);
            }
        }
    }
    kernel_is_well();
}

#[test]
fn completion_is_delayed() {
    let labnic = Labnic::load(&[("completion", "delayed"), ("completion_ms", "200")]).unwrap();
    let (one, other) = two(&labnic);
    let mut a = Client::start(&one);
    let mut b = Client::start(&other);
    let begin = Instant::now();
    let heads: Vec<u16> = (0..5)
        .map(|number| a.queues[1].offer(&frame(B, A, number, 100)))
        .collect();
    a.queues[1].kick();
    for number in 0..5 {
        assert_eq!(b.receive(0), frame(B, A, number, 100));
    }
    let back: Vec<u16> = (0..5)
        .map(|_| wait_for("completion", || a.queues[1].completed()))
        .collect();
    // The kernel counts ticks, and the first one may be nearly over: 10 ms at most.
    assert!(begin.elapsed() >= Duration::from_millis(190));
    assert_eq!(back, heads);
    // A suspend leaves none behind.
    a.queues[1].offer(&frame(B, A, 5, 100));
    a.queues[1].kick();
    assert_eq!(b.receive(0), frame(B, A, 5, 100));
    a.suspended(|_, queues| assert!(queues[1].completed().is_some()));
    kernel_is_well();
}

#[test]
fn completion_is_out_of_order_and_nothing_is_lost() {
    let labnic = Labnic::load(&[("completion", "out_of_order")]).unwrap();
    let (one, other) = two(&labnic);
    let mut a = Client::start(&one);
    let mut b = Client::start(&other);
    let mut disorder = 0;
    for round in 0..40 {
        let first = round * 16;
        let heads: Vec<u16> = (first..first + 16)
            .map(|number| a.queues[1].offer(&frame(B, A, number, 100)))
            .collect();
        a.queues[1].kick();
        // Frames stay in order, although buffers do not.
        for number in first..first + 16 {
            assert_eq!(b.receive(0), frame(B, A, number, 100));
        }
        if round == 0 {
            let taken = [0, 1, 2, 3].map(|entry| b.queues[0].used_element(entry).0);
            assert_eq!(taken, [1, 0, 3, 2]);
        }
        let mut back: Vec<u16> = (0..16)
            .map(|_| wait_for("completion", || a.queues[1].completed()))
            .collect();
        disorder += usize::from(back != heads);
        back.sort_unstable();
        let mut heads = heads;
        heads.sort_unstable();
        assert_eq!(back, heads);
    }
    assert!(disorder > 30, "{disorder}");
    kernel_is_well();
}

//! The lab NIC itself, driven by a plain client in this process: before a VM
//! is tested against it, it must do what it says.

#[path = "hardware_labnic/client.rs"]
#[expect(
    clippy::unwrap_used,
    reason = "a test's driver: a failure is the test's"
)]
mod client;
#[path = "hardware_labnic/in_order.rs"]
mod in_order;

use std::time::{Duration, Instant};

use client::{
    Client, EVENT_IDX, HEADER, MRG_RXBUF, PATIENCE, RING_SIZE, Setup, frame, open, tagged, wait_for,
};
use lab::labnic::{self, Labnic};
use lab::sim::SimDevice;
use rustix::mm::{MapFlags, ProtFlags};
use vdpa::control_queue::{Command, MacTable, RxMode};
use vdpa::device::{VringAddresses, VringBase};
use vdpa::ring::{Direction, Piece, QueueError};
use vdpa::uapi::BackendFeatures;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

const A: [u8; 6] = [2, 0, 0x5e, 0, 0x53, 1];
const B: [u8; 6] = [2, 0, 0x5e, 0, 0x53, 2];
const C: [u8; 6] = [2, 0, 0x5e, 0, 0x53, 3];
const BROADCAST: [u8; 6] = [0xff; 6];
const MULTICAST: [u8; 6] = [1, 0, 0x5e, 0, 0, 9];

fn text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

fn add(labnic: &Labnic, name: &str, mac: [u8; 6]) -> SimDevice {
    labnic.add(name, &["mac", &text(mac)]).unwrap()
}

/// Two devices, A and B.
fn two(labnic: &Labnic) -> (SimDevice, SimDevice) {
    (add(labnic, "a", A), add(labnic, "b", B))
}

fn count(device: &SimDevice, queue: u32, name: &str) -> u64 {
    let stats = device.vstats(queue).unwrap();
    let found = stats
        .get(name)
        .or_else(|| stats.get(name.replace(' ', "_")))
        .and_then(serde_json::Value::as_u64);
    found.unwrap_or_else(|| panic!("no {name} in {stats}"))
}

fn kernel_is_well() {
    assert_eq!(labnic::trouble().unwrap(), Vec::<String>::new());
}

/// Frames in both directions, of all lengths, checked.
fn exchange(a: &mut Client, b: &mut Client, frames: u32) {
    for number in 0..frames {
        let len = usize::try_from(number % 1400).unwrap();
        a.send(0, &frame(B, A, number, len));
        assert_eq!(b.receive(0), frame(B, A, number, len));
        b.send(0, &frame(A, B, number, len));
        assert_eq!(a.receive(0), frame(A, B, number, len));
    }
}

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
            // A frame to oneself, or to a port that the switch knows to be here.
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
    // B is not known yet, and all receive everything.
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
        // The receiver is slow: the sender runs ahead by all its ring.
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
fn who_posts_no_buffers_delays_others_only_for_a_while() {
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
    // None comes: the others get the flood, after the wait but not never.
    let mut c = Client::start(&third);
    let begin = Instant::now();
    a.send(0, &frame(BROADCAST, A, 2, 100));
    assert_eq!(c.receive(0), frame(BROADCAST, A, 2, 100));
    assert!(begin.elapsed() >= Duration::from_millis(250));
    assert_eq!(count(&other, 0, "rx overruns"), 1);
    // Given up, it delays nobody: 20 frames would be 6 s.
    let begin = Instant::now();
    for number in 0..20 {
        a.send(0, &frame(BROADCAST, A, number, 100));
        assert_eq!(c.receive(0), frame(BROADCAST, A, number, 100));
    }
    assert!(begin.elapsed() < Duration::from_secs(5));
    assert_eq!(count(&other, 0, "rx overruns"), 21);
    // With a buffer it is one of them again.
    b.queues[0].post();
    b.queues[0].kick();
    a.send(0, &frame(BROADCAST, A, 3, 100));
    assert_eq!(
        wait_for("frame", || b.queues[0].take()),
        frame(BROADCAST, A, 3, 100)
    );
    kernel_is_well();
}

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
    // SAFETY: a store to a device can't be made otherwise. The page was just
    // mapped writable, is aligned, and nothing in this process refers to it.
    unsafe { address.cast::<u16>().write_volatile(value.to_le()) };
    // SAFETY: unmapping has no safe interface. It is the mapping made above,
    // and no pointer into it is used any more.
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
    // The control queue has none, and there is no page behind the last queue.
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
    // state, prefetched buffers, what the base is after 10 frames
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
        // Buffers are taken in advance when the device is kicked.
        b.queues[0].force_kick();
        std::thread::sleep(Duration::from_millis(50));
        b.suspended(|device, queues| {
            let found = device.vring_base(0).ok();
            let expected = base.map(|index| VringBase::Split { index });
            assert_eq!(found, expected, "{state} {prefetch}");
            // It stands still: what is sent now arrives after the resume.
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
                let offset = moved.device - b.queues[0].ring_memory.range().first() + 2;
                let ordering = std::sync::atomic::Ordering::Acquire;
                b.queues[0].ring_memory.load_u16(offset, ordering).unwrap()
            };
            wait_for("used elements in the private ring", || {
                (private(&b) == 10).then_some(())
            });
            assert_eq!(b.queues[0].used_index(), 7, "{apply} {state} {prefetch}");
            // Three elements, at the places of entries 7 to 9.
            for entry in 7..10_u64 {
                let offset = moved.device - b.queues[0].ring_memory.range().first();
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
    // The kernel counts ticks, of which the first may be nearly over: 10 ms at the most.
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
        // Frames stay in order, although buffers don't.
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
fn the_control_queue_filters() {
    let labnic = Labnic::load(&[]).unwrap();
    let (one, other) = two(&labnic);
    let mut a = Client::start(&one);
    let mut b = Client::start(&other);
    let rx = |mode, on| Command::Rx { mode, on };
    b.obey(&rx(RxMode::Promiscuous, false));
    let passes = |a: &mut Client, b: &mut Client, frame: &[u8], wanted: bool| {
        a.send(0, frame);
        if wanted {
            assert_eq!(b.receive(0), frame);
        } else {
            b.receives_nothing();
        }
    };
    let before = labnic::counter(&other, "filtered").unwrap();
    for (to, wanted) in [(B, true), (BROADCAST, true), (C, false), (MULTICAST, false)] {
        passes(&mut a, &mut b, &frame(to, A, 1, 80), wanted);
    }
    assert_eq!(labnic::counter(&other, "filtered").unwrap(), before + 2);
    b.obey(&Command::MacTableSet(MacTable {
        unicast: vec![C],
        multicast: vec![MULTICAST],
    }));
    for (to, wanted) in [(C, true), (MULTICAST, true), ([3; 6], false)] {
        passes(&mut a, &mut b, &frame(to, A, 2, 80), wanted);
    }
    b.obey(&Command::MacTableSet(MacTable::default()));
    b.obey(&rx(RxMode::AllMulticast, true));
    b.obey(&rx(RxMode::NoBroadcast, true));
    for (to, wanted) in [(MULTICAST, true), (BROADCAST, false), (C, false)] {
        passes(&mut a, &mut b, &frame(to, A, 3, 80), wanted);
    }
    passes(&mut a, &mut b, &tagged(B, A, 7, 4), false);
    b.obey(&Command::VlanAdd(7));
    passes(&mut a, &mut b, &tagged(B, A, 7, 5), true);
    passes(&mut a, &mut b, &tagged(B, A, 8, 6), false);
    b.obey(&Command::VlanDel(7));
    passes(&mut a, &mut b, &tagged(B, A, 7, 7), false);
    b.obey(&Command::MacAddrSet(C));
    assert_eq!(b.mac(), C);
    passes(&mut a, &mut b, &frame(C, A, 8, 80), true);
    b.refuse(&Command::MacAddrSet(MULTICAST));
    assert_eq!(b.mac(), C);
    b.refuse(&Command::AnnounceAck);
    b.refuse(&Command::GuestOffloadsSet(0));
    // A reset brings the provisioned address back.
    drop(b);
    assert_eq!(Client::start(&other).mac(), B);
    kernel_is_well();
}

#[test]
fn a_poor_control_queue_sets_the_address_only() {
    let labnic = Labnic::load(&[("cvq", "poor")]).unwrap();
    let one = labnic.add("a", &["mac", &text(A), "max_vqp", "2"]).unwrap();
    let mut a = Client::start(&one);
    a.obey(&Command::MacAddrSet(B));
    assert_eq!(a.mac(), B);
    let mode = RxMode::Promiscuous;
    for command in [
        Command::Rx { mode, on: false },
        Command::MacTableSet(MacTable::default()),
        Command::VlanAdd(1),
        Command::VqPairsSet(2),
    ] {
        a.refuse(&command);
    }
    assert_eq!(count(&one, 4, "cvq requests"), 5);
    assert_eq!(count(&one, 4, "cvq errors"), 4);
    labnic.set("cvq", "none").unwrap();
    assert!(labnic.add("b", &["max_vqp", "2"]).is_err());
    let other = add(&labnic, "b", B);
    assert!(Client::start(&other).control.is_none());
}

#[test]
fn configuration_changes_interrupt() {
    let labnic = Labnic::load(&[]).unwrap();
    let (one, other) = two(&labnic);
    let mut a = Client::start(&one);
    let mut b = Client::start(&other);
    exchange(&mut a, &mut b, 3);
    let call = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).unwrap();
    b.device().set_config_call(Some(&call)).unwrap();
    assert!(b.link_is_up());
    labnic::set_link(&other, false).unwrap();
    assert_eq!(call.read().unwrap(), 1);
    assert!(!b.link_is_up());
    a.send(0, &frame(B, A, 1, 100));
    wait_for("completion", || a.queues[1].completed());
    b.send(0, &frame(A, B, 1, 100));
    wait_for("completion", || b.queues[1].completed());
    b.receives_nothing();
    a.receives_nothing();
    assert_eq!(labnic::counter(&other, "link_down").unwrap(), 2);
    labnic::set_link(&other, true).unwrap();
    assert_eq!(call.read().unwrap(), 1);
    exchange(&mut a, &mut b, 3);

    labnic::break_down(&other).unwrap();
    assert_eq!(call.read().unwrap(), 1);
    assert_eq!(b.device().status().unwrap(), 0x4f);
    a.send(0, &frame(B, A, 2, 100));
    wait_for("completion", || a.queues[1].completed());
    b.receives_nothing();
    drop(b);
    let mut b = Client::start(&other);
    exchange(&mut a, &mut b, 3);

    labnic.set("config_interrupt", "0").unwrap();
    let third = add(&labnic, "c", C);
    let c = Client::start(&third);
    c.device().set_config_call(Some(&call)).unwrap();
    labnic::set_link(&third, false).unwrap();
    assert!(!c.link_is_up());
    assert!(call.read().is_err());
    kernel_is_well();
}

#[test]
fn every_ability_can_be_off_and_is_seen() {
    let labnic = Labnic::load(&[]).unwrap();
    let all = labnic.add("all", &["max_vqp", "8"]).unwrap();
    let (_file, device, _iotlb) = open(all.path());
    let info = device.info().clone();
    assert_eq!(info.backend_features, BackendFeatures::all());
    assert_eq!((info.groups, info.address_spaces), (3, 3));
    assert_eq!(info.queue_count(), 17);
    let groups = |queue: usize| {
        (
            info.queues[queue].group,
            info.queues[queue].descriptor_group,
        )
    };
    assert_eq!(groups(0), (Some(0), Some(2)));
    assert_eq!(groups(15), (Some(0), Some(2)));
    assert_eq!(groups(16), (Some(1), Some(1)));
    assert_eq!(info.iova_range.last(), (1 << 48) - 1);
    for (parameter, feature) in [
        ("suspend", BackendFeatures::SUSPEND),
        ("resume", BackendFeatures::RESUME),
        (
            "enable_after_driver_ok",
            BackendFeatures::ENABLE_AFTER_DRIVER_OK,
        ),
        ("desc_group", BackendFeatures::DESC_ASID),
        ("iotlb_persist", BackendFeatures::IOTLB_PERSIST),
    ] {
        labnic.set(parameter, "0").unwrap();
        let one = labnic.add("off", &["max_vqp", "8"]).unwrap();
        labnic.set(parameter, "1").unwrap();
        let (_file, device, _iotlb) = open(one.path());
        let expected = BackendFeatures::all() - feature;
        assert_eq!(device.info().backend_features, expected, "{parameter}");
    }
    for (parameter, bit) in [
        ("event_idx", 29),
        ("indirect", 28),
        ("in_order", 35),
        ("mrg_rxbuf", 15),
        ("notification_data", 38),
    ] {
        let other = if parameter == "notification_data" {
            "1"
        } else {
            "0"
        };
        labnic.set(parameter, other).unwrap();
        let one = labnic.add("off", &["max_vqp", "8"]).unwrap();
        labnic
            .set(parameter, if other == "0" { "1" } else { "0" })
            .unwrap();
        let (_file, device, _iotlb) = open(one.path());
        assert_eq!(
            device.info().features ^ info.features,
            1 << bit,
            "{parameter}"
        );
    }
    labnic.set("mq", "0").unwrap();
    assert!(labnic.add("off", &["max_vqp", "8"]).is_err());
    labnic.set("cvq_group", "0").unwrap();
    labnic.set("address_spaces", "1").unwrap();
    labnic.set("queue_size", "1024").unwrap();
    labnic.set("iova_bits", "40").unwrap();
    let one = labnic.add("off", &[]).unwrap();
    let (_file, device, _iotlb) = open(one.path());
    let info = device.info();
    assert_eq!((info.groups, info.address_spaces), (2, 1));
    assert_eq!(info.queues[0].max_size, 1024);
    assert_eq!(info.iova_range.last(), (1 << 40) - 1);
}

#[test]
fn wrong_parameters_are_refused() {
    let labnic = Labnic::load(&[]).unwrap();
    for (parameter, wrong, right) in [
        ("ring_state", "index", "avail"),
        ("apply", "never", "enable"),
        ("completion", "late", "immediate"),
        ("cvq", "rich", "full"),
        ("faults", "wrong_base,none_such", ""),
        ("address_spaces", "5", "3"),
        ("queue_size", "100", "256"),
        ("queue_size", "2048", "256"),
        ("rx_prefetch", "33", "0"),
        ("iova_bits", "65", "48"),
        ("completion_ms", "10001", "20"),
    ] {
        labnic.set(parameter, wrong).unwrap();
        assert!(labnic.add("bad", &[]).is_err(), "{parameter} {wrong}");
        labnic.set(parameter, right).unwrap();
    }
    for attributes in [
        ["max_vqp", "9"],
        ["mtu", "67"],
        ["mac", "01:00:00:00:00:01"],
    ] {
        assert!(labnic.add("bad", &attributes).is_err(), "{attributes:?}");
    }
    labnic.add("good", &[]).unwrap();
    kernel_is_well();
}

#[test]
fn rings_can_have_their_own_address_space() {
    let labnic = Labnic::load(&[]).unwrap();
    let (one, other) = two(&labnic);
    let setup = Setup {
        rings_asid: 2,
        ..Setup::default()
    };
    let mut a = Client::with(&one, &setup);
    let mut b = Client::with(&other, &setup);
    exchange(&mut a, &mut b, 100);
    b.obey(&Command::MacAddrSet(C));
    kernel_is_well();
}

#[test]
fn mappings_survive_a_reset_or_do_not() {
    for (persist, set_map) in [("1", "1"), ("1", "0"), ("0", "1"), ("0", "0")] {
        let parameters = [("iotlb_persist", persist), ("set_map", set_map)];
        let labnic = Labnic::load(&parameters).unwrap();
        let (one, other) = two(&labnic);
        let mut a = Client::start(&one);
        let mut b = Client::start(&other);
        exchange(&mut a, &mut b, 5);
        assert_eq!(b.iotlb.survives_reset(), persist == "1");
        let mut b = b.restart_without_mapping();
        if persist == "1" {
            exchange(&mut a, &mut b, 5);
        } else {
            b.send(0, &frame(A, B, 1, 100));
            a.receives_nothing();
            assert_ne!(count(&other, 1, "tx errors"), 0);
        }
    }
    kernel_is_well();
}

#[test]
fn hostile_chains_harm_nobody_else() {
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
        vec![piece(0, 100, reads)],
        vec![piece(u64::MAX - 50, 40, reads)],
        vec![piece(2 << 20, u32::MAX, reads)],
        vec![piece(2 << 20, 11, reads)],
        vec![piece(2 << 20, 100_000, reads)],
        vec![piece(2 << 20, 100, reads), piece(2 << 20, 100, writes)],
        vec![piece(2 << 20, 100, writes)],
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
        let good = piece(table, 100, reads);
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
    // Receive buffers that are none: the frame is lost, the next one is not.
    let setup = Setup {
        buffers: 0,
        ..Setup::without(MRG_RXBUF)
    };
    drop(b);
    b = Client::with(&other, &setup);
    for chain in [
        vec![piece(0, 2000, writes)],
        vec![piece(2 << 20, 2000, reads)],
        vec![piece(u64::MAX - 4000, 2000, writes)],
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
fn faults_are_what_they_say() {
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
        // Interrupts of before the fault could show are of no interest.
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
                assert!(
                    matches!(broken, Err(QueueError::Broken { .. })),
                    "{broken:?}"
                );
            }
        }
    }
    kernel_is_well();
}

#[test]
fn a_queue_enabled_late_works_only_where_that_can_be() {
    let labnic = Labnic::load(&[]).unwrap();
    let one = add(&labnic, "a", A);
    labnic.set("enable_after_driver_ok", "0").unwrap();
    let other = add(&labnic, "b", B);
    let setup = Setup {
        disabled: Some(1),
        ..Setup::default()
    };
    let mut a = Client::with(&one, &setup);
    let mut b = Client::with(&other, &setup);
    a.enable_anyway(1);
    b.enable_anyway(1);
    a.send(0, &frame(B, A, 1, 100));
    assert_eq!(b.receive(0), frame(B, A, 1, 100));
    b.send(0, &frame(A, B, 1, 100));
    a.receives_nothing();
    assert_eq!(labnic::counter(&one, "ignored_enables").unwrap(), 0);
    assert_eq!(labnic::counter(&other, "ignored_enables").unwrap(), 1);
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

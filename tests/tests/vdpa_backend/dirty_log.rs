//! Logs the pages that the device writes while the guest keeps its device: all of guest memory is
//! compared before and after.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use devices::virtio::backend::{Backend as _, Hardware as _, QueueChange};
use lab::sim::{Mapping, SimDevice};
use vdpa::memory::GuestMemory;
use vm_memory::bitmap::Bitmap as _;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryBackend as _, GuestMemoryRegion as _};

use super::support::frames::{Loopback as _, exchange, packet};
use super::support::guest::{HIGH, RAM_END, REGION, wait};
use super::support::machine::{Machine, options};
use super::support::nic::{PATIENCE, RECEIVE, TRANSMIT};
use super::support::process::{descriptors, inheritable};
use super::support::{FOREIGN, MAC, SECOND, net, second_net};
use devices::virtio::vdpa::VdpaBackend;

const PAGE: u64 = 4096;
/// The receive buffers are the first 16 pages of the second region.
const RECEIVE_END: u64 = HIGH + 16 * PAGE;

/// All of guest memory, by page.
fn pages(memory: &GuestMemory) -> Vec<(u64, Vec<u8>)> {
    [0, HIGH]
        .into_iter()
        .flat_map(|base| (0..REGION / PAGE).map(move |page| base + page * PAGE))
        .map(|address| {
            let mut page = vec![0; 4096];
            memory.read_slice(&mut page, GuestAddress(address)).unwrap();
            (address, page)
        })
        .collect()
}

fn is_dirty(memory: &GuestMemory, address: u64) -> bool {
    let region = memory.find_region(GuestAddress(address)).unwrap();
    let offset = usize::try_from(address - region.start_addr().0).unwrap();
    region.bitmap().dirty_at(offset)
}

/// Runs `work` and compares: each changed page is marked or always dirty, and at least `written`
/// receive buffers are marked.
fn compare(machine: &mut Machine, written: usize, work: impl FnOnce(&mut Machine)) {
    let memory = Arc::clone(&machine.memory);
    if written > 0 {
        // No frame waits there, and arriving frames differ from this.
        let zeroes = [0; 16 * 4096];
        memory.write_slice(&zeroes, GuestAddress(HIGH)).unwrap();
    }
    let before = pages(&memory);
    memory.iter().for_each(|region| (**region).bitmap().reset());
    work(machine);
    let always = machine.backend.untracked_writes();
    let mut received = 0;
    for ((address, old), (_, new)) in before.iter().zip(pages(&memory)) {
        if *old == new {
            continue;
        }
        let marked = is_dirty(&memory, *address);
        let exempt = always
            .iter()
            .any(|(first, len)| *first < address + PAGE && first + len > *address);
        assert!(marked || exempt, "page {address:#x} changed without a mark");
        received += usize::from((HIGH..RECEIVE_END).contains(address) && marked);
    }
    assert!(received >= written, "{received} receive buffers are marked");
    // A page without writes is not marked.
    assert!(!is_dirty(&memory, HIGH + REGION - PAGE));
}

/// Waits until this many threads of this process poll relays: one that was joined is still listed
/// for a moment.
#[track_caller]
fn relay_threads_are(wanted: usize) {
    let begin = Instant::now();
    while relay_threads() != wanted {
        assert!(begin.elapsed() < PATIENCE, "not {wanted} threads");
        thread::sleep(Duration::from_millis(1));
    }
}

fn relay_threads() -> usize {
    std::fs::read_dir("/proc/self/task")
        .unwrap()
        .map_while(Result::ok)
        .filter(|task| {
            std::fs::read_to_string(task.path().join("comm"))
                .is_ok_and(|name| name.trim() == "relay")
        })
        .count()
}

fn begins_and_ends(net: &SimDevice) {
    let inherited = inheritable();
    let mut machine = Machine::new(net);
    machine.start();
    exchange(&mut machine.nic, 20, &[MAC]);
    let has = |machine: &Machine| (machine.backend.mapped_bytes(), descriptors());
    let before = has(&machine);
    for round in 0..20 {
        // Some frames are in flight.
        for sequence in 0..4 {
            machine.nic.send(&packet(sequence, 590, MAC));
        }
        machine.backend.log_writes(true).unwrap();
        machine.backend.log_writes(true).unwrap();
        for sequence in 0..4 {
            let got = machine.nic.receive().unwrap();
            assert_eq!(got[12..], packet(sequence, 590, MAC)[12..], "{round}");
        }
        relay_threads_are(1);
        assert!(has(&machine).0 > before.0);
        // An upgraded program, and one that is only asked, would keep them open for good.
        assert_eq!(inheritable(), inherited);
        compare(&mut machine, 16, |machine| {
            exchange(&mut machine.nic, 40, &[MAC]);
        });
        machine.backend.log_writes(false).unwrap();
        machine.backend.log_writes(false).unwrap();
        assert_eq!(machine.backend.untracked_writes(), []);
        relay_threads_are(0);
        assert_eq!(has(&machine), before, "round {round}");
        exchange(&mut machine.nic, 10, &[MAC]);
    }
}

#[test]
fn a_log_begins_and_ends_under_traffic() {
    for mapping in [Mapping::DEFAULT, Mapping::PINNED] {
        begins_and_ends(&net(mapping));
    }
}

#[test]
fn a_log_outlives_resets_by_the_driver() {
    let net = net(Mapping::DEFAULT);
    let mut machine = Machine::new(&net);
    let bytes = machine.backend.mapped_bytes();
    // Before there is a driver at all.
    machine.backend.log_writes(true).unwrap();
    for round in 0..10 {
        compare(&mut machine, 16, |machine| {
            machine.start();
            exchange(&mut machine.nic, 20, &[MAC]);
        });
        relay_threads_are(1);
        for sequence in 0..8 {
            machine.nic.send(&packet(sequence, 590, MAC));
        }
        machine.backend.reset();
        relay_threads_are(0);
        assert_eq!(machine.backend.untracked_writes(), []);
        if round == 0 {
            // The control queue is mapped from the first start on.
            assert!(machine.backend.mapped_bytes() >= bytes);
        }
    }
    machine.backend.log_writes(false).unwrap();
    machine.start();
    relay_threads_are(0);
    exchange(&mut machine.nic, 20, &[MAC]);
}

#[test]
fn the_guest_changes_its_device_meanwhile() {
    let net = net(Mapping::DEFAULT);
    let mut machine = Machine::new(&net);
    machine.start();
    machine.backend.log_writes(true).unwrap();
    compare(&mut machine, 16, |machine| {
        for _ in 0..5 {
            exchange(&mut machine.nic, 10, &[MAC]);
            for index in [RECEIVE, TRANSMIT] {
                let fresh = Arc::new(vdpa::eventfd::new().unwrap());
                for call in [None, Some(Arc::clone(&fresh))] {
                    let change = QueueChange::Call { index, call };
                    machine.backend.change(change).unwrap();
                }
                assert!(wait(&fresh, PATIENCE), "the spurious interrupt");
                let ring = if index == RECEIVE {
                    &mut machine.nic.receive
                } else {
                    &mut machine.nic.transmit
                };
                ring.call = fresh;
            }
            let command = [&[1, 1][..], &FOREIGN].concat();
            assert_eq!(machine.command(&command), 0);
            exchange(&mut machine.nic, 10, &[FOREIGN]);
            let command = [&[1, 1][..], &MAC].concat();
            assert_eq!(machine.command(&command), 0);
            // Both queues are reset with frames in flight, and come back.
            for sequence in 0..4 {
                machine.nic.send(&packet(sequence, 590, MAC));
            }
            for index in [RECEIVE, TRANSMIT] {
                let change = QueueChange::Reset { index };
                machine.backend.change(change).unwrap();
            }
            machine.nic.restart();
            for queue in [machine.nic.receive.queue(), machine.nic.transmit.queue()] {
                machine.backend.change(QueueChange::Enable(queue)).unwrap();
            }
            relay_threads_are(1);
        }
        exchange(&mut machine.nic, 20, &[MAC]);
    });
    machine.backend.log_writes(false).unwrap();
    exchange(&mut machine.nic, 20, &[MAC]);
}

/// After a reset the queue's ring no longer counts as always dirty. The reset marks its earlier
/// untracked writes.
#[test]
fn untracked_writes_are_marked_at_a_queue_reset() {
    let net = net(Mapping::DEFAULT);
    let mut machine = Machine::new(&net);
    machine.start();
    machine.backend.log_writes(true).unwrap();
    exchange(&mut machine.nic, 5, &[MAC]);
    let used_ring = machine.nic.transmit.addresses.device;
    let untracked = machine.backend.untracked_writes();
    assert!(untracked.iter().any(|(first, _)| *first == used_ring.0));
    compare(&mut machine, 16, |machine| {
        exchange(&mut machine.nic, 20, &[MAC]);
        let change = QueueChange::Reset { index: TRANSMIT };
        machine.backend.change(change).unwrap();
        assert_eq!(machine.backend.untracked_writes(), []);
    });
    assert!(is_dirty(&machine.memory, used_ring.0));
    machine.backend.reset();
    machine.start();
    exchange(&mut machine.nic, 20, &[MAC]);
}

#[test]
fn a_device_is_saved_while_its_writes_are_recorded() {
    let first = net(Mapping::DEFAULT);
    let second = second_net("second", SECOND);
    let mut source = Machine::new(&first);
    source.start();
    for round in 0..5 {
        source.backend.log_writes(true).unwrap();
        exchange(&mut source.nic, 20, &[MAC]);
        let late = packet(round, 590, MAC);
        source.nic.send(&late);
        let state = source.backend.save().unwrap();
        source.backend.save().unwrap_err();
        assert_eq!(source.backend.untracked_writes(), []);
        let activation = source.activation();
        if round % 2 == 0 {
            source.backend.restore(&state, activation).unwrap();
        } else {
            let memory = Arc::clone(&source.memory);
            let options = options(&second);
            let mut destination = VdpaBackend::open(&options, memory, RAM_END).unwrap();
            destination.restore(&state, activation).unwrap();
            let got = source.nic.receive().unwrap();
            assert_eq!(got[12..], late[12..]);
            exchange(&mut source.nic, 20, &[MAC]);
            // And back.
            let state = destination.save().unwrap();
            drop(destination);
            let activation = source.activation();
            source.backend.restore(&state, activation).unwrap();
            exchange(&mut source.nic, 20, &[MAC]);
            continue;
        }
        relay_threads_are(0);
        let got = source.nic.receive().unwrap();
        assert_eq!(got[12..], late[12..]);
        exchange(&mut source.nic, 20, &[MAC]);
    }
}

/// A ring that no driver creates: the relay gives it up and reports an error; the log continues
/// after a reset.
#[test]
fn a_guest_that_breaks_a_relayed_ring_must_reset() {
    let net = net(Mapping::DEFAULT);
    let mut machine = Machine::new(&net);
    machine.start();
    machine.backend.log_writes(true).unwrap();
    exchange(&mut machine.nic, 5, &[MAC]);
    let available = GuestAddress((machine.nic.receive.addresses.driver + 2).0);
    machine
        .memory
        .write_obj(0x7fffu16.to_le(), available)
        .unwrap();
    // A frame arrives, which makes the relay look.
    machine.nic.send(&packet(1, 590, MAC));
    let outcome = machine.turn(PATIENCE);
    assert!(outcome.needs_reset, "{outcome:?}");
    machine.backend.reset();
    compare(&mut machine, 16, |machine| {
        machine.start();
        exchange(&mut machine.nic, 20, &[MAC]);
    });
}

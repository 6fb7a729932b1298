use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::hypervisor::MsiVector as _;
use crate::pci::PciFunction as _;
use crate::vfio::model::{self, DATA, Fault, Rig, config_u32};

/// A function that can move, with this data, whose guest uses vectors 0 and 1.
fn source() -> (Rig, Arc<VfioPciDevice>) {
    let rig = able();
    rig.model.state.lock().data = [DATA, b"of the source"].concat();
    let device = rig.open().unwrap();
    device.write_config(0x04, &[6, 0]);
    // MSI-X is at 0x40, its table at the start of BAR 1.
    for vector in [0, 1] {
        device.write_bar(1, vector * 16, &0xfee0_0000_u64.to_le_bytes());
        device.write_bar(1, vector * 16 + 8, &[0x41, 0, 0, 0, 0, 0, 0, 0]);
    }
    device.write_config(0x42, &[0, 0x80]);
    assert_eq!(rig.model.connected(), 2);
    (rig, device)
}

fn able() -> Rig {
    let rig = Rig::virtio();
    rig.model.state.lock().abilities = Abilities {
        moves: true,
        logs: true,
        early: false,
    };
    rig
}

fn phase(rig: &Rig) -> u32 {
    rig.model.state.lock().migration
}

const MAX: usize = 64;

#[test]
fn a_function_moves() {
    let (rig, device) = source();
    let saved = device.save(MAX).unwrap();
    assert_eq!(saved.data, b"modelof the source");
    assert_eq!(phase(&rig), model::STOP);
    device.save(MAX).unwrap_err();

    let there = able();
    let arrived = there.open().unwrap();
    arrived.compare(&device.view()).unwrap();
    arrived.load(&saved).unwrap();
    assert_eq!((phase(&there), there.model.command()), (model::STOP, 0));
    assert_eq!(there.model.state.lock().data, saved.data);
    arrived.start(&saved).unwrap();
    assert_eq!((phase(&there), there.model.command()), (model::RUNNING, 6));
    assert_eq!(there.model.connected(), 2);
    assert_eq!(config_u32(&arrived, 0x40), config_u32(&device, 0x40));
    // A trigger may have been lost.
    for vector in [0, 1] {
        assert!(there.vectors.get(vector).pending(), "no spurious interrupt");
    }
    arrived.start(&saved).unwrap_err();

    // The guest stays.
    device.resume();
    assert_eq!((phase(&rig), rig.model.resets()), (model::RUNNING, 1));
    device.resume();
    device.save(MAX).unwrap();
    // It ends with the function stopped.
    drop(device);
    assert_eq!((phase(&rig), rig.model.resets()), (model::RUNNING, 2));
}

#[test]
fn a_source_that_cannot_save_runs() {
    for fault in [
        Fault::Enter(model::STOP_COPY),
        Fault::ReadData,
        Fault::Enter(model::STOP),
    ] {
        let (rig, device) = source();
        rig.model.set_fault(Some(fault));
        device.save(MAX).unwrap_err();
        assert_eq!(phase(&rig) % model::RUNNING, 0, "{fault:?}");
        assert!(!device.take_error());
        // The next attempt.
        rig.model.set_fault(None);
        rig.model.state.lock().data = DATA.to_vec();
        assert_eq!(device.save(MAX).unwrap().data, DATA);
    }
    // More data than allowed.
    let (rig, device) = source();
    rig.model.state.lock().data = vec![0; MAX + 1];
    let error = device.save(MAX).unwrap_err();
    assert!(error.to_string().contains("more than 64 bytes"), "{error}");
    assert_eq!(phase(&rig), model::RUNNING);
}

#[test]
fn a_function_that_does_not_resume_is_reported_until_its_reset() {
    let (rig, device) = source();
    device.save(MAX).unwrap();
    rig.model.set_fault(Some(Fault::Enter(model::RUNNING)));
    device.resume();
    assert!(device.take_error() && device.has_failed());
    rig.model.set_fault(None);
    device.reset();
    assert!(!device.has_failed());
    assert_eq!((phase(&rig), rig.model.resets()), (model::RUNNING, 2));
}

#[test]
fn a_destination_that_cannot_load_is_reset() {
    let (_rig, device) = source();
    let saved = device.save(MAX).unwrap();
    for fault in [
        Fault::Enter(model::RESUMING),
        Fault::WriteData,
        Fault::Enter(model::STOP),
    ] {
        let there = able();
        let arrived = there.open().unwrap();
        there.model.set_fault(Some(fault));
        arrived.load(&saved).unwrap_err();
        assert_eq!((there.model.command(), there.model.connected()), (0, 0));
        there.model.set_fault(None);
        drop(arrived);
        assert_eq!(there.model.resets(), 2, "{fault:?}");
    }
    for fault in [Fault::SetVectors, Fault::Enter(model::RUNNING)] {
        let there = able();
        let arrived = there.open().unwrap();
        arrived.load(&saved).unwrap();
        there.model.set_fault(Some(fault));
        arrived.start(&saved).unwrap_err();
        assert_ne!(phase(&there), model::RUNNING, "{fault:?}");
        // A second attempt, as after a failed restore of the machine.
        there.model.set_fault(None);
        arrived.reset();
        arrived.start(&saved).unwrap_err();
        arrived.load(&saved).unwrap();
        arrived.start(&saved).unwrap();
    }
}

#[test]
fn a_state_of_another_function_changes_nothing() {
    let (_rig, device) = source();
    let saved = device.save(MAX).unwrap();
    let there = able();
    let arrived = there.open().unwrap();
    let mut other = saved.clone();
    other.config_space.bytes[0] ^= 1;
    arrived.load(&other).unwrap_err();
    let mut other = saved.clone();
    other.config_space.bytes.truncate(255);
    arrived.load(&other).unwrap_err();
    let mut other = saved.clone();
    other.msix.entries.pop();
    arrived.load(&other).unwrap_err();
    assert_eq!((phase(&there), there.model.resets()), (model::RUNNING, 1));
    // The driver judges the data.
    let mut other = saved.clone();
    other.data = b"else".to_vec();
    let error = arrived.load(&other).unwrap_err();
    assert!(error.to_string().contains("refuses"), "{error}");
    // Not even a right one, before a reset.
    there.model.set_fault(Some(Fault::Enter(model::RUNNING)));
    arrived.start(&saved).unwrap_err();
}

#[test]
fn functions_are_compared() {
    let (_rig, device) = source();
    let view = device.view();
    let compare = |change: fn(&mut FunctionView)| {
        let mut view = view.clone();
        change(&mut view);
        let refused = device.compare(&view).map_err(|error| error.to_string());
        refused.err().unwrap_or_default()
    };
    assert_eq!(compare(|_| ()), "");
    assert!(compare(|view| view.config[2] ^= 1).contains("vendor and device"));
    assert!(compare(|view| view.config[8] ^= 1).contains("class and revision"));
    assert!(compare(|view| view.config[0x2e] ^= 1).contains("subsystem"));
    assert!(compare(|view| view.config[0x34] ^= 1).contains("capabilities"));
    assert!(compare(|view| view.config.clear()).contains("vendor"));
    assert!(compare(|view| view.sizes[1] = 1).contains("sizes of BARs"));
    assert!(compare(|view| view.sizes.clear()).contains("sizes of BARs"));
}

#[test]
fn a_snapshot_needs_no_log() {
    let able = |moves, logs| {
        let rig = Rig::virtio();
        rig.model.state.lock().abilities = Abilities {
            moves,
            logs,
            early: false,
        };
        let device = rig.open().unwrap();
        [device.ensure_savable(), device.ensure_movable()].map(|able| {
            able.map_err(|error| error.to_string())
                .err()
                .unwrap_or_default()
        })
    };
    assert_eq!(able(true, true), ["", ""]);
    let [savable, movable] = able(true, false);
    assert!(
        savable.is_empty() && movable.contains("does not log"),
        "{movable}"
    );
    for refused in able(false, true) {
        assert!(refused.contains("cannot move"), "{refused}");
    }
}

#[test]
fn writes_are_logged() {
    let rig = able();
    let device = rig.open().unwrap();
    device.take_log().unwrap_err();
    device.log_writes(false).unwrap();
    rig.model.set_fault(Some(Fault::StartLog));
    device.log_writes(true).unwrap_err();
    rig.model.set_fault(None);
    device.log_writes(true).unwrap();
    device.log_writes(true).unwrap();
    rig.model.state.lock().log = Some(vec![(0x1000, 0x2000)]);
    assert_eq!(device.take_log().unwrap(), [(0x1000, 0x2000)]);
    assert_eq!(device.take_log().unwrap(), []);
    rig.model.set_fault(Some(Fault::TakeLog));
    device.take_log().unwrap_err();
    device.log_writes(false).unwrap();
}

#[test]
fn a_log_that_does_not_end_is_ended_or_used_later() {
    let rig = able();
    let device = rig.open().unwrap();
    device.log_writes(true).unwrap();
    rig.model.set_fault(Some(Fault::StopLog));
    device.log_writes(false).unwrap_err();
    // The next attempt to move uses it, and the next one to end it may work.
    device.log_writes(true).unwrap();
    assert_eq!(device.take_log().unwrap(), []);
    rig.model.set_fault(None);
    device.log_writes(false).unwrap();
    device.log_writes(true).unwrap();
}

#[test]
fn a_function_that_stays_in_pre_copy_is_reported() {
    for resets in [false, true] {
        let (rig, device, _) = early_source();
        rig.model.set_fault(Some(Fault::Enter(model::RUNNING)));
        device.log_writes(false).unwrap();
        assert_eq!(phase(&rig), model::PRE_COPY);
        assert!(device.take_error() && device.has_failed());
        // Neither moved nor saved: the beginning of its data is gone.
        device.log_writes(true).unwrap_err();
        device.save(MAX).unwrap_err();
        rig.model.set_fault(None);
        if resets {
            device.reset();
            assert!(!device.has_failed());
        }
        device.log_writes(true).unwrap();
        assert_eq!((phase(&rig), device.early()), (model::PRE_COPY, 0));
    }
}

/// A function in PRE_COPY, with all that it has handed out so far.
fn early_source() -> (Rig, Arc<VfioPciDevice>, Vec<Vec<u8>>) {
    let rig = able();
    {
        let mut state = rig.model.state.lock();
        state.abilities.early = true;
        (state.data, state.early) = ([DATA, b"of the source"].concat(), 7);
    }
    let device = rig.open().unwrap();
    assert_eq!(device.read_early(9).unwrap(), b"");
    device.log_writes(true).unwrap();
    assert_eq!(phase(&rig), model::PRE_COPY);
    let read = || Some(device.read_early(9).unwrap()).filter(|data| !data.is_empty());
    let parts: Vec<Vec<u8>> = std::iter::from_fn(read).collect();
    assert_eq!(parts.concat(), b"modelof");
    assert_eq!(device.early(), 7);
    (rig, device, parts)
}

/// A function that has this early data.
fn early_destination(parts: &[Vec<u8>]) -> (Rig, Arc<VfioPciDevice>) {
    let there = able();
    let arrived = there.open().unwrap();
    for part in parts {
        arrived.load_early(part, MAX).unwrap();
    }
    assert_eq!(phase(&there), model::RESUMING);
    (there, arrived)
}

#[test]
fn early_data_precedes_the_rest() {
    let (rig, device, parts) = early_source();
    let (there, arrived) = early_destination(&parts);
    let saved = device.save(MAX).unwrap();
    assert_eq!(
        (saved.early, saved.data.as_slice()),
        (7, &b" the source"[..])
    );
    arrived.load(&saved).unwrap();
    assert_eq!(there.model.state.lock().data, b"modelof the source");
    // A second attempt, after a reset of the machine.
    arrived.reset();
    arrived.load(&saved).unwrap();
    assert_eq!(there.model.state.lock().data, b"modelof the source");
    arrived.start(&saved).unwrap();
    assert_eq!(phase(&there), model::RUNNING);

    // The guest stays: its function begins anew in the next attempt.
    device.resume();
    device.log_writes(false).unwrap();
    assert_eq!(phase(&rig), model::RUNNING);
    device.log_writes(true).unwrap();
    assert_eq!((phase(&rig), device.early()), (model::PRE_COPY, 0));
    device.log_writes(false).unwrap();
    assert_eq!(phase(&rig), model::RUNNING);
}

#[test]
fn early_data_of_a_function_that_was_reset_is_void() {
    let (rig, device, parts) = early_source();
    let (there, arrived) = early_destination(&parts);
    device.write_config(0x04, &[6, 0]);
    device.reset();
    assert_eq!(
        (phase(&rig), device.read_early(9).unwrap()),
        (model::RUNNING, vec![])
    );
    rig.model.state.lock().data = [DATA, b"anew"].concat();
    let saved = device.save(MAX).unwrap();
    assert_eq!((saved.early, saved.data.as_slice()), (0, &b"modelanew"[..]));
    arrived.load(&saved).unwrap();
    assert_eq!(there.model.state.lock().data, b"modelanew");
    arrived.start(&saved).unwrap();
}

#[test]
fn early_data_that_is_lost_or_too_long_is_refused() {
    let (rig, device, parts) = early_source();
    let (_there, arrived) = early_destination(&parts[1..]);
    let (_there, other) = early_destination(&parts);
    other.load_early(&[0; MAX - 6], MAX).unwrap_err();
    let saved = device.save(MAX).unwrap();
    let error = arrived.load(&saved).unwrap_err().to_string();
    assert!(error.contains("is lost"), "{error}");
    device.resume();
    drop((rig, device));

    let rig = able();
    rig.model.state.lock().abilities.early = true;
    let device = rig.open().unwrap();
    rig.model.set_fault(Some(Fault::Enter(model::PRE_COPY)));
    device.log_writes(true).unwrap_err();
    rig.model.set_fault(None);
    device.log_writes(false).unwrap();
    device.log_writes(true).unwrap();
    (rig.model.state.lock().data, rig.model.state.lock().early) = (DATA.to_vec(), 3);
    rig.model.set_fault(Some(Fault::ReadData));
    device.read_early(9).unwrap_err();
}

#[test]
fn a_bitmap_becomes_ranges() {
    let mut ranges = Vec::new();
    append_pages(0x10_0000, &[1 << 63, 0b101, 0, 1], &mut ranges);
    let expected = [
        (0x10_0000 + 63 * PAGE, 2 * PAGE),
        (0x10_0000 + 66 * PAGE, PAGE),
        (0x10_0000 + 192 * PAGE, PAGE),
    ];
    assert_eq!(ranges, expected);
    append_pages(0x10_0000 + 193 * PAGE, &[u64::MAX], &mut ranges);
    assert_eq!(ranges.last(), Some(&(0x10_0000 + 192 * PAGE, 65 * PAGE)));
}

proptest! {
    /// The guest sees what it could have reached by itself, or the state is refused.
    #[test]
    fn any_state_is_possible_or_refused(
        changes in prop::collection::vec((0..256_usize, any::<u8>()), 0..4),
        entries in 0..5_usize,
        data in prop::collection::vec(any::<u8>(), 0..9),
    ) {
        let (_rig, device) = source();
        let mut saved = device.save(MAX).unwrap();
        for (at, byte) in changes {
            saved.config_space.bytes[at] = byte;
        }
        let entry = saved.msix.entries[0];
        saved.msix.entries.resize(entries, entry);
        saved.data = [DATA, &data].concat();
        let there = able();
        let arrived = there.open().unwrap();
        let view = arrived.view();
        if arrived.load(&saved).is_ok() {
            arrived.start(&saved).unwrap();
            prop_assert_eq!(there.model.state.lock().data.clone(), saved.data);
            prop_assert_eq!(entries, 3);
        }
        // Only registers that a guest can write differ.
        prop_assert_eq!(arrived.view(), view);
    }
}

//! Another backend behind the same function: the guest's view, and the result when one of the two
//! fails.

use std::sync::Arc;

use parking_lot::Mutex;
use proptest::prelude::*;
use vdpa::iova::IovaRange;
use vdpa::memory::{AddressSpace, Mode};

use super::rig::{
    FAIL_CHANGE, FAIL_SAVE, MAX_SIZES, Model, OFFER, RING_RESET, Rig, Seen, Shape, Stage,
    VERSION_1, WINDOW, reg,
};
use crate::testing::{FakeDeviceMappings, FakeVectors, Reached};
use crate::virtio::backend::{Backend, Event, Outcome};
use crate::virtio::iommu::{Endpoint as _, Recorder, domains};
use crate::virtio::pci::{Swapped, VirtioPciDevice};
use crate::{Error, ErrorKind};

const NEEDS_RESET: u64 = 64;
/// VIRTIO_NET_F_MAC, which has another meaning in the model that does not occur here.
const MAC: u64 = FAIL_CHANGE;

fn swap(rig: &Rig, shape: Shape) -> (Result<Swapped, Error>, Arc<Mutex<Seen>>) {
    let (next, seen) = Model::new(shape);
    let replacement = rig.device.replacement(Box::new(next));
    let swapped = rig.device.swap(replacement, None);
    (swapped.map_err(|failed| failed.error), seen)
}

fn stage(seen: &Mutex<Seen>) -> Stage {
    seen.lock().stage
}

fn take_interrupts(rig: &Rig) {
    for vector in 0..=4 {
        rig.vectors.get(vector).delivered();
    }
}

/// Returns a backend behind the IOMMU.
fn behind(recorder: &Arc<Mutex<Recorder>>) -> (Box<Model>, Arc<Mutex<Seen>>) {
    let (mut model, seen) = Model::new(Shape::default());
    model.translated = Some(Arc::clone(recorder));
    (Box::new(model), seen)
}

#[test]
fn a_swap_waits_for_a_change_of_the_domains() {
    let [old, new] = [Recorder::new(), Recorder::new()];
    let doorbells = Arc::new(FakeDeviceMappings::default());
    let device = VirtioPciDevice::new(behind(&old).0, &FakeVectors::new(9), doorbells).unwrap();
    let device = Arc::new(device);
    let domains = Arc::new(Mutex::new(domains(true, 1)));
    domains.lock().add(0x80, device.clone()).unwrap();
    let changing = domains.lock();
    std::thread::scope(|scope| {
        let replacement = device.replacement(behind(&new).0);
        let swap = scope.spawn(|| device.swap(replacement, Some(&domains)).is_ok());
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(!swap.is_finished() && new.lock().space.is_none());
        // As a change of the domains does. The new device gets the result.
        device.leave().unwrap();
        drop(changing);
        assert!(swap.join().unwrap());
    });
    assert!(new.lock().space.is_none() && new.lock().mode == Mode::Blocked);
}

#[test]
fn a_device_behind_the_iommu_begins_in_the_space_of_the_old_one() {
    let [old, new] = [Recorder::new(), Recorder::new()];
    let doorbells = Arc::new(FakeDeviceMappings::default());
    let device = VirtioPciDevice::new(behind(&old).0, &FakeVectors::new(9), doorbells).unwrap();
    let space = Arc::new(AddressSpace::new(IovaRange::ALL));
    space.change(|space| space.set_mode(Mode::Identity));
    device.enter(&space).unwrap();
    device
        .swap(device.replacement(behind(&new).0), None)
        .map_err(|failed| failed.error)
        .unwrap();
    assert_eq!(new.lock().mode, Mode::Identity);
    assert!(Arc::ptr_eq(new.lock().space.as_ref().unwrap(), &space));
    // Its changes reach the new device from here on.
    device.leave().unwrap();
    assert_eq!(
        (new.lock().mode, old.lock().mode),
        (Mode::Blocked, Mode::Identity)
    );

    // One that refuses the space, and one that is not behind the IOMMU, do not replace it.
    device.enter(&space).unwrap();
    let broken = Recorder::new();
    broken.lock().broken = true;
    let (outside, _) = Model::new(Shape::default());
    for next in [behind(&broken).0, Box::new(outside)] {
        let refused = device.swap(device.replacement(next), None).unwrap_err();
        assert_eq!(refused.error.kind(), ErrorKind::Incompatible);
    }
    assert_eq!(new.lock().mode, Mode::Identity);
}

#[test]
fn a_driver_continues_with_another_device() {
    let rig = Rig::new();
    rig.seen.lock().doorbells = vec![0, 1];
    rig.start(VERSION_1);
    take_interrupts(&rig);
    let _ = (rig.device.kicks[0].read(), rig.device.kicks[1].read());
    let generation = rig.read(reg::GENERATION, 1);
    let ring_start = |rig: &Rig| {
        let mut starts = Vec::new();
        rig.device.running_rings(|ring, _| starts.push(ring.start));
        starts[0]
    };
    let before = ring_start(&rig);

    let (next, seen) = Model::new(Shape::default());
    {
        let mut seen = seen.lock();
        seen.config = *b"abcdefghij";
        seen.doorbells = vec![1];
    }
    let swapped = rig
        .device
        .swap(rig.device.replacement(Box::new(next)), None);
    let swapped = swapped.unwrap();
    assert!(swapped.gap.is_some());
    // The guest's registers are unchanged, and the new device is behind them.
    assert_eq!(rig.status(), 15);
    assert_eq!(
        rig.read(0x2000, 2),
        u64::from(u16::from_le_bytes(*b"ab")),
        "configuration"
    );
    assert_ne!(rig.read(reg::GENERATION, 1), generation);
    assert_ne!(ring_start(&rig), before);
    {
        let seen = seen.lock();
        assert_eq!(seen.stage, Stage::Active);
        let activation = seen.activation.as_ref().unwrap();
        assert_eq!(activation.features, VERSION_1);
        assert_eq!(activation.queues[0].addresses.size, 128);
        assert!(Arc::ptr_eq(
            &activation.queues[1].kick,
            &rig.device.kicks[1]
        ));
        let replaced = seen.replaced.as_ref().unwrap();
        assert_eq!((replaced.features, replaced.running), (VERSION_1, true));
        assert_eq!(replaced.identity.payload, b"0123456789");
    }
    // The doorbells of the new device, and only those.
    let notify = WINDOW + 0x1_0000;
    assert_eq!(
        rig.doorbells.all()[..2],
        [Reached::Eventfd(notify), Reached::Page(notify + 4096, 1)]
    );
    for vector in [0, 1, 2] {
        assert!(rig.vectors.get(vector).delivered().is_some(), "{vector}");
    }
    assert!(rig.device.kicks[0].read().is_ok() && rig.device.kicks[1].read().is_ok());

    // The old device is stopped, and its owner closes it.
    assert_eq!(rig.stage(), Stage::Saved);
    assert!(!rig.seen.lock().dropped);
    drop(swapped);
    assert!(rig.seen.lock().dropped);
    // Later events go to the new device.
    rig.device.process(3);
    assert_eq!(seen.lock().tokens, [3]);
    rig.write(reg::QUEUE_SELECT, 2, 0);
    rig.write(reg::QUEUE_VECTOR, 2, 4);
    assert_eq!(seen.lock().calls.len(), 1);
    rig.start(VERSION_1);
    assert_eq!(stage(&seen), Stage::Active);
    assert!(rig.seen.lock().calls.is_empty());
}

#[test]
fn the_old_device_hands_over_without_doorbells() {
    let rig = Rig::new();
    {
        let mut seen = rig.seen.lock();
        seen.doorbells = vec![0, 1];
        seen.watched = Some(Arc::clone(&rig.doorbells));
    }
    rig.start(VERSION_1);
    let notify = WINDOW + 0x1_0000;
    let pages = [Reached::Page(notify, 0), Reached::Page(notify + 4096, 1)];
    assert_eq!(rig.doorbells.all()[..2], pages);
    let (swapped, _next) = swap(&rig, Shape::default());
    swapped.unwrap();
    let eventfds = [Reached::Eventfd(notify), Reached::Eventfd(notify + 4096)];
    assert_eq!(rig.seen.lock().reached[..2], eventfds);
}

#[test]
fn every_stage_of_a_driver_can_be_caught() {
    for (steps, gap) in [(0, false), (1, false), (2, false), (3, false), (4, true)] {
        let rig = Rig::new();
        for status in [1, 3].into_iter().take(steps) {
            rig.set_status(status);
        }
        if steps >= 3 {
            rig.agree(VERSION_1);
            rig.set_up_queue(0, 32, 1);
        }
        if steps == 4 {
            rig.set_status(15);
        }
        let (swapped, seen) = swap(&rig, Shape::default());
        assert_eq!(swapped.unwrap().gap.is_some(), gap, "{steps}");
        let relied_on = match steps {
            0 => 0,
            1 | 2 => OFFER,
            _ => VERSION_1,
        };
        let replaced = seen.lock().replaced.clone().unwrap();
        assert_eq!(replaced.features, relied_on, "{steps}");
        assert_eq!(replaced.running, gap);
        if steps == 3 {
            assert_eq!(stage(&seen), Stage::Negotiated);
            rig.set_status(15);
        } else if steps < 3 {
            assert_eq!(stage(&seen), Stage::Inactive);
            rig.start(VERSION_1);
        }
        assert_eq!((rig.status(), stage(&seen)), (15, Stage::Active), "{steps}");
    }
}

/// Devices with which a driver of [`Shape::default`] with the feature MAC cannot continue, with the
/// error text of each.
fn lesser_shapes() -> Vec<(Shape, &'static str)> {
    let fits = Shape::default;
    let smaller = |queue: usize, size| {
        let mut shape = fits();
        shape.max_sizes[queue] = size;
        shape
    };
    let mut more_queues = fits();
    more_queues.max_sizes.extend([256, 256]);
    vec![
        (
            Shape {
                device_type: 2,
                ..fits()
            },
            "virtio type 2",
        ),
        (
            Shape {
                offer: VERSION_1,
                ..fits()
            },
            "driver uses: MAC",
        ),
        (
            smaller(0, 128),
            "queue 0 of the new device takes 128 entries",
        ),
        (smaller(3, 0), "queue 3"),
        (more_queues, "6 queues, but the guest has seen 4"),
        (
            Shape {
                refuses: Some("not as nice"),
                ..fits()
            },
            "cannot replace the old one",
        ),
    ]
}

#[test]
fn an_unfit_device_is_refused_before_anything_stops() {
    for (shape, words) in lesser_shapes() {
        let rig = Rig::new();
        rig.seen.lock().doorbells = vec![0];
        rig.start(VERSION_1 | MAC);
        take_interrupts(&rig);
        let done = rig.doorbells.done.lock().len();
        let (swapped, seen) = swap(&rig, shape);
        let error = swapped.unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!((rig.status(), rig.stage()), (15, Stage::Active));
        // The guest has noticed nothing, and the new device has not started. The size of its queues
        // is known after the negotiation.
        assert_eq!(rig.doorbells.done.lock().len(), done);
        assert!((0..=4).all(|vector| rig.vectors.get(vector).delivered().is_none()));
        assert!(matches!(stage(&seen), Stage::Inactive | Stage::Negotiated));
        assert!(seen.lock().dropped);
    }
}

#[test]
fn a_saved_device_is_not_replaced() {
    let rig = Rig::new();
    rig.start(VERSION_1);
    let state = rig.device.save().unwrap();
    let (swapped, _) = swap(&rig, Shape::default());
    assert_eq!(swapped.unwrap_err().kind(), ErrorKind::CannotHandOver);
    rig.device.restore(&state).unwrap();
    let (swapped, seen) = swap(&rig, Shape::default());
    swapped.unwrap();
    assert_eq!(stage(&seen), Stage::Active);
}

#[test]
fn an_old_device_that_cannot_hand_over_continues() {
    let keeps = Shape {
        keeps_place: true,
        ..Shape::default()
    };
    for (shape, features) in [
        (keeps, VERSION_1),
        (Shape::default(), VERSION_1 | FAIL_SAVE),
    ] {
        let rig = Rig::with(shape);
        rig.seen.lock().doorbells = vec![0];
        rig.start(features);
        take_interrupts(&rig);
        let (swapped, seen) = swap(&rig, Shape::default());
        assert_eq!(swapped.unwrap_err().kind(), ErrorKind::CannotHandOver);
        assert_eq!((rig.status(), rig.stage()), (15, Stage::Active));
        assert_eq!(rig.doorbells.all()[0], Reached::Page(WINDOW + 0x1_0000, 0));
        // Kicks in between are repeated.
        assert!(rig.vectors.get(1).delivered().is_some());
        assert_ne!(stage(&seen), Stage::Active);
    }
}

#[test]
fn the_old_device_continues_where_the_new_one_fails() {
    let rig = Rig::new();
    rig.seen.lock().doorbells = vec![0];
    rig.start(VERSION_1);
    take_interrupts(&rig);
    let fails = Shape {
        fails_restore: true,
        ..Shape::default()
    };
    let (swapped, seen) = swap(&rig, fails);
    let error = swapped.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::CannotStart, "{error}");
    assert!(error.to_string().contains("the old one continues"));
    assert_eq!((rig.status(), rig.stage()), (15, Stage::Active));
    // Not at the saved position: the new device may have worked on the rings.
    assert_eq!(rig.seen.lock().rolled_back, 1);
    assert_eq!(rig.doorbells.all()[0], Reached::Page(WINDOW + 0x1_0000, 0));
    assert!(rig.vectors.get(1).delivered().is_some());
    {
        let seen = seen.lock();
        assert_eq!((seen.stage, seen.dropped), (Stage::Inactive, true));
        assert_eq!(seen.resets, 1, "it must be still before the old one starts");
    }
    rig.report(Outcome::default());
    assert_eq!(rig.seen.lock().tokens, [7]);
}

#[test]
fn a_guest_is_notified_when_neither_works() {
    let rig = Rig::new();
    rig.start(VERSION_1);
    take_interrupts(&rig);
    rig.seen.lock().fails_next_restore = true;
    let fails = Shape {
        fails_restore: true,
        ..Shape::default()
    };
    let (swapped, _) = swap(&rig, fails);
    let error = swapped.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    assert!(error.to_string().contains("cannot now"), "{error}");
    assert_eq!(rig.status(), 15 | NEEDS_RESET);
    assert!(rig.vectors.get(0).delivered().is_some());
    assert_eq!(rig.stage(), Stage::Inactive);
    // Another device fixes it, from the driver's next start.
    let (swapped, seen) = swap(&rig, Shape::default());
    assert!(swapped.unwrap().gap.is_none());
    assert_eq!(
        (rig.status(), stage(&seen)),
        (15 | NEEDS_RESET, Stage::Inactive)
    );
    rig.start(VERSION_1);
    assert_eq!((rig.status(), stage(&seen)), (15, Stage::Active));
}

#[test]
fn another_device_offers_its_own_features_to_the_next_driver() {
    let rig = Rig::new();
    rig.start(VERSION_1);
    let less = Shape {
        offer: VERSION_1 | 1 << 40,
        ..Shape::default()
    };
    swap(&rig, less).0.unwrap();
    rig.set_status(0);
    let offered = [0, 1].map(|select| {
        rig.write(reg::DEVICE_FEATURE_SELECT, 4, select);
        rig.read(reg::DEVICE_FEATURE, 4) << (32 * select)
    });
    assert_eq!(offered[0] | offered[1], VERSION_1 | 1 << 40);
}

#[test]
fn descriptors_change_with_the_device() {
    let events = |fd| {
        vec![
            Event { fd, token: 0 },
            Event {
                fd: fd + 1,
                token: 1,
            },
        ]
    };
    let shape = |fd| Shape {
        events: events(fd),
        ..Shape::default()
    };
    let rig = Rig::with(shape(100));
    rig.start(VERSION_1);
    assert_eq!(rig.device.events(), events(100));
    let (next, _) = Model::new(shape(200));
    let replacement = rig.device.replacement(Box::new(next));
    assert_eq!(replacement.events(), events(200));
    assert_eq!(rig.device.events(), events(100));
    let swapped = rig.device.swap(replacement, None).unwrap();
    assert_eq!(
        (swapped.events, rig.device.events()),
        (events(100), events(200))
    );
    let mut failing = shape(300);
    failing.fails_restore = true;
    let (next, seen) = Model::new(failing);
    let failed = rig
        .device
        .swap(rig.device.replacement(Box::new(next)), None)
        .unwrap_err();
    assert_eq!(rig.device.events(), events(200));
    // It is returned, so that the caller stops polling before it closes the descriptors.
    assert!(!seen.lock().dropped);
    let given_back: Box<dyn Backend> = failed.replacement;
    drop(given_back);
    assert!(seen.lock().dropped);
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Start,
    Reset,
    Break,
    /// The device itself asks for a reset, and there is a backup.
    Fail,
    Swap,
    Refused,
    Fails,
    PowerCycle,
    Vector(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        Just(Step::Start),
        Just(Step::Reset),
        Just(Step::Break),
        Just(Step::Fail),
        Just(Step::Swap),
        Just(Step::Refused),
        Just(Step::Fails),
        Just(Step::PowerCycle),
        (0u64..6).prop_map(Step::Vector),
    ]
}

proptest! {
    /// For every order of actions of guest, device and operator, only the current backend works. It
    /// works exactly while the status says so, with its own doorbells, and no other backend
    /// remains.
    #[test]
    fn at_most_one_device_works(steps in prop::collection::vec(step(), 1..30)) {
        use crate::pci::PciFunction;
        let rig = Rig::new();
        let mut present = Arc::clone(&rig.seen);
        let mut past: Vec<Arc<Mutex<Seen>>> = Vec::new();
        let mut failing = false;
        rig.device.set_has_backup(true);
        for step in steps {
            match step {
                Step::Start => {
                    rig.set_status(0);
                    rig.start(VERSION_1);
                }
                Step::Reset => rig.set_status(0),
                Step::PowerCycle => {
                    rig.device.reset();
                    rig.config_write(0x10, 4, WINDOW & 0xffff_ffff);
                    rig.config_write(0x14, 4, WINDOW >> 32);
                    rig.config_write(4, 2, 6);
                }
                Step::Break => {
                    present.lock().outcome.needs_reset = true;
                    rig.device.process(1);
                }
                Step::Fail => {
                    {
                        let mut present = present.lock();
                        present.failed = true;
                        present.outcome.needs_reset = true;
                    }
                    let works = rig.status() == 15 && !failing;
                    prop_assert_eq!(rig.device.process(1), works);
                    failing |= works;
                }
                Step::Vector(vector) => {
                    rig.write(reg::QUEUE_SELECT, 2, 1);
                    rig.write(reg::QUEUE_VECTOR, 2, vector);
                }
                Step::Swap | Step::Refused | Step::Fails => {
                    let refuses = matches!(step, Step::Refused).then_some("no");
                    let fails_restore = matches!(step, Step::Fails);
                    let running = rig.status() == 15;
                    let shape = Shape { refuses, fails_restore, ..Shape::default() };
                    let (next, seen) = Model::new(shape);
                    seen.lock().doorbells = vec![1];
                    let swapped = rig.device.swap(rig.device.replacement(Box::new(next)), None);
                    let done = swapped.is_ok();
                    prop_assert_eq!(done, refuses.is_none() && !(fails_restore && running));
                    past.push(if done { std::mem::replace(&mut present, seen) } else { seen });
                }
            }
            failing &= rig.status() == 15
                && matches!(step, Step::Fail | Step::Break | Step::Refused | Step::Vector(_));
            let working = stage(&present) == Stage::Active;
            let broken = rig.status() & NEEDS_RESET != 0;
            prop_assert_eq!(working && !broken, rig.status() == 15);
            let pages = rig.doorbells.all().into_iter();
            let pages = pages.filter(|reached| matches!(reached, Reached::Page(..))).count();
            let has = present.lock().doorbells.len();
            prop_assert_eq!(pages, if rig.status() == 15 && !failing { has } else { 0 });
            prop_assert!(past.iter().all(|seen| seen.lock().dropped));
        }
    }
}

#[test]
fn a_device_on_another_host_continues_from_the_state() {
    let rig = Rig::new();
    rig.start(VERSION_1);
    let guest_view = rig.device.guest_view();
    let state = rig.device.save().unwrap();

    let other = Rig::cold();
    other.device.adopt(&guest_view).unwrap();
    {
        let seen = other.seen.lock();
        let replaced = seen.replaced.as_ref().unwrap();
        assert_eq!((replaced.features, replaced.running), (VERSION_1, true));
    }
    other.device.check(&state).unwrap();
    assert_eq!(
        other.stage(),
        Stage::Inactive,
        "a check starts nothing, and more than once"
    );
    other.device.check(&state).unwrap();
    other.device.restore(&state).unwrap();
    other.pci.remap();
    assert_eq!((other.status(), other.stage()), (15, Stage::Active));
    let again = other.device.adopt(&guest_view).unwrap_err();
    assert_eq!(again.kind(), ErrorKind::CannotHandOver);
}

#[test]
fn queues_have_the_sizes_that_belong_to_the_drivers_features() {
    let smaller_at_first = || Shape {
        max_sizes: vec![1; MAX_SIZES.len()],
        negotiated_sizes: Some(MAX_SIZES.to_vec()),
        offer: VERSION_1,
        ..Shape::default()
    };
    // Without a driver, or before it has negotiated, those of the next one count.
    for (status, stage) in [
        (15, Stage::Active),
        (3, Stage::Inactive),
        (0, Stage::Inactive),
    ] {
        let rig = Rig::with(Shape {
            offer: VERSION_1,
            ..Shape::default()
        });
        match status {
            15 => rig.start(VERSION_1),
            status => rig.set_status(status),
        }
        let (next, _) = Model::new(smaller_at_first());
        let next = rig.device.replacement(Box::new(next));
        rig.device.swap(next, None).unwrap();
        let guest_view = rig.device.guest_view();
        let state = rig.device.save().unwrap();
        for adopts in [true, false] {
            let other = Rig::cold_with(smaller_at_first());
            if adopts {
                other.device.adopt(&guest_view).unwrap();
            }
            assert_eq!(other.stage(), Stage::Inactive);
            other.device.restore(&state).unwrap();
            other.pci.remap();
            assert_eq!((other.status(), other.stage()), (status, stage));
        }
    }
}

#[test]
fn a_device_at_another_host_that_is_less_is_refused_before_anything_is_restored() {
    let rig = Rig::new();
    rig.start(VERSION_1 | MAC);
    let guest_view = rig.device.guest_view();
    for (shape, words) in lesser_shapes() {
        let other = Rig::cold_with(shape);
        let error = other.device.adopt(&guest_view).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn a_device_without_an_identity_is_compared_by_the_length_of_its_configuration() {
    let shorter = || Shape {
        config_len: 9,
        ..Shape::default()
    };
    let rig = Rig::new();
    let guest_view = rig.device.guest_view();
    Rig::cold_with(shorter()).device.adopt(&guest_view).unwrap();
    let anonymous = guest_view.without_identity();
    let error = Rig::cold_with(shorter()).device.adopt(&anonymous);
    assert!(error.unwrap_err().to_string().contains("9 bytes"));
}

#[test]
fn features_in_the_restored_state_count() {
    // There was no driver when the other host was asked.
    let before = Rig::new();
    let guest_view = before.device.guest_view();
    let shape = || Shape {
        bears: VERSION_1,
        ..Shape::default()
    };
    for (features, fits) in [(VERSION_1, true), (VERSION_1 | RING_RESET, false)] {
        for runs in [false, true] {
            let rig = Rig::new();
            if runs {
                rig.start(features);
            } else {
                rig.agree(features);
            }
            let state = rig.device.save().unwrap();
            let other = Rig::cold_with(shape());
            other.device.adopt(&guest_view).unwrap();
            let checked = other.device.check(&state);
            assert_eq!(checked.is_ok(), fits, "{runs} {checked:?}");
            if let Err(error) = checked {
                let text = error.to_string();
                assert_eq!(text, "the device lacks properties that the guest relies on");
                assert!(other.device.restore(&state).is_err());
            }
            assert_eq!(other.stage(), Stage::Inactive);
            let asked = other.seen.lock().checked_features.clone();
            assert!(asked.iter().all(|&asked| asked == features), "{asked:?}");
        }
    }
    // Without a driver the guest relies on nothing, and a driver that has yet to choose relies on
    // the whole offer.
    for (walk, needs) in [(&[0][..], false), (&[0, 1, 3], true)] {
        let rig = Rig::new();
        walk.iter().for_each(|&status| rig.set_status(status));
        let state = rig.device.save().unwrap();
        let other = Rig::cold_with(shape());
        other.device.adopt(&guest_view).unwrap();
        assert_eq!(other.device.check(&state).is_err(), needs);
    }
}

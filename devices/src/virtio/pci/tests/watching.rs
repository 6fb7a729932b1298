//! The view of an observer of the rings, and the spurious notification of a queue.

use super::rig::{PACKED, RING_RESET, Rig, VERSION_1, reg};
use crate::virtio::backend::{Outcome, QueueRole};
use crate::virtio::pci::RunningRing;

fn rings(rig: &Rig) -> Vec<RunningRing> {
    let mut rings = Vec::new();
    rig.device.running_rings(|ring, _| rings.push(*ring));
    rings
}

fn indices(rig: &Rig) -> Vec<u16> {
    rings(rig).iter().map(|ring| ring.index).collect()
}

#[test]
fn rings_are_shown_while_the_device_works_on_them() {
    let rig = Rig::new();
    assert_eq!(rig.device.queue_count(), 4);
    assert_eq!(rings(&rig), []);
    assert!(!rig.device.spurious_notify(0));
    rig.start(VERSION_1 | RING_RESET);
    let first = rings(&rig);
    assert_eq!(indices(&rig), [0, 1]);
    for ring in &first {
        assert_eq!((ring.packed, ring.role), (false, QueueRole::Other));
        let seen = rig.seen.lock();
        let queues = &seen.activation.as_ref().unwrap().queues;
        assert_eq!(ring.addresses, queues[usize::from(ring.index)].addresses);
    }

    // A reset queue is not running; when enabled again, it has another ring.
    rig.write(reg::QUEUE_SELECT, 2, 1);
    rig.write(reg::QUEUE_RESET, 2, 1);
    assert_eq!(indices(&rig), [0]);
    assert!(!rig.device.spurious_notify(1));
    rig.set_up_queue(1, 32, 3);
    assert_eq!(indices(&rig), [0, 1]);
    assert!(rings(&rig)[0].start > first[0].start);

    // A broken device has no running queue.
    rig.seen.lock().outcome = Outcome {
        config_changed: false,
        needs_reset: true,
    };
    rig.device.process(0);
    assert_eq!(rings(&rig), []);
    assert!(!rig.device.spurious_notify(0));

    let before = first[0].start;
    rig.write(reg::STATUS, 1, 0);
    assert_eq!(rings(&rig), []);
    rig.start(VERSION_1 | PACKED);
    let again = rings(&rig);
    assert!(again[0].packed && again[0].start > before, "{again:?}");
}

#[test]
fn a_spurious_notify_is_a_kick_and_an_interrupt() {
    let rig = Rig::new();
    rig.start(VERSION_1);
    let call = {
        let seen = rig.seen.lock();
        let queue = &seen.activation.as_ref().unwrap().queues[0];
        queue.call.clone().unwrap()
    };
    let kick = &rig.device.kicks[0];
    let _ = (kick.read(), call.read());
    assert!(rig.device.spurious_notify(0));
    assert_eq!((kick.read().unwrap(), call.read().unwrap()), (1, 1));
    for none in [2, 3, 4, u16::MAX] {
        assert!(!rig.device.spurious_notify(none), "{none}");
    }
    // A driver that polls has no vector.
    rig.write(reg::QUEUE_SELECT, 2, 0);
    rig.write(reg::QUEUE_VECTOR, 2, 0xffff);
    assert!(rig.device.spurious_notify(0));
    assert_eq!(kick.read().unwrap(), 1);
    assert!(call.read().is_err());
}

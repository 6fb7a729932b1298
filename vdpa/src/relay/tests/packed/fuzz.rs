//! Any steps with a packed ring; see [`super::super::fuzz`].

use super::super::fuzz::{GuestOnly, Step, check_change, has, how};
use super::model::{RingSim, SIZE, Shapes, TABLES, WINDOW};
use crate::iova::DeviceAddress;
use crate::relay::{Strategy as How, Svq};
use crate::ring::PackedLayout;

fn sim(variant: u8) -> RingSim {
    let shapes = if has(variant, 3) {
        Shapes::Single
    } else {
        Shapes::Mixed
    };
    let entries = SIZE << u8::from(has(variant, 5));
    RingSim::new(has(variant, 2), shapes, entries)
}

pub(in crate::relay::tests) fn honest(variant: u8, steps: impl Iterator<Item = Step>) {
    let (single, reorders) = (has(variant, 3), has(variant, 4));
    let mut sim = sim(variant);
    let how = |number: u8| how(number & 2);
    for step in steps {
        match step {
            Step::Add => sim.add(),
            Step::Fetch(most) => sim.fetch(most.into()),
            Step::Complete(which) => sim.complete(if reorders { which.into() } else { 0 }),
            Step::Pass => {
                sim.pass();
            }
            Step::Take => sim.take(),
            Step::Interrupts(enabled) => sim.napi(enabled),
            Step::Change(target) => check_change(sim.change(how(target))),
            Step::Restart(target) => {
                // A direct ring shows its position only then.
                if sim.strategy() == How::FullShadow || single && !reorders {
                    sim.restart(how(target)).unwrap();
                }
            }
            Step::Scribble { .. } | Step::Use { .. } => {}
        }
    }
    sim.settle();
}

pub(in crate::relay::tests) fn hostile(variant: u8, steps: impl Iterator<Item = Step>) {
    // The private ring of the scribbles has twice the entries.
    let mut sim = sim(variant | 1 << 5);
    sim.change(How::FullShadow).unwrap();
    for step in steps {
        match step {
            Step::Add => sim.add(),
            Step::Scribble { private, at, bytes } => scribble(&sim, private, at, &bytes),
            Step::Use { id, len } => {
                sim.device.put(u16::try_from(id & 0xffff).unwrap(), len);
                sim.device.advance();
            }
            _ => {
                let shadow = sim.shadow.as_mut().unwrap();
                if shadow.pass(&GuestOnly).is_err() {
                    // Another pass, and giving up, must stay harmless.
                    let _ = shadow.pass(&GuestOnly);
                    let _ = shadow.finish(&GuestOnly).and_then(|_| shadow.settle());
                    break;
                }
            }
        }
    }
    let shadow = sim.shadow.as_mut().unwrap();
    if let Ok(position) = shadow.settle() {
        assert!(position.in_flight().len() <= usize::from(SIZE));
    }
}

/// Writes a few bytes into a ring, as either side might. The private one has twice the entries.
pub(super) fn scribble(sim: &RingSim, private: bool, at: u64, bytes: &[u8]) {
    let bytes = bytes.get(..bytes.len().min(16)).unwrap_or_default();
    if private {
        let size = PackedLayout::new(2 * SIZE).unwrap().size();
        // Both event structures and all entries, and sometimes any offset.
        let at = if at.is_multiple_of(4) {
            at / 4 % (size - 16)
        } else {
            4096 + at / 4 % (16 * 16 + 4)
        };
        sim.space.write(WINDOW + at, bytes);
    } else {
        let ring = sim.guest.ring.addresses();
        let area = match at % 6 {
            0 => ring.driver,
            1 => ring.device,
            2 => DeviceAddress(TABLES),
            _ => ring.descriptor,
        };
        sim.space.write(area.0 + (at / 6) % 140, bytes);
    }
}

//! Used buffers and their interrupts.

use super::rule::Rule;
use super::subject::{Moved, PATIENCE, STUCK, Subject, exercise};
use super::verdict::{Attempt, fail, noted, skipped};
use crate::probe::{send_one, wait};
use crate::ring::Violation;
use crate::uapi::BackendFeatures;

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "completion.used_id",
        rule: "used elements name chains that the device has, each once",
        source: "virtio 1.3, 2.7.8 and 2.8.6",
        check: used_id,
    },
    Rule {
        id: "completion.used_length",
        rule: "the length of a used element is not more than the device could write",
        source: "virtio 1.3, 2.7.8.2",
        check: used_length,
    },
    Rule {
        id: "completion.interrupt",
        rule: "the call eventfd is signalled for a used buffer when the driver asked for it",
        source: "virtio 1.3, 2.7.7.2; include/linux/vdpa.h: set_vq_cb",
        check: interrupt,
    },
];

/// More than one lap of most rings.
const FRAMES: usize = 300;

/// Fails if the device broke this rule. Skips if it broke another one.
fn judged(subject: &Subject<'_>, is_own: fn(&Violation) -> bool) -> Attempt {
    subject.moves_frames()?;
    let mut netdev = subject.start(BackendFeatures::all())?;
    Ok(match exercise(&mut netdev, FRAMES) {
        Moved::All => noted(format!("{FRAMES} frames")),
        Moved::Stuck => skipped(STUCK),
        Moved::Broken(error) => match error.violation() {
            Some(violation) if is_own(&violation) => fail(violation.to_string()),
            Some(_) => skipped("the device broke another rule of its rings first"),
            None => error.into(),
        },
    })
}

fn used_id(subject: &Subject<'_>) -> Attempt {
    judged(subject, |violation| {
        !matches!(violation, Violation::TooLong { .. })
    })
}

fn used_length(subject: &Subject<'_>) -> Attempt {
    judged(subject, |violation| {
        matches!(violation, Violation::TooLong { .. })
    })
}

fn interrupt(subject: &Subject<'_>) -> Attempt {
    let mut netdev = subject.working(1)?;
    let transmit = netdev.driver.transmit()?;
    for round in 0..20 {
        transmit.queue_mut().clear_call()?;
        transmit.queue_mut().enable_interrupts()?;
        send_one(transmit)?;
        let called = wait(transmit, PATIENCE)?;
        if !transmit.drain(PATIENCE)? {
            return Ok(skipped(STUCK));
        }
        if !called {
            return Ok(fail(format!(
                "frame {round}: the device used its buffer but sent no signal within {PATIENCE:?}"
            )));
        }
    }
    Ok(noted("20 frames"))
}

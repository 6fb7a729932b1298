//! Used buffers and the interrupt for them.

use super::rule::Rule;
use super::subject::{Moved, PATIENCE, Subject, drain, exercise};
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

/// More than a lap of most rings.
const FRAMES: usize = 300;

/// The violation that moving frames brings, if one.
fn violation(subject: &Subject<'_>) -> Result<Found, Box<dyn std::error::Error>> {
    let mut netdev = subject.start(BackendFeatures::all())?;
    Ok(match exercise(&mut netdev, FRAMES) {
        Moved::All => Found::None,
        Moved::Stuck => Found::Stuck,
        Moved::Broken(error) => match error.violation() {
            Some(violation) => Found::Violation(violation),
            None => return Err(error.into()),
        },
    })
}

enum Found {
    None,
    Stuck,
    Violation(Violation),
}

/// Whether the violation is this rule's.
fn judged(subject: &Subject<'_>, is_own: fn(&Violation) -> bool) -> Attempt {
    if let Some(verdict) = subject.no_frames().or_else(|| subject.known_stuck()) {
        return Ok(verdict);
    }
    Ok(match violation(subject)? {
        Found::None => noted(format!("{FRAMES} frames")),
        Found::Stuck => skipped("the device moves no frames: see memory.reach"),
        Found::Violation(violation) if is_own(&violation) => fail(violation.to_string()),
        Found::Violation(_) => skipped("the device broke another rule of its rings first"),
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
    let mut netdev = match subject.working(1)? {
        Ok(netdev) => netdev,
        Err(verdict) => return Ok(verdict),
    };
    let Some(pair) = netdev.driver.pairs.first_mut() else {
        return Ok(fail("there is no queue pair"));
    };
    let transmit = &mut pair.transmit;
    for round in 0..20 {
        transmit.queue_mut().clear_call()?;
        transmit.queue_mut().enable_interrupts()?;
        send_one(transmit)?;
        let called = wait(transmit, PATIENCE)?;
        if !drain(transmit, PATIENCE)? {
            return Ok(skipped("the device moves no frames: see memory.reach"));
        }
        if !called {
            return Ok(fail(format!(
                "frame {round}: its buffer was used and no signal came within {PATIENCE:?}"
            )));
        }
    }
    Ok(noted("20 frames"))
}

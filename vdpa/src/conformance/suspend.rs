//! Rules about suspend, ring state and resume.

use std::time::Duration;

use super::rule::Rule;
use super::subject::{Moved, PATIENCE, Subject, exercise};
use super::verdict::{Attempt, Verdict, fail, noted, pass, quirk, skipped};
use crate::causes::in_one_line;
use crate::netdev::Netdev;
use crate::probe::{expected_base, send_one};
use crate::uapi::{self, BackendFeatures};

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "suspend.stops",
        rule: "a suspended device uses no buffer",
        source: "include/uapi/linux/vhost.h: VHOST_VDPA_SUSPEND",
        check: stops,
    },
    Rule {
        id: "suspend.base",
        rule: "the base of a suspended ring matches the device's progress",
        source: "include/uapi/linux/vhost.h: VHOST_GET_VRING_BASE, VHOST_VDPA_SUSPEND",
        check: base,
    },
    Rule {
        id: "suspend.base_round_trip",
        rule: "a suspended ring returns the base that was written",
        source: "drivers/vhost/vdpa.c: VHOST_SET_VRING_BASE, VHOST_GET_VRING_BASE",
        check: round_trip,
    },
    Rule {
        id: "suspend.resume",
        rule: "a resumed device continues where it stopped and processes waiting buffers",
        source: "include/uapi/linux/vhost.h: VHOST_VDPA_RESUME",
        check: resume,
    },
    Rule {
        id: "suspend.not_running",
        rule: "a device that does not run cannot be suspended",
        source: "drivers/vhost/vdpa.c: vhost_vdpa_suspend",
        check: not_running,
    },
];

/// Time for which a suspended device is watched.
const WATCH: Duration = Duration::from_millis(200);
/// Frames before the suspend; not a power of two.
const FRAMES: usize = 37;

/// Sends frames, then suspends the device.
fn suspended(subject: &Subject<'_>) -> Result<Netdev, Verdict> {
    let mut netdev = subject.working(FRAMES)?;
    if !netdev.device.can_suspend() {
        return Err(skipped("SUSPEND is not offered"));
    }
    netdev.suspend()?;
    Ok(netdev)
}

fn stops(subject: &Subject<'_>) -> Attempt {
    let mut netdev = suspended(subject)?;
    let transmit = netdev.driver.transmit()?;
    send_one(transmit)?;
    Ok(if transmit.drain(WATCH)? {
        fail("the device took a frame that was sent after the suspend")
    } else {
        noted(format!("watched for {WATCH:?}"))
    })
}

fn base(subject: &Subject<'_>) -> Attempt {
    let mut netdev = suspended(subject)?;
    let queue = netdev.driver.transmit()?.queue();
    let expected = expected_base(queue.positions(), netdev.device.is_packed());
    Ok(match netdev.device.vring_base(queue.index()) {
        Ok(base) if base == expected => noted(format!("{base:?}")),
        Ok(base) => fail(format!("{base:?}, and {expected:?} were processed")),
        Err(error) => skipped(format!("no ring state: {}", in_one_line(&error))),
    })
}

fn round_trip(subject: &Subject<'_>) -> Attempt {
    let netdev = suspended(subject)?;
    let index = 1;
    let before = match netdev.device.vring_base(index) {
        Ok(base) => base,
        Err(error) => return Ok(skipped(format!("no ring state: {}", in_one_line(&error)))),
    };
    let set = netdev.device.raw().set_vring_state(
        uapi::set_vring_base(),
        u32::from(index),
        before.to_kernel(),
    );
    if let Err(error) = set {
        return Ok(fail(format!("its own base is refused: {error}")));
    }
    let after = netdev.device.vring_base(index)?;
    Ok(if before == after {
        pass()
    } else {
        fail(format!("{before:?} was written and {after:?} is read"))
    })
}

fn resume(subject: &Subject<'_>) -> Attempt {
    let mut netdev = suspended(subject)?;
    if !netdev
        .device
        .backend_features()
        .contains(BackendFeatures::RESUME)
    {
        return Ok(skipped("RESUME is not offered"));
    }
    send_one(netdev.driver.transmit()?)?;
    netdev.resume()?;
    if !netdev.driver.transmit()?.drain(PATIENCE)? {
        return Ok(fail(
            "the device does not take a waiting frame after the resume",
        ));
    }
    Ok(match exercise(&mut netdev, FRAMES) {
        Moved::All => pass(),
        _ => fail("frames stop after the resume"),
    })
}

fn not_running(subject: &Subject<'_>) -> Attempt {
    let (device, _iotlb) = subject.negotiate()?;
    if !device.backend_features().contains(BackendFeatures::SUSPEND) {
        return Ok(skipped("SUSPEND is not offered"));
    }
    Ok(if device.raw().call(uapi::suspend()).is_ok() {
        quirk(
            "the kernel reports success and does nothing: the caller must know that the device \
             runs",
        )
    } else {
        pass()
    })
}

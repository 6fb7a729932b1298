//! Rules about the device status.

use super::rule::Rule;
use super::subject::Subject;
use super::verdict::{Attempt, fail, pass};
use crate::device::Device;

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "status.open",
        rule: "opening the device resets it",
        source: "drivers/vhost/vdpa.c: vhost_vdpa_open",
        check: open,
    },
    Rule {
        id: "status.negotiated",
        rule: "after FEATURES_OK the status is the written value, without FAILED or NEEDS_RESET",
        source: "virtio 1.3, 2.1 and 3.1.1",
        check: negotiated,
    },
    Rule {
        id: "status.no_clearing",
        rule: "status bits cannot be cleared but by writing 0",
        source: "drivers/vhost/vdpa.c: vhost_vdpa_set_status; virtio 1.3, 2.1.1",
        check: no_clearing,
    },
    Rule {
        id: "status.reset",
        rule: "writing 0 resets a running device: the status reads 0 and features can be \
               negotiated again",
        source: "virtio 1.3, 2.1.2 and 2.4.1",
        check: reset,
    },
];

/// ACKNOWLEDGE, DRIVER and FEATURES_OK.
const NEGOTIATED: u8 = 0b1011;

fn open(subject: &Subject<'_>) -> Attempt {
    drop(subject.negotiate()?);
    Ok(match Device::open(subject.path())?.status()? {
        0 => pass(),
        status => fail(format!("the status is {status:#04x}")),
    })
}

fn negotiated(subject: &Subject<'_>) -> Attempt {
    let (device, _iotlb) = subject.negotiate()?;
    Ok(match device.status()? {
        NEGOTIATED => pass(),
        status => fail(format!("the status is {status:#04x}")),
    })
}

fn no_clearing(subject: &Subject<'_>) -> Attempt {
    let (device, _iotlb) = subject.negotiate()?;
    let refused = device.raw().set_status(1).is_err();
    Ok(match device.status()? {
        NEGOTIATED if refused => pass(),
        status => fail(format!(
            "1 was written over {NEGOTIATED:#04x} and the status is {status:#04x}"
        )),
    })
}

fn reset(subject: &Subject<'_>) -> Attempt {
    let (mut device, _iotlb) = subject.negotiate()?;
    let features = device.features();
    device.start()?;
    device.reset()?;
    device.negotiate(features)?;
    Ok(pass())
}

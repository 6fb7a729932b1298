//! Rules about queue groups and address spaces.

use super::rule::Rule;
use super::subject::Subject;
use super::verdict::{Attempt, fail, noted, pass, quirk, skipped};
use crate::uapi;

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "groups.of_queues",
        rule: "each queue's group is below the number of groups",
        source: "drivers/vhost/vdpa.c: VHOST_VDPA_GET_VRING_GROUP",
        check: of_queues,
    },
    Rule {
        id: "groups.no_such_asid",
        rule: "an address space that does not exist is refused",
        source: "drivers/vhost/vdpa.c: VHOST_VDPA_SET_GROUP_ASID (EINVAL)",
        check: no_such_asid,
    },
    Rule {
        id: "groups.no_such_group",
        rule: "a group that does not exist is refused",
        source: "include/linux/vdpa.h: set_group_asid",
        check: no_such_group,
    },
    Rule {
        id: "groups.running",
        rule: "a running device's groups cannot be moved to another address space",
        source: "drivers/vhost/vdpa.c: VHOST_VDPA_SET_GROUP_ASID (EBUSY since 7.1)",
        check: running,
    },
];

fn of_queues(subject: &Subject<'_>) -> Attempt {
    // The library rejects a device with an invalid group, before and after negotiation.
    let (device, _iotlb) = subject.negotiate()?;
    let info = device.info();
    if info.queues.iter().all(|queue| queue.group.is_none()) {
        return Ok(skipped("the device has no groups"));
    }
    Ok(noted(format!(
        "{} groups, {} address spaces",
        info.groups, info.address_spaces
    )))
}

fn no_such_asid(subject: &Subject<'_>) -> Attempt {
    let (device, _iotlb) = subject.negotiate()?;
    for asid in [device.info().address_spaces, u32::MAX] {
        let set = uapi::set_group_asid();
        if device.raw().set_vring_state(set, 0, asid).is_ok() {
            return Ok(fail(format!("address space {asid} is accepted")));
        }
    }
    Ok(pass())
}

fn no_such_group(subject: &Subject<'_>) -> Attempt {
    let (device, _iotlb) = subject.negotiate()?;
    for group in [device.info().groups, u32::MAX] {
        let set = uapi::set_group_asid();
        if device.raw().set_vring_state(set, group, 0).is_ok() {
            return Ok(fail(format!("group {group} is accepted")));
        }
    }
    Ok(pass())
}

fn running(subject: &Subject<'_>) -> Attempt {
    let (mut device, _iotlb) = subject.negotiate()?;
    if device.info().address_spaces < 2 {
        return Ok(skipped("the device has one address space"));
    }
    device.start()?;
    let set = device.raw().set_vring_state(uapi::set_group_asid(), 0, 1);
    Ok(if set.is_ok() {
        quirk("it can: Linux before 7.1 does not check the status")
    } else {
        pass()
    })
}

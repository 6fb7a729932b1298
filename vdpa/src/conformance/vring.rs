//! Rules about setting up rings.

use super::rule::Rule;
use super::subject::Subject;
use super::verdict::{Attempt, fail, noted, pass, quirk, skipped};
use crate::device::Device;
use crate::uapi::{self, vhost_vring_addr};

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "vring.maximum",
        rule: "the largest ring of each queue is a power of two up to 32768",
        source: "virtio 1.3, 2.7",
        check: maximum,
    },
    Rule {
        id: "vring.zero",
        rule: "a ring of 0 entries is refused",
        source: "drivers/vhost/vhost.c: vhost_vring_set_num",
        check: zero,
    },
    Rule {
        id: "vring.power_of_two",
        rule: "a ring whose size is not a power of two is refused",
        source: "drivers/vhost/vhost.c: vhost_vring_set_num; virtio 1.3, 2.7",
        check: power_of_two,
    },
    Rule {
        id: "vring.too_large",
        rule: "a ring above the device's maximum is refused",
        source: "virtio 1.3, 2.7 and 4.1.4.3.2",
        check: too_large,
    },
    Rule {
        id: "vring.no_such_queue",
        rule: "a queue beyond the last one is refused",
        source: "drivers/vhost/vdpa.c: vhost_vdpa_vring_ioctl (ENOBUFS)",
        check: no_such_queue,
    },
    Rule {
        id: "vring.running",
        rule: "a running device's ring addresses cannot be changed",
        source: "drivers/vhost/vdpa.c: vhost_vdpa_vring_ioctl (EINVAL); virtio 1.3, 4.1.4.3.2",
        check: running,
    },
];

fn maximum(subject: &Subject<'_>) -> Attempt {
    let (device, _iotlb) = subject.own()?;
    let sizes: Vec<u16> = device.info().queues.iter().map(|q| q.max_size).collect();
    let wrong = sizes.iter().find(|size| !size.is_power_of_two());
    Ok(match (wrong, sizes.first()) {
        (Some(size), _) => fail(format!("a queue has {size}")),
        (None, Some(size)) => noted(format!("{size} entries")),
        (None, None) => fail("there are no queues"),
    })
}

/// Whether the device accepts this ring size.
fn takes(device: &Device, queue: u32, size: u32) -> bool {
    device
        .raw()
        .set_vring_state(uapi::set_vring_num(), queue, size)
        .is_ok()
}

fn is_refused(subject: &Subject<'_>, size: u32) -> Attempt {
    let (device, _iotlb) = subject.negotiate()?;
    Ok(if takes(&device, 0, size) {
        fail(format!("{size} entries are accepted"))
    } else {
        pass()
    })
}

fn zero(subject: &Subject<'_>) -> Attempt {
    is_refused(subject, 0)
}

fn power_of_two(subject: &Subject<'_>) -> Attempt {
    is_refused(subject, 3)
}

fn too_large(subject: &Subject<'_>) -> Attempt {
    let (device, _iotlb) = subject.negotiate()?;
    let maximum = u32::from(device.info().queue(0)?.max_size);
    let size = 2 * maximum;
    if !takes(&device, 0, maximum) {
        return Ok(fail(format!("its own maximum of {maximum} is refused")));
    }
    if size > 0xffff {
        return Ok(skipped("the device accepts the largest possible ring"));
    }
    Ok(if takes(&device, 0, size) {
        quirk(format!(
            "{size} entries are accepted: the kernel does not check the device's maximum, so the \
             caller must"
        ))
    } else {
        pass()
    })
}

fn no_such_queue(subject: &Subject<'_>) -> Attempt {
    let (device, _iotlb) = subject.negotiate()?;
    let count = u32::from(device.info().queue_count());
    for queue in [count, count + 1, u32::MAX] {
        if takes(&device, queue, 2) {
            return Ok(fail(format!("queue {queue} of {count} can be set up")));
        }
    }
    Ok(pass())
}

fn running(subject: &Subject<'_>) -> Attempt {
    let mut netdev = subject.working(1)?;
    let queue = netdev.driver.transmit()?.queue();
    let addresses = vhost_vring_addr {
        index: u32::from(queue.index()),
        flags: 0,
        desc_user_addr: queue.addresses().descriptor.0,
        used_user_addr: queue.addresses().device.0,
        avail_user_addr: queue.addresses().driver.0,
        log_guest_addr: 0,
    };
    let set = netdev
        .device
        .raw()
        .write(uapi::set_vring_addr(), &addresses);
    Ok(if set.is_ok() {
        fail("VHOST_SET_VRING_ADDR works under DRIVER_OK")
    } else {
        pass()
    })
}

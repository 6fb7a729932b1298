//! Rules about ownership and feature negotiation.

use super::rule::Rule;
use super::subject::Subject;
use super::verdict::{Attempt, fail, pass};
use crate::device::Device;
use crate::features::{Policy, Reason, describe, pass_through};
use crate::uapi;

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "features.owner",
        rule: "ring set-up needs an owner, and a device has only one",
        source: "drivers/vhost/vhost.c: vhost_dev_check_owner, vhost_dev_set_owner",
        check: owner,
    },
    Rule {
        id: "features.version_1",
        rule: "the device offers VERSION_1",
        source: "virtio 1.3, 6.1: devices that are not legacy",
        check: version_1,
    },
    Rule {
        id: "features.dependencies",
        rule: "each offered feature comes with those that it needs",
        source: "virtio 1.3, 5.1.3.1 and 2.2.1",
        check: dependencies,
    },
    Rule {
        id: "features.fixed",
        rule: "features cannot be changed after FEATURES_OK",
        source: "drivers/vhost/vdpa.c: vhost_vdpa_set_features (EBUSY)",
        check: fixed,
    },
    Rule {
        id: "features.unchanged",
        rule: "negotiation does not change the offered features",
        source: "virtio 1.3, 2.2",
        check: unchanged,
    },
    Rule {
        id: "features.backend",
        rule: "an unknown backend feature is refused",
        source: "drivers/vhost/vdpa.c: vhost_vdpa_unlocked_ioctl (EOPNOTSUPP)",
        check: backend,
    },
];

fn owner(subject: &Subject<'_>) -> Attempt {
    let device = Device::open(subject.path())?;
    let set_num = |size| {
        device
            .raw()
            .set_vring_state(uapi::set_vring_num(), 0, size)
            .is_ok()
    };
    if set_num(2) {
        return Ok(fail("VHOST_SET_VRING_NUM works without an owner"));
    }
    let (device, _iotlb) = device.own()?;
    Ok(if device.raw().call(uapi::set_owner()).is_ok() {
        fail("VHOST_SET_OWNER works twice")
    } else {
        pass()
    })
}

fn version_1(subject: &Subject<'_>) -> Attempt {
    let (device, _iotlb) = subject.own()?;
    let offered = device.info().features & (1 << 32) != 0;
    Ok(if offered { pass() } else { fail("") })
}

fn dependencies(subject: &Subject<'_>) -> Attempt {
    let (device, _iotlb) = subject.own()?;
    let info = device.info();
    let alone = pass_through(info.features, info.device_id, Policy::default())
        .withheld
        .into_iter()
        .filter(|(_, reason)| *reason == Reason::MissingDependency)
        .fold(0, |mask, (bit, _)| mask | 1 << bit);
    Ok(match alone {
        0 => pass(),
        alone => fail(format!("{} alone", describe(alone, info.device_id))),
    })
}

fn fixed(subject: &Subject<'_>) -> Attempt {
    let (device, _iotlb) = subject.negotiate()?;
    let features = device.features();
    let again = device.raw().write(uapi::set_features(), &features);
    Ok(if again.is_ok() {
        fail("VHOST_SET_FEATURES works after FEATURES_OK")
    } else {
        pass()
    })
}

fn unchanged(subject: &Subject<'_>) -> Attempt {
    let (device, _iotlb) = subject.negotiate()?;
    let (before, device_id) = (device.info().features, device.device_id());
    let after = device.raw().read(uapi::get_features(), 0)?;
    Ok(match before ^ after {
        0 => pass(),
        changed => fail(format!("changed: {}", describe(changed, device_id))),
    })
}

fn backend(subject: &Subject<'_>) -> Attempt {
    let device = Device::open(subject.path())?;
    let unknown = device.raw().write(uapi::set_backend_features(), &(1 << 63));
    Ok(if unknown.is_ok() {
        fail("bit 63 is accepted")
    } else {
        pass()
    })
}

//! Rules about doorbell pages.

use super::rule::Rule;
use super::subject::{PATIENCE, Subject};
use super::verdict::{Attempt, fail, pass, skipped};
use crate::device::Device;
use crate::netdev::{Kick, Netdev, Options};
use crate::probe::send_one;

pub(super) const RULES: &[Rule] = &[Rule {
    id: "doorbell.store",
    rule: "a store to a queue's mapped doorbell is a kick",
    source: "virtio 1.3, 4.1.5.2; drivers/vhost/vdpa.c: vhost_vdpa_mmap",
    check: store,
}];

fn store(subject: &Subject<'_>) -> Attempt {
    subject.is_network()?;
    let (device, _iotlb) = subject.own()?;
    if let Some(why) = device.missing_doorbell(1)? {
        return Ok(skipped(why));
    }
    drop((device, _iotlb));
    drop(subject.working(1)?);
    let (device, iotlb) = Device::open(subject.path())?.own()?;
    let mut netdev = Netdev::start(device, iotlb, &Options::default())?;
    let transmit = netdev.driver.transmit()?;
    if transmit.queue().kick_by() != Kick::Doorbell {
        return Ok(fail("the device offers a doorbell that cannot be mapped"));
    }
    send_one(transmit)?;
    Ok(if transmit.drain(PATIENCE)? {
        pass()
    } else {
        fail(format!("the device did not react within {PATIENCE:?}"))
    })
}

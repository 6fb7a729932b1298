//! Rules about the device configuration.

use super::rule::Rule;
use super::subject::Subject;
use super::verdict::{Attempt, fail, noted, pass, skipped};
use crate::netdev::{NetConfig, UNFILTERED, VirtioNetConfig, is_unfiltered};

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "config.size",
        rule: "the configuration is as long as the device's structure, which the mark of a \
               software NIC of Bellhop may follow, or a register window of whole pages",
        source: "virtio 1.3, 5.1.4 (struct virtio_net_config) and 4.1.4",
        check: size,
    },
    Rule {
        id: "config.read_beyond",
        rule: "reads beyond the configuration are refused",
        source: "drivers/vhost/vdpa.c: vhost_vdpa_config_validate",
        check: read_beyond,
    },
    Rule {
        id: "config.write_beyond",
        rule: "writes beyond the configuration are refused",
        source: "drivers/vhost/vdpa.c: vhost_vdpa_config_validate",
        check: write_beyond,
    },
    Rule {
        id: "config.queue_pairs",
        rule: "max_virtqueue_pairs is from 1 to 0x8000 and the device has as many queues",
        source: "virtio 1.3, 5.1.4.1",
        check: queue_pairs,
    },
];

/// `struct virtio_net_config` up to `mtu`, and all of it.
const NET_SIZES: std::ops::RangeInclusive<u32> = 12..=28;

fn size(subject: &Subject<'_>) -> Attempt {
    subject.is_network()?;
    let (device, _iotlb) = subject.own()?;
    let size = device.config_size();
    let structure = VirtioNetConfig::LEN;
    let with_mark = u32::try_from(structure + UNFILTERED.len());
    if with_mark == Ok(size) && is_unfiltered(&device)? {
        return Ok(noted(format!("{structure} bytes, and a mark")));
    }
    Ok(if NET_SIZES.contains(&size) {
        noted(format!("{size} bytes"))
    } else if size > 0 && size.is_multiple_of(4096) {
        noted(format!("{size} bytes: a register window"))
    } else {
        fail(format!(
            "{size} bytes, and the structure has {} to {}",
            NET_SIZES.start(),
            NET_SIZES.end()
        ))
    })
}

/// Offsets and lengths that reach outside `size` bytes.
fn outside(size: u32) -> [(u32, usize); 4] {
    [
        (size, 1),
        (size.saturating_sub(1), 2),
        (0, usize::try_from(size).unwrap_or(0) + 1),
        (u32::MAX - 1, 4),
    ]
}

fn read_beyond(subject: &Subject<'_>) -> Attempt {
    let (device, _iotlb) = subject.own()?;
    for (offset, len) in outside(device.config_size()) {
        if device.raw().config(offset, &mut vec![0; len]).is_ok() {
            return Ok(fail(format!("{len} bytes at {offset} can be read")));
        }
    }
    Ok(pass())
}

fn write_beyond(subject: &Subject<'_>) -> Attempt {
    let (device, _iotlb) = subject.own()?;
    for (offset, len) in outside(device.config_size()) {
        if device.raw().set_config(offset, &vec![0; len]).is_ok() {
            return Ok(fail(format!("{len} bytes at {offset} can be written")));
        }
    }
    Ok(pass())
}

fn queue_pairs(subject: &Subject<'_>) -> Attempt {
    subject.is_network()?;
    let (device, _iotlb) = subject.own()?;
    let features = device.info().features;
    if features & (1 << virtio_bindings::virtio_net::VIRTIO_NET_F_MQ) == 0 {
        return Ok(skipped("MQ is not offered"));
    }
    let pairs = NetConfig::read(&device, features)?.max_virtqueue_pairs;
    let queues = device.info().queue_count();
    // The control queue comes after all pairs.
    let needed = pairs.checked_mul(2).and_then(|data| data.checked_add(1));
    Ok(match needed {
        Some(needed) if needed <= queues => noted(format!("{pairs} pairs, {queues} queues")),
        _ => fail(format!("{pairs} pairs, but {queues} queues")),
    })
}

//! vDPA devices as listings, with iproute2's keys in its order.

use vdpa_mgmt::{
    BlkConfig, ClassConfig, Connection, DeviceConfig, NetConfig, QueueType, VdpaDevice, VendorStats,
};

use crate::listing::{Entry, Layout, Listing, Value};
use crate::text::address;
use crate::virtio_names;

/// All devices, for reports.
///
/// # Errors
/// The kernel does not answer.
pub fn all() -> Result<Listing, vdpa_mgmt::Error> {
    Ok(listing(&Connection::open()?.devices()?))
}

/// The configurations of all devices, for reports.
///
/// # Errors
/// The kernel does not answer.
pub fn all_configs() -> Result<Listing, vdpa_mgmt::Error> {
    Ok(config_listing(&Connection::open()?.configs()?))
}

/// A listing of devices.
#[must_use]
pub fn listing(devices: &[VdpaDevice]) -> Listing {
    Listing {
        section: "dev",
        layout: Layout::Line,
        entries: devices.iter().map(device).collect(),
    }
}

/// A listing of the configurations of devices.
#[must_use]
pub fn config_listing(configs: &[DeviceConfig]) -> Listing {
    Listing {
        section: "config",
        layout: Layout::LineThenLists,
        entries: configs.iter().map(config).collect(),
    }
}

/// A listing of the counters of a queue.
#[must_use]
pub fn stats_listing(stats: &VendorStats) -> Listing {
    Listing {
        section: "vstats",
        layout: Layout::LineThenLists,
        entries: vec![vendor_stats(stats)],
    }
}

fn device(device: &VdpaDevice) -> Entry {
    Entry::new(&device.name)
        .with_text("type", virtio_names::device_type(device.device_id))
        .with_text("mgmtdev", device.mgmtdev.to_string())
        .with_number("vendor_id", device.vendor_id)
        .with_number("max_vqs", device.max_vqs)
        .with_number("max_vq_size", device.max_vq_size)
}

fn config(config: &DeviceConfig) -> Entry {
    let entry = Entry::new(&config.name);
    let entry = match &config.class {
        ClassConfig::Net(net) => with_net(entry, net),
        ClassConfig::Block(block) => with_block(entry, block),
        ClassConfig::Other => entry,
    };
    let features = config.negotiated_features;
    let features = features.map(|mask| virtio_names::features(mask, config.device_id));
    entry.with("negotiated_features", features)
}

fn with_net(entry: Entry, net: &NetConfig) -> Entry {
    entry
        .with_some("mac", net.mac.map(|mac| address(&mac)))
        .with_some(
            "link",
            net.link_up().map(|up| if up { "up" } else { "down" }),
        )
        .with_flag("link_announce", net.announce())
        .with_number("max_vq_pairs", net.max_vq_pairs)
        .with_number("mtu", net.mtu)
}

/// iproute2 shows nothing here: the keys are the fields of `struct virtio_blk_config`.
fn with_block(entry: Entry, block: &BlkConfig) -> Entry {
    entry
        .with_number("capacity", block.capacity)
        .with_number("size_max", block.size_max)
        .with_number("seg_max", block.seg_max)
        .with_number("blk_size", block.blk_size)
        .with_number("physical_block_exp", block.physical_block_exp)
        .with_number("alignment_offset", block.alignment_offset)
        .with_number("min_io_size", block.min_io_size)
        .with_number("opt_io_size", block.opt_io_size)
        .with_number("num_queues", block.num_queues)
        .with_number("max_discard_sectors", block.max_discard_sectors)
        .with_number("max_discard_seg", block.max_discard_seg)
        .with_number("discard_sector_alignment", block.discard_sector_alignment)
        .with_number("max_write_zeroes_sectors", block.max_write_zeroes_sectors)
        .with_number("max_write_zeroes_seg", block.max_write_zeroes_seg)
        .with_flag("read_only", block.read_only)
        .with_flag("flush", block.flush)
}

fn vendor_stats(stats: &VendorStats) -> Entry {
    let queue_type = stats.queue_type().map(|queue_type| match queue_type {
        QueueType::Receive => "rx",
        QueueType::Transmit => "tx",
        QueueType::Control => "control_vq",
    });
    let entry = Entry::new(&stats.name).with_some("queue_type", queue_type);
    let counters = stats.counters.iter();
    counters.fold(entry, |entry, (name, value)| {
        entry.with(name.as_str(), Value::Number(*value))
    })
}

//! Management devices as listings, with iproute2's keys in its order.

use vdpa_mgmt::{Connection, MgmtDevice};

use crate::listing::{Entry, Layout, Listing};
use crate::virtio_names;

/// All management devices, for reports.
///
/// # Errors
/// The kernel does not answer.
pub fn all() -> Result<Listing, vdpa_mgmt::Error> {
    Ok(listing(&Connection::open()?.mgmt_devices()?))
}

/// A listing of management devices.
#[must_use]
pub fn listing(devices: &[MgmtDevice]) -> Listing {
    Listing {
        section: "mgmtdev",
        layout: Layout::Lines,
        entries: devices.iter().map(entry).collect(),
    }
}

fn entry(device: &MgmtDevice) -> Entry {
    let classes = virtio_names::classes(device.supported_classes);
    let features = device.supported_features;
    let features =
        features.map(|mask| virtio_names::features(mask, virtio_names::naming_class(device)));
    Entry::new(device.name.to_string())
        .with("supported_classes", classes)
        .with_number("max_supported_vqs", device.max_supported_vqs)
        .with("dev_features", features)
}

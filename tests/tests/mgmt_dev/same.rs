//! Sends the same query to both tools.

use std::path::Path;

use vdpa::device::Device;
use vdpa::iotlb::Iotlb;

use super::support::{bellhop, iproute2, printed};

/// iproute2's output without the trailing spaces of two of its keys.
fn corrected(arguments: &[&str]) -> String {
    let text = printed(&iproute2(arguments));
    text.replace("\"link \"", "\"link\"")
        .replace("\"link_announce \"", "\"link_announce\"")
}

/// Both tools print the same, as text, as JSON and as JSON on many lines.
#[track_caller]
pub(crate) fn same(arguments: &[&str]) {
    for format in [&[][..], &["-j"], &["-jp"], &["-p"], &["-j", "-p"]] {
        let theirs = corrected(&[format, arguments].concat());
        // Bellhop takes the options anywhere after the object.
        let ours = printed(&bellhop(&[arguments, format].concat()));
        assert_eq!(ours, theirs, "{arguments:?} {format:?}");
        assert!(!theirs.is_empty() || format.is_empty() || format == ["-p"]);
    }
    let (object, command) = arguments.split_at(1);
    let ours = printed(&bellhop(&[object, &["-j"], command].concat()));
    assert_eq!(ours, corrected(&[&["-j"], arguments].concat()));
}

/// A device whose driver negotiated everything and does nothing. The memory is returned too: its
/// end resets the device.
pub(crate) fn negotiated(device: &Path) -> (Device, Iotlb) {
    let (mut device, iotlb) = Device::open(device).unwrap().own().unwrap();
    let features = device.info().features;
    device.negotiate(features).unwrap();
    (device, iotlb)
}

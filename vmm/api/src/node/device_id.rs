//! The name of a NIC or a disk of a VM.

/// The longest name of a device, in bytes: the limit of the VM's own API.
const DEVICE_ID_MAX: usize = 64;

name! {
    /// The name of a NIC or a disk: 1 to 64 letters, digits, `.`, `_`, `:` or `-`; not `.` or `..`.
    DeviceId, BadDeviceId, |text| {
        let known = |byte: u8| byte.is_ascii_alphanumeric() || b"._:-".contains(&byte);
        let is_directory = text == "." || text == "..";
        (1..=DEVICE_ID_MAX).contains(&text.len()) && text.bytes().all(known) && !is_directory
    }
}

/// Not a name of a device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "a device's name has 1 to {DEVICE_ID_MAX} letters, digits, dots, underscores, colons or hyphens"
)]
pub struct BadDeviceId;

//! The name of a NIC or a disk of a VM.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The longest name of a device, in bytes: the limit of the VM's own API.
const DEVICE_ID_MAX: usize = 64;

/// The name of a NIC or a disk: 1 to 64 letters, digits, `.`, `_`, `:` or `-`; not `.` or `..`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "Cow<'_, str>")]
pub struct DeviceId(String);

/// Not a name of a device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "a NIC's or disk's name has 1 to {DEVICE_ID_MAX} letters, digits, dots, underscores, colons or \
     hyphens"
)]
pub struct BadDeviceId;

impl DeviceId {
    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for DeviceId {
    type Err = BadDeviceId;

    fn from_str(text: &str) -> Result<Self, BadDeviceId> {
        let known = |byte: u8| byte.is_ascii_alphanumeric() || b"._:-".contains(&byte);
        let is_directory = text == "." || text == "..";
        if (1..=DEVICE_ID_MAX).contains(&text.len()) && text.bytes().all(known) && !is_directory {
            Ok(Self(text.to_owned()))
        } else {
            Err(BadDeviceId)
        }
    }
}

impl TryFrom<Cow<'_, str>> for DeviceId {
    type Error = BadDeviceId;

    fn try_from(text: Cow<'_, str>) -> Result<Self, BadDeviceId> {
        text.parse()
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

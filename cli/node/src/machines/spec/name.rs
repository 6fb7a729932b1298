//! Names of VMs, and the names derived from them and from the names of their NICs.

use std::fmt;
use std::str::FromStr;

use axum::http::StatusCode;
use bellhop_api::node::NicId;
use serde::Serialize;

use crate::error::Error;

/// The longest name of a VM, in bytes.
const VM_NAME_MAX: usize = 63;

/// The name of a VM: 1 to 63 of `a-z`, `0-9` and `-`, not `-` first.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub(crate) struct VmName(String);

/// A text that is not the name of a VM.
pub(crate) fn bad_vm_name() -> Error {
    Error::answered(
        StatusCode::BAD_REQUEST,
        "bad_name",
        format!(
            "a virtual machine's name has 1 to {VM_NAME_MAX} lower-case letters, digits and \
             hyphens, and does not begin with a hyphen"
        ),
    )
}

impl VmName {
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// The name of the vDPA device that is created for a NIC of this VM. It is unique to this VM,
    /// because a VM's name has no dot.
    pub(crate) fn device(&self, nic: &NicId) -> String {
        format!("{}.{}", self.0, nic)
    }

    /// The name of the vDPA device that is created as this NIC's backup. It is unique to this NIC,
    /// because a NIC's name has no tilde.
    pub(crate) fn backup(&self, nic: &NicId) -> String {
        format!("{}~", self.device(nic))
    }

    /// The owner in the record of such a device.
    pub(crate) fn owner(&self, nic: &NicId) -> String {
        format!("{OWNER}{}/{}", self.0, nic)
    }
}

/// The NIC for which a device with this owner was created.
pub(crate) fn owned_by(owner: &str) -> Option<(VmName, NicId)> {
    let (vm, nic) = owner.strip_prefix(OWNER)?.split_once('/')?;
    Some((vm.parse().ok()?, nic.parse().ok()?))
}

/// The prefix of the owner of each NIC that a node has created.
pub(crate) const OWNER: &str = "node:";

impl FromStr for VmName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let known = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        let fits = (1..=VM_NAME_MAX).contains(&text.len()) && text.bytes().all(known);
        if fits && !text.starts_with('-') {
            Ok(Self(text.to_owned()))
        } else {
            Err(bad_vm_name())
        }
    }
}

impl fmt::Display for VmName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

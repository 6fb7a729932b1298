//! The guest's IOMMU.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The state of the guest's IOMMU. All counters but `mappings` grow, and begin anew with the VM's
/// process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IommuInfo {
    /// Mappings of all domains now.
    pub mappings: u64,
    /// Passes over the request queue that found requests; a kick causes one or more.
    pub kicks: u64,
    /// How often the mappings of a domain changed. One kick can have many requests for one change.
    pub change_sets: u64,
    /// MAP requests that succeeded.
    pub maps: u64,
    /// UNMAP requests that succeeded.
    pub unmaps: u64,
    /// Requests that a device or a limit of the IOMMU refused. Linux ignores most of these errors,
    /// and the device then fails silently.
    pub refused: u64,
    /// The last refused request; null without one.
    #[schema(required)]
    pub last_refusal: Option<IommuRefusal>,
}

/// A request to the guest's IOMMU that was refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IommuRefusal {
    /// The device; for a limit, a device of the domain.
    pub device: String,
    /// The device address of the MAP or UNMAP; null for an ATTACH.
    #[schema(required)]
    pub iova: Option<u64>,
    /// The bytes from there on; null for an ATTACH.
    #[schema(required)]
    pub size: Option<u64>,
    /// The cause, for people.
    pub cause: String,
}

impl fmt::Display for IommuRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, cause, .. } = self;
        match (self.iova, self.size) {
            (Some(iova), Some(size)) => {
                write!(
                    f,
                    "{device}: cannot change {size} bytes at {iova:#x}: {cause}"
                )
            }
            _ => write!(f, "{device}: cannot be attached to a domain: {cause}"),
        }
    }
}

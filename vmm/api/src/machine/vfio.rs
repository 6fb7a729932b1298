//! PCI functions of the host, passed through by VFIO.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::PlugPhase;
use crate::config::VfioConfig;

/// A PCI function of the host in a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VfioSummary {
    /// Its name.
    pub id: String,
    /// Whether the guest has it.
    pub state: PlugPhase,
    /// Its directory in sysfs, which ends with its address on the host.
    pub path: String,
    /// Whether it may be a function that is not virtual.
    pub allow_pf: bool,
    /// The NIC that the guest uses while it does not have the function; null without one.
    #[schema(required)]
    pub standby: Option<String>,
    /// Its PCI address in the guest; null before the machine is built.
    #[schema(required)]
    pub address: Option<String>,
}

impl VfioSummary {
    /// A function that is added when the VM starts.
    #[must_use]
    pub fn configured(config: &VfioConfig) -> Self {
        Self {
            id: config.name(),
            state: PlugPhase::Configured,
            path: config.source.shown().into_owned(),
            allow_pf: config.allow_pf,
            standby: config.standby.clone(),
            address: None,
        }
    }
}

/// A part of a BAR that the guest can reach without a VM exit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VfioArea {
    /// The BAR.
    pub bar: u8,
    /// Offset in the BAR.
    pub offset: u64,
    /// Length in bytes.
    pub size: u64,
    /// The guest-physical address; null while the guest has disabled the function's memory.
    #[schema(required)]
    pub address: Option<u64>,
}

/// A PCI function of the host as the guest has set it up. Counters begin when it is plugged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VfioFunctionInfo {
    /// Its driver on the host: vfio-pci or a variant.
    pub driver: String,
    /// Its MSI-X vectors.
    pub vectors: u16,
    /// The vectors that are connected to the guest.
    pub connected_vectors: u16,
    /// The parts of its BARs that need no exit.
    pub areas: Vec<VfioArea>,
    /// Whether it has failed since its last reset: it has reported an uncorrectable error (PCI
    /// Express AER), or a reset or a resume has failed.
    pub failed: bool,
    /// Reads of its BARs that exited to this process.
    pub trapped_reads: u64,
    /// Writes of its BARs that exited to this process.
    pub trapped_writes: u64,
    /// Accesses and resets that the host rejected.
    pub failures: u64,
    /// Accesses to a mapped area that the function did not answer; each unmaps the area.
    pub faults: u64,
    /// Resets by the guest and with the machine.
    pub resets: u64,
    /// How often the host has asked for the function.
    pub host_requests: u64,
    /// Uncorrectable errors that the function has reported (PCI Express AER), and its failed
    /// resets and resumes.
    pub errors: u64,
}

/// A PCI function of the host in detail.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct VfioInfo {
    /// As in a list.
    #[serde(flatten)]
    pub summary: VfioSummary,
    /// The function as the guest has set it up; null before the machine is built.
    #[schema(required)]
    pub function: Option<VfioFunctionInfo>,
}

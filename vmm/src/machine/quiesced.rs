//! A machine that is quiesced: the reason, and its state before.
//!
//! Owns the types. It must not know how a machine comes to be quiesced, nor how it resumes.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use devices::virtio::iommu::DomainsState;

use super::saved::{SavedDevice, SavedFunction};

/// The reason for which a machine is quiesced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QuiescedFor {
    /// A snapshot is written, or another program takes the machine over.
    Snapshot,
    /// It is being sent or has arrived, and the guest's location is not decided yet.
    Migration,
}

/// A machine between its save and its resume.
pub(super) struct Quiesced {
    pub(super) devices: Vec<SavedDevice>,
    /// The functions of a machine from another host. Here, their drivers keep their states.
    pub(super) functions: Vec<SavedFunction>,
    /// The domains of the guest's IOMMU, for devices that have not received them.
    pub(super) iommu: Option<DomainsState>,
    /// Whether its vCPUs ran before.
    pub(super) ran: bool,
    pub(super) quiesced_for: QuiescedFor,
    /// Set if it comes from another host: its devices have no state yet, or rejected it.
    pub(super) arrived: Option<Arrived>,
}

impl Quiesced {
    /// Whether its functions hold, or will load again, states without which it cannot start.
    pub(super) fn has_states(&self) -> bool {
        self.arrived.is_some() && !self.functions.is_empty()
    }
}

/// The state of the devices of a machine from another host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arrived {
    /// They have not received their states.
    AtRest,
    /// One rejected its state. All are reset again, and some may have worked before.
    Tried,
}

/// A machine that is quiesced for another program.
#[derive(Debug)]
pub struct HandOver {
    /// The program that takes over.
    pub program: PathBuf,
    /// The sections of the machine's state, positioned at their beginning.
    pub state: File,
    /// Guest RAM.
    pub ram: File,
    /// KVM's VM as it was in this program. KVM tears it down when the last descriptor closes, which
    /// takes long. So the other program closes this descriptor after the guest runs again. `None`
    /// if the machine has functions of the host: the VM would keep them open.
    pub vm: Option<OwnedFd>,
}

#[cfg(test)]
mod tests {
    use devices::pci::{ConfigSpaceState, MsixState};
    use devices::vfio::VfioState;

    use super::*;

    #[test]
    fn only_a_machine_from_another_host_needs_its_functions() {
        let function = SavedFunction {
            id: "vf".to_owned(),
            slot: 3,
            state: VfioState {
                config_space: ConfigSpaceState { bytes: Vec::new() },
                msix: MsixState {
                    entries: Vec::new(),
                },
                early: 0,
                data: Vec::new(),
            },
        };
        let has_states = |functions: Vec<SavedFunction>, arrived| {
            let quiesced = Quiesced {
                devices: Vec::new(),
                functions,
                iommu: None,
                ran: true,
                quiesced_for: QuiescedFor::Migration,
                arrived,
            };
            quiesced.has_states()
        };
        for arrived in [Arrived::AtRest, Arrived::Tried] {
            assert!(has_states(vec![function.clone()], Some(arrived)));
            assert!(!has_states(Vec::new(), Some(arrived)));
        }
        assert!(!has_states(vec![function], None));
    }
}
